"""Proportions in pieces: weights that change at given times, components that drop out at a limit. No state.

A component's *ideal* is the integral of its share over the positions, an exact fraction. `ideal_course` walks a
timeline of weights once and notes every component's ideal at the positions where anything changes; a component with a
limit drops out when its ideal reaches it, and the others share the rest in their own proportions. `settled` then turns
the ideals there into whole counts, and each piece between two such positions is a tree (`Proportions`) over the counts
that are its own.

Guarantees. Counts only ever grow; a limit is met exactly; errors do not accumulate over pieces: at their ends every
count is within one sample of its ideal, and in between it has stayed within two, for up to 64 components.

How counts are settled. A sample may come within a tolerance of its ideal time, so it has an earliest and a latest
piece; the samples with the earliest deadlines go first. That finds counts wherever there are any, and for a tolerance
of one there always are (R. Tijdeman, "The chairman assignment problem", 1980; G. Steiner and S. Yeomans, "Level
schedules for mixed-model, just-in-time processes", 1993). The least tolerance out of a few is used.
Rejected: a new tree at each change adds its error to the last one's; rounding each piece's end by itself makes counts
run backwards.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zephon.proportions import I64, Apportioned, Proportions, integer_weights, pieces_of, rounded_weights

LONGEST_PIECE = 2**47
"""Samples; a tree takes weights that sum to twice as many."""

LONGEST_SCALE = 2**256
"""Weights of many unlike sums have a huge common denominator; beyond this they are rounded to 2**-48 of their sum."""

FINE_TIMELINE = 256
"""Up to so many weights a timeline is noted an eighth before and after each change as well: there a count may have to
be off by nearly a sample, and in between it need not.
"""
AFTER_LAST = 1024
"""Samples after the last change at which counts are settled once more, for all that follows."""

TOLERANCES = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)

Timeline = Sequence[tuple[Fraction, Sequence[int]]]
"""(time, the weight of each component from then on), in order, the first at 0. Times are positions, whole or not."""


class NothingToDraw(ValueError):
    """All components that the weights name have dropped out at `time`, though others have samples left."""

    def __init__(self, time: Fraction, left: list[int]) -> None:
        super().__init__(f"components {left} have samples left at position {float(time):g}, and no weight")
        self.time, self.left = time, left


class Course(NamedTuple):
    """Every component's ideal at the positions where something changes: a whole number and a part of one."""

    positions: list[int]  # ascending, from 0
    floors: list[list[int]]  # one list for each position
    parts: list[list[float]]
    after: list[int] | None  # the weights after the last position; None if it is the end


def ideal_course(timeline: Timeline, limits: Sequence[int | None], end: int | None = None) -> Course:
    """Follow the weights up to the `end`, or until nothing is left to draw, or until nothing changes any more.

    `limits` are the samples that a component has at most, None for no limit. Raises NothingToDraw.
    """
    walk = _Walk(len(limits), finely=len(timeline) <= FINE_TIMELINE)
    bounds = [time for time, _ in timeline[1:]]
    last: Fraction | None = None if end is None else Fraction(end)
    for (_, given), until in zip(timeline, [*bounds, last], strict=True):
        if last is not None and (until is None or until > last):
            until = last
        while until is None or walk.time < until:
            alive = [i for i, limit in enumerate(limits) if limit is None or walk.below(i, limit)]
            drawn = {i for i in alive if given[i]}
            if not drawn:
                left = [i for i in alive if any(others[i] for _, others in timeline)]
                if left:
                    raise NothingToDraw(walk.time, left)
                return walk.course(None)
            weights = walk.follow([weight if i in drawn else 0 for i, weight in enumerate(given)])
            times = [until] if until is not None else []
            for i in drawn:
                limit = limits[i]
                if limit is not None and weights[i]:
                    times.append(walk.time_of(i, limit))
            if not times:
                walk.whole()
                if len(walk.positions) > 1:
                    walk.advance(Fraction(walk.positions[-1] + AFTER_LAST))
                return walk.course(weights)
            walk.advance(min(times))
    return walk.course(None)


