"""Every second of every lane is put to the account of what it waited for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon_daemon.waits import LONGEST_LOOK, Waits

CAUSES = st.sampled_from(["reading", "operator 'tokenize'", "the trainer"])


@given(st.lists(st.tuples(st.floats(0.0, LONGEST_LOOK), CAUSES, CAUSES, st.integers(0, 1)), max_size=40))
def test_the_accounts_add_up_to_the_seconds_of_all_lanes(looks: list[tuple[float, str, str, int]]) -> None:
    waits, now = Waits(), 10.0
    waits.look({0: ("reading", 0), 1: ("reading", 0)}, now)
    for pause, first, second, moved in looks:
        now += pause
        waits.look({0: (first, moved), 1: (second, 0)}, now)
        assert 0 <= waits.seconds(0, now) <= now - 10.0
    assert sum(waits.spent.values()) == pytest.approx(2 * (now - 10.0))


def test_a_lane_waits_from_when_it_last_moved_or_waited_for_something_else() -> None:
    waits = Waits()
    for second in range(8):
        waits.look({0: ("reading", 0), 1: ("reading", second), 2: ("reading" if second < 5 else "ranks", 0)}, second)
    assert [waits.seconds(lane, 7.0) for lane in range(4)] == [7.0, 0.0, 2.0, 0.0]


def test_of_a_long_pause_between_two_looks_only_the_end_is_accounted_for() -> None:
    waits = Waits()
    waits.look({0: ("reading", 0)}, 0.0)
    waits.look({0: ("reading", 0)}, 1000.0)
    assert waits.spent == {"reading": LONGEST_LOOK}
