"""With `drop_last=False` a run that is stopped after any number of batches of any group goes on with exactly the rest.

Also in the rounds in which lanes have run out: whether the empty batch of such a lane was delivered or is still due is
part of the state. Batches are compared lane by lane, empty ones included, so every rank sees as many in every round.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.small_recipes import Lockstep, Recipe, examples, quiet, recipes, reference
from zephon.errors import CheckpointError

Batches = dict[int, list[tuple[int, int]]]


def delivered(run: Lockstep, group: int, most: int = 10**9) -> list[tuple[int, int, int]]:
    """The next batches of a group, at most so many: lane, first record, records."""
    found: list[tuple[int, int, int]] = []
    while len(found) < most and (batch := run.groups[group].next_batch()) is not None:
        found.append((batch.lane, batch.first_record, len(batch)))
    return found


def by_lane(lanes: int, batches: list[tuple[int, int, int]]) -> Batches:
    return {lane: [batch[1:] for batch in batches if batch[0] == lane] for lane in range(lanes)}


def rest_of(recipe: Recipe, dp: int, state: dict[str, Any]) -> Batches:
    run = quiet(lambda: Lockstep(recipe, dp, 3, state=json.loads(json.dumps(state))))
    try:
        assert run.checkpoint() == state
        return by_lane(recipe.lanes, [batch for group in range(dp) for batch in delivered(run, group)])
    finally:
        run.close()


def check(recipe: Recipe, dp: int, fractions: tuple[float, ...], resumed_on: int) -> None:
    whole = Lockstep(recipe, 1, 3)
    expected = by_lane(recipe.lanes, delivered(whole, 0))
    rounds = {len(batches) for batches in expected.values()}
    assert len(rounds) == 1
    stopped = Lockstep(recipe, dp, 3)
    before: list[tuple[int, int, int]] = []
    for group, run in enumerate(stopped.groups):
        # Short of the very end, after which a run alone would begin the next epoch.
        before += delivered(stopped, group, int(fractions[group] * sum(rounds) * len(run.lanes)))
    state = stopped.checkpoint()
    for run in (whole, stopped):
        run.close()
    rest, had = rest_of(recipe, resumed_on, state), by_lane(recipe.lanes, before)
    assert {lane: had[lane] + rest[lane] for lane in had} == expected


FRACTIONS = st.tuples(*[st.floats(0, 0.9999) for _ in range(4)])


@examples(20)
@given(recipes(drop_last=False, steps=(), source=(("chunk_size", 3),)), st.integers(1, 4), st.integers(1, 4), FRACTIONS)
@example(Recipe(rows=(61,), lanes=4, drop_last=False), 1, 2, (0.98,) * 4)
@example(Recipe(rows=(5,), lanes=4, drop_last=False), 4, 1, (0.0, 0.9, 0.0, 0.9))
def test_every_group_stops_where_it_likes_and_the_rest_comes_batch_for_batch(
    recipe: Recipe, dp: int, resumed_on: int, fractions: tuple[float, ...]
) -> None:
    check(recipe, min(dp, recipe.lanes), fractions, min(resumed_on, recipe.lanes))


@examples(20)
@given(recipes(drop_last=False, strategy="contiguous", source=(("chunk_size", 3),)), FRACTIONS)
@example(Recipe(rows=(40, 33), weights=(1, 2), steps=("filter", "shuffle"), lanes=8, drop_last=False), (0.93,) * 4)
def test_lanes_of_unequal_lengths_stop_anywhere_and_the_rest_comes_batch_for_batch(
    recipe: Recipe, fractions: tuple[float, ...]
) -> None:
    check(recipe, 1, fractions, 1)


def stopped(recipe: Recipe, batches: int) -> dict[str, Any]:
    """The state after so many batches."""
    pipeline = recipe.pipeline(3)
    for _ in zip(range(batches), pipeline):
        pass
    return json.loads(json.dumps(pipeline.checkpoint()))  # type: ignore[no-any-return]


@pytest.mark.parametrize("batches", range(21, 24))
def test_a_lane_that_had_run_out_goes_on_with_data_that_were_added_knowingly(batches: int) -> None:
    recipe = Recipe(rows=(61,), lanes=4, drop_last=False, source=(("chunk_size", 3), ("stop_after_passes", 1)))
    state = stopped(recipe, batches)
    assert any(lane["stands"] > lane["records"] for lane in state["lanes"].values())
    longer = replace(recipe, source=(("chunk_size", 3), ("stop_after_passes", 2)))
    rest = list(longer.pipeline(3).restore(state, allow_changed=["source"]))
    assert max(map(len, rest)) == 3
    for lane in range(4):
        due = reference(longer.plan(3), lane).fields["id"].to_list()[state["lanes"][str(lane)]["records"] :]
        assert [i for batch in rest if batch.lane == lane and len(batch) for i in batch["id"].tolist()] == due


@pytest.mark.parametrize(
    ("lanes", "said"),
    [
        ({"0": 9}, "lane 0 goes on after record 6"),
        ({"0": 2**60}, "lane 0 stands at record 1152921504606846976 with 6 records"),
        (dict.fromkeys("0123", 2**60), "lane 0 stands at record 1152921504606846976 with 6 records"),
    ],
)
def test_a_state_whose_lanes_stand_where_they_cannot_is_refused(lanes: dict[str, int], said: str) -> None:
    recipe = Recipe(rows=(61,), lanes=4, drop_last=False, source=(("chunk_size", 3),))
    state = stopped(recipe, 6)
    for lane, stands in lanes.items():
        state["lanes"][lane]["stands"] = stands
    with pytest.raises(CheckpointError, match=said):
        list(recipe.pipeline(3).restore(state))
