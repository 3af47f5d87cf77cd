"""In which order waiting records leave, so that the output keeps given shares: start-time fair queueing.

Each dataset has a queue and a *turn*, which grows by weight / share with every record of it that leaves; of the queues
that hold a record, the one whose turn is lowest gives its oldest. So long as every queue holds something, each dataset
has had its share of the weight to within about one record, whatever the weights. A dataset whose queue was empty goes
on from the turn that the others have reached meanwhile: what it missed is not made up for in one go, which would only
replace one long run by another. (P. Goyal, H. Vin, H. Cheng, "Start-time fair queueing", 1996.)

A record of several datasets waits in the queue of the one that it holds most of in proportion to its share, and is
charged to all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_EMPTY = float("inf")
_GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, are spread as evenly as can be, however many there are
_NEVER = 1e300  # the turn of a dataset without a share: it leaves when nothing else is there

Charge = float | tuple[tuple[int, float], ...]
"""What a record weighs: for its own dataset, or for each of several."""


class FairOrder:
    """The queues. `shares` are the datasets' by number, in any unit, 0 for those that are not wanted."""

    def __init__(self, shares: Sequence[float]) -> None:
        total = sum(shares)
        self.shares = [share / total for share in shares]
        self._per_weight = [1 / share if share else 0.0 for share in self.shares]
        self._queues: list[deque[tuple[int, Charge]]] = [deque() for _ in shares]
        self._turns = [0.0 if share else _NEVER for share in self.shares]
        self._heads = [_EMPTY] * len(self.shares)  # turns of those whose queue is not empty
        self._reached = 0.0
        self._began = False
        self.held = 0
        self.largest = 0.0
        """The weight of the heaviest record so far."""
        self.due: int | None = None
        """The dataset that `come_strictly` last waited for: until one of its records comes, none may leave."""

    @property
    def waiting(self) -> list[Charge]:
        """The charges of the records that wait, in the order of their numbers."""
        return [charge for _, charge in sorted(one for queue in self._queues for one in queue)]

    def add(self, number: int, dataset: int, charge: Charge, *, forgive: bool = True) -> None:
        """A record comes to wait. `forgive`: a dataset that had none waiting goes on from where the others are."""
        weight = charge if isinstance(charge, float) else sum(part for _, part in charge)
        if not self._began:
            self._began = True
            self._spread(weight)
        self.largest = max(self.largest, weight)
        queue = self._queues[dataset]
        if not queue:
            if forgive and self._turns[dataset] < self._reached:
                self._turns[dataset] = self._reached
            self._heads[dataset] = self._turns[dataset]
        queue.append((number, charge))
        self.held += 1

    def leave(self, down_to: int) -> list[int]:
        """The numbers of the records that leave, in order, until only so many are held."""
        heads, queues, turns, per_weight = self._heads, self._queues, self._turns, self._per_weight
        out = []
        for _ in range(self.held - down_to):
            low = min(heads)
            dataset = heads.index(low)
            queue = queues[dataset]
            number, charge = queue.popleft()
            out.append(number)
            if low < _NEVER:
                self._reached = low
            if isinstance(charge, float):
                turns[dataset] = low + charge * per_weight[dataset]
                heads[dataset] = turns[dataset] if queue else _EMPTY
            else:
                self._charge(charge)
                heads[dataset] = turns[dataset] if queue else _EMPTY
        self.held -= len(out)
        return out

    def come_strictly(self, numbers: Sequence[int], datasets: Sequence[int], charges: Sequence[Charge]) -> list[int]:
        """Records come, one after another. The numbers of those that leave, each as soon as its turn has come: while no
        dataset is due whose queue is empty.
        """
        out: list[int] = []
        for number, dataset, charge in zip(numbers, datasets, charges):
            self.add(number, dataset, charge, forgive=False)
            if self.due is None or self.due == dataset:
                self._leave_strictly(out)
        return out

    def _leave_strictly(self, out: list[int]) -> None:
        heads, queues, turns, per_weight = self._heads, self._queues, self._turns, self._per_weight
        turn, due = self._lacking()
        while self.held:
            self.due = due
            low = min(heads)
            if low >= _NEVER or turn < low:
                return
            dataset = heads.index(low)
            queue = queues[dataset]
            number, charge = queue.popleft()
            out.append(number)
            self.held -= 1
            if isinstance(charge, float):
                turns[dataset] = low + charge * per_weight[dataset]
                if queue:
                    heads[dataset] = turns[dataset]
                    continue
                heads[dataset] = _EMPTY
            else:
                self._charge(charge)
                heads[dataset] = turns[dataset] if queue else _EMPTY
            turn, due = self._lacking()

    def _lacking(self) -> tuple[float, int | None]:
        """The lowest turn of a dataset that has none waiting, and that dataset."""
        lacking = [(self._turns[d], d) for d, head in enumerate(self._heads) if head == _EMPTY and self.shares[d]]
        return min(lacking, default=(_EMPTY, None))

    def _spread(self, weight: float) -> None:
        """First turns: a part of a record each, another for every dataset, so that those of equal shares take turns
        evenly and do not come all at once.
        """
        wanted = sorted((share, dataset) for dataset, share in enumerate(self.shares) if share)
        for place, (_, dataset) in enumerate(wanted):
            self._turns[dataset] = (0.5 + place * _GOLDEN) % 1 * weight * self._per_weight[dataset]

    def _charge(self, parts: tuple[tuple[int, float], ...]) -> None:
        for dataset, weight in parts:
            if self.shares[dataset]:
                self._turns[dataset] += weight * self._per_weight[dataset]
                if self._heads[dataset] != _EMPTY:
                    self._heads[dataset] = self._turns[dataset]
