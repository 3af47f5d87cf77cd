"""What a worker is at work on, as its engine sees it without asking: a page of memory that both have mapped.

    int64 x 4   task, operator, place, moves (`zephon.whereabouts`)

The worker makes it, with the means to look at its stack (`stacks`), and hands all of it over when it is ready; what is
written there outlives the worker.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from zephon.errors import ProtocolError
from zephon.transport.rings import PAGE
from zephon.transport.segments import Segment
from zephon.whereabouts import NUMBERS, Whereabouts
from zephon_daemon.stacks import Stack, offer_stack


class OwnNotes:
    """The worker's side. `fds` go to the engine, which maps them; they stay open."""

    def __init__(self) -> None:
        self._page = Segment.create("zephon-notes", PAGE)
        self.at = Whereabouts(self._page.array[: NUMBERS * 8].data.cast("q"))
        self.at.begin(-1)
        self.fds = (self._page.fileno(), offer_stack(), os.pidfd_open(os.getpid()))


class WorkerNotes:
    """The engine's side; `fds` are taken out of the list."""

    def __init__(self, fds: list[int], pid: int) -> None:
        if len(fds) != 3:
            raise ProtocolError(f"worker notes came with {len(fds)} descriptors, not with 3")
        self._page = Segment.attach(fds.pop(0), writable=False, name="worker notes")
        self.stack = Stack(fds.pop(0), fds.pop(0), pid)
        if self._page.size < NUMBERS * 8:
            raise ProtocolError(f"worker notes of {self._page.size} bytes")
        self.at = Whereabouts(self._page.array[: NUMBERS * 8].data.cast("q"))

    def close(self) -> None:
        self.stack.close()
        del self.at
        self._page.close()


def in_operator(operators: Sequence[str], number: int) -> str:
    """Where a worker is, for people. `operators` are the names of its front."""
    if number < 0:
        return {-2: "rebuilding the recipe's functions", -3: "setting up operators"}.get(number, "no operator")
    if number == 0:
        return "reading"
    return f"operator {operators[number - 1]!r}" if number <= len(operators) else "sending what came out"
