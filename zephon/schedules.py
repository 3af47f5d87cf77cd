"""Mixtures: fixed weights, and weights that change along an epoch.

`MixtureSpec` is one set of weights. `MixtureSchedule` is several, each with the place from which it holds: a number of
samples of the epoch, or a fraction of it. A point marked "linear" is reached in a straight line from the one before.

A straight line is a staircase in whole samples: so many even steps that it is never more than an eighth of a sample
away from the line, and at most `LARGEST_STAIRCASE` of them; at the end of each step the two agree. A step has the
weights of its middle.

`timeline` turns either into what `zephon.piecewise` follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from zephon.errors import SettingError
from zephon.piecewise import Timeline
from zephon.proportions import checked_weights, exact, integer_weights, rounded_weights

LARGEST_STAIRCASE = 1024

_ALLOWED = (
    'Allowed: a list of (position, {dataset: weight}) or (position, {dataset: weight}, "linear"), the first at 0, '
    "positions ascending, all whole numbers of samples or all fractions of the epoch between 0 and 1"
)

BySample = Callable[[list[int]], list[int]]
"""From weights as the user counts them, perhaps in tokens, to weights of samples."""


@dataclass(frozen=True)
class MixtureSpec:
    """Weights by dataset name, in any unit: `{"web": 0.7, "code": 0.3}`. 0 means never drawn."""

    weights: Mapping[str, int | float]

    def __post_init__(self) -> None:
        if not isinstance(self.weights, Mapping):
            raise SettingError(f"mixture: weights are {self.weights!r}. Allowed: a dict from dataset name to weight.")
        object.__setattr__(self, "weights", checked_weights("mixture", self.weights))

    @property
    def names(self) -> set[str]:
        return set(self.weights)

    def describe(self) -> dict[str, Any]:
        """As JSON."""
        return dict(self.weights)


class Point(NamedTuple):
    """From `position` on, the mixture has these weights; `linear` if it moves to them from the point before."""

    position: int | Fraction
    weights: Mapping[str, int | float]
    linear: bool


@dataclass(frozen=True)
class MixtureSchedule:
    """Weights that change along each epoch: `MixtureSchedule([(0, {...}), (0.8, {...})])`.

    Positions are whole numbers (samples of the epoch, over all lanes) or floats between 0 and 1 (fractions of an epoch
    whose length its ends define). `(position, weights, "linear")` moves in a straight line from the point before,
    and may stand at 1.0. Every point has a weight for each dataset, as shares of the point's sum. Raises SettingError.
    """

    given: Any
    points: tuple[Point, ...] = field(init=False)

    def __post_init__(self) -> None:
        if isinstance(self.given, (str, bytes, Mapping)) or not isinstance(self.given, Sequence) or not self.given:
            raise SettingError(f"mixture schedule: the points are {self.given!r}. {_ALLOWED}.")
        points = [_point(number, entry) for number, entry in enumerate(self.given)]
        if points[0].position != 0 or points[0].linear:
            raise SettingError(f"mixture schedule: the first point is {self.given[0]!r}. {_ALLOWED}.")
        for number in range(1, len(points)):
            before, here = points[number - 1], points[number]
            if here.position <= before.position:
                raise SettingError(f"mixture schedule: {self.given[number]!r} does not come after point {number}.")
            if isinstance(here.position, int) and any(isinstance(p.position, Fraction) for p in points):
                raise SettingError(f"mixture schedule: {self.given[number]!r} counts otherwise. {_ALLOWED}.")
            if set(here.weights) != set(before.weights):
                different = sorted(set(here.weights) ^ set(before.weights))
                raise SettingError(
                    f"mixture schedule: point {number + 1} and the one before do not both name {different}. Allowed: "
                    "in each point a weight for every dataset, 0 for not drawn there."
                )
        object.__setattr__(self, "points", tuple(points))
        object.__setattr__(self, "given", tuple(map(_plain, self.given)))

    @property
    def names(self) -> set[str]:
        return set(self.points[0].weights)

    @property
    def by_fractions(self) -> bool:
        """Whether positions are fractions of the epoch."""
        return isinstance(self.points[-1].position, Fraction)

    def describe(self) -> dict[str, Any]:
        """As JSON, as it was written."""
        return {"schedule": [list(entry) for entry in self.given]}


Mixture = MixtureSpec | MixtureSchedule


def mixture_from(value: Any) -> Mixture | None:
    """The mixture of a recipe's argument, or of a checkpoint's JSON. SettingError if it is none."""
    if value is None or isinstance(value, (MixtureSpec, MixtureSchedule)):
        return value
    if isinstance(value, Mapping) and set(value) == {"schedule"} and isinstance(value["schedule"], Sequence):
        return MixtureSchedule(value["schedule"])
    return MixtureSpec(value)


def timeline(mixture: Mixture, names: Sequence[str], length: int | None, by_sample: BySample) -> Timeline:
    """The weights of every component, in the order of `names`, from each time on; `length` is what fractions are of."""
    if isinstance(mixture, MixtureSpec):
        return [(Fraction(0), by_sample(_weights(mixture.weights, names)))]
    whole = Fraction(length if mixture.by_fractions and length is not None else 1)
    out: list[tuple[Fraction, list[int]]] = []
    before: tuple[Fraction, list[int]] | None = None
    for point in mixture.points:
        at, weights = Fraction(point.position) * whole, _weights(point.weights, names)
        if point.linear and before is not None:
            out.pop()
            out += [(time, by_sample(step)) for time, step in _staircase(*before, at, weights)]
        out.append((at, by_sample(weights)))
        before = at, weights
    return out


def later(course: Timeline, position: int) -> Timeline:
    """The same timeline as it is from a position on, counted from there."""
    kept = [(time - position, weights) for time, weights in course]
    first = max(number for number, (time, _) in enumerate(kept) if time <= 0)
    return [(Fraction(0), kept[first][1]), *kept[first + 1 :]]


def _weights(by_name: Mapping[str, int | float], names: Sequence[str]) -> list[int]:
    return integer_weights([by_name.get(name, 0) for name in names])


def _staircase(start: Fraction, low: list[int], end: Fraction, high: list[int]) -> list[tuple[Fraction, list[int]]]:
    """(time, weights) of each step of a straight line between the shares that two sets of weights mean."""
    span, ones, others = end - start, sum(low), sum(high)
    steep = max(abs(b * ones - a * others) for a, b in zip(low, high, strict=True)) / (ones * others)
    steps = min(LARGEST_STAIRCASE, max(1, math.ceil(math.sqrt(steep * float(span)))))
    inner = {math.floor(start + span * number / steps + Fraction(1, 2)) for number in range(1, steps)}
    bounds = [start, *(Fraction(b) for b in sorted(inner) if start < b < end), end]
    out = []
    for here, onward in pairwise(bounds):
        done = ((here + onward) / 2 - start) / span
        old, new = (done.denominator - done.numerator) * others, done.numerator * ones
        out.append((here, rounded_weights([a * old + b * new for a, b in zip(low, high, strict=True)])))
    return out


def _point(number: int, entry: Any) -> Point:
    if isinstance(entry, (str, bytes, Mapping)) or not isinstance(entry, Sequence) or len(entry) not in (2, 3):
        raise SettingError(f"mixture schedule: point {number + 1} is {entry!r}. {_ALLOWED}.")
    position, weights = entry[:2]
    linear = len(entry) == 3
    if linear and entry[2] != "linear":
        raise SettingError(f"mixture schedule: point {number + 1} ends with {entry[2]!r}. {_ALLOWED}.")
    whole = isinstance(position, (int, np.integer)) and not isinstance(position, bool) and 0 <= position < 2**62
    part = isinstance(position, float) and (0 <= position < 1 or (position == 1 and linear))
    if not (whole or part):
        raise SettingError(f"mixture schedule: the position of point {number + 1} is {position!r}. {_ALLOWED}.")
    spec = MixtureSpec(weights)
    return Point(exact(position) if position and part else int(position), spec.weights, linear)


def _plain(entry: Sequence[Any]) -> tuple[Any, ...]:
    """A point in plain types, so that its JSON says the same."""
    position = entry[0] if isinstance(entry[0], float) and entry[0] else int(entry[0])
    return (position, dict(MixtureSpec(entry[1]).weights), *entry[2:])
