"""What is on its way through one stage of one lane: tasks out in order, outcomes back in any order, put in order again.

`InOrder` is that for any stage. `StageLine` is a later stage's: records come to it from the chain before, wait, and are
handed out as tasks. Where a window ends is a mark in its sequence, so that the chain behind is flushed exactly there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from zephon.columns import Block
from zephon.stages import LaterStage, pieces
from zephon.windows import Outcome, StageTask

WAITING = 8
"""Tasks that wait in front of a later stage, from which on nothing is handed out of the stages before."""

AHEAD = 2
"""For each worker that a later stage may have at once: its tasks that are handed out and not yet put in order."""


class WindowEnd:
    """The mark in a stage's sequence."""


ENDS = WindowEnd()


class InOrder:
    """The numbers of tasks that were handed out, and the outcomes that came back before their turn."""

    def __init__(self) -> None:
        self._sequence: deque[int | WindowEnd] = deque()
        self._early: dict[int, Outcome] = {}
        self.outstanding = 0
        """Tasks whose outcomes have not been put in order."""

    @property
    def head(self) -> int | None:
        """The number of the task whose turn is next; None if none is handed out. Marks never stand in front."""
        return self._sequence[0] if self._sequence else None  # type: ignore[return-value]

    @property
    def early(self) -> int:
        """Outcomes that wait for that of an earlier task."""
        return len(self._early)

    @property
    def in_work(self) -> int:
        """Tasks whose outcomes have not come back."""
        return self.outstanding - len(self._early)

    def hand_out(self, number: int) -> None:
        """A task goes out."""
        self._sequence.append(number)
        self.outstanding += 1

    def mark(self) -> None:
        """A window ends here."""
        self._sequence.append(ENDS)

    def come_back(self, number: int, outcome: Outcome) -> None:
        """The outcome of a task."""
        self._early[number] = outcome

    def next(self) -> Outcome | WindowEnd | None:
        """What comes next in the order, if it is here."""
        if not self._sequence:
            return None
        head = self._sequence[0]
        if isinstance(head, WindowEnd):
            self._sequence.popleft()
            return head
        found = self._early.pop(head, None)
        if found is not None:
            self._sequence.popleft()
            self.outstanding -= 1
        return found


class StageLine(InOrder):
    """A lane's records in front of later stage number `number`, and its tasks in work."""

    def __init__(self, stage: LaterStage, number: int, epoch: int, lane: int) -> None:
        super().__init__()
        self.stage, self.number = stage, number
        self._epoch, self._lane = epoch, lane
        self._waiting: deque[Block | WindowEnd] = deque()
        self._sizes: deque[int] = deque()
        self._gone = self._blocks = 0
        self.records = self.came = 0
        """Records that wait or are in work, and all that ever came."""

    @property
    def full(self) -> bool:
        """Whether no more should come to it."""
        return self._blocks >= WAITING

    @property
    def ready(self) -> bool:
        """Whether a task could be handed out."""
        most = self.stage.parallelism
        return bool(self._blocks) and self.in_work < most and self.outstanding < AHEAD * most

    def give(self, blocks: Sequence[Block]) -> None:
        """Records come to the stage."""
        for block in pieces(blocks):
            self._waiting.append(block)
            self._blocks += 1
            self.records += len(block)
            self.came += len(block)

    def end_window(self) -> None:
        """Those that come from now on are of the next window."""
        if self._blocks:
            self._waiting.append(ENDS)
        else:
            self.mark()

    def next_task(self, number: int) -> StageTask:
        """The next task, as number `number`. To be asked if `ready`."""
        block = self._waiting.popleft()
        assert isinstance(block, Block)
        self._blocks -= 1
        low, self._gone = self._gone, self._gone + len(block)
        self._sizes.append(len(block))
        self.hand_out(number)
        while self._waiting and isinstance(self._waiting[0], WindowEnd):
            self._waiting.popleft()
            self.mark()
        return StageTask(self._epoch, self._lane, low, self._gone, self.number, block)

    def next(self) -> Outcome | WindowEnd | None:
        found = super().next()
        if isinstance(found, Outcome):
            self.records -= self._sizes.popleft()
        return found
