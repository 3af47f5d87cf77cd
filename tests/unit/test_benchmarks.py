"""The instrument of `make bench`: rows against their targets, ratios round by round, two commits side by side."""

from __future__ import annotations

import math

import pytest

from tests.benchmarks.compare import _table
from tests.benchmarks.contest import Compared, in_turn
from tests.benchmarks.report import Row, table


@pytest.mark.parametrize(
    ("figure", "target", "at_least", "met"),
    [
        (0.5, 0.5, True, True), (0.49, 0.5, True, False), (5, 5, False, True), (5.1, 5, False, False),
        (0, 0, False, True), (1, 0, False, False), (3, None, False, None),
    ],
)  # fmt: skip
def test_a_row_says_whether_its_target_is_met(figure: float, target: float | None, at_least: bool, met: bool) -> None:
    row = Row("what", figure, "s", target, at_least=at_least)
    assert row.met is met
    assert row.as_json()["met"] is met
    assert ("MISSED" in table([row])) == (met is False)


def test_contestants_take_turns_and_are_compared_round_by_round() -> None:
    order: list[str] = []

    def contestant(name: str, rates: list[float]) -> object:
        def run() -> float:
            order.append(name)
            return rates.pop(0)

        return run

    compared = in_turn({"a": contestant("a", [2, 30, 9]), "b": contestant("b", [1, 10, 9])}, 3)  # type: ignore[dict-item]
    assert order == ["a", "b"] * 3
    assert compared.ratio("a", "b") == (2, 1, 3)
    assert compared.median("a") == 9


def test_rates_of_a_noisy_machine_cancel_out_in_a_ratio() -> None:
    noise = [1.0, 0.1, 3.0]
    compared = Compared({"a": [2 * each for each in noise], "b": noise})
    assert all(math.isclose(each, 2) for each in compared.ratio("a", "b"))


def test_two_commits_are_compared_in_what_both_have_round_by_round() -> None:
    here, base = {"old": [2.0, 30.0, 9.0], "new": [1.0]}, {"old": [1.0, 10.0, 9.0], "gone": [1.0]}
    head, line = _table(here, base, {"old": "ms", "new": "s"}).splitlines()
    assert head.split() == ["what", "base", "here", "ratio", "lowest", "to", "highest"]
    assert line.split() == ["old", "9", "9", "2.00", "1.00", "to", "3.00", "ms"]
