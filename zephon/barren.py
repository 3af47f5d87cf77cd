"""Notices that no record of an epoch comes through, instead of looking for one for ever or ending with none.

Samples that gave no record are a fact of the plan, as windows are pure; this keeps it for each lane. Once the lanes'
barren beginnings together hold every row of every dataset that is drawn, nothing can ever come: operators judge a
record by itself, so another pass changes nothing. That is certain as soon as it is so, within the first pass, for an
epoch that ends and for one that does not.

Where it is not certain, because another process has the other lanes or a user's own operator or work source may make
something else of the same records later, an endless lane is given up after `BARREN_PASSES` passes without a record.
"""

from __future__ import annotations

import numpy as np

from zephon.columns import Block
from zephon.datasets.fetch import read
from zephon.errors import RunFailed
from zephon.lane_windows import window_of
from zephon.ops.base import Faults, Scope, Stateful, Stateless, WindowKey
from zephon.plan import Plan
from zephon.windows import pointers_of, tasks_of
from zephon.words import many
from zephon.work import StaticMixtureWorkSource

BARREN_PASSES = 20
"""Even if one row of all came through, an endless lane would have met it, but for odds of one in 10^8."""

SAMPLES_JUDGED = 512
_EACH_ALONE = ("pack_flat", "pack_sequences", "shuffle", "ensure_mixture")
"""Stateful operators that drop a record, if they do, for what it is."""


def barren(plan: Plan, epoch: int) -> Barren:
    """The one of a plan's epoch in this process."""
    found = plan.derived.get(("barren", epoch))
    if found is None:
        found = plan.derived[("barren", epoch)] = Barren(plan, epoch)
    return found


class Barren:
    """One epoch's lanes, as far as they gave no record from their beginning on."""

    def __init__(self, plan: Plan, epoch: int) -> None:
        self.plan, self.epoch = plan, epoch
        self.fruitful = False
        self._rows = 0
        self._tried = [0] * plan.lanes
        self._ended: set[int] = set()
        self._enough = self._every_row()

    def note(self, lane: int, samples: int, ended: bool, skipped: int) -> None:
        """The lane's first `samples` gave no record, and it has no others if it `ended`. RunFailed if nothing can."""
        self._tried[lane] = max(self._tried[lane], samples)
        if ended:
            self._ended.add(lane)
        if self.fruitful:
            return
        if self._enough is not None:
            chunk = self.plan.chunk_size
            if min(self._tried) // chunk * chunk * self.plan.lanes >= self._enough:
                self._fail(self._rows, skipped)
        if len(self._ended) == self.plan.lanes and any(self._tried):
            self._fail(sum(self._tried), skipped)

    def of(self, lane: int) -> tuple[int, bool]:
        """A lane's first samples that gave no record, and whether it has no others."""
        return self._tried[lane], lane in self._ended

    def _fail(self, samples: int, skipped: int) -> None:
        bad = f" {many(skipped, 'bad record was', 'bad records were')} skipped in this lane alone." if skipped else ""
        raise RunFailed(
            f"0 of {many(samples, 'record')} passed {culprit(self.plan, self.epoch)}, so epoch {self.epoch} has no "
            f"record.{bad} Look for a filter that drops everything, a field that no record has, or a length that none "
            "fits."
        )

    def _every_row(self) -> int | None:
        """The least number of positions from 0 that hold every row of every drawn dataset; None where a record may
        have another fate the next time, or some rows never come.
        """
        source = self.plan.source
        alone = all(op.name in _EACH_ALONE for op in self.plan.back if isinstance(op, Stateful))
        if not isinstance(source, StaticMixtureWorkSource) or not alone:
            return None
        drawn = source.drawn()
        self._rows = sum(dataset.total for dataset in source.datasets if dataset.name in drawn)
        proportions = self.plan.curriculum(self.epoch).proportions
        try:
            return max(
                proportions.first_total_with(number, dataset.total)
                for number, dataset in enumerate(source.datasets)
                if dataset.name in drawn
            )
        except ValueError:
            return None


def culprit(plan: Plan, epoch: int) -> str:
    """The operator that the epoch's first samples do not pass, found by putting them through one by one."""
    window = window_of(plan, epoch, 0, 0)
    if window is None:
        return "reading"
    faults = Faults("skip", plan.source.datasets, Scope(plan, epoch, 0))
    task = next(tasks_of(window, epoch, 0, SAMPLES_JUDGED))
    pointers = np.column_stack((pointers_of(plan, task), np.arange(task.low, task.high)))
    block, last = read(plan.source.datasets, pointers, plan.fields, faults), "reading"
    for operator in (*plan.front, *plan.back):
        if not len(block):
            break
        last = operator.name
        operator.setup()
        if isinstance(operator, Stateless):
            block = operator.process(block, faults)
        elif isinstance(operator, Stateful):
            held = operator.accumulator(WindowKey(plan.seed, epoch, 0, window.chunk))
            block = Block.concat([*held.push(block, faults), *held.flush(faults)])
    return last
