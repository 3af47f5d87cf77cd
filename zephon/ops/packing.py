"""The arithmetic of packing: which document goes where. No tokens are touched here.

*Wrap* lays documents end to end and cuts every `capacity` tokens (`wrapped`). *Bins* keeps some sequences open and
puts each document whole into one of them (`Bins`): the first with room, or the one that it fills best. It is online: a
document is placed as it comes, from what came before it in its window and nothing else.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zephon.columns import IntArray

DEFAULT_BINS = 64
_NUMBER_BITS = 40  # a level is `room << 40 | bin`, so that sorting levels sorts by room, then by age
_NUMBER = (1 << _NUMBER_BITS) - 1


def restarting(lengths: IntArray) -> npt.NDArray[np.int32]:
    """Positions that count from 0 in each segment: int32 `[sum(lengths)]`."""
    ends = np.cumsum(lengths)
    out = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int32)
    out -= np.repeat((ends - lengths).astype(np.int32), lengths)
    return out


def pieces_of(lengths: IntArray, capacity: int) -> tuple[IntArray, IntArray, IntArray]:
    """Documents cut into pieces of at most `capacity`: `(document, start within it, length)` of each piece."""
    counts = -(-lengths // capacity)
    document = np.repeat(np.arange(len(lengths)), counts)
    within = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = within * capacity
    return document, starts, np.minimum(lengths[document] - starts, capacity)


class Segments(NamedTuple):
    """Runs of tokens of one document inside one sequence, in the order of the stream."""

    document: IntArray
    sequence: IntArray
    length: IntArray


def wrapped(lengths: IntArray, capacity: int) -> Segments:
    """Documents of `lengths` (all at least 1) laid end to end from a sequence's beginning."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    bounds = np.sort(np.concatenate((ends, np.arange(capacity, total + 1, capacity))))
    bounds = bounds[np.diff(bounds, prepend=0) > 0]
    length = np.diff(bounds, prepend=0)
    starts = bounds - length
    return Segments(np.searchsorted(ends, starts, "right"), starts // capacity, length)


class Placement(NamedTuple):
    """Where each document went: its bin and the offset in it; and the bins that were closed, in that order."""

    bins: list[int]
    offsets: list[int]
    closed: list[int]


class Bins:
    """Open sequences of `capacity` tokens, numbered in the order of their opening.

    A document goes into the first open bin with room (`best=False`) or into the one that it leaves the least room in,
    the oldest of several (`best=True`). Where none has room a new bin is opened; if `limit` are open already, the
    oldest of them is closed first, or the fullest (`close_fullest`). A bin that is full, or holds `most` documents, is
    closed at once.
    """

    def __init__(
        self,
        capacity: int,
        limit: int = DEFAULT_BINS,
        *,
        best: bool,
        close_fullest: bool = False,
        most: int | None = None,
    ) -> None:
        self.capacity, self.limit, self.best, self.close_fullest = capacity, limit, best, close_fullest
        self.most = most or capacity  # each document has a token at least
        self.opened = 0
        self._rooms: dict[int, int] = {}  # open bin -> room, in the order of opening
        self._counts: dict[int, int] = {}
        self._levels: list[int] = []  # the open bins by room, then age; kept for `best` only

    @property
    def open(self) -> list[int]:
        """The open bins, oldest first."""
        return list(self._rooms)

    def place(self, lengths: Sequence[int]) -> Placement:
        """Put documents of these lengths (1 to `capacity` each) into bins, in order."""
        return self._place_best(lengths) if self.best else self._place_first(lengths)

    def close_all(self) -> list[int]:
        """Close every open bin, oldest first."""
        bins = self.open
        self._rooms.clear()
        self._counts.clear()
        self._levels.clear()
        return bins

    def _place_best(self, lengths: Sequence[int]) -> Placement:
        levels, rooms, capacity = self._levels, self._rooms, self.capacity
        bins: list[int] = []
        offsets: list[int] = []
        closed: list[int] = []
        for length in lengths:
            at = bisect_left(levels, length << _NUMBER_BITS)
            if at < len(levels):
                level = levels.pop(at)
                number, room = level & _NUMBER, level >> _NUMBER_BITS
            else:
                if len(levels) >= self.limit:
                    closed.append(self._make_room())
                number, room = self.opened, capacity
                self.opened += 1
            bins.append(number)
            offsets.append(capacity - room)
            room -= length
            if room and not self._is_crowded(number):
                rooms[number] = room
                insort(levels, room << _NUMBER_BITS | number)
            else:
                rooms.pop(number, None)
                closed.append(number)
        return Placement(bins, offsets, closed)

    def _place_first(self, lengths: Sequence[int]) -> Placement:
        rooms, capacity = self._rooms, self.capacity
        bins: list[int] = []
        offsets: list[int] = []
        closed: list[int] = []
        for length in lengths:
            for number, room in rooms.items():  # noqa: B007  (both are used once the loop is left)
                if room >= length:
                    break
            else:
                if len(rooms) >= self.limit:
                    closed.append(self._make_room())
                number, room = self.opened, capacity
                self.opened += 1
            bins.append(number)
            offsets.append(capacity - room)
            room -= length
            if room and not self._is_crowded(number):
                rooms[number] = room
            else:
                rooms.pop(number, None)
                closed.append(number)
        return Placement(bins, offsets, closed)

    def _is_crowded(self, number: int) -> bool:
        """Counts one more document in a bin; whether that was the last it may hold."""
        if self.most >= self.capacity:
            return False
        count = self._counts.pop(number, 0) + 1
        if count < self.most:
            self._counts[number] = count
        return count >= self.most

    def _make_room(self) -> int:
        """Close one of the open bins."""
        rooms = self._rooms
        number = min(rooms, key=rooms.__getitem__) if self.close_fullest else next(iter(rooms))
        room = rooms.pop(number)
        self._counts.pop(number, None)
        if self.best:
            del self._levels[bisect_left(self._levels, room << _NUMBER_BITS | number)]
        return number
