"""Whoever stays where it is for too long is reported once, and ended much later; nobody else is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zephon_daemon.watchdog import Act, Patience, Watchdog

QUICK = Patience(20.0, 200.0)


@given(st.lists(st.tuples(st.floats(0.1, 30.0), st.integers(0, 2)), max_size=60))
def test_no_report_unless_a_position_stayed_for_the_limit_and_none_is_missed(
    steps: list[tuple[float, int]],
) -> None:
    dog, now, since, last, told = Watchdog(QUICK), 0.0, 0.0, None, False
    for pause, position in steps:
        now += pause
        acts = [act for _, act, _ in dog.look({"w": position}, now)]
        if position != last:
            assert (Act.GOES_ON in acts) == told
            since, last, told = now, position, False
            continue
        if Act.REPORT in acts:
            assert now - since >= 20.0
            assert not told
            told = True
        if now - since >= 60.0:  # a look comes every 30 seconds at most
            assert told
        assert (Act.END in acts) <= (now - since >= 200.0)
    assert set(dog.stalled) == ({"w"} if told else set())


def test_the_stack_is_asked_for_first_then_it_is_reported_once_and_ended_once() -> None:
    dog = Watchdog(QUICK)
    seen = [(second, act) for second in range(400) for _, act, _ in dog.look({3: ("task", 1)}, float(second))]
    assert seen == [(20, Act.ASK), (21, Act.REPORT), (200, Act.END)]


def test_who_has_nothing_to_do_is_never_stalled_and_who_is_gone_is_forgotten() -> None:
    dog = Watchdog(QUICK)
    assert not [act for second in range(1000) for act in dog.look({3: None}, float(second))]
    dog.look({3: "a"}, 1000.0)
    dog.look({}, 1010.0)
    assert not dog.look({3: "a"}, 1025.0)


def test_moves_are_counted_not_tasks_that_begin_or_end() -> None:
    dog = Watchdog(Patience(1.0, 2.0))
    for now, position in enumerate([None, 1, 1, 2, 3, None, None, 4]):
        dog.look({"w": position}, float(now))
    assert dog.moves == 4  # to 1, 2, 3 and 4


def test_a_slow_one_that_moves_is_not_stalled() -> None:
    dog = Watchdog(QUICK)
    assert not [act for step in range(1000) for act in dog.look({3: step}, step * 19.0)]


def test_without_an_end_nobody_is_ended_and_without_a_limit_nobody_is_reported() -> None:
    for patience, expected in (
        (Patience.of(5.0, 0.0), {Act.ASK, Act.REPORT}),
        (Patience.of(0.0, 0.0), set()),
        (Patience.of(0.0, 9.0), {Act.END}),
    ):
        dog = Watchdog(patience)
        assert {act for s in range(1000) for _, act, _ in dog.look({3: "a"}, float(s))} == expected
    assert Patience.of(2.0, None) == Patience(2.0, 20.0)
