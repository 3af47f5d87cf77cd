"""The engine's state machine with a user's own work source: every interleaving gives the reference, and the state rides
on what clients are told.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.daemon.test_run import World, lane_records
from tests.unit.own_sources import SOURCES, Adaptive, OwnRecipe, datasets
from tests.unit.small_recipes import examples
from zephon.errors import RunFailed
from zephon.frontiers import Announcement, Checkpoint, frontier_at
from zephon.transport import protocol as p
from zephon_daemon.instructions import Tell
from zephon_daemon.run import Run


def announced(world: World, told: list[p.Announced]) -> None:
    """Keep what ranks are told of windows."""
    do = world.do

    def listening(instructions: list[Any]) -> None:
        told.extend(i.message for i in instructions if isinstance(i, Tell) and isinstance(i.message, p.Announced))
        do(instructions)

    world.do = listening  # type: ignore[method-assign]


@examples(12)
@given(
    seed=st.integers(0, 10**6),
    source=st.sampled_from(sorted(SOURCES)),
    chunks=st.integers(1, 12),
    dp=st.sampled_from([1, 2, 3]),
    steps=st.sampled_from([(), ("shuffle",), ("filter", "shuffle")]),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_every_interleaving_delivers_the_reference_and_what_was_announced_resumes_it(
    seed: int, source: str, chunks: int, dp: int, steps: tuple[str, ...], drop_last: bool, data: st.DataObject
) -> None:
    recipe = OwnRecipe(source=source, chunks=chunks, steps=steps, drop_last=drop_last, lanes=3)
    plan = recipe.plan()
    whole = {lane: lane_records(plan, 0, lane) for lane in range(plan.lanes)}
    if not any(whole.values()):
        return
    lengths = [len(records) for records in whole.values()]
    rounds = min(lengths) // 2 if drop_last else (max(lengths) + 1) // 2
    world, told = World(plan, dp, seed, None, 1, True), []
    announced(world, told)
    world.play()
    for rank in world.ranks.values():
        assert rank.rounds[-1] == rounds
        for lane in rank.own:
            assert rank.got.get((0, lane), []) == whole[lane][: rounds * 2]

    known = {lane: [Announcement(0, 0, 0)] for lane in whole}
    for message in sorted(told, key=lambda m: m.chunk):
        if known[message.lane][-1].chunk < message.chunk:
            known[message.lane].append(Announcement(message.chunk, message.records, message.skipped, message.source))
    assert all(a.source for found in known.values() for a in found[1:])
    stop = data.draw(st.integers(0, rounds)) * 2
    lanes = {lane: frontier_at(found, min(stop, len(whole[lane]))) for lane, found in known.items()}
    again = World(recipe.plan(), 3, seed, Checkpoint(plan.identity, 0, lanes), 1, True)
    again.play()
    for rank in again.ranks.values():
        for lane in rank.own:
            assert rank.got.get((0, lane), []) == whole[lane][stop : rounds * 2]


def test_asking_for_a_task_raises_what_the_users_source_raises() -> None:
    class Breaks(Adaptive):
        def clone_for_lane(self, lane_id: int, canonical_replicas: int) -> Any:
            return Breaks(self.datasets_by_id, self.chunks, lane_id, canonical_replicas)

        def next_chunk(self) -> Any:
            if self.done == 5:
                raise ValueError("not today")
            return super().next_chunk()

    pipeline = OwnRecipe(lanes=1, flush_every=2).pipeline()
    pipeline.source = type(pipeline.source)(Breaks(datasets(), 9))
    run = Run(pipeline.plan(), dp_degree=1, groups=(0,))
    with pytest.raises(RunFailed, match="chunk 5 of epoch 0: next_chunk raised ValueError: not today"):
        for _ in range(20):
            chosen = run.choose(0, 1)
            if chosen is not None:
                run.next_task(chosen[1])
