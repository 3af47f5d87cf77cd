"""One lane, produced: tasks handed out in order, outcomes taken back in any order, records out in lane order.

This is where parallel execution becomes equal to the reference. A task carries its sequence number; outcomes that
arrive early wait; each is pushed through the window's chain in turn; after a window's last task the chain is flushed,
and the record number at which the next window begins is announced. It does no I/O, so embedded runs and the engine
share it.
"""

from __future__ import annotations

from collections import deque

from zephon.barren import BARREN_PASSES, barren
from zephon.batching import LaneStream
from zephon.columns import Block
from zephon.errors import CheckpointError, CheckpointMismatch, RunFailed
from zephon.frontiers import Announcement, Frontier, frontier_at
from zephon.lane_windows import Window, lane_windows
from zephon.ops.base import Faults, Scope, WindowKey, add_counts
from zephon.plan import Plan
from zephon.token_counts import DrawnCounts
from zephon.windows import TASK_SAMPLES, Chain, Outcome, Task, tasks_of


class LaneProducer:
    """A lane of one epoch, from a frontier on."""

    def __init__(self, plan: Plan, epoch: int, lane: int, start: Frontier, task_samples: int = TASK_SAMPLES) -> None:
        self.plan, self.epoch, self.lane = plan, epoch, lane
        self.announcements: list[Announcement] = [start.announcement]
        self.stream = LaneStream(start.records, start.offset, plan.empty)
        self.skipped = start.skipped
        self.samples = 0
        self.drawn = DrawnCounts(len(plan.source.datasets))
        self.reports: list[str] = []
        self.unsaid: list[str] = []
        """Of the reports, those that came of no task (of accumulators, of functions on batches): for the log."""
        self._task_samples = task_samples
        self._counters: dict[str, int] = {}
        self._made = start.announcement.records  # the lane's records so far, replayed ones included
        self._fruitful = self._made  # what it was when the lane last had records
        self._barren = 0  # samples of whole windows since then
        self._held = 0  # records that went into this window's chain while the lane has none
        self._ends: deque[int] = deque()  # the lane's number of the sample after each task that is not pushed yet
        self._ahead = lane_windows(plan, epoch, lane, start.announcement)
        self._to_hand_out: deque[Task] = deque()
        self._handed_out = 0
        self._windows: deque[tuple[Window, int]] = deque()  # (window, number of the first task after it)
        self._pushed = 0
        self._early: dict[int, Outcome] = {}
        self._chain: Chain | None = None
        self._faults = self._fresh_faults()
        self._plan_window()
        if not self._windows:
            self._check_end()
            if not self._made:
                barren(plan, epoch).note(lane, 0, True, self.skipped)

    @property
    def ended(self) -> bool:
        """Whether every record of the lane has been produced."""
        return not self._windows

    @property
    def counters(self) -> dict[str, int]:
        """What operators dropped and padded so far, by name."""
        total = dict(self._counters)
        if self._chain is not None:
            add_counts(total, self._chain.counters())
        return total

    @property
    def outstanding(self) -> int:
        """Tasks handed out whose outcomes have not been pushed."""
        return self._handed_out - self._pushed

    @property
    def pushed(self) -> int:
        """Tasks whose outcomes have been pushed: the number of the next one."""
        return self._pushed

    @property
    def early(self) -> int:
        """Outcomes that wait for that of an earlier task."""
        return len(self._early)

    @property
    def exhausted(self) -> bool:
        """Whether every task has been handed out."""
        if not self._to_hand_out:
            self._plan_window()
        return not self._to_hand_out

    def next_task(self) -> tuple[int, Task] | None:
        """The lane's next task with its sequence number; None when all are handed out."""
        if self.exhausted:
            return None
        self._handed_out += 1
        return self._handed_out - 1, self._to_hand_out.popleft()

    @property
    def upcoming(self) -> int:
        """The lane's number of the first sample of the next task. Not to be asked when `exhausted`."""
        return self._to_hand_out[0].low

    def is_next(self, number: int) -> bool:
        """Whether that outcome would be pushed at once, and so may lie in borrowed memory."""
        return number == self._pushed and bool(self.plan.back)

    def accept(self, number: int, outcome: Outcome) -> None:
        """Take the outcome of task `number`; push it, and those that waited for it."""
        self._early[number] = outcome
        while (ready := self._early.pop(self._pushed, None)) is not None:
            self._push(ready)

    def take(self, count: int) -> Block:
        """The lane's next batch: its next `count` records (fewer if it has no more), as the user's functions on batches
        leave it.
        """
        first = self.stream.first
        block = self.stream.take(count)
        if self.plan.on_batches:
            faults = self._fresh_faults()  # of no window, so no part of any frontier
            for operator in self.plan.on_batches:
                block = operator.apply(block, self.lane, first, self.plan.dataset_names, faults)
            self.reports += faults.reports
            self.unsaid += faults.reports
            add_counts(self._counters, {"failed_batches": faults.skipped})
        return block

    def frontier(self, records: int) -> Frontier:
        """The lane's frontier once that many records were delivered. Older announcements are forgotten."""
        frontier = frontier_at(self.announcements, records)
        self.announcements = [a for a in self.announcements if a >= frontier.announcement]
        return frontier

    def _plan_window(self) -> None:
        window = self._ahead.next()
        if window is not None:
            tasks = list(tasks_of(window, self.epoch, self.lane, self._task_samples, self.plan.grain))
            self._to_hand_out.extend(tasks)
            self._ends.extend(task.high for task in tasks)
            self._windows.append((window, self._handed_out + len(self._to_hand_out)))

    def _push(self, outcome: Outcome) -> None:
        window, ends_at = self._windows[0]
        if self.stream.to_drop and self.plan.changed_at is not None and window.low >= self.plan.changed_at:
            raise CheckpointMismatch(
                f"lane {self.lane}: the checkpoint names a window too far back for a change of the mixture. Resume "
                "once without the change, save, and change it then."
            )
        if self._chain is None:
            self._chain = Chain(self.plan.back, WindowKey(self.plan.seed, self.epoch, self.lane, window.chunk))
        self.skipped += outcome.skipped
        self.reports += outcome.reports
        add_counts(self._counters, outcome.counters)
        self.samples += len(outcome.block)
        self.drawn.add(outcome.block)
        tried = self._ends.popleft()
        self._append(self._chain.push(outcome.block, self._faults))
        self._pushed += 1
        ends = self._pushed == ends_at
        if ends:
            self._append(self._chain.flush(self._faults))
        self._look_for_records(tried, len(outcome.block), ends)
        if ends:
            self._end_window()

    def _append(self, blocks: list[Block]) -> None:
        for block in blocks:
            self._made += len(block)
            self.stream.append(block)

    def _end_window(self) -> None:
        assert self._chain is not None
        add_counts(self._counters, self._chain.counters())
        add_counts(self._counters, self._faults.counters)
        self._chain = None
        self.skipped += self._faults.skipped
        self.reports += self._faults.reports
        self.unsaid += self._faults.reports
        self._faults = self._fresh_faults()
        window, _ = self._windows.popleft()
        self._check_barren(window)
        if not self._windows:
            self._plan_window()
        if self._windows:
            begins = self._windows[0][0]
            self.announcements.append(Announcement(begins.chunk, self._made, self.skipped, begins.source))
        else:
            self._check_end()

    def _look_for_records(self, tried: int, came: int, ends_window: bool) -> None:
        """Say that the lane's samples up to `tried` gave no record, once none of them is held any more."""
        if self._made:
            if not self._fruitful:
                barren(self.plan, self.epoch).fruitful = True
            return
        assert self._chain is not None
        self._held = 0 if ends_window else self._held + came
        if self._held <= self._chain.counters().get("dropped_records", 0):
            ended = ends_window and self.exhausted and len(self._windows) == 1
            barren(self.plan, self.epoch).note(self.lane, tried, ended, self.skipped + self._faults.skipped)

    def _fresh_faults(self) -> Faults:
        plan = self.plan
        return Faults(plan.settings.on_error, plan.source.datasets, Scope(plan, self.epoch, self.lane))

    def _check_barren(self, window: Window) -> None:
        self._barren = 0 if self._made > self._fruitful else self._barren + window.high - window.low
        self._fruitful = self._made
        first = self._barren == window.high - window.low  # the other lanes' may be on their way, and make it certain
        if not self._barren or first or self.plan.ends(self.epoch) is True:
            return
        if self._barren >= BARREN_PASSES * sum(dataset.total for dataset in self.plan.source.datasets):
            droppers = [op.name for op in self.plan.operators if op.changes_counts]
            bad = f" {self.skipped} bad records were skipped." if self.skipped else ""
            end = "run is endless" if self.plan.ends(self.epoch) is False else "work source has not come to an end"
            raise RunFailed(
                f"lane {self.lane}: 0 of {self._barren} records passed {' and '.join(droppers) or 'reading'}, and the "
                f"{end}, so it would wait for ever.{bad} Look for a filter or a field that no record has."
            )

    def _check_end(self) -> None:
        if self.stream.to_drop:
            raise CheckpointError(
                f"lane {self.lane} ends {self.stream.to_drop} records before the place that the checkpoint names: the "
                "data are not those it was taken with"
            )
