"""Elastic determinism: stopped anywhere and resumed on any number of groups, every lane is what the reference says.

A drawn recipe is run by all its groups side by side, stopped (also inside a round), its parts merged, and resumed on
another topology, twice in a row. Each lane's records must equal the reference execution (`zephon.windows.run_window`):
same samples, same bytes, same order, and so must every global step, since each round ends for all lanes at one record.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.small_recipes import (
    STEP_LISTS,
    Lockstep,
    Recipe,
    digest,
    examples,
    expected_ends,
    last_stand,
    quiet,
    recipes,
    reference,
)
from zephon.columns import Block
from zephon.windows import TASK_SAMPLES, run_window, window_of

ENDLESS = 30
"""Records of a lane that are looked at where a run has no end."""


def lanes_of(recipe: Recipe, epoch: int = 0) -> tuple[dict[int, Block], bool]:
    """The reference's lanes, and whether they are whole."""
    plan = recipe.plan()
    endless = plan.curriculum(epoch).total is None
    most = ENDLESS if endless else 10**9
    return {lane: reference(plan, lane, epoch, most) for lane in range(plan.lanes)}, not endless


def assert_lanes(parts: dict[int, list[Block]], lanes: dict[int, Block], ends: dict[int, int]) -> None:
    for lane, whole in lanes.items():
        got = Block.concat(parts[lane])
        assert len(got) == ends[lane], f"lane {lane}"
        assert digest(got) == digest(whole.slice(0, ends[lane])), f"lane {lane}"
        samples, expected = got.compact_samples(), whole.slice(0, ends[lane]).compact_samples()
        assert np.array_equal(samples.samples, expected.samples[:, :3])


TOPOLOGIES = st.sampled_from([8, 4, 3, 2, 1])
LEGS = st.lists(
    st.tuples(TOPOLOGIES, st.integers(1, 4), st.lists(st.integers(0, 7), max_size=25)), min_size=1, max_size=3
)


@examples(30)
@given(recipes(), LEGS, TOPOLOGIES, st.integers(1, 4))
@example(Recipe(lanes=2, rows=(12,), drop_last=True), [(2, 2, [0, 0, 1, 1, 0])], 1, 2)
@example(Recipe(lanes=2, rows=(12,), drop_last=False), [(2, 4, [0, 0, 1])], 1, 4)
def test_stopped_anywhere_and_resumed_on_any_groups_every_lane_equals_the_reference(recipe, legs, last_dp, last_size):
    lanes, whole = lanes_of(recipe)
    totals = {lane: len(block) for lane, block in lanes.items()}
    parts: dict[int, list[Block]] = {lane: [] for lane in lanes}
    state = None
    for dp, size, turns in legs:
        run = Lockstep(recipe, min(dp, recipe.lanes), size, state)
        most = max(run.begins.values())
        run.batches(turns, last_stand(run.plan, totals, most) if whole else ENDLESS)
        state = json.loads(json.dumps(run.checkpoint()))
        for lane, blocks in run.records.items():
            parts[lane] += blocks
        stands = {lane: int(state["lanes"][str(lane)]["records"]) for lane in lanes}
        if state["epoch"] == 0:
            assert stands == {lane: sum(map(len, blocks)) for lane, blocks in parts.items()}
        else:
            assert_lanes(parts, lanes, expected_ends(run.plan, totals, most))
            return
    last = Lockstep(recipe, min(last_dp, recipe.lanes), last_size, state)
    ends = expected_ends(last.plan, totals, max(last.begins.values()))
    if whole and (len(last.groups) == 1 or last.plan.lane_totals(0) is not None):
        last.to_the_end()
    else:  # a group that cannot know the others' lanes goes to the end of its own
        stand = last_stand(last.plan, totals, max(last.begins.values())) if whole else ENDLESS
        last.batches([group for _ in range(100) for group in range(8)], stand)
        if not whole:
            ends = {lane: last.begins[lane] + len(last.lane(lane)) for lane in lanes}
            assert min(ends.values()) > ENDLESS - 5
    for lane, blocks in last.records.items():
        parts[lane] += blocks
    assert_lanes(parts, lanes, ends)


