"""Several engines: the processor time of each for a million tokens of the node's production, with 1, 2 and 4 of them.

Four ranks of a group each read workload B: without end, and to no known end (a finite run whose packing changes
counts), where engines also tell each other of their lanes; what that costs the daemon is in the details. On a machine
of few cores the engines take turns, but their seconds are what they would be on many.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

from tests.benchmarks.contest import Player
from tests.benchmarks.corpus import Corpus
from tests.benchmarks.processes import cpu_seconds
from tests.benchmarks.report import Row, Scale
from tests.benchmarks.zephon_runs import Daemon, Recipe, daemon

RANKS, WORKERS, BATCHES = 4, 4, 2400
COUNTS = (1, 2, 4)
SOURCES = {
    "without end": (', chunk_size=2048, exhausted_policy="repeat"', 1.15),
    "to no known end": (", chunk_size=2048, stop_after_passes=200", 1.5),
}
"""Each with how much more than an even share of the work of one engine alone is allowed: noise, and what they tell."""


def engines(corpus: Corpus, scale: Scale) -> list[Row]:
    """CPU seconds of each engine for a million tokens, with 1, 2 and 4 engines: they fall as one over their number."""
    return [row for name, (source, more) in SOURCES.items() for row in _engines(name, source, more, corpus, scale)]


def _engines(name: str, source: str, more: float, corpus: Corpus, scale: Scale) -> Iterator[Row]:
    each: dict[int, list[list[float]]] = defaultdict(list)
    daemons: dict[int, list[float]] = defaultdict(list)
    for _ in range(scale.rounds):
        for count in COUNTS:
            spent, of_daemon = _spent(source, corpus, scale, count)
            each[count].append(spent)
            daemons[count].append(of_daemon)
    alone = [sum(spent) for spent in each[1]]
    for count in COUNTS:
        busiest = [max(spent) / one for spent, one in zip(each[count], alone, strict=True)]
        total = [sum(spent) / one for spent, one in zip(each[count], alone, strict=True)]
        shown = ", ".join(f"{statistics.median(column):.1f}" for column in zip(*each[count], strict=True))
        detail = f"{shown} ms a M tokens; the daemon {statistics.median(daemons[count]):.1f}"
        spread = f"{min(total):.2f} to {max(total):.2f}"
        row = f"engines {name}: {count}"
        yield Row(f"{row}: the busiest to one alone", statistics.median(busiest), "×", more / count, detail=detail)
        yield Row(f"{row}: all together to one alone", statistics.median(total), "×", more, detail=spread)


def _spent(source: str, corpus: Corpus, scale: Scale, count: int) -> tuple[list[float], float]:
    """Milliseconds for a million tokens: of each engine, and of the daemon."""
    options = "--engines", str(count), "--workers", str(WORKERS)
    with daemon(Recipe("ids", source=source), corpus, *options) as node, node.ranks(RANKS) as those:
        for rank in those:
            rank.hear()
        batches = scale.count(BATCHES) // RANKS
        _take(those, batches // 4 + 1)
        before = _used(node)
        tokens = _take(those, batches)
        after = _used(node)
        spent = {title: (after[title] - before[title]) / tokens * 1e9 for title in after}
        return [spent[title] for title in sorted(spent) if title.startswith("zephon engine")], spent["daemon"]


def _used(node: Daemon) -> dict[str, float]:
    """Seconds of the daemon and of each engine so far."""
    found = {"daemon": cpu_seconds([node.process.pid])}
    for pid, title in node.processes().items():
        if title.startswith("zephon engine"):
            found[title] = cpu_seconds([pid])
    return found


def _take(those: Sequence[Player], batches: int) -> int:
    for rank in those:
        rank.tell(["take", batches])
    return sum(rank.hear() for rank in those)
