"""What happens when a dataset has come to its end, and where that ends an epoch. Known before the epoch starts.

Three rules, one at a time. *Passes*: every drawn dataset completes so many passes, the shorter ones repeating
meanwhile. *Policies*: a "stop" dataset ends the epoch just before it would begin a second pass; a "repeat" one goes
on. *Repeats*: a dataset that has been repeated so many times drops out, the others go on in their own proportions,
and the epoch ends when all have dropped out. Policies and repeats may be given for some datasets and not for others;
a dataset with neither repeats without end.

An epoch may consist of stretches, each with a mixture of its own, where the mixture was changed knowingly: a dataset
goes on from its own count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from zephon.errors import SettingError
from zephon.piecewise import NothingToDraw, PiecewiseProportions, Timeline, ideal_course
from zephon.proportions import Apportioned, ChangingProportions, Proportions, integer_weights
from zephon.schedules import later
from zephon.words import many

POLICIES = ("stop", "repeat")
_UNIT = 2**20  # samples over which the shares of a schedule by fractions are integrated


@dataclass(frozen=True)
class Exhaustion:
    """The rules of a work source. `repeats` has the datasets with a limit; `passes` is None under another rule."""

    stop: frozenset[str]
    repeats: Mapping[str, int]
    passes: int | None


def read_rules(names: Sequence[str], policy: Any, max_repeats: Any, passes: int, passes_given: bool) -> Exhaustion:
    """The rules from a work source's arguments. SettingError for senseless ones and for two that contradict."""
    policies = by_dataset("exhausted_policy", policy, names, _policy)
    repeats = by_dataset("max_repeats", max_repeats, names, _repeats)
    rule = next((name for name, given in (("exhausted_policy", policy), ("max_repeats", max_repeats)) if given), None)
    if max_repeats is not None and rule is None:
        rule = "max_repeats"
    if rule is not None and passes_given:
        value = policy if rule == "exhausted_policy" else max_repeats
        raise SettingError(
            f"{rule}={value!r} and stop_after_passes={passes} both say when an epoch ends: give one of them "
            f"(stop_after_passes counts passes only where {rule} is None)."
        )
    stop = frozenset(name for name, value in policies.items() if value == "stop")
    both = sorted(stop & set(repeats))
    if both:
        raise SettingError(
            f'exhausted_policy={policy!r} and max_repeats={max_repeats!r} contradict each other for {both}: "stop" '
            "ends the epoch where a repeat would begin. Give max_repeats as a dict without them, or leave them at "
            '"repeat".'
        )
    return Exhaustion(stop, repeats, passes if rule is None else None)


def by_dataset(setting: str, value: Any, names: Sequence[str], checked: Callable[[str, Any], Any]) -> dict[str, Any]:
    """A setting that is one value or a dict from dataset name to value, for each dataset that it is given for."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, checked(setting, value))
    unknown = sorted(set(value) - set(names), key=str)
    if unknown:
        raise SettingError(f"{setting} names unknown datasets: {unknown}. Allowed: {sorted(names)}.")
    return {name: checked(f"{setting}[{name!r}]", given) for name, given in value.items()}


def _policy(setting: str, value: Any) -> str:
    if not isinstance(value, str) or value not in POLICIES:
        raise SettingError(f"{setting} is {value!r}. Allowed: None, {', '.join(map(repr, POLICIES))}.")
    return value


def _repeats(setting: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise SettingError(f"{setting} is {value!r}. Allowed: None or a whole number of at least 0.")
    return int(value)


@dataclass(frozen=True)
class Stretch:
    """From `position` of the epoch on: a mixture as weights of samples. `course` takes the epoch's length."""

    position: int
    course: Callable[[int | None], Timeline]
    by_fractions: bool


def epoch_of(
    stretches: Sequence[Stretch], names: Sequence[str], rows: Sequence[int], rules: Exhaustion
) -> tuple[Apportioned, int | None]:
    """The proportions of an epoch, and its samples (None: endless). SettingError where a schedule has no end."""
    return _Epoch(names, rows, rules).of(stretches)


