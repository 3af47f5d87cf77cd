"""Where a process is in its task: in which operator, at which of its samples. A few numbers, written as it goes on.

Whoever watches the process reads them from outside, so they may lie in shared memory: they say what a worker that
hangs, or that was killed, was at work on. A note costs less than a tenth of a microsecond.
"""

from __future__ import annotations

from typing import Protocol

IDLE, LOADING, SETTING_UP, READING = -1, -2, -3, 0
"""Instead of an operator: no task; functions are being rebuilt; operators are being set up; samples are being read.
Operator `n` of a front counts as `n + 1`, and the sending of what came out as one more than the last.
"""

NUMBERS = 4


class Numbers(Protocol):
    """Memory for `NUMBERS` whole numbers of 64 bits."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...


class Whereabouts:
    """Either side's view of `numbers`: task, operator, place of a sample in its lane (-1 where none is known), and how
    often something moved apart from these.
    """

    __slots__ = ("_numbers",)

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers

    def begin(self, task: int) -> None:
        """Another task is in work. Numbers of tasks are the caller's; -1 is none."""
        self.enter(IDLE)
        self._numbers[0] = task

    def enter(self, operator: int) -> None:
        """Another operator is at work, on which sample is not known."""
        self._numbers[2] = -1
        self._numbers[1] = operator

    def turn_to(self, place: int) -> None:
        """The operator is at work on the sample at this place of the lane."""
        self._numbers[2] = place

    def move(self) -> None:
        """The operator is done with some of its samples, whichever."""
        self._numbers[3] += 1

    @property
    def now(self) -> tuple[int, int, int]:
        """Task, operator, place."""
        return self._numbers[0], self._numbers[1], self._numbers[2]

    @property
    def moves(self) -> int:
        """How often `move` was called."""
        return self._numbers[3]
