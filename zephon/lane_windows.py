"""The windows of a lane, one after another: what whoever produces a lane needs to know of its work source.

There are two kinds of sources. Of a curriculum (`StaticMixtureWorkSource`) any window is known by arithmetic, and so is
any sample: whoever needs the pointers of a task computes them from the lane and the samples' numbers. A user's own
source is *pulled*: chunk by chunk, in order, where the lane is produced; its windows bring their pointers along, and
the state that the source was in before them.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from zephon.columns import IntArray
from zephon.custom_source import CustomSource
from zephon.frontiers import Announcement
from zephon.lanes import window_at, window_start
from zephon.plan import Plan
from zephon.pulling import PulledChunks

BEGINNING = Announcement(0, 0, 0)
"""Of an epoch, in every lane."""


class Window(NamedTuple):
    """One window of a lane: its number, its first chunk, and the lane's samples `low` to `high`.

    Of a source that is pulled also their pointers (int64 `[high - low, 3]`) and the source's state before them.
    """

    number: int
    chunk: int
    low: int
    high: int
    pointers: IntArray | None = None
    source: str = ""


class LaneWindows(Protocol):
    """The windows of one lane of one epoch from some window on."""

    def next(self) -> Window | None:
        """The next window; None after the lane's last, however often it is asked."""


def lane_windows(plan: Plan, epoch: int, lane: int, start: Announcement = BEGINNING) -> LaneWindows:
    """The lane's windows from the one on that begins at `start`. Raises CheckpointError if none begins there."""
    if isinstance(plan.source, CustomSource):
        return PulledWindows(plan, epoch, lane, start)
    return ArithmeticWindows(plan, epoch, lane, start)


def window_of(plan: Plan, epoch: int, lane: int, number: int) -> Window | None:
    """A lane's window by its number; None if the lane has no such window.

    Of a source that is pulled, all windows before it are pulled as well.
    """
    windows = lane_windows(plan, epoch, lane)
    if isinstance(windows, ArithmeticWindows):
        return windows.window(number)
    for _ in range(number):
        if windows.next() is None:
            return None
    return windows.next()


class ArithmeticWindows:
    """Those of a curriculum."""

    def __init__(self, plan: Plan, epoch: int, lane: int, start: Announcement) -> None:
        self._plan, self._lane, self._curriculum = plan, lane, plan.curriculum(epoch)
        self._number = window_at(lane, plan.lanes, plan.flush_every, start.chunk)

    def next(self) -> Window | None:
        window = self.window(self._number)
        self._number += window is not None
        return window

    def window(self, number: int) -> Window | None:
        """Any window; None after the lane's last."""
        plan, lane = self._plan, self._lane
        chunk = window_start(lane, plan.lanes, plan.flush_every, number)
        end = window_start(lane, plan.lanes, plan.flush_every, number + 1)
        low, high = chunk * plan.chunk_size, end * plan.chunk_size
        total = self._curriculum.lane_samples(lane)
        if total is not None:
            high = min(high, total)
        return Window(number, chunk, low, high) if low < high else None


class PulledWindows:
    """Those of a user's own source."""

    def __init__(self, plan: Plan, epoch: int, lane: int, start: Announcement) -> None:
        assert isinstance(plan.source, CustomSource)
        self._plan, self._lane = plan, lane
        self._number = window_at(lane, plan.lanes, plan.flush_every, start.chunk)
        self._chunks = PulledChunks(plan.source, epoch, lane, plan.lanes)
        if start.chunk:
            self._chunks.restore(start.chunk, start.source, replays=not plan.source_changed)

    def next(self) -> Window | None:
        plan, number = self._plan, self._number
        chunk = window_start(self._lane, plan.lanes, plan.flush_every, number)
        end = window_start(self._lane, plan.lanes, plan.flush_every, number + 1)
        pulled = self._chunks.pull(end - chunk)
        if pulled is None:
            return None
        self._number += 1
        low = pulled.before.samples
        return Window(number, chunk, low, low + len(pulled.pointers), pulled.pointers, pulled.before.to_text())
