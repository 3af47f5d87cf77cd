"""One lane, produced: tasks handed out in order, outcomes taken back in any order, records out in lane order.

This is where parallel execution becomes equal to the reference. A task carries its sequence number; outcomes that
arrive early wait; each is pushed through the window's chain in turn; after a window's last task the chain is flushed,
and the record number at which the next window begins is announced. It does no I/O, so embedded runs and the engine
share it.

Where there are later stages (`zephon.stages`) what a chain gives out becomes tasks of the next one, whose outcomes go
through the chain behind it. A stage's tasks are handed out before those of the stages in front of it, and none of these
while too much waits for it; so whatever is handed out finds its place, and a full lane always drains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass

from zephon.barren import BARREN_PASSES, barren
from zephon.batching import LaneStream
from zephon.columns import Block
from zephon.errors import CheckpointError, CheckpointMismatch, RunFailed
from zephon.frontiers import Announcement, Frontier, frontier_at
from zephon.in_order import InOrder, StageLine, WindowEnd
from zephon.lane_windows import Window, lane_windows
from zephon.ops.base import Faults, Scope, add_counts
from zephon.plan import Plan
from zephon.stretch import Stretch
from zephon.token_counts import DrawnCounts
from zephon.windows import TASK_SAMPLES, AnyTask, Outcome, Task, tasks_of
from zephon.words import many


@dataclass
class _OpenWindow:
    """A window in work. `ends_at` is the number of the front's first task after it."""

    window: Window
    ends_at: int
    skipped: int = 0


REPORTS_KEPT = 1000