class _Epoch:
    def __init__(self, names: Sequence[str], rows: Sequence[int], rules: Exhaustion) -> None:
        self.names, self.rows, self.rules = names, rows, rules

    def of(self, stretches: Sequence[Stretch]) -> tuple[Apportioned, int | None]:
        had = [0] * len(self.rows)
        parts: list[tuple[int, Apportioned]] = []
        for stretch, following in zip(stretches, [*stretches[1:], None], strict=True):
            part, total = self._stretch(stretch, had)
            parts.append((stretch.position, part))
            whole = part if len(parts) == 1 else ChangingProportions(parts[0][1], parts[1:])
            end = None if total is None else stretch.position + total
            if following is None or (end is not None and end <= following.position):
                break
            had = whole.counts(following.position)
        return whole, end

    def _stretch(self, stretch: Stretch, had: list[int]) -> tuple[Apportioned, int | None]:
        """The proportions from a stretch's beginning on, counted from there, and where they end."""
        limits = [
            max(0, rows * (1 + self.rules.repeats[name]) - before) if name in self.rules.repeats else None
            for name, rows, before in zip(self.names, self.rows, had, strict=True)
        ]
        if stretch.by_fractions:
            return self._of_known_length(stretch, limits)
        course = later(stretch.course(None), stretch.position)
        drawn = [i for i in range(len(self.names)) if any(weights[i] for _, weights in course)]
        if len(course) == 1 and all(limits[i] is None for i in drawn):
            same: Apportioned = Proportions(integer_weights(course[0][1]))
            return same, self._total(same, drawn, had)
        pieces = self._pieces(course, limits, None)
        total = self._total(pieces, drawn, had)
        return pieces, min((t for t in (total, pieces.total) if t is not None), default=None)

    def _pieces(self, course: Timeline, limits: list[int | None], end: int | None) -> PiecewiseProportions:
        try:
            return PiecewiseProportions(ideal_course(course, limits, end))
        except NothingToDraw as error:
            left = [self.names[i] for i in error.left]
            raise SettingError(
                f"mixture: at sample {math.ceil(error.time)} of the epoch every dataset that has a weight has dropped "
                f"out (max_repeats), but {left} have rows left and weight 0 there. Give them a weight, or set no "
                "limit for another dataset."
            ) from error

    def _total(self, proportions: Apportioned, drawn: list[int], had: list[int]) -> int | None:
        """Where the rules for passes and policies end it."""
        if self.rules.passes is None:
            ends = []
            for i in drawn:
                if self.names[i] in self.rules.stop:
                    try:
                        ends.append(proportions.first_total_with(i, self.rows[i] + 1 - had[i]) - 1)
                    except ValueError:
                        continue  # it never begins a second pass
            return max(0, min(ends)) if ends else None
        total = 0
        for i in drawn:
            try:
                total = max(total, proportions.first_total_with(i, self.rows[i] * self.rules.passes - had[i]))
            except ValueError as error:
                raise SettingError(
                    f"mixture: dataset {self.names[i]!r} never completes its "
                    f"{many(self.rules.passes, 'pass', 'passes')}, since its weight becomes 0 before, so the epoch "
                    "would never end. Set exhausted_policy or max_repeats."
                ) from error
        return total

    def _of_known_length(self, stretch: Stretch, limits: list[int | None]) -> tuple[Apportioned, int | None]:
        """A schedule by fractions: its length first, from the rules, then its course."""
        assert not stretch.position, "a schedule by fractions begins with the epoch"
        unit = stretch.course(_UNIT)
        drawn = [i for i in range(len(self.names)) if any(weights[i] for _, weights in unit)]
        stop = [i for i in drawn if self.names[i] in self.rules.stop]
        if any(limits[i] is not None for i in drawn):
            if stop or any(limits[i] is None for i in drawn):
                raise self._unknown_length("max_repeats for every dataset that is drawn, and no other rule")
            length = sum(limits[i] or 0 for i in drawn)
            pieces = self._pieces(stretch.course(length), limits, length)
            return pieces, pieces.total
        if self.rules.passes is None and not stop:
            raise self._unknown_length('"stop" for a dataset, max_repeats for all, or stop_after_passes')
        end = ideal_course(unit, [None] * len(self.names), _UNIT)
        ideals = [floor + Fraction(part) for floor, part in zip(end.floors[-1], end.parts[-1], strict=True)]
        if stop:
            longest = min(Fraction(self.rows[i]) * _UNIT / ideals[i] for i in stop)
            last = math.floor(longest) + 1
            return self._nearest(stretch, last, -1, lambda counts: all(counts[i] <= self.rows[i] for i in stop))
        need = {i: self.rows[i] * (self.rules.passes or 1) for i in drawn}
        least = max(Fraction(count) * _UNIT / ideals[i] for i, count in need.items())
        first = max(1, math.ceil(least) - 1)
        return self._nearest(stretch, first, 1, lambda counts: all(counts[i] >= n for i, n in need.items()))

    def _nearest(
        self, stretch: Stretch, length: int, step: int, fits: Callable[[list[int]], bool]
    ) -> tuple[Apportioned, int]:
        """The first length, step by step, whose counts fit. Rounding moves it by a sample or two."""
        while True:
            pieces = self._pieces(stretch.course(length), [None] * len(self.names), length)
            if fits(pieces.counts(length)):
                return pieces, length
            length += step

    def _unknown_length(self, needed: str) -> SettingError:
        return SettingError(
            "mixture: a schedule by fractions needs an epoch whose length is known beforehand, which these rules do "
            f"not say. Give {needed}; or write the schedule's positions as whole numbers of samples."
        )
