"""A pool of documents that wait for a bin they fit well.

When more than `size` documents wait, one is placed: of the bins that any of them fits, the fullest (best fit) or the
oldest (first fit) takes the longest that fits it. For best fit that is as good as comparing all documents with all bins
for the closest pair (the share of padding came out the same to four digits), and it takes two searches. Where no
document fits any bin, the oldest is placed by the usual rule. So is, before all others, one that has seen `patience`
documents placed since it came.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

from zephon.ops.bins import LENGTH, NUMBER, BestFit, Bins, FirstFit, Placement, Rules


class _Waiting(Bins):
    """The pool. Mixed into a kind of bins, which places what leaves the pool."""

    def __init__(self, rules: Rules, size: int, patience: int | None = None) -> None:
        super().__init__(rules)
        self.size, self.patience = size, patience
        self._pool: dict[int, int] = {}  # the keys that wait, oldest first -> what `_placed` was when it came
        self._by_length: list[int] = []  # the same keys, sorted
        self._placed = 0

    def place(self, keys: Sequence[int]) -> Placement:
        for key in keys:
            self._now = key
            self._pool[key] = self._placed
            insort(self._by_length, key)
            if len(self._pool) > self.size:
                self._place_one()
        return self._taken()

    def finish(self) -> Placement:
        while self._pool:
            self._place_one()
        return self._taken()

    def _place_one(self) -> None:
        key, waiting = next(iter(self._pool)), self._by_length
        if self.patience is None or self._placed - self._pool[key] < self.patience:
            level = self._find(waiting[0])
            if level is not None:
                key = waiting[bisect_right(waiting, level | NUMBER) - 1]
        del self._pool[key], waiting[bisect_left(waiting, key)]
        self._placed += 1
        self._settle(key)


class FirstFitCandidates(_Waiting, FirstFit):
    """First fit, with a pool."""

    def place(self, keys: Sequence[int]) -> Placement:
        if self.patience is not None or self.most is not None:
            return super().place(keys)
        waiting, pool, size = self._by_length, self._pool, self.size
        for key in keys:
            pool[key] = 0
            insort(waiting, key)
            if len(waiting) <= size:
                continue
            self._now = key
            level = self._find(waiting[0])
            if level is None:
                self._place_one()
            else:
                chosen = waiting.pop(bisect_right(waiting, level | NUMBER) - 1)
                del pool[chosen]
                self._fill(chosen)
        return self._taken()


class BestFitCandidates(_Waiting, BestFit):
    """Best fit, with a pool."""

    def place(self, keys: Sequence[int]) -> Placement:
        if self.patience is not None or self.most is not None:
            return super().place(keys)
        levels, waiting, pool, size = self._levels, self._by_length, self._pool, self.size
        placed, into, opened = self._keys.append, self._into.append, self._open
        for key in keys:
            pool[key] = 0
            insort(waiting, key)
            if len(waiting) <= size:
                continue
            self._now = key
            at = bisect_left(levels, waiting[0] & LENGTH)
            if at == len(levels):
                self._place_one()
                continue
            level = levels.pop(at)
            chosen = waiting.pop(bisect_right(waiting, level | NUMBER) - 1)
            del pool[chosen]
            placed(chosen)
            into(level)
            left = level - (chosen & LENGTH)
            if left > NUMBER:
                insort(levels, left)
                opened[left & NUMBER] = left
            else:
                del opened[left]
                self._close(left)
        return self._taken()
