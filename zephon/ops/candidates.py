"""A pool of documents that wait for a bin they fit well.

When more than `size` documents wait, one is placed. With best fit it is the longest that goes into the fullest bin
which any of them fits: as good in the end as comparing all documents with all bins for the closest pair (the share of
padding came out the same to four digits), and found by two searches. With first fit it is the oldest document for
which some open bin has room. Where no document fits any bin, the oldest is placed by the usual rule. So is, before all
others, one that has seen `patience` documents placed since it came.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from zephon.ops.bins import NUMBER, NUMBER_BITS, BestFit, Bins, FirstFit, Placement, Rules


class _Waiting(Bins):
    """The pool. Mixed into a kind of bins, which places what leaves the pool."""

    def __init__(self, rules: Rules, size: int, patience: int | None = None) -> None:
        super().__init__(rules)
        self.size, self.patience = size, patience
        self._pool: dict[int, int] = {}  # waiting document -> length, oldest first
        self._placed = 0
        self._since: dict[int, int] = {}  # waiting document -> what `_placed` was when it came; with `patience` only

    def place(self, documents: Sequence[int], lengths: Sequence[int]) -> Placement:
        for document, length in zip(documents, lengths):
            self._now = document
            self._pool[document] = length
            if self.patience is not None:
                self._since[document] = self._placed
            self._join(document, length)
            if len(self._pool) > self.size:
                self._place_one()
        return self._taken()

    def finish(self) -> Placement:
        while self._pool:
            self._place_one()
        return self._taken()

    def _place_one(self) -> None:
        document = next(iter(self._pool))
        if self.patience is None or self._placed - self._since[document] < self.patience:
            document = self._choice(document)
        length = self._leave(document)
        self._placed += 1
        self._settle(document, length)

    def _choice(self, oldest: int) -> int:
        """The waiting document to be placed next."""
        raise NotImplementedError

    def _join(self, document: int, length: int) -> None:
        """A document has come to wait."""

    def _leave(self, document: int) -> int:
        """Takes a document out of the pool; its length."""
        self._since.pop(document, None)
        return self._pool.pop(document)


class FirstFitCandidates(_Waiting, FirstFit):
    """First fit, with a pool."""

    def place(self, documents: Sequence[int], lengths: Sequence[int]) -> Placement:
        if self.patience is not None:
            return super().place(documents, lengths)
        pool, size = self._pool, self.size
        for document, length in zip(documents, lengths):
            self._now = document
            pool[document] = length
            if len(pool) <= size:
                continue
            room = self._tree[1]
            for waiting, needed in pool.items():
                if needed <= room:
                    del pool[waiting]
                    self._fill(waiting, needed)
                    break
            else:
                self._place_one()
        return self._taken()

    def _choice(self, oldest: int) -> int:
        room = self.largest_room
        return next((document for document, length in self._pool.items() if length <= room), oldest)


class BestFitCandidates(_Waiting, BestFit):
    """Best fit, with a pool."""

    def __init__(self, rules: Rules, size: int, patience: int | None = None) -> None:
        super().__init__(rules, size, patience)
        self._by_length: list[int] = []  # `length << 40 | counted-down document`, so the oldest of a length comes last

    def place(self, documents: Sequence[int], lengths: Sequence[int]) -> Placement:
        if self.patience is not None:
            return super().place(documents, lengths)
        levels, waiting, pool, size, fill = self._levels, self._by_length, self._pool, self.size, self._fill
        for document, length in zip(documents, lengths):
            self._now = document
            pool[document] = length
            insort(waiting, length << NUMBER_BITS | NUMBER - document)
            if len(waiting) <= size:
                continue
            at = bisect_left(levels, waiting[0] & ~NUMBER)
            if at == len(levels):
                self._place_one()
                continue
            key = waiting.pop(bisect_left(waiting, (levels[at] >> NUMBER_BITS) + 1 << NUMBER_BITS) - 1)
            chosen = NUMBER - (key & NUMBER)
            fill(at, chosen, pool.pop(chosen))
        return self._taken()

    def _choice(self, oldest: int) -> int:
        levels, waiting = self._levels, self._by_length
        at = bisect_left(levels, waiting[0] & ~NUMBER)
        if at == len(levels):
            return oldest
        beyond = (levels[at] >> NUMBER_BITS) + 1 << NUMBER_BITS
        return NUMBER - (waiting[bisect_left(waiting, beyond) - 1] & NUMBER)

    def _join(self, document: int, length: int) -> None:
        insort(self._by_length, length << NUMBER_BITS | NUMBER - document)

    def _leave(self, document: int) -> int:
        length = super()._leave(document)
        del self._by_length[bisect_left(self._by_length, length << NUMBER_BITS | NUMBER - document)]
        return length
