"""`map_batch`: a function on each batch, which takes its turn whatever comes out."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zephon
from tests.unit.small_recipes import dataset
from zephon import Pipeline, SampleBatch, StaticMixtureWorkSource
from zephon.errors import CheckpointMismatch, RecordError, SettingError
from zephon.testing import assert_resumes_exactly


def recipe(fn=None, *, rows=48, size=3, drop_last=True, drop_none=True, **options):
    source = StaticMixtureWorkSource([dataset("web", rows, 2)], None, seed=3, chunk_size=4)
    pipeline = Pipeline(source).shuffle(8).batch(size, drop_last=drop_last)
    if fn is not None:
        pipeline.map_batch(fn, drop_none=drop_none)
    return pipeline.options(canonical_replicas=2, flush_every_k_chunks=2, **options)


def test_the_function_sees_the_very_batch_and_its_result_is_delivered():
    plain = list(recipe())
    seen = []

    def doubled(batch):
        seen.append((batch.lane, batch.first_record, batch.digest, [r.payload["id"] for r in batch.records]))
        return {"id": batch["id"] * 2, "lane": np.full(len(batch), batch.lane)}

    changed = list(recipe(doubled))
    in_the_run = seen[-len(plain) :]  # before it, the check at the start calls the function
    assert in_the_run == [(b.lane, b.first_record, b.digest, b["id"].tolist()) for b in plain]
    assert [b["id"].tolist() for b in changed] == [(b["id"] * 2).tolist() for b in plain]
    assert [b.samples for b in changed] == [b.samples for b in plain]
    assert [(b.lane, b.first_record, b.ends_round) for b in changed] == [
        (b.lane, b.first_record, b.ends_round) for b in plain
    ]


@given(st.sets(st.integers(0, 15), max_size=16), st.sampled_from([2, 3, 5]), st.booleans())
def test_a_batch_that_becomes_empty_still_takes_its_turn_and_its_records_count(dropped, size, drop_last):
    def some(batch):
        return None if batch.first_record // size in dropped else batch

    plain, changed = list(recipe(size=size, drop_last=drop_last)), list(recipe(some, size=size, drop_last=drop_last))
    assert [(b.lane, b.first_record, b.ends_round) for b in changed] == [
        (b.lane, b.first_record, b.ends_round) for b in plain
    ]
    for one, other in zip(plain, changed, strict=True):
        assert len(other) == (0 if one.first_record // size in dropped else len(one))


def test_it_resumes_exactly_in_the_middle_of_everything():
    assert_resumes_exactly(lambda: recipe(lambda batch: {"id": batch["id"] + len(batch)}))


def test_batches_of_another_length_name_all_the_samples_they_were_made_from():
    batch = next(iter(recipe(lambda batch: {"joined": np.concatenate(list(batch["id"][:, None]))[None]})))
    assert batch["joined"].shape == (1, 3)
    assert batch.samples == [next(iter(recipe())).samples]
    assert len(batch.samples[0]) == 3


def test_records_may_be_changed_in_place():
    def marked(batch):
        for record in batch.records:
            record.payload["double"] = record.payload.pop("id") * 2
        return batch

    for batch, plain in zip(recipe(marked), recipe(), strict=True):
        assert batch["double"].tolist() == (plain["id"] * 2).tolist()
        assert "id" not in batch
        assert batch.samples == plain.samples


def test_records_may_be_left_out_and_put_in_another_order_in_place():
    def turned(batch):
        batch.records.pop(0)
        batch.records.reverse()
        return batch

    batch, plain = next(iter(recipe(turned))), next(iter(recipe()))
    assert batch["id"].tolist() == plain["id"].tolist()[:0:-1]
    assert batch.samples == plain.samples[:0:-1]


def test_arrays_may_be_changed_in_place_also_by_a_function_that_reads_the_records():
    def doubled(batch):
        batch["id"][...] = [record.payload["id"] * 2 for record in batch.records]
        return batch

    assert [b["id"].tolist() for b in recipe(doubled)] == [(b["id"] * 2).tolist() for b in recipe()]


def test_a_batch_of_which_arrays_and_records_are_changed_is_bad():
    def torn(batch):
        batch.records[0].payload["id"] = -1
        batch["id"][1] = -1
        return batch

    with pytest.raises(RecordError, match="changed the batch's arrays and its records too"):
        next(iter(recipe(torn)))


def test_records_made_anew_keep_the_datasets_names():
    def made(batch):
        return SampleBatch.from_records(list(reversed(batch.records)))

    batch, plain = next(iter(recipe(made))), next(iter(recipe()))
    assert batch.samples == plain.samples[::-1]
    assert batch["id"].tolist() == plain["id"].tolist()[::-1]


@pytest.mark.parametrize(
    "fn, says",
    [
        (lambda batch: 3, "returned int, expected a batch, a mapping or None"),
        (lambda batch: {"a": 3}, "the single value 3 as field 'a'"),
        (lambda batch: {"a": [1], "b": [1, 2]}, "different lengths"),
        (lambda batch: {1: [1]}, "a field named 1"),
        (lambda batch: batch["no"], "KeyError"),
    ],
)
def test_a_senseless_result_is_an_error_that_names_lane_record_and_sample(fn, says):
    with pytest.raises(RecordError) as caught:
        list(recipe(fn))
    text = str(caught.value)
    assert says in text
    assert "map_batch (lane 0, from record 0 on)" in text
    assert "'web'" in text


def test_a_failing_batch_is_empty_where_errors_are_skipped():
    def fails_once(batch):
        if batch.first_record == 3:
            raise ValueError("no")
        return batch

    batches = list(recipe(fails_once, on_error="skip"))
    assert [len(b) for b in batches if b.first_record == 3] == [0, 0]
    assert all(len(b) == 3 for b in batches if b.first_record != 3)


def test_none_is_an_error_if_every_batch_is_to_be_kept():
    with pytest.raises(RecordError, match="drop_none=False keeps every batch"):
        list(recipe(lambda batch: None, drop_none=False))


def test_the_microbatch_size_joins_the_identity():
    run = iter(pipeline := recipe(lambda batch: batch))
    next(run)
    next(run)
    state = pipeline.checkpoint()
    assert state["identity"]["microbatch_size"] == 3
    assert "microbatch_size" not in recipe().plan().identity
    with pytest.raises(CheckpointMismatch, match="microbatch_size: checkpoint 3, recipe 4"):
        recipe(lambda batch: batch, size=4).restore(state)


def test_it_comes_after_batch_and_what_is_no_function_is_refused():
    with pytest.raises(SettingError, match=r"map_batch\(\) before batch\(\)"):
        Pipeline(StaticMixtureWorkSource([dataset("web", 4, 1)], None)).map_batch(lambda batch: batch)
    with pytest.raises(SettingError, match="must be a function of one SampleBatch, not int"):
        recipe(3)


def test_what_the_function_does_to_its_batch_reaches_no_other():
    def spoils(batch):
        batch["id"][:] = -1

    assert all(len(b) == 0 for b in recipe(spoils))
    once = recipe(lambda batch: spoils(batch) or {"id": batch["id"]}, rows=24)
    assert [b["id"].tolist() for b in once] == [[-1] * 3] * 8


def test_a_batch_has_random_numbers_of_its_own_in_each_epoch_whoever_runs_it():
    def drawn(batch):
        return {"r": zephon.generator().integers(0, 2**62, len(batch))}

    pipeline = recipe(drawn)
    first, second = ([b["r"].tolist() for b in pipeline] for _ in range(2))
    assert len({number for epoch in (first, second) for numbers in epoch for number in numbers}) == 2 * 48
    assert [b["r"].tolist() for b in recipe(drawn, runner="threads", max_workers=3)] == first
    assert_resumes_exactly(lambda: recipe(drawn))


def test_a_function_that_calls_exit_is_a_bad_batch_and_ends_nothing():
    with pytest.raises(RecordError, match="SystemExit"):
        list(recipe(lambda batch: sys.exit(3)))
