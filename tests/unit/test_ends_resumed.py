"""With `drop_last=False` a run that is stopped after any number of batches of any group goes on with exactly the rest.

Also in the rounds in which lanes have run out: whether the empty batch of such a lane was delivered or is still due is
part of the state. Batches are compared lane by lane, empty ones included, so every rank sees as many in every round.
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.small_recipes import Lockstep, Recipe, examples, quiet, recipes

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
