"""Where processor time goes: seconds of each process for a million tokens, with one rank, four, and four that share."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tests.benchmarks.contest import Player
from tests.benchmarks.corpus import Corpus
from tests.benchmarks.processes import cpu_seconds
from tests.benchmarks.report import Row, Scale
from tests.benchmarks.zephon_runs import Daemon, Recipe, daemon

BATCHES = 2400
ALONE, APART, TOGETHER = (1, 1), (4, 1), (1, 4)
"""Groups, and ranks of each: one rank; four groups of one; one group of four, as tensor-parallel peers are."""
RANK = "one rank"
KINDS = ("daemon", "forkserver", "engine", "worker")


@dataclass(frozen=True)
class Spent:
    """Seconds for a million tokens of production, by kind of process; `RANK` is the mean of the ranks."""

    by_kind: dict[str, float]

    @property
    def ours(self) -> float:
        return sum(seconds for kind, seconds in self.by_kind.items() if kind != RANK)


def cpu(corpus: Corpus, scale: Scale) -> list[Row]:
    """CPU seconds for a million tokens: four ranks cost one production, and ranks that share a group add none."""
    rows = []
    for workload, name in (("text", "A"), ("ids", "B")):
        spent: dict[tuple[int, int], list[Spent]] = defaultdict(list)
        for _ in range(scale.rounds):
            for shape in (ALONE, APART, TOGETHER):
                spent[shape].append(_spent(workload, corpus, scale, *shape))
        one = spent[ALONE]
        rows += [
            _ratio(f"CPU {name}: four ranks to one", spent[APART], one),
            _ratio(f"CPU {name}: four ranks of one group to one", spent[TOGETHER], one),
        ]
        for kind in (*KINDS, RANK):
            each = [found.by_kind.get(kind, 0.0) for found in one]
            detail = f"{min(each) * 1e3:.2f} to {max(each) * 1e3:.2f}"
            rows.append(Row(f"CPU {name}: {kind}", _median(one, kind), "ms a M tokens", None, detail=detail))
    return rows


def _ratio(name: str, found: Sequence[Spent], base: Sequence[Spent]) -> Row:
    each = [a.ours / b.ours for a, b in zip(found, base, strict=True)]
    # A worker knows nothing of ranks: what its part grows by is the machine's doing, not the sharing's.
    parts = [f"{kind} {_median(found, kind):.1f} and {_median(base, kind):.1f}" for kind in ("engine", "worker")]
    detail = f"{min(each):.2f} to {max(each):.2f}; {', '.join(parts)} ms a M tokens"
    return Row(name, statistics.median(each), "×", 1.1, detail=detail)


def _median(spent: Sequence[Spent], kind: str) -> float:
    """Of a kind of process, in ms a million tokens."""
    return statistics.median(each.by_kind.get(kind, 0.0) for each in spent) * 1e3


def _spent(workload: str, corpus: Corpus, scale: Scale, groups: int, readers: int) -> Spent:
    with daemon(Recipe(workload), corpus, "--workers", "2") as node, node.ranks(groups, readers) as those:
        for rank in those:
            rank.hear()
        batches = scale.count(BATCHES) // groups
        _take(those, batches // 4 + 1)
        before = _used(node, those)
        tokens = sum(_take(those, batches)) / readers
        after = _used(node, those)
        return Spent({kind: (after[kind] - before[kind]) / tokens * 1e6 for kind in after})


def _take(those: Sequence[Player], batches: int) -> list[int]:
    for rank in those:
        rank.tell(["take", batches])
    return [rank.hear() for rank in those]


def _used(node: Daemon, those: Sequence[Player]) -> dict[str, float]:
    used = dict.fromkeys(KINDS, 0.0)
    for pid, title in node.processes().items():
        kind = next((kind for kind in KINDS[1:] if f"zephon {kind}" in title), KINDS[0])
        used[kind] += cpu_seconds([pid])
    used[RANK] = cpu_seconds([rank.process.pid for rank in those]) / len(those)
    return used
