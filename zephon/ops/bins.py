"""Which sequence each document goes into: open sequences as bins, documents as their lengths. No tokens are touched.

It is online: documents are placed in the order of their coming, from what came before them in their window and nothing
else. A document goes whole into an open bin that has room: the first, or the one that it leaves the least room in.
Where none has room a new bin is opened; if `limit` are open already, the oldest is closed to make room, or the fullest.
With `split` no bin is closed before it is full: the document's beginning fills it, and the rest goes on.

A bin that is full, or holds `most` documents, is closed at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Sequence
from math import isqrt
from typing import NamedTuple

import numpy as np

from zephon.columns import IntArray

DEFAULT_BINS = 64
NUMBER_BITS = 32
NUMBER = (1 << NUMBER_BITS) - 1
LENGTH = ~NUMBER
"""A *level* is a bin: `room << 32 | its number`, so that sorting levels sorts by room, then by age. A *key* is a
document: `length << 32 | its number counted down`, so that of one length the oldest comes last. Both fit int64.
"""


class Rules(NamedTuple):
    """How many tokens a bin holds, how many bins may be open, which of them is closed to make room, how many documents
    a bin may hold, and whether documents may be split.
    """

    capacity: int
    limit: int = DEFAULT_BINS
    close_fullest: bool = False
    most: int | None = None
    split: bool = False


class Placement(NamedTuple):
    """Pieces of documents in the order of their placing, and the bins that were closed, in that order.

    `pieces` is int64 `[5, n]`: the document of a piece, where in it the piece starts, its length, its bin, its offset
    there; unless documents are split a piece is a whole one. Bin `closed[j]` was closed when document `closed_at[j]`
    came.
    """

    pieces: IntArray
    closed: list[int]
    closed_at: list[int]


class Bins(ABC):
    """Open bins of `capacity` tokens, numbered in the order of their opening."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.capacity, self.limit, self.close_fullest, self.most, self.split = rules
        self.opened = 0
        self._open: dict[int, int] = {}  # open bin -> its level, in the order of opening
        self._counts: dict[int, int] = {}
        self._keys: list[int] = []  # of the pieces placed since the last call
        self._into: list[int] = []  # for each the level of its bin before
        self._starts: dict[int, int] = {}  # of the pieces that are not a document's beginning
        self._closed: list[int] = []
        self._closed_at: list[int] = []
        self._now = 0  # the key of the document that has just come

    @property
    def open(self) -> list[int]:
        """The open bins, oldest first."""
        return list(self._open)

    def place(self, keys: Sequence[int]) -> Placement:
        """Documents by their keys, in the order of their numbers; lengths 1 to `capacity`, any from 1 with `split`."""
        for key in keys:
            self._now = key
            self._settle(key)
        return self._taken()

    def finish(self) -> Placement:
        """No more documents: place those that wait. The bins stay open."""
        return self._taken()

    def _taken(self) -> Placement:
        keys, into = np.array(self._keys, np.int64), np.array(self._into, np.int64)
        starts = np.zeros(len(keys), np.int64)
        if self._starts:
            starts[list(self._starts)] = list(self._starts.values())
        offsets = self.capacity - (into >> NUMBER_BITS)
        pieces = np.stack((NUMBER - (keys & NUMBER), starts, keys >> NUMBER_BITS, into & NUMBER, offsets))
        made = Placement(pieces, self._closed, [NUMBER - (key & NUMBER) for key in self._closed_at])
        self._keys, self._into, self._starts, self._closed, self._closed_at = [], [], {}, [], []
        return made

    def _settle(self, key: int) -> None:
        """Put a document where the rule says."""
        start, capacity = 0, self.capacity
        while (level := self._find(key)) is None:
            length = key >> NUMBER_BITS
            if len(self._open) < self.limit:
                level = capacity << NUMBER_BITS | self.opened
                self.opened += 1
                part = min(length, capacity)
            else:
                level = self._fullest() if self.close_fullest else next(iter(self._open.values()))
                if not self.split:
                    del self._open[level & NUMBER]
                    self._unlisted(level)
                    self._close(level & NUMBER)
                    continue
                part = level >> NUMBER_BITS
            self._put(part << NUMBER_BITS | key & NUMBER, start, level)
            start += part
            key -= part << NUMBER_BITS
            if key <= NUMBER:
                return
        self._put(key, start, level)

    def _put(self, key: int, start: int, level: int) -> None:
        """A piece into a bin of that level. A bin with all of its room is a new one."""
        if start:
            self._starts[len(self._keys)] = start
        self._keys.append(key)
        self._into.append(level)
        number, left = level & NUMBER, level - (key & LENGTH)
        crowded = self.most is not None and self._is_crowded(number)
        new = level >> NUMBER_BITS == self.capacity
        if left > NUMBER and not crowded:
            self._open[number] = left
            if new:
                self._listed(left)
            else:
                self._relisted(level, left)
            return
        if not new:
            del self._open[number]
            self._unlisted(level)
        self._close(number)

    def _is_crowded(self, number: int) -> bool:
        """Counts one more document in a bin; whether that was the last it may hold."""
        count = self._counts.get(number, 0) + 1
        self._counts[number] = count
        return self.most is not None and count >= self.most

    def _close(self, number: int) -> None:
        self._counts.pop(number, None)
        self._closed.append(number)
        self._closed_at.append(self._now)

    def _fullest(self) -> int:
        """The level of the open bin with the least room, the oldest of several."""
        return min(self._open.values())

    @abstractmethod
    def _find(self, key: int) -> int | None:
        """The level of the open bin that a document goes into; None if none has room."""

    @abstractmethod
    def _listed(self, level: int) -> None:
        """A bin was opened and has that level now."""

    @abstractmethod
    def _relisted(self, before: int, level: int) -> None:
        """A bin's room has shrunk."""

    @abstractmethod
    def _unlisted(self, level: int) -> None:
        """A bin that had that level was closed."""


