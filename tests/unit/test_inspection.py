"""Looking at a past or future step: the same batches as a run that goes there, from the nearest window known."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.small_recipes import Recipe, examples, recipes
from zephon.errors import SettingError
from zephon.frontiers import complete_checkpoint
from zephon.inspection import batches_of_step, described

TOKENS = Recipe(rows=(60, 40), weights=(2, 1), steps=("tokenize", "wrap", "shuffle"), lanes=2)


def steps_of(recipe, epochs=1):
    """The batches of each step, epoch by epoch, and a checkpoint after each step."""
    pipeline, found, states = recipe.pipeline(), [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(epochs):
            found.append([[]])
            for batch in pipeline:
                found[-1][-1].append(batch)
                if batch.ends_round:
                    states.append(pipeline.checkpoint())
                    found[-1].append([])
                if len(states) > 12:
                    break
    return found, states


@given(recipes(), st.data())
@examples(8)
def test_a_step_looked_at_alone_equals_the_step_of_a_run(recipe, data):
    (steps,), states = steps_of(recipe)
    whole = [step for step in steps if step and step[-1].ends_round]
    if not whole:
        return
    number = data.draw(st.integers(1, len(whole)))
    state = data.draw(st.sampled_from([None, *states]))
    checkpoint = complete_checkpoint(state) if state is not None and state["epoch"] == 0 else None
    batches = batches_of_step(recipe.plan(), number, 0, checkpoint)
    expected = {batch.lane: (batch.digest, batch.samples, batch.first_record) for batch in whole[number - 1]}
    assert {batch.lane: (batch.digest, batch.samples, batch.first_record) for batch in batches} == expected


def test_a_step_beyond_the_end_is_refused_whether_arithmetic_knows_the_end_or_not():
    with pytest.raises(SettingError, match=r"epoch 0 has 7 steps, not 8"):
        batches_of_step(Recipe(rows=(60,), lanes=4).plan(), 8)
    with pytest.raises(SettingError, match=r"epoch 1 ends before step 4000"):
        batches_of_step(TOKENS.plan(), 4000, 1)
    with pytest.raises(SettingError, match="must be a whole number from 1"):
        batches_of_step(TOKENS.plan(), 0)


def test_the_last_steps_of_lanes_of_unequal_length_are_seen_with_their_empty_batches():
    recipe = Recipe(rows=(50,), source=(("chunk_size", 1),), steps=("filter",), lanes=8, flush_every=1, drop_last=False)
    (steps,), _ = steps_of(recipe)
    whole = [step for step in steps if step]
    assert [len(batch) for batch in whole[-1]].count(0) > 0
    for number, step in enumerate(whole, 1):
        found = batches_of_step(recipe.plan(), number)
        assert {batch.lane: batch.digest for batch in found} == {batch.lane: batch.digest for batch in step}
    with pytest.raises(SettingError, match=f"epoch 0 ends before step {len(whole) + 1}"):
        batches_of_step(recipe.plan(), len(whole) + 1)


def test_it_says_of_each_record_the_samples_and_the_text():
    plan = TOKENS.plan()
    lines = list(described(plan, 2, 0, batches_of_step(plan, 2)))
    assert lines[0] == "step 2 of epoch 0: 4 records of 2 lanes"
    assert lines[1].startswith("lane 0, record 2: d")
    assert "tokens: 'w" in lines[2]
    plain = Recipe(rows=(60,), lanes=2).plan()
    text = "\n".join(described(plain, 1, 0, batches_of_step(plain, 1)))
    assert "\n    id: " in text
