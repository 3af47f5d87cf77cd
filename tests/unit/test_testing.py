"""`assert_resumes_exactly`: it holds for what is right, and names the batch where something is wrong."""
from __future__ import annotations

import random
from itertools import count

import pytest

from tests.unit.small_recipes import STEP_LISTS, Recipe
from zephon import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
from zephon.columns import Block, Fixed, column_of
from zephon.errors import RunFailed, SettingError
from zephon.ops.base import Accumulator, Stateful, Stateless, WindowKey
from zephon.testing import assert_resumes_exactly


@pytest.mark.parametrize("steps", STEP_LISTS, ids=lambda steps: "-".join(steps) or "none")
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_pipeline_resumes_exactly_after_any_batch_across_an_epochs_end(steps, drop_last):
    recipe = Recipe(steps=steps, rows=(12, 8), weights=(1, 1), lanes=3, flush_every=1, drop_last=drop_last)
    assert_resumes_exactly(recipe.pipeline(), batches=14, follow=3)


@pytest.mark.parametrize("strategy", ["contiguous", "interleaved"])
def test_it_holds_for_new_pipelines_on_any_groups_with_everything_that_follows_compared(strategy):
    recipe = Recipe(steps=("filter", "tokenize", "best_fit", "shuffle"), lanes=8, strategy=strategy)
    assert_resumes_exactly(recipe.pipeline, batches=12, topologies=(4, 3, 8))
    assert_resumes_exactly(recipe.pipeline, batches=6, topologies=[1])
    assert_resumes_exactly(Recipe(lanes=1).pipeline(), batches=6)


@pytest.mark.parametrize("runner", ["inline", "threads", ("inline", "threads")])
def test_it_holds_in_every_runner(runner):
    recipe = Recipe(steps=("filter", "tokenize", "wrap", "shuffle"))
    assert_resumes_exactly(recipe.pipeline(max_workers=3), batches=8, follow=4, runner=runner)
    assert_resumes_exactly(recipe.pipeline(runner="threads", max_workers=2), batches=4)


# What it finds


def pipeline_with(*operators) -> Pipeline:
    shard = InMemoryShard([{"id": i} for i in range(200)])
    source = StaticMixtureWorkSource([Dataset.from_dict("web", {"a": shard})], None, chunk_size=8)
    pipeline = Pipeline(source)
    for operator in operators:
        pipeline._add(operator) if isinstance(operator, (Stateless, Stateful)) else pipeline.map_transform(operator)
    return pipeline.batch(2).options(canonical_replicas=4, flush_every_k_chunks=2)


def with_random(row):
    return {**row, "r": random.random()}


def with_random_filter(row):
    return row if random.random() < 0.5 else None


counter = count()


def with_counter(row):
    return {**row, "n": next(counter)}


class Described:
    name = "wrong"

    def describe(self):
        return {}


class BySizeOfBlock(Described, Stateless):
    """Depends on how records were cut into blocks."""

    def process(self, block, faults):
        return block.with_fields({**block.fields, "together": column_of([len(block)] * len(block))})


class NeverFlushed(Described, Stateful):
    """One state for all windows of a process: a window depends on those before it."""

    changes_counts = True

    def __init__(self):
        self.held = Held()

    def accumulator(self, key: WindowKey) -> Accumulator:
        return self.held


class Held(Accumulator):
    def __init__(self):
        super().__init__()
        self.blocks: list[Block] = []

    def push(self, block, faults):
        self.blocks.append(block.copy())
        return [self.blocks.pop(0)] if len(self.blocks) > 2 else []

    def flush(self, faults):
        return []


class ByPlaceInWindow(Described, Stateful):
    """Right: a running number of the records of a window."""

    def accumulator(self, key: WindowKey) -> Accumulator:
        return Numbered()


class Numbered(Accumulator):
    seen = 0

    def push(self, block, faults):
        self.seen += len(block)
        numbers = column_of(list(range(self.seen - len(block), self.seen)))
        assert isinstance(numbers, Fixed)
        return [block.with_fields({**block.fields, "place": numbers})]

    def flush(self, faults):
        return []


def test_it_names_the_batch_and_field_that_differ():
    assert_resumes_exactly(pipeline_with(ByPlaceInWindow()))
    with pytest.raises(AssertionError, match=r"^restored after 0 batches, batch 0: field 'r' differs \(lane 0"):
        assert_resumes_exactly(pipeline_with(with_random))
    with pytest.raises(AssertionError, match=r"^restored after 0 batches: it failed.*map_transform"):
        assert_resumes_exactly(pipeline_with(with_counter))
    with pytest.raises(AssertionError, match="restored after"):
        assert_resumes_exactly(lambda: pipeline_with(with_random_filter))


def test_an_operator_that_sees_how_records_were_cut_is_found():
    with pytest.raises(AssertionError, match=r"field 'together' differs"):
        assert_resumes_exactly(pipeline_with(BySizeOfBlock()))


def test_state_that_outlives_its_window_is_found():
    with pytest.raises(AssertionError, match="restored after"):
        assert_resumes_exactly(lambda: pipeline_with(NeverFlushed()))


def test_a_pipeline_that_delivers_nothing_is_an_error():
    with pytest.raises(RunFailed, match="0 of 200 records passed map_transform"):
        assert_resumes_exactly(pipeline_with(lambda row: None))
    with pytest.raises(AssertionError, match="delivers no batch"):
        assert_resumes_exactly(Recipe(rows=(24,), lanes=8).pipeline(microbatch_size=4))


@pytest.mark.parametrize(
    "arguments",
    [{"batches": 0}, {"batches": 1.5}, {"follow": 0}, {"topologies": [5]}, {"topologies": [0]}, {"runner": "fork"}],
)
def test_senseless_arguments_are_refused(arguments):
    with pytest.raises(SettingError, match=next(iter(arguments))):
        assert_resumes_exactly(pipeline_with(lambda row: row), **arguments)
