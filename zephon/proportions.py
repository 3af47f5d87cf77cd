"""Proportions: which component takes position T of a mixture, and how many it had before. Arithmetic, no state.

Weights become integers over a common denominator. Components sit at the leaves of a binary tree built as Huffman's
(the two lightest first, ties by index); of T samples a node sends `floor(T*l/(l+r) + 1/2)` to its lighter child and
the rest to the other. Weights that change are pieces of such trees: `zephon.piecewise`.

Guarantees: counts only ever grow; one position adds one sample to one component; a component of weight 0 is never
drawn; weights that sum to W give every component exactly its weight after W samples. Exact integers for every
position below 2**62.
Rejected: `floor(T*W[i]) - floor(T*W[i-1])` runs backwards; a random draw for each position has no closed-form end.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zephon.errors import SettingError

I64 = NDArray[np.int64]

LARGEST_TOTAL = 2**48  # of weights: float64 then finds a node's share to within one, for positions below 2**50
_DIRECT = 2**50


def checked_weights(setting: str, weights: Mapping[str, Any]) -> dict[str, int | float]:
    """The weights as plain numbers; SettingError that names the setting and the component for anything senseless."""
    allowed = "Allowed: for each name a finite number of at least 0, and at least one of them above 0"
    checked: dict[str, int | float] = {}
    for name, weight in weights.items():
        number = isinstance(weight, (int, float, np.integer, np.floating)) and not isinstance(weight, bool)
        if not number or not 0 <= weight < math.inf:
            raise SettingError(f"{setting}: the weight of {name!r} is {weight!r}. {allowed}.")
        checked[name] = int(weight) if isinstance(weight, (int, np.integer)) else float(weight)
    if not any(checked.values()):
        raise SettingError(f"{setting}: no weight is above 0 in {dict(weights)!r}. {allowed}.")
    return checked


def integer_weights(weights: Sequence[int | float | Fraction], largest_total: int = LARGEST_TOTAL) -> list[int]:
    """Whole numbers in the same proportions.

    Exact where their sum is at most `largest_total`, else the nearest by largest remainder; a positive weight never
    becomes 0. A float means its decimal notation (0.1 is 1/10).
    """
    fractions = [exact(weight) for weight in weights]
    if min(fractions, default=Fraction(-1)) < 0 or not any(fractions):
        raise ValueError(f"weights must be at least 0 and one of them above 0: {list(weights)}")
    common = math.lcm(*(f.denominator for f in fractions))
    whole = [f.numerator * (common // f.denominator) for f in fractions]
    divisor = math.gcd(*whole)
    whole = [w // divisor for w in whole]
    total = sum(whole)
    if total <= largest_total:
        return whole
    shares = [max(w * largest_total // total, min(w, 1)) for w in whole]
    by_remainder = sorted(range(len(whole)), key=lambda i: (-(whole[i] * largest_total % total), i))
    for i in by_remainder[: max(0, largest_total - sum(shares))]:
        shares[i] += 1
    while (excess := sum(shares) - largest_total) > 0:  # tiny weights were raised to 1: the largest give it back
        largest = max(range(len(shares)), key=lambda i: (shares[i], -i))
        shares[largest] -= min(excess, shares[largest] - 1)
    return shares


def exact(number: int | float | Fraction) -> Fraction:
    """The number as a fraction. A float means its decimal notation."""
    return Fraction(repr(float(number))) if isinstance(number, (float, np.floating)) else Fraction(number)


def rounded_weights(weights: Sequence[int]) -> list[int]:
    """The nearest whole numbers in the same proportions that sum to 2**48, by largest remainder. 0 stays 0."""
    total = sum(weights)
    split = [divmod(weight * LARGEST_TOTAL, total) for weight in weights]
    whole = [floor for floor, _ in split]
    by_remainder = sorted(range(len(whole)), key=lambda i: (-split[i][1], i))
    for i in by_remainder[: LARGEST_TOTAL - sum(whole)]:
        whole[i] += 1
    return whole


class Apportioned(ABC):
    """Which component each position belongs to, and how many samples it had before. Counts only ever grow."""

    @abstractmethod
    def counts(self, total: int) -> list[int]:
        """How many of the first `total` positions each component has. Exact for any total."""

    @abstractmethod
    def first_total_with(self, component: int, count: int) -> int:
        """The least T such that `component` has `count` of the first T positions. ValueError if it never has."""

    @abstractmethod
    def groups(self, positions: I64) -> Iterator[tuple[int, I64, I64]]:
        """(component, where in `positions`, number of its samples before that position); a component may come twice."""

    def locate(self, positions: I64) -> tuple[I64, I64]:
        """(component, number of its samples before) for each position, both int64 of the positions' length."""
        component, index = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
        for which, where, here in self.groups(positions):
            component[where], index[where] = which, here
        return component, index


