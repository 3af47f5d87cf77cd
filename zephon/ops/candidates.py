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

from zephon.ops.bins import LENGTH, NUMBER, BestFit, Bins, Closed, FirstFit, Rules


class _Waiting(Bins):
    """The pool. Mixed into a kind of bins, which says which of them takes the next.

    That bin is *in hand*: it takes document after document for as long as it has room for the shortest, and no shorter
    one comes. Until then no other bin could be the fullest, or the oldest, that has room for one.
    """

    def __init__(self, rules: Rules, size: int, patience: int | None = None) -> None:
        super().__init__(rules)
        self.size, self.patience = size, patience
        self._came: dict[int, int] = {}  # the keys that wait, oldest first -> what `_placed` was when it came
        self._by_length: list[int] = []  # the same keys, sorted
        self._placed = 0

    def place(self, keys: Sequence[int]) -> list[Closed]:
        came, waiting, placed = self._came, self._by_length, self._placed
        size, patience, most = self.size, self.patience, self._most
        number, reach = 0, NUMBER  # of the bin in hand, and the largest key that it could have room for
        pieces: list[int] = []  # in it
        for key in keys:
            if key:
                self._now = key
                came[key] = placed
                insort(waiting, key)
                if waiting[0] is key and reach != NUMBER:
                    self._give(reach & LENGTH | number)
                    reach = NUMBER
                if len(waiting) <= size:
                    continue
            overdue = patience is not None and placed - came[next(iter(came))] >= patience
            placed += 1
            at = 0 if overdue else bisect_right(waiting, reach)
            if not at:
                if reach != NUMBER:
                    self._give(reach & LENGTH | number)
                level = None if overdue else self._take(waiting[0] & LENGTH)
                if level is None:
                    level = self._place_oldest(overdue)
                    number, reach = level & NUMBER, level | NUMBER
                    pieces = self._open[number] if level else pieces
                    continue
                number, reach = level & NUMBER, level | NUMBER
                pieces, at = self._open[number], bisect_right(waiting, reach)
            chosen = waiting.pop(at - 1)
            del came[chosen]
            pieces.append(chosen)
            reach -= chosen & LENGTH
            if reach == NUMBER or len(pieces) == most:
                self._close(number)
                reach = NUMBER
        if reach != NUMBER:
            self._give(reach & LENGTH | number)
        self._placed = placed
        return self._taken()

    def _place_oldest(self, overdue: bool) -> int:
        """By the usual rule. Returns the level of a bin to have in hand, 0 for none."""
        key = next(iter(self._came))
        del self._came[key], self._by_length[bisect_left(self._by_length, key)]
        if not overdue:
            return self._settle(key)  # no bin but this one can have room for any that waits
        level = self._take(key & LENGTH)
        level = self._settle(key) if level is None else self._put(key, level)
        if level:
            self._give(level)
        return 0

    def finish(self) -> list[Closed]:
        return self.place([0] * len(self._by_length))  # one is placed each time, and none comes


class FirstFitCandidates(_Waiting, FirstFit):
    """First fit, with a pool."""


class BestFitCandidates(_Waiting, BestFit):
    """Best fit, with a pool."""
