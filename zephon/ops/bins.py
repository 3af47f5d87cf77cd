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
from typing import NamedTuple

import numpy as np

from zephon.columns import IntArray

DEFAULT_BINS = 64
NUMBER_BITS = 40  # a level is `room << 40 | bin`, so that sorting levels sorts by room, then by age
NUMBER = (1 << NUMBER_BITS) - 1


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
        self._rooms: dict[int, int] = {}  # open bin -> room, in the order of opening
        self._counts: dict[int, int] = {}
        self._pieces: list[int] = []  # of those placed since the last call, five numbers each
        self._closed: list[int] = []
        self._closed_at: list[int] = []
        self._now = 0  # the document that has just come

    @property
    def open(self) -> list[int]:
        """The open bins, oldest first."""
        return list(self._rooms)

    def place(self, documents: Sequence[int], lengths: Sequence[int]) -> Placement:
        """Documents by number, with their lengths: 1 to `capacity`, any from 1 with `split`."""
        for document, length in zip(documents, lengths):
            self._now = document
            self._settle(document, length)
        return self._taken()

    def finish(self) -> Placement:
        """No more documents: place those that wait. The bins stay open."""
        return self._taken()

    def _taken(self) -> Placement:
        pieces = np.array(self._pieces, np.int64).reshape(-1, 5).T
        made = Placement(pieces, self._closed, self._closed_at)
        self._pieces, self._closed, self._closed_at = [], [], []
        return made

    def _settle(self, document: int, length: int) -> None:
        """Put a document where the rule says."""
        start = 0
        while (number := self._find(length)) is None:
            if len(self._rooms) < self.limit:
                number = self.opened
                self.opened += 1
                if length <= self.capacity:
                    self._put(document, start, length, number, self.capacity)
                    return
                self._put(document, start, self.capacity, number, self.capacity)
                start, length = start + self.capacity, length - self.capacity
                continue
            number = self._fullest() if self.close_fullest else next(iter(self._rooms))
            room = self._rooms[number]
            if self.split:
                self._put(document, start, room, number, room)
                start, length = start + room, length - room
            else:
                del self._rooms[number]
                self._unlisted(number, room)
                self._close(number)
        self._put(document, start, length, number, self._rooms[number])

    def _put(self, document: int, start: int, length: int, number: int, room: int) -> None:
        """A piece into a bin that has that room. A bin that is not among the open ones is a new one."""
        self._pieces.extend((document, start, length, number, self.capacity - room))
        left = room - length
        crowded = self.most is not None and self._is_crowded(number)
        if left and not crowded:
            self._rooms[number] = left
            if room == self.capacity:
                self._listed(number, left)
            else:
                self._relisted(number, room, left)
            return
        if room < self.capacity:
            del self._rooms[number]
            self._unlisted(number, room)
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
        """The open bin with the least room, the oldest of several."""
        return min(self._rooms, key=self._rooms.__getitem__)

    @abstractmethod
    def _find(self, length: int) -> int | None:
        """The open bin that a document of this length goes into; None if none has room."""

    @abstractmethod
    def _listed(self, number: int, room: int) -> None:
        """A bin was opened and has that room left."""

    @abstractmethod
    def _relisted(self, number: int, before: int, room: int) -> None:
        """A bin's room has shrunk."""

    @abstractmethod
    def _unlisted(self, number: int, room: int) -> None:
        """A bin that had that room was closed."""


