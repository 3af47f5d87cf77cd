"""What an engine is working on at this very moment, kept in memory that outlives it.

The engine makes the memory and hands it to the daemon; after the engine's death the daemon reads there what killed it,
as far as that can be known. A note costs less than two microseconds, so it is made before every task's records go
through the operators that run in the engine. It does without numpy, as the whole daemon does.

    int64 x 6   whether something is in work, epoch, lane, the lane's samples from, to; rounds of the engine's loop
    text        through what they go, ended by a zero byte
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zephon.transport.segments import PAGE, Segment

if TYPE_CHECKING:
    from zephon.windows import AnyTask

_NUMBERS = 6
_TEXT_AT = _NUMBERS * 8
_IDLE, _TASK, _OTHER = 0, 1, 2

STARTING = "the start of pipeline"
"""What is done where a run takes shape: no record is on its way to a rank yet."""


class BlackBox:
    """Either side's view of the memory."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._numbers = segment.memory[:_TEXT_AT].cast("q")
        self._text = segment.memory[_TEXT_AT:]
        self._through = ""

    @classmethod
    def create(cls) -> BlackBox:
        """The engine's, idle."""
        return cls(Segment.create("zephon-black-box", PAGE))

    @classmethod
    def attach(cls, fd: int) -> BlackBox:
        """The daemon's; `fd` is used up."""
        return cls(Segment.attach(fd, writable=False, name="black box"))

    def fileno(self) -> int:
        return self._segment.fileno()

    def task(self, task: AnyTask, through: str) -> None:
        """A task's records go through operators of these names. Those of a later stage's are no samples of the lane."""
        if task.stage:
            self.other(f"lane {task.lane}, epoch {task.epoch}, in {through}")
            return
        self._name(through)
        numbers = self._numbers
        numbers[1], numbers[2], numbers[3], numbers[4] = task.epoch, task.lane, task.low, task.high
        self._numbers[0] = _TASK

    def other(self, what: str) -> None:
        """Something else is done that a user's code has a part in."""
        self._name(what)
        self._numbers[0] = _OTHER

    def beat(self) -> None:
        """The engine has gone round its loop once more."""
        self._numbers[5] += 1

    @property
    def beats(self) -> int:
        """How often it has."""
        return self._numbers[5]

    def idle(self) -> None:
        """Nothing of the kind is in work."""
        self._numbers[0] = _IDLE

    def close(self) -> None:
        del self._numbers, self._text
        self._segment.close()

    def __str__(self) -> str:
        """What was in work, for people; empty if nothing was."""
        kind, epoch, lane, low, high, _ = self._numbers.tolist()
        text = self._text.tobytes().partition(b"\0")[0].decode(errors="replace")
        if kind == _TASK:
            return f"at work on lane {lane}, epoch {epoch}, its samples {low} to {high - 1}, in {text}"
        return f"at work on {text}" if kind == _OTHER else ""

    def _name(self, text: str) -> None:
        if text != self._through:
            self._through = text
            data = text.encode()[: PAGE - _TEXT_AT - 1] + b"\0"
            self._text[: len(data)] = data
