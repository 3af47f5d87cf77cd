"""Where processor time goes: seconds of each process for a million tokens, with one rank, four, and four that share.

The three jobs run side by side and take batches in turn, a slice at a time, so that what others do to the machine
meets all of them alike. After each slice a job comes to rest, having made as much as was taken.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from tests.benchmarks.contest import Player
from tests.benchmarks.corpus import Corpus
from tests.benchmarks.processes import cpu_seconds
from tests.benchmarks.report import Row, Scale
from tests.benchmarks.zephon_runs import Daemon, Recipe, daemon

BATCHES, SLICES = 4800, 8
"""Taken of each job in a round, in so many slices."""
ALONE, APART, TOGETHER = (1, 1), (4, 1), (1, 4)
"""Groups, and ranks of each: one rank; four groups of one; one group of four, as tensor-parallel peers are."""
RANK = "one rank"
KINDS = ("daemon", "forkserver", "engine", "worker")
STILL_SECONDS, AT_REST, REST_WITHIN = 0.05, 0.02, 60.0
"""At rest is who uses less than this share of a core for so long; within a minute all are."""


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
        spent = _side_by_side(workload, corpus, scale)
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


def _side_by_side(workload: str, corpus: Corpus, scale: Scale) -> dict[tuple[int, int], list[Spent]]:
    """What each of the three jobs spent in each round."""
    with ExitStack() as stack:
        jobs = {}
        for groups, readers in (ALONE, APART, TOGETHER):
            node = stack.enter_context(daemon(Recipe(workload), corpus, "--workers", "2"))
            jobs[groups, readers] = _Job(node, stack.enter_context(node.ranks(groups, readers)), groups, readers)
        batches = scale.count(BATCHES) // SLICES + 1
        for job in jobs.values():
            job.take(2 * batches)
            job.spent()
        spent: dict[tuple[int, int], list[Spent]] = {shape: [] for shape in jobs}
        for _ in range(scale.rounds):
            for _ in range(SLICES):
                for job in jobs.values():
                    job.take(batches)
            for shape, job in jobs.items():
                spent[shape].append(job.spent())
        return spent


class _Job:
    """A daemon and its ranks, which take batches when they are told to."""

    def __init__(self, node: Daemon, ranks: Sequence[Player], groups: int, readers: int) -> None:
        self._node, self._ranks, self._groups, self._readers = node, ranks, groups, readers
        self._tokens = 0.0
        self._before = dict.fromkeys((*KINDS, RANK), 0.0)
        for rank in ranks:
            rank.hear()

    def take(self, batches: int) -> None:
        """So many batches of all groups together; ends when as many more are made and all is at rest."""
        for rank in self._ranks:
            rank.tell(["take", -(-batches // self._groups)])
        self._tokens += sum(rank.hear() for rank in self._ranks) / self._readers
        before, now, limit = 0.0, sum(self._used().values()), time.monotonic() + REST_WITHIN
        while now - before > AT_REST * STILL_SECONDS:
            if time.monotonic() > limit:
                raise RuntimeError(f"the daemon at {self._node.socket} does not come to rest while nothing is taken")
            time.sleep(STILL_SECONDS)
            before, now = now, sum(self._used().values())

    def spent(self) -> Spent:
        """For a million of the tokens taken since this was last asked."""
        used, before, tokens = self._used(), self._before, self._tokens
        self._before, self._tokens = used, 0.0
        return Spent({kind: (used[kind] - before[kind]) / tokens * 1e6 for kind in used})

    def _used(self) -> dict[str, float]:
        """Seconds so far by kind of process."""
        used = dict.fromkeys((*KINDS, RANK), 0.0)
        for pid, title in self._node.processes().items():
            kind = next((kind for kind in KINDS[1:] if f"zephon {kind}" in title), KINDS[0])
            used[kind] += cpu_seconds([pid])
        used[RANK] = cpu_seconds([rank.process.pid for rank in self._ranks]) / len(self._ranks)
        return used
