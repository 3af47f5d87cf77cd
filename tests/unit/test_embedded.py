"""A run in this process: epochs, their ends, states at any point, and errors that never look like an end."""

from __future__ import annotations

import gc
import json
import signal
import threading
import warnings
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.small_recipes import (
    Lockstep,
    Recipe,
    dataset,
    digest,
    examples,
    expected_ends,
    last_stand,
    quiet,
    recipes,
    reference,
)
from zephon import Pipeline, StaticMixtureWorkSource, merge_checkpoints
from zephon.columns import Block
from zephon.errors import CheckpointError, RecordError, RunFailed
from zephon.frontiers import parse_checkpoint


def ids(batches) -> list[int]:
    return [i for batch in batches for i in (batch["id"].tolist() if len(batch) else [])]


def counted(rows: int, lanes: int = 4, size: int = 2, **options) -> Pipeline:
    return Recipe(rows=(rows,), lanes=lanes).pipeline(size, **options)


def picky(bad: int, on_error: str = "raise", rows: int = 40) -> Pipeline:
    """A pipeline in which one record is bad."""

    def check(row):
        if row["id"] == bad:
            raise ValueError(f"id {bad}")
        return row

    source = StaticMixtureWorkSource([dataset("web", rows, 2)], None, chunk_size=4, shuffle_shards=False)
    return Pipeline(source).map_transform(check).batch(2).options(canonical_replicas=2, on_error=on_error)


# Epochs and their ends


