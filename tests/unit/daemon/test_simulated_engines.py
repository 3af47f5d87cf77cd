"""Several engines of one run, simulated: each has some groups and dies alone, and what they tell each other is late.

Each engine's world is that of `test_simulated_deaths`, with ranks of its own groups. Between them is the daemon, which
passes words on in their order from each to each, at moments of the seed's choice; what is on its way to an engine that
dies is lost.
"""

from __future__ import annotations

import random
import warnings
from collections import deque
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.unit.daemon.test_run import lane_records, pipeline
from tests.unit.daemon.test_simulated_deaths import Rank, World, check_ranks, has_records
from zephon import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
from zephon.errors import RunFailed
from zephon.frontiers import Checkpoint, complete_checkpoint
from zephon.plan import Plan
from zephon.transport.protocol import LanesTold
from zephon_daemon.run import Run


class Engine(World):
    """One engine's world."""

    def __init__(self, node: Node, number: int, plan: Plan, dp: int, readers: int, seed: int,
                 checkpoint: Checkpoint | None, together: bool) -> None:  # fmt: skip
        super().__init__(plan, dp, readers, seed, checkpoint, together)
        self.node = node
        self.groups = [group for group in self.groups if group % node.engines == number]
        self.ranks = [rank for rank in self.ranks if rank.group in self.groups]
        self.post: deque[LanesTold | None] = deque()
        """What the daemon has for it; None asks it to tell of its lanes."""

    @property
    def everyone(self) -> list[Rank]:
        return [rank for world in self.node.worlds for rank in world.ranks]

    def start(self, origin: Checkpoint | None, groups: tuple[int, ...]) -> Run:
        made = super().start(origin, groups)
        self.node.started()
        return made

    def kill_engine(self) -> bool:
        self.post.clear()
        return super().kill_engine()

    def read_post(self) -> None:
        assert self.engine is not None
        told = self.post.popleft()
        if told is None:
            self.engine.tell_lanes()
        else:
            self.do(self.engine.hear(told))


class Node:
    """A daemon with its engines."""

    def __init__(
        self, plan: Plan, engines: int, dp: int, readers: int, seed: int, checkpoint: Checkpoint | None,
        together: bool = False,
    ) -> None:  # fmt: skip
        self.random = random.Random(seed)
        self.engines = engines
        self.worlds = [Engine(self, n, plan, dp, readers, seed + n, checkpoint, together) for n in range(engines)]

    @property
    def alive(self) -> list[Engine]:
        return [world for world in self.worlds if world.engine is not None]

    def started(self) -> None:
        if len(self.alive) > 1:
            for world in self.alive:
                world.post.append(None)

    def pass_on(self) -> bool:
        """Take what engines have to tell, and deliver some of what waits; whether anything moved."""
        moved = False
        for world in self.alive:
            told = world.engine.others.take(0)  # type: ignore[union-attr]
            if told is not None:
                moved = True
                for other in self.alive:
                    if other is not world:
                        other.post.append(told)
        waiting = [world for world in self.alive if world.post]
        for world in waiting:
            for _ in range(self.random.randint(0, len(world.post))):
                moved = True
                world.read_post()
        return moved

    def go_without(self) -> None:
        """Seconds have passed, and the daemon has said who reads where."""
        for world in self.alive:
            elsewhere = [rank for other in self.worlds if other is not world for rank in other.ranks]
            groups = {rank.group for rank in elsewhere if rank.connected}
            lost = {rank.group for rank in elsewhere if rank.lost}
            world.engine.read_there(sorted(groups), sorted(lost))  # type: ignore[union-attr]
            world.do(world.engine.go_without())  # type: ignore[union-attr]

    def die(self) -> None:
        """The daemon, and so all engines at once: nobody but the ranks knows anything any more."""
        for world in self.alive:
            if world.lives < 8:
                world.kill_engine()

    def play(self) -> None:
        worlds: list[Any] = [world for world in self.worlds if world.ranks]
        for _ in range(60_000):
            if all(rank.done for world in worlds for rank in world.ranks):
                return
            if self.random.random() < 0.01:
                self.die()
            if self.random.random() < 0.003:
                self.go_without()
            for idle in range(200):
                moved = self.random.random() < 0.5 and self.pass_on()
                self.random.shuffle(worlds)
                if any([moved, *(world.step() for world in worlds)]):
                    break
                assert idle < 199, [world.stuck() for world in worlds]
                if idle == 100:
                    self.go_without()
        pytest.fail("too many events")


