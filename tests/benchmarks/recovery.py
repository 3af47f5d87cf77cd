"""How long a rank waits for its next batch after the engine or the daemon was killed, under `zephon launch`, and what
of all the processes is left when the launch has ended.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
import uuid
from pathlib import Path

from tests.benchmarks.contest import REPOSITORY, environment, module
from tests.benchmarks.corpus import Corpus
from tests.benchmarks.report import Row, Scale
from tests.benchmarks.zephon_runs import ZEPHON, Recipe, recipe_file
from tests.leaks import Leaks


def deaths(corpus: Corpus, scale: Scale) -> list[Row]:
    """A killed engine and a killed daemon: the longest wait for a batch of a rank that takes them as fast as it can.

    At the end nothing is left anywhere: no process, no file in /dev/shm, nothing in the runtime folder.
    """
    rows = []
    mark = f"zephon-benchmark-{uuid.uuid4().hex}"
    with tempfile.TemporaryDirectory(prefix="zb", dir="/tmp") as folder, recipe_file(Recipe("text"), corpus) as path:
        found, marked = Leaks(mark, Path(folder)), environment(XDG_RUNTIME_DIR=folder, ZEPHON_BENCHMARK=mark)
        for victim in ("engine", "daemon"):
            command = [*ZEPHON, "launch", str(path), "--workers", "2", "--"]
            command += module("rank", "survive", victim, str(scale.count(3)))
            done = subprocess.run(command, env=marked, cwd=REPOSITORY, stdout=subprocess.PIPE, check=True)
            waits = json.loads(done.stdout.splitlines()[-1])
            detail = f"{min(waits):.2f} to {max(waits):.2f} s, of {len(waits)}"
            rows.append(Row(f"a killed {victim}: to the next batch", statistics.median(waits), "s", 5, detail=detail))
        left = found.after_the_test() + [f"file {each}" for each in Path(folder).rglob("*") if each.is_file()]
    return [*rows, Row("after all kills: left anywhere", len(left), "things", 0, detail="; ".join(left))]