@examples(8)
@given(recipes(source=(("chunk_size", 3), ("shuffle_block_size", "global"))), st.integers(1, 3))
def test_an_epoch_is_whole_rounds_and_the_next_is_shuffled_anew(recipe, size):
    pipeline = recipe.pipeline(size)
    plan = recipe.plan(size)
    for epoch in range(2):
        assert pipeline.epoch == epoch
        batches = quiet(lambda: list(pipeline))
        lanes = {lane: reference(plan, lane, epoch) for lane in range(plan.lanes)}
        ends = expected_ends(plan, {lane: len(block) for lane, block in lanes.items()})
        for lane, block in lanes.items():
            got = Block.concat([batch.block for batch in batches if batch.lane == lane])
            assert digest(got) == digest(block.slice(0, ends[lane]))
        assert [batch.lane for batch in batches] == list(range(plan.lanes)) * (len(batches) // plan.lanes)
        assert [batch.ends_round for batch in batches] == [batch.lane == plan.lanes - 1 for batch in batches]
    first, second = (reference(plan, 0, epoch).samples.tolist() for epoch in range(2))
    assert first != second or len(first) < 6


@examples(8)
@given(recipes(even_ends=True), st.integers(1, 3), st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_steps_are_counted_from_the_runs_beginning_over_epochs_and_resumes(recipe, size, legs):
    done, state = 0, None
    for rounds in legs:
        pipeline = recipe.pipeline(size)
        if state is not None:
            pipeline.restore(state)
        for _ in range(3):
            for batch in quiet(lambda run=pipeline, count=rounds * recipe.lanes: list(islice(run, count))):
                done += batch.ends_round
            assert pipeline.step == done
        state = pipeline.checkpoint()
        assert "past" not in state or state["epoch"], "of the first epoch the frontiers say it all"


def test_a_step_is_as_many_rounds_as_batches_per_step_makes_and_of_this_runs_batches():
    pipeline = counted(48, lanes=4, batches_per_step=8)
    list(islice(pipeline, 16))
    assert pipeline.step == 2
    state = pipeline.checkpoint()
    assert counted(48, lanes=4, size=1).restore(state).step == 8
    assert counted(48, lanes=4, size=4, batches_per_step=4).restore(state).step == 2


@pytest.mark.parametrize("drop_last", [True, False])
def test_iterating_inside_an_epoch_goes_on_with_it(drop_last):
    pipeline = Recipe(rows=(41,), drop_last=drop_last).pipeline()
    parts = [*islice(pipeline, 7), *islice(pipeline, 4), *pipeline]
    whole = list(Recipe(rows=(41,), drop_last=drop_last).pipeline())
    assert [batch.digest for batch in parts] == [batch.digest for batch in whole]
    assert pipeline.epoch == 1


def test_an_ended_iterator_stays_ended_while_a_new_one_delivers_the_next_epoch():
    pipeline = counted(16)
    batches, other = iter(pipeline), iter(pipeline)
    first = next(other)
    assert len(list(batches)) == 7
    assert next(batches, None) is None
    assert next(other, None) is None
    assert len(list(pipeline)) == 8
    assert pipeline.epoch == 2
    assert first.first_record == 0


def test_an_epoch_without_a_round_warns_and_ends_at_once():
    pipeline = counted(7, lanes=4, size=2)
    with pytest.warns(UserWarning, match="no full round.*4.*every lane|no full round"):
        assert list(pipeline) == []
    assert pipeline.epoch == 1


def test_without_drop_last_the_last_round_is_short_and_every_lane_has_its_turn():
    batches = list(Recipe(rows=(18,), lanes=4, drop_last=False).pipeline(4))
    assert [batch.lane for batch in batches] == [0, 1, 2, 3] * 2
    assert [len(batch) for batch in batches] == [4, 4, 4, 4, 1, 1, 0, 0]
    assert sorted(ids(batches)) == list(range(18))
    assert [batch.ends_round for batch in batches] == [False, False, False, True] * 2


@examples(20)
@given(recipes(source=(("chunk_size", 4),), steps=()), st.integers(1, 8), st.integers(1, 5))
def test_all_groups_of_a_finite_run_end_at_the_same_round(recipe, dp, size):
    run = Lockstep(recipe, min(dp, recipe.lanes), size)
    run.to_the_end()
    assert len({group.turns.rounds for group in run.groups}) == 1
    alone = Lockstep(recipe, 1, size)
    alone.to_the_end()
    assert run.groups[0].turns.rounds == alone.groups[0].turns.rounds


def test_a_group_that_cannot_see_the_others_ends_with_its_own_lanes_and_says_so():
    recipe = Recipe(rows=(60,), steps=("filter",))
    with pytest.warns(UserWarning, match=r"lanes \[0, 1\] only.*even_ends=False"):
        iter(recipe.pipeline(dp_degree=2, dp_group_id=0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        iter(replace(recipe, even_ends=False).pipeline(dp_degree=2, dp_group_id=0))
        iter(replace(recipe, steps=()).pipeline(dp_degree=2, dp_group_id=0))


# States


@examples(20)
@given(recipes(), st.integers(0, 30))
def test_a_state_survives_json_and_says_how_many_records_each_lane_delivered(recipe, batches):
    run = Lockstep(recipe, 1)
    run.batches([0] * batches, 10**9)
    state = run.checkpoint()
    assert json.loads(json.dumps(state)) == state
    if state["epoch"] == 0:
        delivered = {lane: len(run.lane(lane)) for lane in range(recipe.lanes)}
        assert {lane: f.records for lane, f in parse_checkpoint(state).lanes.items()} == delivered


def test_a_state_at_the_end_of_an_epoch_begins_the_next_whether_or_not_the_end_was_seen():
    pipeline = counted(16)
    batches = iter(pipeline)
    for _ in range(8):
        next(batches)
    before = pipeline.checkpoint()
    assert next(batches, None) is None
    assert pipeline.checkpoint() == before
    assert before["epoch"] == 1
    assert {entry["records"] for entry in before["lanes"].values()} == {0}


@examples(20)
@given(recipes(source=(("chunk_size", 4),), steps=(), lanes=4), st.integers(0, 3), st.integers(0, 3))
def test_parts_taken_inside_the_last_round_join_though_one_group_has_ended_it(recipe, first, second):
    """No group calls the epoch over while another may still be inside its last round."""
    plan = recipe.plan()
    lengths = {lane: len(reference(plan, lane)) for lane in range(4)}
    ends = expected_ends(plan, lengths)
    run = Lockstep(recipe, 2)
    run.rounds(max(0, max(ends.values()) // 2 - 1))
    run.batches([0] * first + [1] * second, last_stand(plan, lengths))
    rest = Lockstep(recipe, 1, state=run.checkpoint())
    rest.groups[0].settle()
    if rest.groups[0].epoch == 0:
        rest.to_the_end()
        assert {lane: len(run.lane(lane)) + len(rest.lane(lane)) for lane in ends} == ends
    else:
        assert {lane: len(run.lane(lane)) for lane in ends} == ends


def test_a_state_of_all_groups_at_their_ends_begins_the_next_epoch_and_not_an_empty_one():
    recipe = Recipe(rows=(60,), steps=("filter",))
    groups = [quiet(lambda g=g: recipe.pipeline(dp_degree=2, dp_group_id=g)) for g in range(2)]
    states = []
    for pipeline in groups:
        batches = quiet(lambda p=pipeline: iter(p))
        while not pipeline._current().at_end():
            next(batches)
        states.append(pipeline.checkpoint())
    assert [state["epoch"] for state in states] == [0, 0]
    resumed = recipe.pipeline().restore(merge_checkpoints(states))
    assert resumed.epoch == 1
    assert list(resumed)


@pytest.mark.parametrize(("says", "left"), [(True, (3, 4)), (False, (2, 0))])
def test_after_a_stop_inside_the_last_round_all_groups_end_the_epoch_together(says, left):
    """A state of a version that did not say where lanes stand has no empty batches due."""
    recipe = Recipe(rows=(3,), lanes=8, drop_last=False)
    whole = recipe.pipeline()
    next(iter(whole))
    state = whole.checkpoint()
    for lane in () if says else state["lanes"].values():
        del lane["stands"]
    for group, left_here in enumerate(left):
        pipeline = recipe.pipeline(dp_degree=2, dp_group_id=group).restore(state)
        assert pipeline.epoch == 0
        assert len(list(pipeline)) == left_here
        assert pipeline.epoch == 1


def test_a_state_of_one_group_holds_its_own_lanes_and_restores_only_when_merged():
    pipeline = quiet(lambda: counted(64, dp_degree=2, dp_group_id=1))
    next(iter(pipeline))
    part = pipeline.checkpoint()
    assert part["complete"] is False
    assert sorted(part["lanes"]) == ["2", "3"]
    with pytest.raises(CheckpointError, match=r"no entry for lanes \[0, 1\]"):
        counted(64).restore(part)


# Errors


def test_an_error_is_raised_again_at_every_further_call_and_by_every_iterator():
    pipeline = picky(bad=21)
    batches = iter(pipeline)
    before = []
    with pytest.raises(RecordError, match="row 1.*id 21|id 21"):
        for batch in batches:
            before.append(batch)
    for again in (batches, batches, iter(pipeline)):
        with pytest.raises(RecordError, match="id 21"):
            next(again)
    assert 0 < len(before) < 20


def test_a_state_can_be_saved_before_and_after_an_error_and_goes_on_from_there():
    pipeline = picky(bad=21)
    batches = iter(pipeline)
    delivered = []
    while True:
        state = pipeline.checkpoint()  # never raises, though the next window holds the bad record
        try:
            delivered += next(batches)["id"].tolist()
        except RecordError:
            break
    assert pipeline.checkpoint() == state
    rest = ids(picky(bad=21, on_error="skip").restore(state))
    assert delivered + rest == ids(picky(bad=21, on_error="skip"))


def test_an_interrupt_inside_a_batch_ends_the_run_and_its_state_is_whole():
    hits = []

    def interrupted(row):
        if row["id"] == 30 and not hits:
            hits.append(1)
            signal.raise_signal(signal.SIGINT)
        return row

    source = StaticMixtureWorkSource([dataset("web", 60, 1)], None, chunk_size=4, shuffle_shards=False)

    def make() -> Pipeline:
        return (
            Pipeline(source)
            .map_transform(interrupted)
            .shuffle(4)
            .batch(2)
            .options(canonical_replicas=2, flush_every_k_chunks=1)
        )

    pipeline = make()
    delivered = []
    batches = iter(pipeline)
    with pytest.raises(KeyboardInterrupt):
        for batch in batches:
            delivered.append(batch.digest)
    with pytest.raises(RunFailed, match="interrupted.*restore"):
        next(batches)
    state = pipeline.checkpoint()
    assert hits
    rest = [batch.digest for batch in make().restore(state, allow_changed=["operators"])]
    assert delivered + rest == [batch.digest for batch in make()]


def test_a_closed_pipeline_is_said_to_be_closed_and_starts_anew_when_iterated_again():
    pipeline = counted(64)
    batches = iter(pipeline)
    first = next(batches).digest
    pipeline.close()
    with pytest.raises(RunFailed, match="closed"):
        next(batches)
    assert next(iter(pipeline)).digest == first


def test_threads_end_when_the_pipeline_is_closed():
    before = set(threading.enumerate())  # of earlier tests, which may end meanwhile
    pipeline = counted(64, runner="threads", max_workers=3)
    next(iter(pipeline))
    assert set(threading.enumerate()) - before
    pipeline.close()
    assert set(threading.enumerate()) <= before


def test_a_run_that_is_let_go_of_ends_also_where_a_thread_of_its_own_collects_it():
    let_go, ended = threading.Event(), threading.Event()
    seen = []

    def collect(record):
        if threading.current_thread().name.startswith("zephon-worker"):
            seen.append(record)
            if len(seen) > 4:  # what comes after the first task
                let_go.wait(30)
                gc.collect()
        return [record]

    def begin():
        pipeline = Pipeline(StaticMixtureWorkSource([dataset("web", 64, 1)], None, chunk_size=4))
        pipeline.add_op("collect", process_one=collect, teardown=ended.set).batch(2)
        pipeline.options(canonical_replicas=1, runner="threads", max_workers=1)
        next(iter(pipeline))
        pipeline.itself = pipeline  # so that only the garbage collector ends it

    before = set(threading.enumerate())
    gc.disable()
    try:
        begin()
        ended.clear()  # that of the check at the start
        let_go.set()
        assert ended.wait(30)
    finally:
        gc.enable()
    for thread in threading.enumerate():
        if thread.name == "zephon-end":
            thread.join()
    assert set(threading.enumerate()) <= before


def test_skipped_records_are_left_out_and_the_lanes_go_on():
    pipeline = picky(bad=21, on_error="skip")
    got = ids(pipeline)
    assert set(got) < set(range(40)) - {21}
    assert len(got) == len(set(got)) == 38 - 2  # the lane that lost a record has 19, so the last round is not whole
