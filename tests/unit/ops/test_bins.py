"""Which open sequence each document goes into."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.ops.bins import BestFit, Bins, FirstFit, Placement, Rules, keys_of
from zephon.ops.candidates import BestFitCandidates, FirstFitCandidates
from zephon.ops.homogeneity import ByComponent

CAPACITY = 20
rules = st.builds(
    Rules, st.just(CAPACITY), st.integers(1, 6), st.booleans(), st.none() | st.integers(1, 4), st.booleans()
)
sizes = st.lists(st.integers(1, CAPACITY), max_size=80)


class Plain:
    """The rule, said as plainly as possible."""

    def __init__(self, rules: Rules, *, best: bool, pool: int = 0, patience: int | None = None) -> None:
        self.rules, self.best, self.pool, self.patience = rules, best, pool, patience
        self.bins: list[list[int]] = []  # pieces' lengths
        self.closed: list[int] = []
        self.pieces: list[tuple[int, ...]] = []
        self.waiting: list[tuple[int, int, int]] = []  # document, length, placements when it came
        self.placed = 0

    def room(self, number: int) -> int:
        return CAPACITY - sum(self.bins[number])

    @property
    def open(self) -> list[int]:
        return [number for number in range(len(self.bins)) if number not in self.closed]

    def come(self, document: int, length: int) -> None:
        self.waiting.append((document, length, self.placed))
        if len(self.waiting) > self.pool:
            self.place_one()

    def place_one(self) -> None:
        chosen = self.waiting[0]
        if self.patience is None or self.placed - chosen[2] < self.patience:
            chosen = self.choice() or chosen
        self.waiting.remove(chosen)
        self.placed += 1
        self.settle(*chosen[:2])

    def choice(self) -> tuple[int, int, int] | None:
        for number in sorted(self.open, key=self.room) if self.best else self.open:
            fitting = [w for w in self.waiting if w[1] <= self.room(number)]
            if fitting:
                return max(fitting, key=lambda w: w[1])
        return None

    def settle(self, document: int, length: int) -> None:
        start = 0
        while length:
            fitting = [b for b in self.open if self.room(b) >= length]
            if not fitting and len(self.open) >= self.rules.limit:
                victim = min(self.open, key=self.room) if self.rules.close_fullest else self.open[0]
                if not self.rules.split:
                    self.closed.append(victim)
                    continue
                number, part = victim, self.room(victim)
            else:
                if not fitting:
                    self.bins.append([])
                    fitting = [len(self.bins) - 1]
                number = min(fitting, key=self.room) if self.best else fitting[0]
                part = min(length, CAPACITY)
            self.pieces.append((document, start, part, number, sum(self.bins[number])))
            self.bins[number].append(part)
            start, length = start + part, length - part
            if self.room(number) == 0 or len(self.bins[number]) == (self.rules.most or -1):
                self.closed.append(number)


def keys(lengths: list[int], low: int = 0, high: int | None = None) -> list[int]:
    numbers = np.arange(len(lengths))
    return keys_of(numbers[low:high], np.array(lengths, np.int64)[low:high])


def joined(parts: list[Placement]) -> tuple[list[tuple[int, ...]], list[int]]:
    return [tuple(p) for part in parts for p in part.pieces.T.tolist()], [n for part in parts for n in part.closed]


@given(sizes, rules, st.booleans(), st.integers(0, 5), st.none() | st.integers(0, 4), st.lists(st.integers(0, 80)))
def test_bins_follow_the_plain_rule_however_documents_are_cut_into_calls(
    lengths: list[int], given_rules: Rules, best: bool, pool: int, patience: int | None, cuts: list[int]
) -> None:
    plain = Plain(given_rules, best=best, pool=pool, patience=patience)
    bins: Bins
    if pool:
        bins = (BestFitCandidates if best else FirstFitCandidates)(given_rules, pool, patience)
    else:
        bins = (BestFit if best else FirstFit)(given_rules)
    bounds = [0, *sorted(min(cut, len(lengths)) for cut in cuts), len(lengths)]
    parts = [bins.place(keys(lengths, low, high)) for low, high in pairwise(bounds)]
    for document, length in enumerate(lengths):
        plain.come(document, length)
    assert joined(parts) == (plain.pieces, plain.closed)
    assert bins.open == plain.open
    assert len(bins.open) <= given_rules.limit
    parts.append(bins.finish())
    while plain.waiting:
        plain.place_one()
    assert joined(parts) == (plain.pieces, plain.closed)


@given(st.lists(st.integers(1, 70), max_size=60), st.integers(1, 5), st.booleans())
def test_a_bin_of_split_documents_is_full_when_it_is_closed(lengths: list[int], limit: int, fullest: bool) -> None:
    bins = BestFit(Rules(CAPACITY, limit, fullest, split=True))
    made = bins.place(keys(lengths))
    document, start, length, number, offset = made.pieces
    for closed in made.closed:
        assert length[number == closed].sum() == CAPACITY
    for one, whole in enumerate(lengths):
        mine = document == one
        ends = np.cumsum(length[mine])
        assert start[mine].tolist() == (ends - length[mine]).tolist()
        assert ends[-1] == whole
    assert (offset + length <= CAPACITY).all()


@given(st.lists(st.tuples(st.integers(1, CAPACITY), st.integers(0, 2)), max_size=60), st.lists(st.integers(0, 60)))
def test_each_component_has_bins_of_its_own_however_documents_are_cut_into_calls(
    documents: list[tuple[int, int]], cuts: list[int]
) -> None:
    def run(bounds: list[int]) -> tuple[Any, list[int]]:
        bins = ByComponent(lambda: BestFitCandidates(Rules(CAPACITY, 2), 3))
        lengths, components = np.array(documents, np.int64).reshape(-1, 2).T
        numbers = np.arange(len(documents))
        parts = [bins.place(numbers[a:b], lengths[a:b], components[a:b]) for a, b in pairwise(bounds) if a < b]
        parts.append(bins.finish())
        pieces, closed = joined(parts)
        by_bin: dict[int, list[tuple[int, ...]]] = {}
        for piece in pieces:
            by_bin.setdefault(piece[3], []).append(piece)
        return by_bin, closed

    whole = run([0, len(documents)])
    assert run([0, *sorted(min(cut, len(documents)) for cut in cuts), len(documents)]) == whole
    for pieces in whole[0].values():
        assert len({documents[piece[0]][1] for piece in pieces}) == 1


@pytest.mark.parametrize("kind", [BestFit, FirstFit])
def test_a_bin_that_a_document_fills_exactly_is_closed_at_once(kind: type[Bins]) -> None:
    made = kind(Rules(10)).place(keys([6, 10, 4]))
    assert (made.closed, made.closed_at) == ([1, 0], [1, 2])
