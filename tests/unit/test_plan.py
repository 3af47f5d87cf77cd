"""The plan: what is left open is resolved once, a checkpoint is kept to, and every difference is refused by name."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.small_recipes import Recipe, dataset, digest, recipes, reference, row_of
from zephon import Dataset, InMemoryShard, MixtureSpec, Pipeline, StaticMixtureWorkSource
from zephon.errors import CheckpointMismatch, DatasetError, SettingError
from zephon.frontiers import Checkpoint, Frontier, parse_checkpoint
from zephon.plan import CHANGEABLE, WINDOW_SAMPLES


def checkpoint_of(pipeline: Pipeline) -> Checkpoint:
    return parse_checkpoint(json.loads(json.dumps(pipeline.checkpoint())))


def simple(rows: int = 60, **source) -> Pipeline:
    return Pipeline(StaticMixtureWorkSource([dataset("web", rows, 2)], None, **source))


# What is left open


def test_lanes_left_unset_are_the_groups_of_the_first_run_with_a_warning():
    with pytest.warns(UserWarning, match="canonical_replicas is not set: this run has 4 lanes"):
        plan = simple().plan(dp_degree=4)
    assert plan.lanes == 4


def test_lanes_left_unset_come_from_the_checkpoint_without_a_warning():
    saved = checkpoint_of(simple().options(canonical_replicas=8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert simple().plan(dp_degree=2, checkpoint=saved).lanes == 8


def test_the_seed_is_the_checkpoints_whatever_the_recipe_says():
    saved = checkpoint_of(simple(seed=5).options(canonical_replicas=2))
    plan = simple(seed=9).options(canonical_replicas=2).plan(checkpoint=saved)
    assert plan.seed == plan.identity["seed"] == 5


def test_sizes_left_open_are_kept_by_the_checkpoint_though_other_lanes_would_give_others():
    first = simple(rows=9000).shuffle(4).options(canonical_replicas=2)
    plan = first.plan()
    assert plan.chunk_size == 9000 // 64 // 2
    assert plan.flush_every == -(-WINDOW_SAMPLES // plan.chunk_size)
    again = simple(rows=9000).shuffle(4).plan(dp_degree=1, checkpoint=checkpoint_of(first))
    assert (again.lanes, again.chunk_size, again.flush_every) == (2, plan.chunk_size, plan.flush_every)
    assert again.identity == plan.identity


def test_large_data_has_chunks_of_2048_in_windows_of_8_and_without_an_accumulator_a_window_is_one_chunk():
    big = replace_counts(simple(), 10**9)
    assert big.shuffle(4).options(canonical_replicas=8).plan().chunk_size == 2048
    assert big.plan().flush_every == 8
    assert replace_counts(simple(), 10**9).options(canonical_replicas=8).plan().flush_every == 1


def replace_counts(pipeline: Pipeline, rows: int) -> Pipeline:
    class Large:
        name, location, digest, total, shard_count = "web", "nowhere", "d", rows, 1

        @property
        def counts(self):
            import numpy as np

            return np.array([rows])

    pipeline.source.datasets = [Large()]
    return pipeline


@given(recipes())
def test_a_plan_resolved_again_from_its_own_checkpoint_is_the_same(recipe):
    plan = recipe.plan()
    lanes = {lane: Frontier() for lane in range(plan.lanes)}
    again = recipe.pipeline().plan(checkpoint=Checkpoint(json.loads(json.dumps(plan.identity)), 0, lanes))
    assert again.identity == plan.identity == json.loads(json.dumps(plan.identity))


@given(recipes())
def test_arithmetic_totals_are_the_lanes_lengths_and_are_given_only_where_nothing_changes_counts(recipe):
    plan = recipe.plan()
    totals = plan.lane_totals(0)
    if plan.curriculum(0).total is None or not plan.counts_are_arithmetic:
        assert totals is None
    else:
        assert totals == {lane: len(reference(plan, lane)) for lane in range(plan.lanes)}
    assert replace(plan, settings=replace(plan.settings, on_error="skip")).lane_totals(0) is None


@given(recipes(), st.integers(2, 9), st.sampled_from(["threads", "inline"]), st.integers(1, 8))
def test_neither_execution_nor_topology_nor_batching_reaches_the_identity(recipe, size, runner, workers):
    other = replace(recipe, drop_last=not recipe.drop_last, strategy="interleaved")
    pipeline = other.pipeline(size, runner=runner, max_workers=workers, prefetch_batches=workers, dp_degree=1)
    assert pipeline.plan().identity == recipe.plan().identity


def test_an_accumulator_needs_windows_that_end_and_nothing_else_does():
    with pytest.raises(SettingError, match="flush_every_k_chunks=0"):
        simple().shuffle(4).options(canonical_replicas=1, flush_every_k_chunks=0).plan()
    assert simple().options(canonical_replicas=1, flush_every_k_chunks=0).plan().flush_every == 1


def test_a_dataset_without_rows_is_refused_by_its_place(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DatasetError, match=str(tmp_path)):
        Pipeline(StaticMixtureWorkSource([Dataset.from_path("web", tmp_path)], None)).options(
            canonical_replicas=1
        ).plan()


# What differs from the checkpoint


BASE = Recipe(rows=(60, 30), weights=(2, 1), steps=("filter", "shuffle"), lanes=2)


@pytest.mark.parametrize(
    "other, setting, named",
    [
        (replace(BASE, weights=(1, 1)), "mixture", ["mixture.d0", "checkpoint 2", "recipe 1"]),
        (replace(BASE, rows=(60, 31)), "datasets", ["datasets[d1].rows", "checkpoint 30", "recipe 31"]),
        (replace(BASE, steps=("shuffle",)), "operators", ["steps"]),
        (replace(BASE, steps=("late_filter", "shuffle")), "operators", ["steps[map_transform].fn"]),
        (replace(BASE, source=(("shuffle_block_size", 7),)), "source", ["source.shuffle_block_size", "recipe 7"]),
    ],
)
def test_every_difference_is_refused_by_name_with_the_way_to_accept_it(other, setting, named):
    saved = checkpoint_of(BASE.pipeline())
    with pytest.raises(CheckpointMismatch) as caught:
        other.pipeline().plan(checkpoint=saved)
    text = str(caught.value)
    assert all(part in text for part in named), text
    assert f"allow_changed=['{setting}']" in text
    assert caught.value.differences
    accepted = other.pipeline().plan(checkpoint=saved, allow_changed=[setting])
    assert accepted.identity != saved.identity


def test_all_differences_are_listed_together():
    saved = checkpoint_of(BASE.pipeline())
    other = replace(BASE, rows=(61, 30), weights=(1, 1), steps=("shuffle",))
    with pytest.raises(CheckpointMismatch) as caught:
        other.pipeline().plan(checkpoint=saved)
    text = str(caught.value)
    assert all(part in text for part in ("mixture.d0", "datasets[d0].rows", "steps"))
    assert "allow_changed=['datasets', 'mixture', 'operators']" in text
    with pytest.raises(CheckpointMismatch) as caught:
        other.pipeline().plan(checkpoint=saved, allow_changed=["mixture", "operators"])
    assert "mixture" not in str(caught.value)
    assert "allow_changed=['datasets']" in str(caught.value)


@pytest.mark.parametrize(
    "other, named",
    [
        (replace(BASE, lanes=4), "canonical_replicas: checkpoint 2, recipe 4"),
        (replace(BASE, flush_every=3), "flush_every_k_chunks: checkpoint 2, recipe 3"),
        (replace(BASE, source=(("chunk_size", 3),)), "chunk_size"),
    ],
)
def test_what_frontiers_are_counted_in_cannot_be_changed_knowingly_either(other, named):
    saved = checkpoint_of(BASE.pipeline())
    with pytest.raises(CheckpointMismatch, match="leave that to the checkpoint") as caught:
        other.pipeline().plan(checkpoint=saved)
    assert named in str(caught.value)
    assert "allow_changed" not in str(caught.value)


@pytest.mark.parametrize("names", [["canonical_replicas"], ["mixtures"], ["seed"], "mixture"])
def test_allow_changed_takes_names_of_what_may_change_and_nothing_else(names):
    saved = checkpoint_of(BASE.pipeline())
    with pytest.raises(SettingError, match="allow_changed") as caught:
        BASE.pipeline().plan(checkpoint=saved, allow_changed=names)
    assert all(name in str(caught.value) for name in (CHANGEABLE if isinstance(names, list) else ["list"]))


def test_a_mixture_changed_knowingly_repeats_and_skips_no_row_of_any_dataset():
    """Every dataset goes on from its own position, twice in a row."""
    recipe = Recipe(rows=(400, 300), weights=(2, 1), steps=("shuffle",), lanes=2, source=(("chunk_size", 4),))
    state, seen = None, []
    for weights, rounds in (((2, 1), 7), ((1, 3), 9), ((1, 1), 11)):
        pipeline = replace(recipe, weights=weights).pipeline()
        if state is not None:
            pipeline.restore(state, allow_changed=["mixture"])
        batches = iter(pipeline)
        for _ in range(rounds * 2):
            seen += next(batches).samples
        state = json.loads(json.dumps(pipeline.checkpoint()))
    assert len(seen) == len(set(seen)) == 27 * 2 * 2
    shares = [sum(1 for name, _, _ in part if name == "d0") / len(part) for part in (seen[:28], seen[-30:])]
    assert shares[0] > shares[1]


# A run on a changed plan is the run of that plan from the start


def test_two_pipelines_of_one_identity_have_the_same_lanes_whatever_their_objects():
    rows = [row_of("web", i) for i in range(50)]
    made = []
    for _ in range(2):
        source = StaticMixtureWorkSource(
            [Dataset.from_dict("web", {"a": InMemoryShard(rows[:20]), "b": InMemoryShard(rows[20:])})],
            MixtureSpec({"web": 1}),
            chunk_size=4,
        )
        made.append(Pipeline(source).shuffle(9).options(canonical_replicas=3).plan())
    assert made[0].identity == made[1].identity
    assert [digest(reference(made[0], n)) for n in range(3)] == [digest(reference(made[1], n)) for n in range(3)]
