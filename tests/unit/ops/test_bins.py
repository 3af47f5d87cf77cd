"""Which open sequence each document goes into."""

from __future__ import annotations

from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.ops.bins import BestFit, Bins, Closed, FirstFit, Rules, keys_of, pieces_in
from zephon.ops.candidates import BestFitCandidates, FirstFitCandidates
from zephon.ops.homogeneity import ByComponent

CAPACITY = 20
rules = st.builds(
    Rules, st.just(CAPACITY), st.integers(1, 6), st.booleans(), st.none() | st.integers(1, 4), st.booleans()
)
sizes = st.lists(st.integers(1, CAPACITY), max_size=80)
Piece = tuple[int, int, int]
"""Document, where in it the piece starts, length."""


class Plain:
    """The rule, said as plainly as possible."""

    def __init__(self, rules: Rules, *, best: bool, pool: int = 0, patience: int | None = None) -> None:
        self.rules, self.best, self.pool, self.patience = rules, best, pool, patience
        self.bins: list[list[Piece]] = []
        self.closed: list[tuple[int, list[Piece]]] = []  # with the document that had come
        self.open: list[int] = []
        self.waiting: list[tuple[int, int, int]] = []  # document, length, placements when it came
        self.placed = self.now = 0

    def room(self, number: int) -> int:
        return CAPACITY - sum(length for _, _, length in self.bins[number])

    def close(self, number: int) -> None:
        self.open.remove(number)
        self.closed.append((self.now, self.bins[number]))

    def come(self, document: int, length: int) -> None:
        self.now = document
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
                    self.close(victim)
                    continue
                number, part = victim, self.room(victim)
            else:
                if not fitting:
                    fitting = [len(self.bins)]
                    self.open += fitting
                    self.bins.append([])
                number = min(fitting, key=self.room) if self.best else fitting[0]
                part = min(length, CAPACITY)
            self.bins[number].append((document, start, part))
            start, length = start + part, length - part
            if self.room(number) == 0 or len(self.bins[number]) == (self.rules.most or -1):
                self.close(number)


def keys(lengths: list[int], low: int = 0, high: int | None = None) -> list[int]:
    numbers = np.arange(len(lengths))
    return keys_of(numbers[low:high], np.array(lengths, np.int64)[low:high])


def pieces(of: list[int]) -> list[Piece]:
    return list(zip(*(column.tolist() for column in pieces_in(of, split=True)), strict=True))


def closings(closed: list[Closed]) -> list[tuple[int, list[Piece]]]:
    return [(pieces([at])[0][0], pieces(of)) for at, of in closed]


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
    closed = [one for low, high in pairwise(bounds) for one in bins.place(keys(lengths, low, high))]
    for document, length in enumerate(lengths):
        plain.come(document, length)
    assert closings(closed) == plain.closed
    assert [pieces(of) for of in bins.open] == [plain.bins[number] for number in plain.open]
    assert len(bins.open) <= given_rules.limit
    closed += bins.finish()
    while plain.waiting:
        plain.place_one()
    assert closings(closed) == plain.closed
    assert [pieces(of) for of in bins.open] == [plain.bins[number] for number in plain.open]


@given(st.lists(st.integers(1, 70), max_size=60), st.integers(1, 5), st.booleans())
def test_a_bin_of_split_documents_is_full_when_it_is_closed(lengths: list[int], limit: int, fullest: bool) -> None:
    bins = BestFit(Rules(CAPACITY, limit, fullest, split=True))
    closed = [of for _, of in closings(bins.place(keys(lengths)))]
    assert all(sum(length for _, _, length in of) == CAPACITY for of in closed)
    still_open = [pieces(of) for of in bins.open]
    assert all(sum(length for _, _, length in of) < CAPACITY for of in still_open)
    placed = sorted(piece for of in closed + still_open for piece in of)
    for document, whole in enumerate(lengths):
        mine = [(start, length) for one, start, length in placed if one == document]
        ends = np.cumsum([length for _, length in mine])
        assert [start for start, _ in mine] == [0, *ends[:-1].tolist()]
        assert ends[-1] == whole


@given(st.lists(st.tuples(st.integers(1, CAPACITY), st.integers(0, 2)), max_size=60), st.lists(st.integers(0, 60)))
def test_each_component_has_bins_of_its_own_however_documents_are_cut_into_calls(
    documents: list[tuple[int, int]], cuts: list[int]
) -> None:
    def run(bounds: list[int]) -> list[list[Piece]]:
        bins = ByComponent(lambda: BestFitCandidates(Rules(CAPACITY, 2), 3))
        lengths, components = np.array(documents, np.int64).reshape(-1, 2).T
        numbers = np.arange(len(documents))
        closed = [
            of for a, b in pairwise(bounds) if a < b for of in bins.place(numbers[a:b], lengths[a:b], components[a:b])
        ]
        closed += bins.finish()
        return [pieces(of) for of in [*closed, *chain.from_iterable(bins.open)]]

    whole = run([0, len(documents)])
    assert run([0, *sorted(min(cut, len(documents)) for cut in cuts), len(documents)]) == whole
    assert all(len({documents[document][1] for document, _, _ in of}) == 1 for of in whole)
    assert sorted(document for of in whole for document, _, _ in of) == list(range(len(documents)))


@pytest.mark.parametrize("kind", [BestFit, FirstFit])
def test_a_bin_that_a_document_fills_exactly_is_closed_at_once(kind: type[Bins]) -> None:
    closed = kind(Rules(10)).place(keys([6, 10, 4]))
    assert closings(closed) == [(1, [(1, 0, 10)]), (2, [(0, 0, 6), (2, 0, 4)])]