class BestFit(Bins):
    """The bin that is left with the least room, the oldest of several."""

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self._levels: list[int] = []  # the open bins by room, then age

    def place(self, documents: Sequence[int], lengths: Sequence[int]) -> Placement:
        levels, fill = self._levels, self._fill
        for document, length in zip(documents, lengths):
            self._now = document
            at = bisect_left(levels, length << NUMBER_BITS)
            if at < len(levels):
                fill(at, document, length)
            else:
                self._settle(document, length)
        return self._taken()

    def _fill(self, at: int, document: int, length: int) -> None:
        """A document into the open bin of `levels[at]`."""
        level = self._levels.pop(at)
        number, room = level & NUMBER, level >> NUMBER_BITS
        self._pieces.extend((document, 0, length, number, self.capacity - room))
        crowded = self.most is not None and self._is_crowded(number)
        if room > length and not crowded:
            self._rooms[number] = room - length
            insort(self._levels, level - (length << NUMBER_BITS))
        else:
            del self._rooms[number]
            self._close(number)

    def _find(self, length: int) -> int | None:
        at = bisect_left(self._levels, length << NUMBER_BITS)
        return self._levels[at] & NUMBER if at < len(self._levels) else None

    def _fullest(self) -> int:
        return self._levels[0] & NUMBER

    def _listed(self, number: int, room: int) -> None:
        insort(self._levels, room << NUMBER_BITS | number)

    def _relisted(self, number: int, before: int, room: int) -> None:
        levels = self._levels
        del levels[bisect_left(levels, before << NUMBER_BITS | number)]
        insort(levels, room << NUMBER_BITS | number)

    def _unlisted(self, number: int, room: int) -> None:
        del self._levels[bisect_left(self._levels, room << NUMBER_BITS | number)]


class FirstFit(Bins):
    """The oldest bin that has room, found in a tree whose nodes know the largest room below them.

    A bin's leaf is its place in the order of opening; when the leaves are used up, the open bins move to the first ones
    of a tree with twice as many as there are bins.
    """

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self._leaf: dict[int, int] = {}
        self._bin_at: list[int] = []
        self._tree: list[int] = [0, 0]
        self._leaves = 1

    def place(self, documents: Sequence[int], lengths: Sequence[int]) -> Placement:
        for document, length in zip(documents, lengths):
            self._now = document
            if self._tree[1] < length:
                self._settle(document, length)
            else:
                self._fill(document, length)
        return self._taken()

    def _fill(self, document: int, length: int) -> None:
        """A document into the oldest bin that has room; one has."""
        tree, leaves, node = self._tree, self._leaves, 1
        while node < leaves:
            node *= 2
            if tree[node] < length:
                node += 1
        number, room = self._bin_at[node - leaves], tree[node]
        self._pieces.extend((document, 0, length, number, self.capacity - room))
        crowded = self.most is not None and self._is_crowded(number)
        if room > length and not crowded:
            self._rooms[number] = room - length
            self._set(node, room - length)
        else:
            del self._rooms[number], self._leaf[number]
            self._set(node, 0)
            self._close(number)

    @property
    def largest_room(self) -> int:
        """Of all open bins; 0 if none is open."""
        return self._tree[1]

    def _find(self, length: int) -> int | None:
        tree = self._tree
        if tree[1] < length:
            return None
        node, leaves = 1, self._leaves
        while node < leaves:
            node *= 2
            if tree[node] < length:
                node += 1
        return self._bin_at[node - leaves]

    def _listed(self, number: int, room: int) -> None:
        if len(self._bin_at) == self._leaves:
            self._rebuild()  # the bin is among the open ones already
            return
        self._leaf[number] = len(self._bin_at)
        self._bin_at.append(number)
        self._set(self._leaf[number] + self._leaves, room)

    def _relisted(self, number: int, before: int, room: int) -> None:
        self._set(self._leaf[number] + self._leaves, room)

    def _unlisted(self, number: int, room: int) -> None:
        self._set(self._leaf.pop(number) + self._leaves, 0)

    def _set(self, node: int, room: int) -> None:
        tree = self._tree
        tree[node] = room
        while node > 1:
            node //= 2
            left, right = tree[2 * node], tree[2 * node + 1]
            most = left if left >= right else right
            if tree[node] == most:
                break
            tree[node] = most

    def _rebuild(self) -> None:
        self._bin_at = list(self._rooms)
        self._leaf = {number: leaf for leaf, number in enumerate(self._bin_at)}
        self._leaves = 1 << (2 * len(self._bin_at)).bit_length()
        self._tree = [0] * (2 * self._leaves)
        self._tree[self._leaves : self._leaves + len(self._rooms)] = self._rooms.values()
        for node in range(self._leaves - 1, 0, -1):
            self._tree[node] = max(self._tree[2 * node], self._tree[2 * node + 1])
