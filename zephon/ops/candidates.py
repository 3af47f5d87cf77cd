"""A pool of documents that wait for a bin they fit well.

When more than `size` documents wait, one is placed. With best fit it is the longest that goes into the fullest bin
which any of them fits: as good in the end as comparing all documents with all bins for the closest pair (the share of
padding came out the same to four digits), and found by two searches. With first fit it is the oldest document for
which some open bin has room. Where no document fits any bin, the oldest is placed by the usual rule. So is, before all
others, one that has seen `patience` documents placed since it came.
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
        self._placed = 0

    def place(self, keys: Sequence[int]) -> Placement:
        for key in keys:
            self._now = key
            self._pool[key] = self._placed
            self._joined(key)
            if len(self._pool) > self.size:
                self._place_one()
        return self._taken()

    def finish(self) -> Placement:
        while self._pool:
            self._place_one()
        return self._taken()

    def _place_one(self) -> None:
        key = next(iter(self._pool))
        if self.patience is None or self._placed - self._pool[key] < self.patience:
            key = self._choice(key)
        del self._pool[key]
        self._left(key)
        self._placed += 1
        self._settle(key)

    def _choice(self, oldest: int) -> int:
        """The waiting document to be placed next."""
        raise NotImplementedError

    def _joined(self, key: int) -> None:
        """A document has come to wait."""

    def _left(self, key: int) -> None:
        """A document waits no more."""


class FirstFitCandidates(_Waiting, FirstFit):
    """First fit, with a pool."""

    def place(self, keys: Sequence[int]) -> Placement:
        if self.patience is not None or self.most is not None:
            return super().place(keys)
        pool, size = self._pool, self.size
        for key in keys:
            self._now = key
            pool[key] = 0
            if len(pool) <= size:
                continue
            room = max(self._tops, default=0) | NUMBER
            for waiting in pool:
                if waiting <= room:
                    del pool[waiting]
                    self._fill(waiting)
                    break
            else:
                self._place_one()
        return self._taken()

    def _choice(self, oldest: int) -> int:
        room = max(self._tops, default=0) | NUMBER
        return next((key for key in self._pool if key <= room), oldest)


class BestFitCandidates(_Waiting, BestFit):
    """Best fit, with a pool."""

    def __init__(self, rules: Rules, size: int, patience: int | None = None) -> None:
        super().__init__(rules, size, patience)
        self._by_length: list[int] = []

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

    def _choice(self, oldest: int) -> int:
        levels, waiting = self._levels, self._by_length
        at = bisect_left(levels, waiting[0] & LENGTH)
        return waiting[bisect_right(waiting, levels[at] | NUMBER) - 1] if at < len(levels) else oldest

    def _joined(self, key: int) -> None:
        insort(self._by_length, key)

    def _left(self, key: int) -> None:
        del self._by_length[bisect_left(self._by_length, key)]