class LaneProducer:
    """A lane of one epoch, from a frontier on."""

    def __init__(self, plan: Plan, epoch: int, lane: int, start: Frontier, task_samples: int = TASK_SAMPLES) -> None:
        self.plan, self.epoch, self.lane = plan, epoch, lane
        self.announcements: list[Announcement] = [start.announcement]
        self.stream = LaneStream(start.records, start.offset, plan.empty)
        self._ran_out = start.place > start.records
        self.skipped = start.skipped
        self.samples = 0
        self.drawn = DrawnCounts(len(plan.source.datasets))
        self.reports: deque[str] = deque(maxlen=REPORTS_KEPT)
        self.unsaid: list[str] = []
        """Of the reports, those that came of no task (of accumulators, of functions on batches): for the log."""
        self._task_samples = task_samples
        self._counters: dict[str, int] = {}
        self._began = self._made = start.announcement.records  # the lane's records so far, replayed ones included
        self._fruitful = self._made  # what it was when the lane last had records
        self._barren = 0  # samples of whole windows since then
        self._held = 0  # records that went into this window's chain while the lane has none
        self._ends: deque[int] = deque()  # the lane's number of the sample after each task that is not pushed yet
        self._settled = start.skipped  # bad records of whole windows
        self._ahead = lane_windows(plan, epoch, lane, start.announcement)
        self._to_hand_out: deque[Task] = deque()
        self._front = InOrder()
        self._handed_out = self._front_handed_out = self._front_pushed = 0
        self._windows: deque[_OpenWindow] = deque()
        later = plan.later
        self._on_batches = plan.on_batches
        self._lines = [StageLine(stage, number + 1, epoch, lane) for number, stage in enumerate(later)]
        self._of_line: dict[int, int] = {}  # of the tasks of later stages in work, by number
        chains = (plan.chain, *(stage.chain for stage in later))
        self._stretches = [Stretch(plan, epoch, lane, operators) for operators in chains]
        self._consumes = [bool(plan.chain), *(stage.holds for stage in later)]
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
        for stretch in self._stretches:
            add_counts(total, stretch.counters)
        return total

    @property
    def outstanding(self) -> int:
        """Tasks handed out whose outcomes have not been pushed."""
        return self._front.outstanding + sum(line.outstanding for line in self._lines)

    @property
    def of_front(self) -> int:
        """How many of those are the front's."""
        return self._front.outstanding

    @property
    def in_later(self) -> int:
        """Records that are in front of later stages, or in them."""
        return sum(line.records for line in self._lines)

    @property
    def to_come(self) -> float:
        """Records of the lane that will come of those, going by what has become of others."""
        waiting = self.in_later
        through = self._lines[0].came - waiting if waiting else 0
        return waiting * (self._made - self._began) / through if through > 0 else waiting

    def in_work(self, stage: int) -> int:
        """Tasks of a later stage that are handed out and have not come back."""
        return self._lines[stage - 1].in_work

    @property
    def pushed(self) -> int:
        """Tasks whose outcomes have been pushed."""
        return self._handed_out - self.outstanding

    @property
    def head(self) -> int | None:
        """The number of the task whose outcome the lane waits for; None if none is handed out."""
        for stage in (*reversed(self._lines), self._front):
            if stage.head is not None:
                return stage.head
        return None

    @property
    def early(self) -> int:
        """Outcomes that wait for that of an earlier task."""
        return self._front.early + sum(line.early for line in self._lines)

    @property
    def exhausted(self) -> bool:
        """Whether every task of the front has been handed out."""
        if not self._to_hand_out:
            self._plan_window()
        return not self._to_hand_out

    @property
    def full(self) -> bool:
        """Whether so much is in front of a later stage that the front should wait."""
        return bool(self._lines) and self._lines[0].full

    @property
    def can_go_on(self) -> bool:
        """Whether there is a task to hand out."""
        return self.later_ready() or not (self.full or self.exhausted)

    def later_ready(self, closed: Container[int] = ()) -> bool:
        """Whether `next_task` would be one of a later stage, other than those `closed`."""
        return bool(self._lines) and self._ready(closed) is not None

    def next_task(self, closed: Container[int] = ()) -> tuple[int, AnyTask] | None:
        """The lane's next task with its number: of the last stage that has one, and is not `closed`.

        None when all are handed out, or what is handed out has to come back first.
        """
        number = self._handed_out
        line = self._ready(closed) if self._lines else None
        task: AnyTask
        if line is not None:
            self._of_line[number] = line.number
            task = line.next_task(number)
        elif self.full or self.exhausted:
            return None
        else:
            task = self._to_hand_out.popleft()
            self._front.hand_out(number)
            self._front_handed_out += 1
        self._handed_out += 1
        return number, task

    def _ready(self, closed: Container[int]) -> StageLine | None:
        """The last later stage with a task to hand out, and with room behind it."""
        room = True
        for line in reversed(self._lines):
            if room and line.ready and line.number not in closed:
                return line
            room = not line.full
        return None

    @property
    def upcoming(self) -> int:
        """The lane's number of the first sample of the front's next task. Not to be asked when `exhausted`."""
        return self._to_hand_out[0].low

    def is_of_front(self, number: int) -> bool:
        """Whether task `number`, which is in work, is the front's."""
        return number not in self._of_line

    def is_next(self, number: int) -> bool:
        """Whether that outcome would be pushed at once, and so may lie in borrowed memory."""
        stage = self._of_line.get(number, 0)
        return self._consumes[stage] and number == (self._lines[stage - 1] if stage else self._front).head

    def accept(self, number: int, outcome: Outcome) -> None:
        """Take the outcome of task `number`; push it, and those that waited for it."""
        stage = self._of_line.pop(number, 0)
        if stage:
            self._lines[stage - 1].come_back(number, outcome)
            self._drain(stage)
            return
        self._front.come_back(number, outcome)
        while isinstance(ready := self._front.next(), Outcome):
            self._push(ready)

    def take(self, count: int) -> Block:
        """The lane's next batch: its next `count` records (fewer if it has no more), as the user's functions on batches
        leave it.
        """
        first = self.stream.first
        block = self.stream.take(count)
        if self._on_batches:
            # Of no window, so no part of any frontier.
            faults = Faults(
                self.plan.settings.on_error,
                self.plan.source.datasets,
                Scope(self.plan, self.epoch, self.lane),
            )
            for operator in self._on_batches:
                block = operator.apply(block, self.lane, first, self.plan.dataset_names, faults)
            self.reports += faults.reports
            self.unsaid += faults.reports
            add_counts(self._counters, {"failed_batches": faults.skipped})
        return block

    def frontier(self, records: int, stands: int) -> Frontier:
        """The lane's frontier once that many records were delivered and it stands there in turn-taking. Older
        announcements are forgotten.
        """
        frontier = frontier_at(self.announcements, records, None if self.plan.settings.drop_last else stands)
        self.announcements = [a for a in self.announcements if a >= frontier.announcement]
        return frontier

    def _plan_window(self) -> None:
        window = self._ahead.next()
        if window is not None:
            tasks = list(tasks_of(window, self.epoch, self.lane, self._task_samples, self.plan.grain))
            self._to_hand_out.extend(tasks)
            self._ends.extend(task.high for task in tasks)
            self._windows.append(_OpenWindow(window, self._front_handed_out + len(self._to_hand_out)))

    def _push(self, outcome: Outcome) -> None:
        """An outcome of the front, whose turn it is."""
        window = self._window_at(0)
        self.samples += len(outcome.block)
        self.drawn.add(outcome.block)
        tried = self._ends.popleft()
        self._take_in(0, outcome)
        self._front_pushed += 1
        if self._front_pushed == window.ends_at:
            self._flush(0)
        else:
            self._look_for_records(tried, len(outcome.block))

    def _drain(self, stage: int) -> None:
        """Push what has come back of a later stage, as far as its turn has come."""
        while (ready := self._lines[stage - 1].next()) is not None:
            if isinstance(ready, WindowEnd):
                self._flush(stage)
            else:
                self._take_in(stage, ready)

    def _window_at(self, stage: int) -> _OpenWindow:
        """The window that is in work behind a stage."""
        return self._windows[self._stretches[stage].ended - self._stretches[-1].ended]

    def _take_in(self, stage: int, outcome: Outcome) -> None:
        """Put an outcome of a stage through the operators behind it."""
        at = self._window_at(stage)
        self.skipped += outcome.skipped
        at.skipped += outcome.skipped
        self.reports += outcome.reports
        add_counts(self._counters, outcome.counters)
        self._give(stage, self._stretches[stage].push(outcome.block, at.window))

    def _flush(self, stage: int) -> None:
        """A window ends behind a stage."""
        at, stretch = self._window_at(stage), self._stretches[stage]
        self._give(stage, stretch.flush(at.window))
        counted, faults = stretch.end_window()
        add_counts(self._counters, counted)
        self.skipped += faults.skipped
        at.skipped += faults.skipped
        self.reports += faults.reports
        self.unsaid += faults.reports
        if stage < len(self._lines):
            self._lines[stage].end_window()
            self._drain(stage + 1)
        else:
            self._end_window()
        if not stage:
            self._held = 0

    def _give(self, stage: int, blocks: list[Block]) -> None:
        """What came out behind a stage is the next one's, or the lane's."""
        if stage < len(self._lines):
            self._lines[stage].give(blocks)
            return
        window = self._windows[0].window
        if self.stream.to_drop and self.plan.changed_at is not None and window.low >= self.plan.changed_at:
            raise CheckpointMismatch(
                f"lane {self.lane}: the checkpoint names a window too far back for a change of the mixture. Resume "
                "once without the change, save, and change it then."
            )
        for block in blocks:
            self._made += len(block)
            self.stream.append(block)
        if self._ran_out and len(self.stream):
            raise CheckpointError(
                f"lane {self.lane} goes on after record {self.stream.first}, and the checkpoint says that it had run "
                "out there: the data are not those it was taken with, or its 'stands' is wrong. Without the lanes' "
                "'stands' a checkpoint is read as one of an older version, and lanes go on from their records"
            )

    def _end_window(self) -> None:
        """The lane's first window in work is through."""
        if self._made and not self._fruitful:
            barren(self.plan, self.epoch).fruitful = True
        elif not self._made:
            ended = self.exhausted and len(self._windows) == 1
            barren(self.plan, self.epoch).note(self.lane, self._windows[0].window.high, ended, self.skipped)
        at = self._windows.popleft()
        self._settled += at.skipped
        self._check_barren(at.window)
        if not self._windows:
            self._plan_window()
        if self._windows:
            begins = self._windows[0].window
            self.announcements.append(Announcement(begins.chunk, self._made, self._settled, begins.source))
        else:
            self._check_end()

    def _look_for_records(self, tried: int, came: int) -> None:
        """Say that the lane's samples up to `tried` gave no record, once none of them is held any more."""
        if self._made:
            if not self._fruitful:
                barren(self.plan, self.epoch).fruitful = True
            return
        first = self._stretches[0]
        self._held += came
        if first.ended == self._stretches[-1].ended and self._held <= first.counters.get("dropped_records", 0):
            barren(self.plan, self.epoch).note(self.lane, tried, False, self.skipped + first.faults.skipped)

    def _check_barren(self, window: Window) -> None:
        self._barren = 0 if self._made > self._fruitful else self._barren + window.high - window.low
        self._fruitful = self._made
        first = self._barren == window.high - window.low  # the other lanes' may be on their way, and make it certain
        if not self._barren or first or self.plan.ends(self.epoch) is True:
            return
        if self._barren >= BARREN_PASSES * sum(dataset.total for dataset in self.plan.source.datasets):
            droppers = [op.name for op in self.plan.operators if op.changes_counts]
            bad = f" {many(self.skipped, 'bad record was', 'bad records were')} skipped." if self.skipped else ""
            end = "run is endless" if self.plan.ends(self.epoch) is False else "work source has not come to an end"
            raise RunFailed(
                f"lane {self.lane}: 0 of {many(self._barren, 'record')} passed {' and '.join(droppers) or 'reading'}, "
                f"and the {end}, so it would wait for ever.{bad} Look for a filter or a field that no record has."
            )

    def _check_end(self) -> None:
        if self.stream.to_drop:
            raise CheckpointError(
                f"lane {self.lane} ends {many(self.stream.to_drop, 'record')} before the place that the checkpoint "
                "names: the data are not those it was taken with"
            )