def state_after(recipe: Any, batches: int) -> Checkpoint | None:
    if not batches:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an epoch without a full round is said
        stream = iter(recipe)
        for _ in range(batches):
            next(stream, None)
    return complete_checkpoint(recipe.checkpoint())


@pytest.mark.timeout(3600)
@given(
    seed=st.integers(0, 10**9),
    engines=st.sampled_from([2, 2, 3]),
    dp=st.sampled_from([2, 3, 3]),
    readers=st.sampled_from([1, 1, 2]),
    rows=st.integers(2, 90),
    shuffle=st.sampled_from([0, 5]),
    drop=st.sampled_from([True, True, False]),
    microbatch=st.integers(1, 3),
    drop_last=st.booleans(),
    even_ends=st.sampled_from([True, True, False]),
    stopped_after=st.sampled_from([0, 0, 5, 12]),
    together=st.booleans(),
)
def test_engines_of_one_run_die_alone_at_any_moment_and_every_rank_gets_the_reference_once_and_ends_with_the_others(
    seed: int, engines: int, dp: int, readers: int, rows: int, shuffle: int, drop: bool, microbatch: int,
    drop_last: bool, even_ends: bool, stopped_after: int, together: bool,
) -> None:  # fmt: skip
    def make() -> Any:
        return pipeline(
            rows, shuffle=shuffle, drop=drop, microbatch=microbatch, drop_last=drop_last, even_ends=even_ends
        )

    checkpoint = state_after(make(), stopped_after)
    plan = make().plan(dp_degree=dp, checkpoint=checkpoint)
    assume(has_records(plan))
    node = Node(plan, engines, dp, readers, seed, checkpoint, together and even_ends)
    node.play()
    for world in node.worlds:
        check_ranks(world)


def test_an_engine_finds_out_how_far_lanes_come_whose_engine_died_before_it_told_of_them() -> None:
    """Its ranks train with those that wait for them: these had a round more when their engine died."""
    plan = pipeline(60, shuffle=5, drop=True, microbatch=1, drop_last=True, even_ends=True).plan(dp_degree=2)
    node = Node(plan, 2, 2, 1, 3, None, together=True)
    first, second = node.worlds
    (ahead,), (behind,) = first.ranks, second.ranks

    def goes_on(world: Engine, rank: Rank) -> None:
        """A little of everything but deaths."""
        world.assign()
        if world.in_work:
            world.work()
        world.step_rank(rank)
        if rank.held and rank.connected and not world.in_collective(rank):
            world.hand_back(rank)
        while world.post:
            world.read_post()

    while ahead.run is None or not ahead.run.rounds:
        goes_on(first, ahead)
        goes_on(second, behind)
        told = second.engine.others.take(0)  # type: ignore[union-attr]
        if told is not None:
            first.post.append(told)  # what the first has to tell is lost
    first.kill_engine()
    assert behind.run is not None
    for _ in range(200):
        goes_on(second, behind)
    assert behind.run.rounds == 0
    node.go_without()
    for _ in range(200):
        goes_on(second, behind)
    assert behind.run.rounds == 2, "that which they had, and the next, at whose end it waits for them"
    node.play()
    for world in node.worlds:
        check_ranks(world)


def test_engines_whose_lanes_give_no_record_find_out_together_that_the_epoch_has_none() -> None:
    def make() -> Any:
        data = Dataset.from_dict("d", {"0": InMemoryShard([{"id": i} for i in range(40)])})
        recipe = Pipeline(StaticMixtureWorkSource([data], mixture=None, seed=1, chunk_size=3))
        return recipe.map_transform(lambda row: None).batch(2).options(canonical_replicas=6)

    plan = make().plan(dp_degree=2)
    assert not any(lane_records(plan, 0, lane) for lane in range(plan.lanes))
    with pytest.raises(RunFailed, match="0 of 40 records"):
        Node(plan, 2, 2, 1, 0, None).play()