class Proportions(Apportioned):
    """The tree over integer weights. Components are numbered as the weights are.

    `ahead` says how many samples each component has already had beyond its share: of two that meet in a node the one
    that is ahead gets its next sample later, by up to one rounding. Counts after the sum of all weights stay exact.
    """

    def __init__(self, weights: Sequence[int], ahead: Sequence[float] | None = None) -> None:
        if not any(weights) or min(weights) < 0 or sum(weights) > LARGEST_TOTAL:
            raise ValueError(f"weights must be whole numbers of at least 0 with a sum from 1 to 2**48: {list(weights)}")
        self.weights = tuple(int(w) for w in weights)
        # A node is (lighter child, heavier child, lighter weight, both weights, what is added before the division by
        # both: half of it where nobody is ahead); a child is a node or ~component.
        self._nodes: list[tuple[int, int, int, int, int]] = []
        self._parent: dict[int, int] = {}
        lead = list(ahead) if ahead is not None else [0.0] * len(self.weights)
        heap = [(w, i, ~i, lead[i]) for i, w in enumerate(self.weights) if w]
        heapq.heapify(heap)
        while len(heap) > 1:
            light_weight, _, light, light_lead = heapq.heappop(heap)
            heavy_weight, _, heavy, heavy_lead = heapq.heappop(heap)
            node, both = len(self._nodes), light_weight + heavy_weight
            half = both // 2
            if light_lead != heavy_lead:
                half = min(int(both * min(max(0.5 - 0.5 * (light_lead - heavy_lead), 0.0), 1.0)), both - 1)
            self._nodes.append((light, heavy, light_weight, both, half))
            self._parent[light] = self._parent[heavy] = node
            joint = (light_weight * light_lead + heavy_weight * heavy_lead) / both
            heapq.heappush(heap, (both, len(self.weights) + node, node, joint))
        self._root = heap[0][2]

    def counts(self, total: int) -> list[int]:
        out = [0] * len(self.weights)
        stack = [(self._root, int(total))]
        while stack:
            child, here = stack.pop()
            if child < 0:
                out[~child] = here
                continue
            light, heavy, weight, both, half = self._nodes[child]
            to_light = (here * weight + half) // both
            stack += [(light, to_light), (heavy, here - to_light)]
        return out

    def first_total_with(self, component: int, count: int) -> int:
        if not self.weights[component]:
            raise ValueError(f"component {component} has weight 0 and is never drawn")
        if count <= 0:
            return 0
        child, needed = ~component, int(count)
        while child != self._root:
            node = self._parent[child]
            light, _, weight, both, half = self._nodes[node]
            if child == light:  # floor((T*l + half)/w) >= needed
                needed = -(-(needed * both - half) // weight)
            else:  # T - floor((T*l + half)/w) = ceil((T*h - half)/w) >= needed
                needed = ((needed - 1) * both + half) // (both - weight) + 1
            child = node
        return needed

    def groups(self, positions: I64) -> Iterator[tuple[int, I64, I64]]:
        if not len(positions):
            return
        stack = [(self._root, np.arange(len(positions)), np.asarray(positions, dtype=np.int64))]
        while stack:
            child, where, here = stack.pop()
            if child < 0:
                yield ~child, where, here
                continue
            light, heavy, weight, both, half = self._nodes[child]
            before, remainder = _sent(here, weight, both, half)
            goes_light = remainder + (weight + half) >= both  # one more position tips the rounding
            for side, mask, onward in ((light, goes_light, before), (heavy, ~goes_light, here - before)):
                chosen = np.flatnonzero(mask)
                if len(chosen):
                    stack.append((side, where[chosen], onward[chosen]))


class ChangingProportions(Apportioned):
    """Proportions that change at given positions: `changes` are (first position, the proportions from there on).

    A component goes on from its own count at each change, and the new proportions count from there.
    """

    def __init__(self, first: Apportioned, changes: Sequence[tuple[int, Apportioned]]) -> None:
        self._parts: list[tuple[int, Apportioned, list[int]]] = [(0, first, [0] * len(first.counts(0)))]
        for start, proportions in changes:
            self._parts.append((start, proportions, self.counts(start)))
        self._starts = np.array([start for start, _, _ in self._parts])

    def counts(self, total: int) -> list[int]:
        start, proportions, had = next(part for part in reversed(self._parts) if part[0] <= total)
        return [a + b for a, b in zip(had, proportions.counts(total - start), strict=True)]

    def first_total_with(self, component: int, count: int) -> int:
        ends = [start for start, _, _ in self._parts[1:]]
        for (start, proportions, had), end in zip(self._parts, [*ends, None], strict=True):
            if had[component] >= count:
                return start
            try:
                total = start + proportions.first_total_with(component, count - had[component])
            except ValueError:
                continue
            if end is None or total <= end:
                return total
        raise ValueError(f"component {component} is never drawn often enough")

    def groups(self, positions: I64) -> Iterator[tuple[int, I64, I64]]:
        for number, here in pieces_of(self._starts, positions):
            start, proportions, had = self._parts[number]
            for component, where, index in proportions.groups(positions[here] - start):
                yield component, here[where], index + had[component]


def pieces_of(starts: I64, positions: I64) -> Iterator[tuple[int, I64]]:
    """(number of a piece, where in `positions` its positions are), of the pieces that have some. `starts` ascend."""
    piece = np.searchsorted(starts, positions, side="right") - 1
    if len(piece) and (piece == piece[0]).all():
        yield int(piece[0]), np.arange(len(positions))
        return
    for number in np.unique(piece).tolist():
        yield number, np.flatnonzero(piece == number)


def _sent(positions: I64, weight: int, both: int, half: int) -> tuple[I64, I64]:
    """(q, r): q = floor((T*weight + half)/both) and r = T*weight - q*both, which lies in [-half, both - half).

    float64 finds q to within one; r is computed modulo 2**64 and is small, hence exact, and corrects q.
    """
    whole: I64 | None = None
    if positions.max() >= _DIRECT:
        whole, positions = np.divmod(positions, np.int64(both))
    q = np.floor(positions * (float(weight) / float(both)) + half / both).astype(np.int64)
    l_, w_ = np.array([weight], dtype=np.int64), np.array([both], dtype=np.int64)
    r: I64 = positions * l_ - q * w_
    up, down = r >= both - half, r < -half
    q += up
    q -= down
    r -= up * w_
    r += down * w_
    return (q if whole is None else q + whole * l_), r
