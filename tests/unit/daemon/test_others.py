"""What an engine tells a run's other engines: nothing where there are none, soon enough, and all of it once more."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
from zephon.plan import Plan
from zephon.transport.protocol import Announced, LanesTold, LaneTotal, Released
from zephon_daemon.instructions import Tell
from zephon_daemon.others import MOVES_SECONDS, TELL_SECONDS, Others, unsaid
from zephon_daemon.run import Run

SIZE, ENOUGH = 4, 3


def plan_of(rows: int = 60) -> Plan:
    data = Dataset.from_dict("d", {"0": InMemoryShard([{"id": i} for i in range(rows)])})
    recipe = Pipeline(StaticMixtureWorkSource([data], mixture=None, seed=1, chunk_size=3))
    recipe.map_transform(lambda row: row if row["id"] % 3 else None).batch(SIZE)
    return recipe.options(canonical_replicas=4, flush_every_k_chunks=2).plan()


PLAN = plan_of()


def reach(others: Others, records: int, lane: int = 0) -> None:
    others.reach(0, lane, records, 0, SIZE, ENOUGH)


def test_an_engine_that_has_a_run_for_itself_tells_nothing() -> None:
    others = Others(PLAN)
    others.announce(Announced(0, 0, 3, 5, 0))
    assert others.total(LaneTotal(0, 0, 9, 0), ours=True)
    others.release(Released(0, 2, True))
    others.begin(1)
    reach(others, 40)
    assert (others.take(7), others.due(0.0)) == (None, math.inf)
    assert unsaid({7: others}, 0.0) == ([], math.inf)


def test_what_a_lane_has_come_to_waits_a_moment_and_then_is_told_once() -> None:
    others = Others(PLAN)
    others.tell_again()
    others.take(7)
    reach(others, 1)
    assert unsaid({7: others}, 1.0) == ([], pytest.approx(TELL_SECONDS))
    reach(others, 2)
    reach(others, 5)
    (told,), wait = unsaid({7: others}, 1.0 + 2 * TELL_SECONDS)
    assert (told, wait) == (LanesTold(7, reached=[[0, 0, 5]], begun=-1), math.inf)
    reach(others, 6)  # in the round that it had begun
    assert unsaid({7: others}, 200.0) == ([], math.inf)


@pytest.mark.parametrize("act", [
    lambda others: others.total(LaneTotal(0, 0, 9, 0), ours=True),
    lambda others: others.release(Released(0, 2, True)),
    lambda others: others.begin(1),
    lambda others: reach(others, ENOUGH * SIZE),
])  # fmt: skip
def test_ends_epochs_and_half_a_ring_of_rounds_do_not_wait(act: Any) -> None:
    others = Others(PLAN)
    others.tell_again()
    others.take(7)
    act(others)
    assert len(unsaid({7: others}, 100.0)[0]) == 1


def test_lanes_before_the_one_that_is_furthest_behind_wait() -> None:
    others = Others(PLAN)
    others.tell_again()
    others.take(7)
    reach(others, ENOUGH * SIZE, lane=0)
    reach(others, ENOUGH * SIZE, lane=1)
    (told,), _ = unsaid({7: others}, 1.0)
    assert told.reached == [[0, 0, ENOUGH * SIZE], [0, 1, ENOUGH * SIZE]]
    reach(others, 9 * ENOUGH * SIZE, lane=0)
    assert unsaid({7: others}, 1.0)[0] == []
    reach(others, 2 * ENOUGH * SIZE, lane=1)
    (told,), _ = unsaid({7: others}, 1.0)
    assert told.reached == [[0, 0, 9 * ENOUGH * SIZE], [0, 1, 2 * ENOUGH * SIZE]]
    others.total(LaneTotal(1, 0, 2 * ENOUGH * SIZE, 0), ours=True)
    others.take(7)
    reach(others, 10 * ENOUGH * SIZE, lane=0)
    assert len(unsaid({7: others}, 1.0)[0]) == 1, "a lane that has ended holds nobody up"


def test_that_an_engine_moves_is_told_once_a_second_and_moves_nobody_who_hears_it() -> None:
    others = Others(PLAN)
    others.tell_again()
    others.take(7)
    assert [len(unsaid({7: others}, now, moves)[0]) for now, moves in ((1.0, 3), (1.5, 4), (1.9, 5))] == [1, 0, 0]
    assert unsaid({7: others}, 1.0 + MOVES_SECONDS, 5) == ([LanesTold(7)], math.inf)
    others.heard(LanesTold(7))
    assert (others.words, unsaid({7: others}, 200.0, 5)) == (1, ([], math.inf))


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0.0, 0.05)), min_size=1, max_size=40))
def test_the_others_know_of_every_round_in_time_and_are_told_no_oftener_than_they_must(
    steps: list[tuple[int, float]],
) -> None:
    """After each step they know of all rounds but less than half a ring's, or a moment has not passed yet."""
    others, records, known, now, last = Others(PLAN), 0, 0, 0.0, -math.inf
    others.tell_again()
    others.take(7)
    for more, seconds in steps:
        records, now = records + more, now + seconds
        reach(others, records)
        told, wait = unsaid({7: others}, now)
        for words in told:
            ahead = records - known >= ENOUGH * SIZE
            assert ahead or now > last + TELL_SECONDS - 1e-9
            known, last = words.reached[0][2], now
        assert records // SIZE - known // SIZE <= ENOUGH
        if known // SIZE != records // SIZE:
            assert 0 < wait < TELL_SECONDS + 1e-9
    told, _ = unsaid({7: others}, now + 2 * TELL_SECONDS)
    known = told[0].reached[0][2] if told else known
    assert (known // SIZE, -(-known // SIZE)) == (records // SIZE, -(-records // SIZE))


def test_of_other_engines_lanes_readers_are_told_windows_and_totals_and_so_are_those_who_come_later() -> None:
    run = Run(PLAN, dp_degree=2, groups=(0,))
    run.join(1, 0, 1)
    window, total = Announced(3, 0, 6, 11, 1, '{"at": 5}'), LaneTotal(3, 0, 20, 1)
    told = LanesTold(0, announced=[window], totals=[total])
    assert [order.message for order in run.hear(told) if isinstance(order, Tell)] == [window, total]
    assert run.others.take(0) is None, "what was heard is not told on"
    again = [order.message for order in run.hear(told) if isinstance(order, Tell)]
    assert again == [window], "a total is told once; a window that is known is nothing to a rank"
    late = [order.message for order in run.join(2, 0, 2) if isinstance(order, Tell)]
    assert window in late
    assert total in late


def test_groups_that_read_elsewhere_are_not_missing() -> None:
    run = Run(PLAN, dp_degree=2, groups=(0,))
    run.join(1, 0, 1)
    assert run.missing_groups() == [1]
    run.others.read_there([1])
    assert run.missing_groups() == []
    run.others.read_there([])
    assert (run.missing_groups(), run.others.came) == ([1], {1})


def test_asked_again_a_run_tells_all_that_it_knows_of_its_lanes() -> None:
    run = Run(PLAN, dp_degree=2, groups=(0,))
    run.join(1, 0, 1)
    run.begin(1, 0)
    run.hear(LanesTold(0, totals=[LaneTotal(3, 0, 20, 0)]))
    for _ in range(2):
        run.tell_lanes()
        told = run.others.take(5)
        assert told is not None
        assert (told.run, told.begun, told.totals) == (5, 0, [LaneTotal(3, 0, 20, 0)])
        assert {window.lane for window in told.announced} == {0, 1}
