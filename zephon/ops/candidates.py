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
        came, waiting, placed, patience, most = self._came, self._by_length, self._placed, self.patience, self._most
        number, reach, pieces = 0, NUMBER, []  # the bin in hand; `reach`: the largest key that it could have room for
        for key in keys:
            if key:
                self._now = key
                came[key] = placed
                insort(waiting, key)
                if waiting[0] == key and reach != NUMBER:
                    self._give(reach & LENGTH | number)
                    reach = NUMBER
                if len(waiting) <= self.size:
                    continue
            overdue = patience is not None and placed - came[next(iter(came))] >= patience
            placed += 1
            at = bisect_right(waiting, reach)
            if overdue or not at:
                if reach != NUMBER:
                    self._give(reach & LENGTH | number)
                    reach = NUMBER
                oldest = next(iter(came))
                level = self._take((oldest if overdue else waiting[0]) & LENGTH)
                if overdue or level is None:
                    del came[oldest], waiting[bisect_left(waiting, oldest)]
                    self._settle(oldest) if level is None else self._put(oldest, level)
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

    def finish(self) -> list[Closed]:
        return self.place([0] * len(self._by_length))  # one is placed each time, and none comes


class FirstFitCandidates(_Waiting, FirstFit):
    """First fit, with a pool."""


class BestFitCandidates(_Waiting, BestFit):
    """Best fit, with a pool."""
