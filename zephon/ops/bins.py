"""Which sequence each document goes into: open sequences as bins, documents as their lengths. No tokens are touched.

It is online: documents are placed in the order of their coming, from what came before them in their window and nothing
else. A document goes whole into an open bin that has room: the first, or the one that it leaves the least room in.
Where none has room a new bin is opened; if `limit` are open already, the oldest is closed to make room, or the fullest.
With `split` no bin is closed before it is full: the document's beginning fills it, and the rest goes on.

A bin that is full, or holds `most` documents, is closed at once.

Everything is a number, so that one search in a sorted list finds the bin or the document that is wanted:

- A *piece* of a document is `where it starts << 64 | its length << 32 | the document's number, counted down`.
- A *key* is a document: the piece that is all of it. Of keys of one length the oldest document's is the largest.
- A *level* is an open bin: `room << 32 | its number`. Of bins with the same room the oldest's is the smallest. Numbers
  grow in the order of opening.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from zephon.columns import IntArray

DEFAULT_BINS = 64
NUMBER_BITS = 32
NUMBER = (1 << NUMBER_BITS) - 1
LENGTH = NUMBER << NUMBER_BITS
START_BITS = 64

Closed = tuple[int, list[int]]
"""A closed bin: the key of the document that had come when it was closed, and its pieces, end to end."""


class Rules(NamedTuple):
    """How many tokens a bin holds, how many bins may be open, which of them is closed to make room, how many documents
    a bin may hold, and whether documents may be split.
    """

    capacity: int
    limit: int = DEFAULT_BINS
    close_fullest: bool = False
    most: int | None = None
    split: bool = False


class Bins(ABC):
    """Open bins of `capacity` tokens."""

    def __init__(self, rules: Rules) -> None:
        self.capacity, self.limit, self.close_fullest, most, self.split = rules
        self._most = most or 0  # no bin ever holds 0
        self._open: dict[int, list[int]] = {}  # open bin -> its pieces, in the order of opening
        self._closed: list[Closed] = []  # since the last call
        self._now = 0  # the key of the document that has just come

    @property
    def open(self) -> list[list[int]]:
        """The pieces of each open bin, oldest bin first."""
        return list(self._open.values())

    @abstractmethod
    def place(self, keys: Sequence[int]) -> list[Closed]:
        """Documents in the order of their numbers, of lengths 1 to `capacity`, or any from 1 with `split`. Returns the
        bins that were closed, in that order.
        """

    def finish(self) -> list[Closed]:
        """No more documents: place those that wait. The bins stay open."""
        return self._taken()

    def _taken(self) -> list[Closed]:
        closed, self._closed = self._closed, []
        return closed

    def _settle(self, key: int) -> int:
        """Put a document where the rule says, when no open bin has room for it. Returns what `_put` does."""
        level: int | None = None
        while level is None:
            if len(self._open) < self.limit:
                level = self._new()
            else:
                level = self._take_fullest() if self.close_fullest else self._take_oldest()
                if not self.split:
                    self._close(level & NUMBER)
                    level = self._new()
            length = key >> NUMBER_BITS & NUMBER
            part = min(length, level >> NUMBER_BITS)
            level = self._put(key - (length - part << NUMBER_BITS), level)
            if part == length:
                return level
            key += (part << START_BITS) - (part << NUMBER_BITS)
            level = self._take(key & LENGTH)
        return self._put(key, level)

    def _put(self, piece: int, level: int) -> int:
        """A piece into the bin of that level, which has been taken. Returns the bin's level now, 0 if it was closed."""
        pieces = self._open[level & NUMBER]
        pieces.append(piece)
        level -= piece & LENGTH
        if level > NUMBER and len(pieces) != self._most:
            return level
        self._close(level & NUMBER)
        return 0

    def _close(self, number: int) -> None:
        """Close a bin that has been taken."""
        self._closed.append((self._now, self._open.pop(number)))

    @abstractmethod
    def _new(self) -> int:
        """Open a bin: its level. It counts as taken."""

    @abstractmethod
    def _take(self, length: int) -> int | None:
        """The level of the open bin that a document goes into, by its length `<< 32`; None if none has room. What is
        taken is then given back with less room, or closed.
        """

    @abstractmethod
    def _take_fullest(self) -> int:
        """The level of the open bin with the least room, the oldest of several."""

    @abstractmethod
    def _take_oldest(self) -> int:
        """The level of the oldest open bin."""

    @abstractmethod
    def _give(self, level: int) -> None:
        """A bin that was taken has that level now."""