class BestFit(Bins):
    """The bin that is left with the least room, the oldest of several."""

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self._levels: list[int] = []  # the open bins by room, then age

    def place(self, keys: Sequence[int]) -> Placement:
        levels = self._levels
        for key in keys:
            self._now = key
            at = bisect_left(levels, key & LENGTH)
            if at < len(levels) and self.most is None:
                self._fill(levels.pop(at), key)
            else:
                self._settle(key)
        return self._taken()

    def _fill(self, level: int, key: int) -> None:
        """A whole document into an open bin that has room, and is not among the levels any more."""
        self._keys.append(key)
        self._into.append(level)
        left = level - (key & LENGTH)
        if left > NUMBER:
            insort(self._levels, left)
            self._open[left & NUMBER] = left
        else:
            del self._open[left]
            self._close(left)

    def _find(self, key: int) -> int | None:
        at = bisect_left(self._levels, key & LENGTH)
        return self._levels[at] if at < len(self._levels) else None

    def _fullest(self) -> int:
        return self._levels[0]

    def _listed(self, level: int) -> None:
        insort(self._levels, level)

    def _relisted(self, before: int, level: int) -> None:
        self._unlisted(before)
        insort(self._levels, level)

    def _unlisted(self, level: int) -> None:
        del self._levels[bisect_left(self._levels, level)]


class FirstFit(Bins):
    """The oldest bin that has room.

    Levels stand in the order of opening, in groups, and each group knows its largest; closed bins leave gaps (level 0).
    When the groups are used up, the open bins move together, into as many groups as a group has bins.
    """

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self._width = 1
        self._slots: list[int] = []
        self._tops: list[int] = []
        self._slot: dict[int, int] = {}  # open bin -> its slot

    def place(self, keys: Sequence[int]) -> Placement:
        for key in keys:
            self._now = key
            if self.most is not None or not self._fill(key):
                self._settle(key)
        return self._taken()

    def _fill(self, key: int) -> bool:
        """A whole document into the oldest bin that has room, if one has."""
        length = key & LENGTH
        for group, top in enumerate(self._tops):  # noqa: B007  (used once the loop is left)
            if top >= length:
                break
        else:
            return False
        slot = group * self._width
        while (level := self._slots[slot]) < length:
            slot += 1
        self._keys.append(key)
        self._into.append(level)
        left = level - length
        if left > NUMBER:
            self._open[left & NUMBER] = left
            self._set(slot, level, left)
        else:
            del self._open[left], self._slot[left]
            self._set(slot, level, 0)
            self._close(left)
        return True

    def _find(self, key: int) -> int | None:
        length = key & LENGTH
        group = next((group for group, top in enumerate(self._tops) if top >= length), None)
        if group is None:
            return None
        low = group * self._width
        return next(level for level in self._slots[low : low + self._width] if level >= length)

    def _listed(self, level: int) -> None:
        slot = len(self._slots)
        if slot >= self._width * self._width:
            self._slots = list(self._open.values())  # the new bin is the last of them
            self._slot = {number: slot for slot, number in enumerate(self._open)}
            self._width = isqrt(2 * len(self._slots)) + 1
            self._tops = [max(self._slots[low : low + self._width]) for low in range(0, len(self._slots), self._width)]
            return
        self._slots.append(level)
        self._slot[level & NUMBER] = slot
        if slot % self._width:
            self._tops[-1] = max(self._tops[-1], level)
        else:
            self._tops.append(level)

    def _relisted(self, before: int, level: int) -> None:
        self._set(self._slot[level & NUMBER], before, level)

    def _unlisted(self, level: int) -> None:
        self._set(self._slot.pop(level & NUMBER), level, 0)

    def _set(self, slot: int, before: int, level: int) -> None:
        self._slots[slot] = level
        group = slot // self._width
        if self._tops[group] == before:
            low = group * self._width
            self._tops[group] = max(self._slots[low : low + self._width])


def keys_of(documents: IntArray, lengths: IntArray) -> list[int]:
    """The keys of documents by number and length, as Python's numbers."""
    keys: list[int] = (lengths << NUMBER_BITS | NUMBER - documents).tolist()
    return keys