@examples(15)
@given(recipes(), st.integers(1, 9), st.integers(1, 9), TOPOLOGIES, TOPOLOGIES, TOPOLOGIES, st.sampled_from([1, 2, 3]))
def test_every_global_step_is_the_same_after_two_resumes_with_other_sizes(recipe, first, second, dp, dp2, dp3, parts):
    """A step is six records of each lane, as batches of 6, 3 or 2: digests of whole steps are compared."""
    lanes, _ = lanes_of(recipe)
    steps: list[dict[int, str]] = []
    state, limit = None, min(map(len, lanes.values())) // 6
    for groups, size, stop in ((dp, 6, first), (dp2, 6 // parts, second), (dp3, 3, 10**6)):
        run = Lockstep(recipe, min(groups, recipe.lanes), size, state)
        wanted = max(0, min(stop, limit - len(steps)))
        assert run.rounds(wanted * 6 // size) == wanted * 6 // size
        for number in range(wanted):
            steps.append({lane: digest(run.lane(lane).slice(number * 6, number * 6 + 6)) for lane in lanes})
        state = run.checkpoint()
    assert len(steps) == limit
    for number, step in enumerate(steps):
        assert step == {lane: digest(block.slice(number * 6, number * 6 + 6)) for lane, block in lanes.items()}


@examples(15)
@given(recipes(source=(), even_ends=True), TOPOLOGIES, st.lists(st.integers(0, 7), max_size=200), st.data())
def test_a_state_taken_in_the_second_epoch_goes_on_in_it(recipe, dp, turns, data):
    first = Lockstep(recipe, 1)
    first.to_the_end()
    first.groups[0].end_epoch()
    state = first.checkpoint()
    assert state["epoch"] == 1
    assert all(entry["records"] == 0 for entry in state["lanes"].values())
    lanes, _ = lanes_of(recipe, epoch=1)
    ends = expected_ends(first.plan, {lane: len(block) for lane, block in lanes.items()})
    run = Lockstep(recipe, min(dp, recipe.lanes), state=state)
    run.batches(turns, last_stand(run.plan, {lane: len(block) for lane, block in lanes.items()}))
    again = Lockstep(recipe, 1, state=run.checkpoint())
    again.groups[0].settle()
    if again.groups[0].epoch == 1:
        again.to_the_end()
        assert_lanes({lane: run.records[lane] + again.records[lane] for lane in lanes}, lanes, ends)
    else:
        assert_lanes(run.records, lanes, ends)


# Execution never shows


@examples(15)
@given(recipes(), st.sampled_from(["inline", "threads"]), st.integers(1, 4), st.sampled_from([1, 2, 5, 1000]))
def test_no_execution_setting_shows_in_the_data(recipe, runner, workers, task_samples):
    lanes, whole = lanes_of(recipe)
    run = Lockstep(recipe, 1, runner=runner, workers=workers, task_samples=task_samples)
    try:
        ends = expected_ends(run.plan, {lane: len(block) for lane, block in lanes.items()})
        if whole:
            run.to_the_end()
        else:
            run.rounds(ENDLESS // 2)
        assert_lanes(run.records, lanes, ends)
    finally:
        run.close()


@examples(30)
@given(recipes(), st.integers(0, 7), st.integers(0, 6), st.sampled_from([1, 3, TASK_SAMPLES]))
def test_a_window_computed_alone_equals_the_window_in_its_stream(recipe, lane, number, task_samples):
    plan = recipe.plan()
    lane %= plan.lanes
    if window_of(plan, 0, lane, number) is None:
        return
    before = sum(len(block) for w in range(number) for block in run_window(plan, 0, lane, w))
    alone = Block.concat(list(run_window(recipe.plan(), 0, lane, number, task_samples=task_samples)))
    stream = reference(plan, lane, most=before + len(alone))
    assert digest(alone) == digest(stream.slice(before, before + len(alone)))


@pytest.mark.parametrize("steps", STEP_LISTS, ids=lambda steps: "-".join(steps) or "none")
def test_batches_have_one_digest_however_they_were_produced(steps):
    """`batch.digest`, over fields, shapes, dtypes and bytes: not of records joined, but of each batch as delivered."""
    digests = set()
    for runner, workers, task_samples in (("inline", 1, 512), ("inline", 1, 1), ("threads", 3, 2)):
        run = Lockstep(
            Recipe(steps=steps, rows=(50, 31), weights=(2, 1)),
            1,
            runner=runner,
            workers=workers,
            task_samples=task_samples,
        )
        found = []
        while (batch := run.groups[0].next_batch()) is not None:
            found.append(
                (batch.lane, batch.first_record, batch.ends_round, batch.digest, tuple(map(str, batch.samples)))
            )
        run.close()
        assert found
        digests.add(tuple(found))
    assert len(digests) == 1


def test_a_state_saved_right_after_a_load_is_the_loaded_one_on_any_topology():
    recipe = Recipe(steps=("shuffle",))
    run = Lockstep(recipe, 4)
    run.batches([0, 1, 2, 3, 0, 1], 100)
    state = run.checkpoint()
    for dp in (1, 2, 3, 4):
        assert quiet(lambda dp=dp: Lockstep(recipe, dp, state=state).checkpoint()) == state
