"""Later stages: the engine's processor time with a costly function behind packing, in the engine and on workers.

Workload B, packed, and then a function that takes some 0.4 ms for each sequence, with `parallelism` and without.
What it costs all processes together may only grow by the copying of the sequences to a worker and back.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tests.benchmarks.contest import Player
from tests.benchmarks.corpus import Corpus
from tests.benchmarks.processes import cpu_seconds
from tests.benchmarks.report import Row, Scale
from tests.benchmarks.zephon_runs import Daemon, Recipe, daemon

BATCHES, WORKERS = 1200, 2
COSTLY = ".map_transform(lambda row: (sum(range(20_000)), row)[1]{})"
MOST = 0.5
ALL_TOGETHER = 1.2


def stages(corpus: Corpus, scale: Scale) -> list[Row]:
    """CPU seconds of the engine with a costly function behind packing: on workers, to its own."""
    here, there = [], []
    for _ in range(scale.rounds):
        here.append(_spent(corpus, scale, ""))
        there.append(_spent(corpus, scale, f", parallelism={WORKERS}"))
    rows = []
    for place, (name, most) in enumerate((("the engine", MOST), ("all processes", ALL_TOGETHER))):
        each = [mine[place] / own[place] for mine, own in zip(there, here, strict=True)]
        mine, own = (statistics.median(found[place] for found in which) for which in (there, here))
        detail = f"{min(each):.2f} to {max(each):.2f}; {mine:.1f} and {own:.1f} ms a M tokens"
        rows.append(Row(f"stages: {name}", statistics.median(each), "×", most, detail=detail))
    return rows


def _spent(corpus: Corpus, scale: Scale, parallelism: str) -> tuple[float, float]:
    """Milliseconds for a million tokens: of the engine, and of all processes of the daemon."""
    recipe = Recipe("ids", behind=COSTLY.format(parallelism))
    with daemon(recipe, corpus, "--workers", str(WORKERS)) as node, node.ranks() as those:
        for rank in those:
            rank.hear()
        batches = scale.count(BATCHES)
        _take(those, batches // 4 + 1)
        before = _used(node)
        tokens = _take(those, batches)
        engine, everything = (after - then for after, then in zip(_used(node), before, strict=True))
        return engine / tokens * 1e9, everything / tokens * 1e9


def _used(node: Daemon) -> tuple[float, float]:
    """Seconds of the engine and of all processes so far."""
    processes = node.processes()
    return cpu_seconds([pid for pid, title in processes.items() if "zephon engine" in title]), cpu_seconds(processes)


def _take(those: Sequence[Player], batches: int) -> int:
    for rank in those:
        rank.tell(["take", batches])
    return sum(rank.hear() for rank in those)
