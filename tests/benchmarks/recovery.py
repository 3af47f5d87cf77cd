"""How long a rank waits for its next batch after the engine or the daemon was killed, under `zephon launch`."""

from __future__ import annotations

import json
import statistics
import subprocess

from tests.benchmarks.contest import REPOSITORY, environment, module
from tests.benchmarks.corpus import Corpus
from tests.benchmarks.report import Row, Scale
from tests.benchmarks.zephon_runs import ZEPHON, Recipe, recipe_file


def deaths(corpus: Corpus, scale: Scale) -> list[Row]:
    """A killed engine and a killed daemon: the longest wait for a batch of a rank that takes them as fast as it can."""
    rows = []
    with recipe_file(Recipe("text"), corpus) as path:
        for victim in ("engine", "daemon"):
            command = [*ZEPHON, "launch", str(path), "--workers", "2", "--"]
            command += module("rank", "survive", victim, str(scale.count(3)))
            done = subprocess.run(command, env=environment(), cwd=REPOSITORY, stdout=subprocess.PIPE, check=True)
            waits = json.loads(done.stdout.splitlines()[-1])
            detail = f"{min(waits):.2f} to {max(waits):.2f} s, of {len(waits)}"
            rows.append(Row(f"a killed {victim}: to the next batch", statistics.median(waits), "s", 5, detail=detail))
    return rows