class BestFit(Bins):
    """The bin that is left with the least room, the oldest of several."""

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self._levels: list[int] = []  # of the open bins, sorted; one that is taken is not there
        self._opened = 0

    def place(self, keys: Sequence[int]) -> list[Closed]:
        levels, bins, most = self._levels, self._open, self._most
        for key in keys:
            length = key & LENGTH
            at = bisect_left(levels, length)
            self._now = key
            if at < len(levels):
                level = levels.pop(at) - length
                pieces = bins[level & NUMBER]
                pieces.append(key)
                if level <= NUMBER or len(pieces) == most:
                    self._close(level & NUMBER)
                    continue
            elif not (level := self._settle(key)):
                continue
            insort(levels, level)
        return self._taken()

    def _new(self) -> int:
        number = self._opened
        self._opened += 1
        self._open[number] = []
        return self.capacity << NUMBER_BITS | number

    def _take(self, length: int) -> int | None:
        at = bisect_left(self._levels, length)
        return self._levels.pop(at) if at < len(self._levels) else None

    def _take_fullest(self) -> int:
        return self._levels.pop(0)

    def _take_oldest(self) -> int:
        number, pieces = next(iter(self._open.items()))
        room = self.capacity - sum(piece >> NUMBER_BITS & NUMBER for piece in pieces)
        level = room << NUMBER_BITS | number
        del self._levels[bisect_left(self._levels, level)]
        return level

    def _give(self, level: int) -> None:
        insort(self._levels, level)


class FirstFit(Bins):
    """The oldest bin that has room.

    The bins' rooms are the leaves of a binary tree, in the order of opening, whose nodes know the most room below them:
    node `i` stands over `2 * i` and `2 * i + 1`, and the leaf of bin `n` is `size + n`. Closed bins have no room left.
    When all leaves are used, the open bins move together, numbered anew, into a tree with as many leaves to spare.
    """

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self._size = 1
        self._rooms = [0, 0]
        self._opened = 0

    def place(self, keys: Sequence[int]) -> list[Closed]:
        for key in keys:
            self._now = key
            rooms, size, length = self._rooms, self._size, key >> NUMBER_BITS
            if rooms[1] < length:
                if level := self._settle(key):
                    self._give(level)
                continue
            node = 1
            while node < size:
                node += node
                if rooms[node] < length:
                    node += 1
            pieces = self._open[node - size]
            pieces.append(key)
            room = rooms[node] - length
            if not room or len(pieces) == self._most:
                self._close(node - size)
                continue
            self._set(node, room)
        return self._taken()

    def _new(self) -> int:
        if self._opened == self._size:
            self._move_together()
        number = self._opened
        self._opened += 1
        self._open[number] = []
        return self.capacity << NUMBER_BITS | number

    def _move_together(self) -> None:
        rooms = [self._rooms[self._size + number] for number in self._open]
        self._open = dict(enumerate(self._open.values()))
        self._opened = len(rooms)
        self._size = size = 1 << (2 * len(rooms) - 1).bit_length()
        self._rooms = [0] * size + rooms + [0] * (size - len(rooms))
        for node in range(size - 1, 0, -1):
            self._rooms[node] = max(self._rooms[2 * node : 2 * node + 2])

    def _take(self, length: int) -> int | None:
        rooms, size, length = self._rooms, self._size, length >> NUMBER_BITS
        if rooms[1] < length:
            return None
        node = 1
        while node < size:
            node *= 2
            if rooms[node] < length:
                node += 1
        return rooms[node] << NUMBER_BITS | node - size

    def _take_fullest(self) -> int:
        rooms = self._rooms[self._size : self._size + self._opened]
        least = min(filter(None, rooms))
        return least << NUMBER_BITS | rooms.index(least)

    def _take_oldest(self) -> int:
        number = next(iter(self._open))
        return self._rooms[self._size + number] << NUMBER_BITS | number

    def _give(self, level: int) -> None:
        self._set(self._size + (level & NUMBER), level >> NUMBER_BITS)

    def _close(self, number: int) -> None:
        super()._close(number)
        self._set(self._size + number, 0)

    def _set(self, node: int, room: int) -> None:
        """The bin of that leaf has so much room now."""
        rooms = self._rooms
        rooms[node] = room
        while node > 1:
            room = room if room > rooms[node ^ 1] else rooms[node ^ 1]
            node >>= 1
            if rooms[node] == room:
                return
            rooms[node] = room


def keys_of(documents: IntArray, lengths: IntArray) -> list[int]:
    """The keys of documents by number and length, as Python's numbers."""
    keys: list[int] = (lengths << NUMBER_BITS | NUMBER - documents).tolist()
    return keys


def pieces_in(pieces: list[int], *, split: bool) -> tuple[IntArray, IntArray, IntArray]:
    """`(document, start, length)` of pieces, each int64 `[n]`; without `split` all start at 0."""
    if split:
        start = np.array([piece >> START_BITS for piece in pieces], np.int64)
        pieces = [piece & (LENGTH | NUMBER) for piece in pieces]
    else:
        start = np.zeros(len(pieces), np.int64)
    keys = np.array(pieces, np.int64)
    return NUMBER - (keys & NUMBER), start, keys >> NUMBER_BITS
