"""After an engine's death ranks go on without others: some come late, behind or ahead, or die after all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.unit.daemon.test_run import lane_records, pipeline
from tests.unit.daemon.test_simulated_deaths import Rank, World
from zephon_daemon.lane_rings import LaneRings
from zephon_daemon.lane_waits import lane_waits
from zephon_daemon.report import run_report
from zephon_daemon.run import Run
from zephon_daemon.stalls import Oversight
from zephon_daemon.watchdog import Patience


def scene(dp: int, readers: int) -> World:
    """Nobody knows beforehand how many records its lanes have."""
    plan = pipeline(300, shuffle=0, drop=True, microbatch=1, drop_last=True).plan(dp_degree=dp)
    return World(plan, dp, readers, 5, None)


def come(world: World, rank: Rank, slots: int) -> Run:
    """It is the first to come to an engine whose rings have so many slots."""
    world.come(rank)
    assert world.engine is not None
    world.engine.rings = LaneRings(slots, None, world.engine.lanes)
    return world.engine


def read(world: World, ranks: Sequence[Rank], until: Callable[[], bool]) -> None:
    """These ranks read, and give back what they have."""
    for _ in range(2000):
        if until():
            return
        world.assign()
        if world.in_work:
            world.work()
        for rank in ranks:
            if not until():
                world.step_rank(rank)
                if rank.held and rank.connected:
                    world.hand_back(rank)
    raise AssertionError(world.stuck())


def rounds(*ranks: Rank) -> int:
    return min(rank.run.rounds if rank.run is not None else 0 for rank in ranks)


def check(world: World) -> None:
    """Everybody had the records of each lane from its first one on."""
    for rank in world.ranks:
        for (epoch, lane), got in rank.got.items():
            assert got == lane_records(world.plan, epoch, lane)[: len(got)]


def test_a_lane_goes_on_for_one_who_has_had_some_of_it_whoever_comes_and_dies() -> None:
    """One is furthest ahead of where it came, behind it another begins and dies, then a third comes from further on."""
    world = scene(dp=1, readers=3)
    ahead, behind, last = world.ranks
    come(world, ahead, slots=5)
    read(world, world.ranks, lambda: rounds(*world.ranks) == 2)
    read(world, [last], lambda: rounds(last) == 6)
    world.kill_engine()
    engine = come(world, ahead, slots=1)
    world.do(engine.go_without())
    read(world, [ahead], lambda: rounds(ahead) == 4)
    world.come(behind)
    world.do(engine.go_without())
    world.kill_rank(behind)
    world.come(last)
    read(world, [ahead, last], lambda: rounds(ahead, last) == 9)
    check(world)


def test_lanes_stand_in_for_a_group_of_which_one_came_and_died_before_the_other_that_waits_for_those_who_are_here() -> (
    None
):
    world = scene(dp=2, readers=2)
    *here, dies, waits = sorted(world.ranks, key=lambda rank: rank.group)
    come(world, waits, slots=5)
    read(world, world.ranks, lambda: rounds(*world.ranks) == 1)
    known = max(rank.run.epoch.rounds for rank in (*here, dies) if rank.run is not None)
    read(world, [waits], lambda: rounds(waits) > known)
    for rank in (*here, dies):
        rank.pipe.clear()  # what else it was told is lost with the engine
    world.kill_engine()
    engine = come(world, dies, slots=1)
    world.kill_rank(dies)
    for rank in here:
        world.come(rank)
    world.do(engine.go_without())
    read(world, here, lambda: rounds(*here) > known)
    check(world)


@pytest.mark.parametrize("late", [False, True])
def test_nobody_stands_in_for_a_group_whose_ranks_have_died_and_the_others_are_told(late: bool) -> None:
    world = scene(dp=2, readers=1)
    here, dies = world.ranks
    read(world, world.ranks, lambda: rounds(*world.ranks) == 2)
    world.kill_engine()
    engine = come(world, here, slots=1)
    if late:
        world.do(engine.go_without())
        read(world, [here], lambda: rounds(here) > 6)
    world.kill_rank(dies)
    assert not engine.waits_for_ranks
    world.do(engine.go_without())
    with pytest.raises(AssertionError, match=r"groups \[1\], whose ranks have left the run"):
        read(world, [here], lambda: rounds(here) > 40)
    check(world)


def test_lanes_that_stood_in_for_ranks_which_read_from_another_engine_now_are_no_more_reported() -> None:
    world = scene(dp=2, readers=1)
    here, _ = world.ranks
    read(world, world.ranks, lambda: rounds(*world.ranks) == 1)
    world.kill_engine()
    engine = come(world, here, slots=1)
    world.do(engine.go_without())

    def reported() -> list[int]:
        return [lane["lane"] for lane in run_report("pipeline", engine, 0, None)["lanes"]]

    assert reported() == [0, 1, 2, 3, 4, 5]
    engine.read_there([1])
    assert reported() == [0, 1, 2]
    oversight = Oversight(Patience(10.0, 100.0), world.scheduler, lambda _: world.plan, lambda: 0.0)
    assert set(lane_waits(0, engine, world.scheduler, oversight)) == {0, 1, 2}


def test_ranks_go_on_to_the_next_epoch_without_others_and_no_further_so_that_these_can_end_theirs() -> None:
    plan = pipeline(60, shuffle=0, drop=True, microbatch=1, drop_last=True).plan(dp_degree=2)
    for late in ([1], [2, 3], [1, 2, 3], [1, 3]):
        world = World(plan, 2, 2, 5, None)
        away = [rank for number, rank in enumerate(world.ranks) if number in late]
        here = [rank for number, rank in enumerate(world.ranks) if number not in late]
        read(world, world.ranks, lambda ranks=world.ranks: rounds(*ranks) == 2)
        world.kill_engine()
        for rank in here:
            world.come(rank)
        assert world.engine is not None
        world.do(world.engine.go_without())
        with pytest.raises(AssertionError, match="to attach"):
            read(world, here, lambda here=here: epoch(*here) == 3)
        assert epoch(*here) in (1, 2)
        for rank in away:
            world.come(rank)
        read(world, world.ranks, lambda ranks=world.ranks: epoch(*ranks) == 4)
        check(world)


def epoch(*ranks: Rank) -> int:
    return min(rank.run.epoch.number if rank.run is not None else 0 for rank in ranks)
