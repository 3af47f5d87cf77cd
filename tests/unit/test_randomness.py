"""Random numbers of a user's functions depend on the run's seed, the epoch, the pass and the record alone."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zephon
from tests.unit.custom_operators import Records, noisy, pipeline_of
from tests.unit.small_recipes import examples, tokenizer
from zephon import Pipeline, SampleRecord
from zephon.embedded import EmbeddedRun
from zephon.errors import RecordError, RunFailed
from zephon.ops import generator, spawn_child
from zephon.runners import InlinePool
from zephon.windows import Front


def drawing(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"], "of": row["of"], "r": float(zephon.generator().random())}


def drawn(pipeline: Pipeline, epochs: int = 1) -> list[dict[tuple[int, int], list[float]]]:
    """For each epoch the numbers of each row, in the order of its passes."""
    found: list[dict[tuple[int, int], list[float]]] = []
    for _ in range(epochs):
        numbers: dict[tuple[int, int], list[float]] = {}
        for batch in pipeline:
            for row in batch.block.to_rows():
                numbers.setdefault((row["of"], row["id"]), []).append(row["r"])
        found.append(numbers)
    pipeline.close()
    return found


def recipe(fn: Any = drawing, lanes: int = 3, **settings: Any) -> Pipeline:
    pipeline = pipeline_of(lanes=lanes, batch=1, **{"rows": (60,), "chunk": 10, **settings})
    pipeline._batched = False
    return pipeline.map_transform(fn).batch(1, drop_last=False)


@examples(10)
@given(st.integers(1, 5), st.integers(1, 30), st.booleans())
def test_numbers_do_not_depend_on_lanes_chunks_or_the_order_of_rows(lanes: int, chunk: int, shuffled: bool) -> None:
    assert drawn(recipe(lanes=lanes, chunk=chunk, shuffle_within_shard=shuffled)) == drawn(recipe())


def test_every_record_epoch_pass_and_operator_has_numbers_of_its_own() -> None:
    twice = drawn(recipe(stop_after_passes=2), epochs=2)
    numbers = [number for epoch in twice for passes in epoch.values() for number in passes]
    assert len(set(numbers)) == len(numbers) == 60 * 2 * 2
    other_seed = drawn(recipe(seed=6))
    assert not {number for passes in other_seed[0].values() for number in passes} & set(numbers)

    def two(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "s": row["r"], "r": float(zephon.generator().random())}

    pipeline = recipe()
    pipeline._batched = False
    pipeline.map_transform(two).batch(1)
    rows = [row for batch in pipeline for row in batch.block.to_rows()]
    assert all(row["r"] != row["s"] for row in rows)


def test_within_a_call_a_record_has_one_generator_that_goes_on() -> None:
    def draws(row: dict[str, Any]) -> dict[str, Any]:
        one, other = zephon.generator(), generator()
        assert one is other
        return {**row, "r": 0.0, "both": [float(one.random()), float(other.random())]}

    rows = [row for batch in recipe(draws) for row in batch.block.to_rows()]
    assert all(row["both"][0] != row["both"][1] for row in rows)


def adding(process_many: Callable[[Records], Records]) -> list[dict[str, Any]]:
    pipeline = pipeline_of(rows=(30,), lanes=1, batch=1)
    pipeline._batched = False
    return [r for b in pipeline.add_op("mine", process_many=process_many).batch(1) for r in b.block.to_rows()]


def test_a_list_of_records_draws_by_meta_and_children_have_numbers_of_their_own() -> None:
    def children(records: Records) -> Records:
        made = []
        for record in records:
            for index in range(2):
                meta = spawn_child(record.meta, index)
                made.append(SampleRecord(meta, {"r": float(generator(meta).random())}))
        return made

    rows = adding(children)
    assert len({row["r"] for row in rows}) == len(rows) == 60
    alone = adding(noisy)
    turned = adding(lambda records: noisy(records[::-1])[::-1])
    assert [row["noise"] for row in alone] == [row["noise"] for row in turned]


def test_a_list_of_records_needs_a_meta_and_a_made_up_one_is_refused() -> None:
    with pytest.raises(RecordError, match=r"of which record\? .* zephon.generator\(record.meta\)"):
        adding(lambda records: [SampleRecord(records[0].meta, {"r": generator().random()})])
    with pytest.raises(RecordError, match="of no record of the pipeline"):
        adding(lambda records: [SampleRecord(records[0].meta, {"r": generator(zephon.SampleMeta(("d", 0, 0)))})])


def test_outside_a_function_of_a_running_pipeline_there_is_no_generator() -> None:
    with pytest.raises(RunFailed, match="works inside a function that a running pipeline calls"):
        generator()
    list(recipe())
    with pytest.raises(RunFailed, match="and nowhere else"):
        generator()


@pytest.mark.parametrize("before", ["split", "pack", "pieces", "late"])
def test_pieces_of_one_sample_have_numbers_of_their_own(before: str) -> None:
    def noise(row: dict[str, Any]) -> dict[str, Any]:
        return {"r": float(generator().random())}

    def long(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "text": "w1 " * 12, "input_ids": [row["id"]] * 24}

    def add(pipeline: Pipeline) -> Pipeline:
        pipeline.map_transform(long)
        if before == "late":
            pipeline.shuffle(7)
        if before in ("split", "late"):
            pipeline.tokenize(
                tokenizer_id=tokenizer(), field="text", special_tokens="none", max_length=4, split_long_samples=True
            )
        if before == "pack":
            pipeline.pack_flat(8, algorithm="wrap")
        if before == "pieces":
            pipeline.add_op("thrice", process_many=lambda records: [record for record in records for _ in range(3)])
            pipeline.add_op("first two", process_one=lambda record: [record, record])
        return pipeline.map_transform(noise).batch(1, drop_last=False)

    def run(task_samples: int) -> list[float]:
        pipeline = pipeline_of(rows=(30,), lanes=2, chunk=5, batch=1, stop_after_passes=2)
        pipeline._batched = False
        plan = add(pipeline).plan()
        made = EmbeddedRun(plan, InlinePool(Front(plan)), task_samples=task_samples)
        return [row["r"] for batch in iter(made.next_batch, None) for row in batch.block.to_rows()]

    numbers = run(512)
    assert len(numbers) == 30 * 2 * (6 if before == "pieces" else 3)
    assert len(set(numbers)) == len(numbers)
    assert run(1) == run(3) == numbers
