"""Bad records that were left out (`on_error="skip"`): counted by dataset and operator; the first ones told in full.

The counts travel among those of what operators drop, under names that only this module knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

Skips = dict[str, dict[str, int]]
"""Bad records by dataset, and in it by the operator that could not do them."""

LOGGED = 20
"""Of a run, the reports that are logged in full."""

_MARK, _LONGEST = "skipped\t", 200


def counter_of(dataset: str, operator: str) -> str:
    """The name of a counter. Where an operator says more of itself, in brackets, that is left out."""
    return f"{_MARK}{operator.partition(' (')[0][:_LONGEST]}\t{dataset[:_LONGEST]}"


def without_skips(counters: Mapping[str, int]) -> dict[str, int]:
    """The counters of other things."""
    return {name: count for name, count in counters.items() if not name.startswith(_MARK)}


def skips_in(many_counters: Iterable[Mapping[str, int]]) -> Skips:
    """The bad records in several counters, summed."""
    found: Skips = {}
    for counters in many_counters:
        for name, count in counters.items():
            if name.startswith(_MARK):
                _, operator, dataset = name.split("\t", 2)
                add_skips(found, {dataset: {operator: count}})
    return found


def add_skips(total: Skips, more: Mapping[str, Mapping[str, int]]) -> None:
    """Add to what is known."""
    for dataset, by_operator in more.items():
        for operator, count in by_operator.items():
            here = total.setdefault(dataset, {})
            here[operator] = here.get(operator, 0) + count


def in_words(skips: Mapping[str, Mapping[str, int]]) -> str:
    """As text: "web: 3 in read, 1 in tokenize; code: 2 in read"."""
    return "; ".join(
        f"{dataset}: {', '.join(f'{count} in {operator}' for operator, count in sorted(by_operator.items()))}"
        for dataset, by_operator in sorted(skips.items())
    )


class FirstReports:
    """Hands on the first reports of a run, one line each. What follows is only counted."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell, self._told = tell, 0

    def say(self, reports: Sequence[str]) -> None:
        for report in reports[: max(0, LOGGED - self._told)]:
            self._told += 1
            more = "; further ones are only counted" if self._told == LOGGED else ""
            self._tell(f"{report}{more}")