class _Walk:
    """Where the ideals stand, as whole numbers over one `scale`, and what they were at whole positions on the way."""

    def __init__(self, components: int, finely: bool) -> None:
        self.finely = finely
        self.time = Fraction(0)
        self.positions = [0]
        self._floors, self._parts = [[0] * components], [[0.0] * components]
        self._ideal, self._scale = [0] * components, 1
        self._weights, self._total = [0] * components, 1

    def below(self, component: int, limit: int) -> bool:
        return self._ideal[component] < limit * self._scale

    def follow(self, weights: list[int]) -> list[int]:
        """Go on with these weights; they are rounded where their sum has too little in common with those before."""
        divisor = math.gcd(*weights)
        weights = [weight // divisor for weight in weights]
        if math.lcm(self._scale, sum(weights)) > LONGEST_SCALE:
            weights = rounded_weights(weights)
        self._weights, self._total = weights, sum(weights)
        return weights

    def time_of(self, component: int, limit: int) -> Fraction:
        """When the component's ideal will have come to that."""
        missing = limit * self._scale - self._ideal[component]
        return self.time + Fraction(missing * self._total, self._weights[component] * self._scale)

    def advance(self, until: Fraction) -> None:
        """Go on to `until`; the first and the last whole position on the way are noted."""
        if math.ceil(self.time) <= until:
            self.whole()
        first, last = self.positions[-1], math.floor(until)
        margin = (last - first) // 8
        stops = [first + margin, last - margin, last] if self.finely and margin > 1 else [last]
        for stop in stops:
            while stop > self.positions[-1]:
                self._note(min(stop, self.positions[-1] + LONGEST_PIECE))
        self._ideal, self._scale = self._at(until)
        self.time = until

    def whole(self) -> None:
        """Note the next whole position, unless it is noted."""
        if math.ceil(self.time) > self.positions[-1]:
            self._note(math.ceil(self.time))

    def course(self, after: list[int] | None) -> Course:
        return Course(self.positions, self._floors, self._parts, after)

    def _note(self, position: int) -> None:
        ideal, scale = self._at(Fraction(position))
        split = [divmod(each, scale) for each in ideal]
        self.positions.append(position)
        self._floors.append([whole for whole, _ in split])
        self._parts.append([rest / scale for _, rest in split])

    def _at(self, time: Fraction) -> tuple[list[int], int]:
        """The ideals at a later time, and their scale."""
        span = (time - self.time) / self._total
        scale = math.lcm(self._scale, span.denominator)
        factor, step = scale // self._scale, span.numerator * (scale // span.denominator)
        return [had * factor + weight * step for had, weight in zip(self._ideal, self._weights, strict=True)], scale


class Settled(NamedTuple):
    """Whole counts at the positions of a course."""

    counts: I64  # [positions, components]
    ahead: NDArray[np.float64]  # [positions, components], counts less ideals


def settled(course: Course) -> Settled:
    """The counts of every component at every position of a course, each within one sample of its ideal."""
    floors = np.array(course.floors, dtype=np.int64)
    parts = np.array(course.parts)
    below_one = 1 - 0.5 / max(1, floors.shape[1] - 1)
    low, high = 0, len(TOLERANCES)
    best: I64 | None = None
    while low < high:  # wider tolerances can do whatever narrower ones can
        middle = (low + high) // 2
        found = _counts(course.positions, floors, parts, TOLERANCES[middle])
        if found is None:
            low = middle + 1
        else:
            best, high = found, middle
    for tolerance in (below_one, 1.0):
        if best is None:
            best = _counts(course.positions, floors, parts, tolerance)
    assert best is not None
    return Settled(best, best - floors - parts)


def _counts(positions: list[int], floors: I64, parts: NDArray[np.float64], tolerance: float) -> I64 | None:
    """Counts within `tolerance` of the ideals `floors + parts`; None if there are none."""
    least: I64 = floors + (parts > tolerance)
    most: I64 = floors + (parts > 0) * (parts >= 1 - tolerance)
    deadlines: list[list[int]] = least.T.tolist()
    out = np.zeros_like(floors)
    for at in range(1, len(positions)):
        now: I64 = np.maximum(out[at - 1], least[at])
        room = positions[at] - int(now.sum())
        free = np.flatnonzero(now < most[at]).tolist()
        if not 0 <= room <= len(free):
            return None
        if room:
            urgency = [(bisect_left(deadlines[i], int(now[i]) + 1, at), -parts[at, i], i) for i in free]
            now[[i for _, _, i in sorted(urgency)[:room]]] += 1
        out[at] = now
    return out


class PiecewiseProportions(Apportioned):
    """Proportions along a course. `total` is where it ends, None if it never does."""

    def __init__(self, course: Course) -> None:
        counts, ahead = settled(course)
        self._starts: I64 = np.array(course.positions, dtype=np.int64)
        self._counts = counts
        self._ahead = np.vstack([(ahead[:-1] + ahead[1:]) / 2, ahead[-1:]])
        self._after = None if course.after is None else tuple(integer_weights(course.after))
        self.total = None if course.after is not None else course.positions[-1]

    def counts(self, total: int) -> list[int]:
        piece = min(bisect_right(self._starts, total), len(self._starts)) - 1
        had: list[int] = self._counts[piece].tolist()
        rest = total - int(self._starts[piece])
        return [a + b for a, b in zip(had, self._piece(piece).counts(rest), strict=True)] if rest else had

    def first_total_with(self, component: int, count: int) -> int:
        piece = bisect_left(self._counts[:, component], count) - 1
        if piece < 0:
            return 0
        start, had = int(self._starts[piece]), int(self._counts[piece, component])
        return start + self._piece(piece).first_total_with(component, count - had)

    def groups(self, positions: I64) -> Iterator[tuple[int, I64, I64]]:
        for number, here in pieces_of(self._starts, positions):
            had = self._counts[number]
            for component, where, index in self._piece(number).groups(positions[here] - self._starts[number]):
                yield component, here[where], index + had[component]

    def _piece(self, number: int) -> Proportions:
        if number < len(self._starts) - 1:
            weights = tuple((self._counts[number + 1] - self._counts[number]).tolist())
        elif self._after is not None:
            weights = self._after
        else:
            raise ValueError(f"there is nothing beyond position {self._starts[-1]}")
        return _tree(weights, tuple(self._ahead[number].tolist()))


@lru_cache(maxsize=256)
def _tree(weights: tuple[int, ...], ahead: tuple[float, ...]) -> Proportions:
    """A chunk's positions lie in few pieces, and neighbouring chunks in the same ones."""
    return Proportions(weights, ahead)
