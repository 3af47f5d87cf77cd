"""Operators of a user's own: whatever lists they are given, how a run is cut and executed never shows."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.custom_operators import PIECES, Records, pipeline_of
from tests.unit.small_recipes import digest, examples, quiet
from zephon import Pipeline, SampleMeta, SampleRecord
from zephon.columns import Block
from zephon.embedded import EmbeddedRun
from zephon.errors import RecordError, RunFailed, SettingError
from zephon.ops import BaseOp, CountingAccumulator, OpContext, PassthroughAccumulator, tombstones_for_record
from zephon.ops.base import Faults
from zephon.ops.records import records_of
from zephon.runners import make_pool
from zephon.testing import assert_resumes_exactly
from zephon.windows import Front, run_window

PIECE_LISTS = [
    ("stamp",), ("children", "told"), ("odd", "stamp", "noisy"), ("noisy_one", "fours"), ("doubled", "sorted"),
    ("numbered", "stamp"), ("pairs", "children", "told"), ("shuffle", "stamp", "noisy_one"), ("hoard", "counted"),
    ("children", "odd", "stamp", "stamp"), ("sorted", "doubled", "noisy"), ("counted", "shuffle", "fours", "told"),
]  # fmt: skip


def delivered(pipeline: Pipeline, task_samples: int = 512, runner: str = "inline", workers: int = 1) -> list[Any]:
    """What one epoch delivers, batch by batch."""
    plan = pipeline.plan()
    pool = make_pool(runner, Front(plan), workers)
    try:
        run = EmbeddedRun(plan, pool, task_samples=task_samples)
        found = []
        while (batch := run.next_batch()) is not None:
            found.append((batch.lane, batch.first_record, batch.digest, tuple(map(str, batch.samples))))
        return found
    finally:
        pool.close()


@examples(25)
@given(
    st.lists(st.sampled_from(sorted(PIECES)), min_size=1, max_size=4),
    st.sampled_from([1, 7, 64, 96, 130, 1000]),
    st.sampled_from([3, 10, 50, 100]),
    st.integers(1, 4),
)
def test_cuts_into_tasks_never_show_in_what_custom_operators_make(
    pieces: list[str], task_samples: int, chunk: int, lanes: int
) -> None:
    made = lambda: pipeline_of(*pieces, rows=(150, 60), lanes=lanes, chunk=chunk)  # noqa: E731
    assert quiet(lambda: delivered(made(), task_samples)) == quiet(lambda: delivered(made()))


@pytest.mark.parametrize("pieces", PIECE_LISTS, ids="-".join)
def test_runners_never_show_and_every_window_alone_is_the_window_in_its_stream(pieces: tuple[str, ...]) -> None:
    expected = delivered(pipeline_of(*pieces))
    assert expected
    assert delivered(pipeline_of(*pieces), 40, "threads", 4) == expected
    plan = pipeline_of(*pieces).plan()
    for lane in range(plan.lanes):
        first, again = (
            digest(Block.concat(list(run_window(plan, 0, lane, 1, task_samples=samples)))) for samples in (512, 33)
        )
        assert first == again


@pytest.mark.parametrize("pieces", PIECE_LISTS, ids="-".join)
def test_custom_operators_resume_exactly(pieces: tuple[str, ...]) -> None:
    assert_resumes_exactly(lambda: pipeline_of(*pieces, rows=(120, 60), chunk=10), batches=10)


def rows_of(pipeline: Pipeline) -> list[dict[str, Any]]:
    """All records of an epoch, lane by lane."""
    return [row for batch in pipeline.options(canonical_replicas=1) for row in batch.block.to_rows()]


def adding(
    process_many: Callable[[Records], Records], *before: str, packed: bool = False, **settings: Any
) -> Pipeline:
    pipeline = pipeline_of(*before, rows=(20,), lanes=1, chunk=10, batch=1)
    pipeline._batched = False
    if packed:
        pipeline.map_transform(lambda row: {"input_ids": [row["id"]] * (1 + row["id"] % 5)})
        pipeline.pack_flat(8, algorithm="wrap")
    return pipeline.add_op("mine", process_many=process_many, **settings).batch(1, drop_last=False)


def unchecked(pipeline: Pipeline) -> list[Any]:
    """The batches of an epoch, without the check at the start, which calls the functions too."""
    run = pipeline.run(pipeline.plan(), dp_degree=1, group=0)
    found = list(iter(run.next_batch, None))
    run.pool.close()
    return found


def test_a_record_knows_where_it_is_from() -> None:
    seen: list[SampleMeta] = []

    def look(records: Records) -> Records:
        seen.extend(record.meta for record in records)
        return records

    batches = unchecked(adding(look))
    assert [meta.sample_id for meta in seen] == [batch.samples[0] for batch in batches]
    assert [(meta.chunk_id, meta.chunk_offset) for meta in seen] == [(n // 10, n % 10) for n in range(20)]
    assert {meta.lane_id for meta in seen} == {0}
    assert seen[3].component_sample_counts == {"d0": 1}
    assert seen[3].lineage == ()


def test_a_record_that_brings_its_token_ids_counts_them_whatever_lies_beside_it() -> None:
    ids: list[Any] = [[1, 2], (1, 2, 3), np.arange(4), [], None, "none", 5]
    rows = [{"n": number, "input_ids": value} for number, value in enumerate(ids)] + [{"n": 7}, {"n": 8, "tokens": [1]}]
    expected = [2, 3, 4, 0, None, None, None, None, 1]
    for size in (1, 2, 9):
        found: list[int | None] = []
        for low in range(0, 9, size):
            block = Block.from_rows(rows[low : low + size], np.zeros((len(rows[low : low + size]), 3), np.int64))
            found += [next(iter(r.meta.component_token_counts.values()), None) for r in records_of(block, Faults())]
        assert found == expected


def test_a_packed_record_keeps_all_of_its_samples() -> None:
    counts: list[SampleMeta] = []

    def reverse(records: Records) -> Records:
        counts.extend(record.meta for record in records)
        return [SampleRecord(record.meta, {"n": record.payload["sequence_length"]}) for record in reversed(records)]

    batches = unchecked(adding(reverse, packed=True))
    plain = list(adding(lambda records: records, packed=True))
    assert len(batches) == len(plain) > 3
    windows = sorted({meta.component_sample_counts["d0"] for meta in counts})
    assert len(windows) > 1
    assert sum(meta.component_token_counts["d0"] for meta in counts) == sum(1 + i % 5 for i in range(20))
    assert sorted(map(str, (batch.samples for batch in batches))) == sorted(map(str, (b.samples for b in plain)))
    assert [batch.samples for batch in batches] != [batch.samples for batch in plain]


def test_lineage_and_tags_stay_with_a_record_through_other_operators() -> None:
    seen: list[SampleMeta] = []

    def look(records: Records) -> Records:
        seen.extend(record.meta for record in records)
        return records

    rows = [row for b in unchecked(adding(look, "children", "odd", "shuffle", "children")) for row in b.block.to_rows()]
    assert all(len(meta.lineage) == 2 and meta.tags["of"] == row["id"] for meta, row in zip(seen, rows))
    assert {meta.lineage for meta in seen} == {(a, b) for a in range(2) for b in range(2)}


def test_what_a_function_changes_or_keeps_is_its_own() -> None:
    shared: dict[str, Any] = {"id": 0, "list": []}

    def reuse(row: dict[str, Any]) -> dict[str, Any]:
        shared["id"] = row["id"]
        shared["list"].append(row["id"])
        del shared["list"][:-2]
        return shared

    pipeline = pipeline_of(rows=(8,), lanes=1, batch=8)
    pipeline._batched = False
    (batch,) = list(pipeline.map_transform(reuse).batch(8))
    rows = batch.block.to_rows()
    assert sorted(row["id"] for row in rows) == list(range(8))
    assert all(row["list"][-1] == row["id"] for row in rows)


def test_setup_is_called_once_teardown_at_the_end_and_what_setup_sets_is_no_part_of_the_identity() -> None:
    calls: list[str] = []

    class Opened(BaseOp):
        name = "opened"

        def setup(self, ctx: OpContext) -> None:
            calls.append(f"setup {ctx.name}")
            self.file = object()

        def teardown(self) -> None:
            calls.append("teardown")

        def process_many(self, records: Records) -> Records:
            assert self.file
            return records

    pipeline = pipeline_of(rows=(20,), lanes=1, batch=1)
    pipeline._batched = False
    pipeline.add_op(Opened()).batch(1)
    before = pipeline.plan().identity
    list(pipeline)
    assert calls == ["setup add_op 'opened'"]
    assert pipeline.plan().identity == before
    pipeline.close()
    assert calls == ["setup add_op 'opened'", "teardown"]


def fail_on(number: int) -> Callable[[Records], Records]:
    def fail(records: Records) -> Records:
        if any(record.payload["id"] == number for record in records):
            raise ValueError("no such number")
        for record in records:
            record.payload["seen"] = record.payload.get("seen", 0) + 1
        return records

    return fail


def holding_itself_in(what: str) -> Callable[[Records], Records]:
    def hold(records: Records) -> Records:
        for record in records:
            if record.payload["id"] == 13:
                value: list[Any] = []
                value.append(value)
                into = record.payload if what == "payload" else record.meta.tags
                into["x"] = value
        return records

    return hold


@pytest.mark.parametrize("accumulator", [None, CountingAccumulator(7)])
@pytest.mark.parametrize("what", ["payload", "tags"])
def test_a_record_with_a_value_that_holds_itself_is_bad_without_its_neighbours(what: str, accumulator: Any) -> None:
    with pytest.raises(RecordError, match="add_op 'mine': dataset 'd0', shard s1, row 6, lane 0: .* holds itself"):
        list(adding(holding_itself_in(what), accumulator=accumulator))
    rows = rows_of(adding(holding_itself_in(what), accumulator=accumulator).options(on_error="skip"))
    assert sorted(row["id"] for row in rows) == [i for i in range(20) if i != 13]


@pytest.mark.parametrize("accumulator", [None, CountingAccumulator(7)])
def test_one_bad_record_is_named_and_skipped_without_its_neighbours(accumulator: Any) -> None:
    pipeline = adding(fail_on(13), accumulator=accumulator)
    with pytest.raises(RecordError, match="add_op 'mine': dataset 'd0', shard s1, row 6, lane 0: ValueError: no such"):
        list(pipeline)
    rows = rows_of(adding(fail_on(13), accumulator=accumulator).options(on_error="skip"))
    assert sorted(row["id"] for row in rows) == [i for i in range(20) if i != 13]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda records: None, "process_many returned NoneType, expected a list of SampleRecord"),
        (lambda records: [{"id": 1}], "a list with a dict in it"),
        (lambda records: [SampleRecord(SampleMeta(("d0", 0, 0)), {})], "whose meta is of no record of the pipeline"),
        (lambda records: [SampleRecord(records[0].meta, {1: 2})], "the key 1 of type int"),
        (lambda records: [SampleRecord(SampleMeta(("d0", 0, 0), lane_id=9, _origin=((0, 0, 0, 0),)), {})], "of lane 9"),
        (lambda records: next(iter(())), "StopIteration"),
        (lambda records: (_ for _ in ()).throw(SystemExit(3)), "SystemExit: 3"),
    ],
)
def test_a_wrong_result_says_what_is_wrong_with_it(function: Any, words: str) -> None:
    with pytest.raises(RecordError, match=words):
        list(adding(function))


def test_an_error_of_a_record_names_its_lane_and_a_way_to_see_it() -> None:
    with pytest.raises(RecordError) as caught:
        list(adding(fail_on(13)))
    assert caught.value.lane == 0
    assert "To see the record: zephon.debug.DatasetInspector(dataset).read('s1', 6)" in str(caught.value)


def holding(push: Any, **settings: Any) -> Pipeline:
    pipeline = pipeline_of(rows=(20,), lanes=1, batch=1)
    pipeline._batched = False
    return pipeline.stateful_transform("mine", init_state=list, push=push, **settings).batch(1)


@pytest.mark.parametrize(
    ("pipeline", "words"),
    [
        (lambda: holding(lambda state, records: records), r"push returned list, expected \(state, records\)"),
        (lambda: holding(lambda state, records: (state, None)), "push returned NoneType, expected a list"),
        (lambda: holding(lambda state, records: (state, holding_itself_in("tags")(records))), "push .* holds itself"),
        (lambda: holding(lambda state, records: 1 / 0), "20 records, the first of .*: push failed: ZeroDivisionError"),
        (lambda: holding(lambda s, r: (s, []), flush=lambda s: 1 / 0), "flush failed: ZeroDivisionError"),
        (lambda: holding(lambda s, r: (s, r), transform=lambda r: r[0]), "transform returned SampleRecord"),
    ],
)
def test_a_failing_function_with_a_state_ends_the_run_and_names_its_records(pipeline: Any, words: str) -> None:
    with pytest.raises(RunFailed, match=f"stateful_transform 'mine': lane 0, .*{words}"):
        list(pipeline().options(on_error="skip"))


def test_an_accumulator_that_keeps_records_after_a_flush_is_an_error() -> None:
    class Keeper(CountingAccumulator):
        def flush(self, *, reset: bool = False) -> list[Records]:
            return []

    with pytest.raises(RunFailed, match="still has data after flush"):
        list(adding(lambda records: records, accumulator=lambda: Keeper(7)))


@pytest.mark.parametrize(
    ("add", "words"),
    [
        (lambda p: p.add_op(BaseOp()), "BaseOp has neither process_many nor process_one"),
        (lambda p: p.add_op("mine"), "give process_many"),
        (lambda p: p.add_op("mine", process_many=3), "process_many must be a function"),
        (lambda p: p.add_op("mine", process_many=list, accumulator=3), "accumulator must be"),
        (lambda p: p.add_op("mine", process_many=list, parallelism=0), "parallelism=0"),
        (lambda p: p.add_op(7), "expected an instance of zephon.ops.BaseOp or a name"),
        (lambda p: p.add_op(PIECES and BaseOp(), process_many=list), "process_many belongs to"),
        (lambda p: p.stateful_transform("mine", init_state=0, push=None), "push must be a function"),
        (lambda p: p.stateful_transform("mine", init_state=0, push=len, should_flush=len), "without flush"),
        (lambda p: p.stateful_transform("", init_state=0, push=len), "name="),
        (lambda p: p.stateful_transform("mine", init_state=(i for i in ()), push=len), "init_state cannot be copied"),
    ],
)
def test_a_senseless_operator_is_refused_where_it_is_added(add: Any, words: str) -> None:
    pipeline = pipeline_of()
    pipeline._batched = False
    with pytest.raises(SettingError, match=words):
        add(pipeline)


def test_functions_and_attributes_are_part_of_the_identity_and_parallelism_is_not() -> None:
    def identity(**settings: Any) -> Any:
        pipeline = pipeline_of()
        pipeline._batched = False
        return pipeline.add_op("mine", **settings).plan().identity

    same = identity(process_many=lambda records: records)
    assert identity(process_many=lambda records: records, parallelism=3) == same
    assert identity(process_many=lambda records: records[:1]) != same
    four, five = (identity(process_many=list, accumulator=CountingAccumulator(n)) for n in (4, 5))
    assert four != five


def test_accumulators_to_build_on_hold_and_give_what_they_say() -> None:
    records = [SampleRecord(SampleMeta(("d", 0, i)), {}) for i in range(7)]
    counting, passing = CountingAccumulator(3), PassthroughAccumulator()
    assert [len(group) for group in counting.push_many(records)] == [3, 3]
    assert counting.has_pending_data()
    assert counting.flush(reset=True) == [records[6:]]
    assert not counting.has_pending_data()
    assert counting.flush() == []
    assert passing.push_many(records) == [records]
    assert passing.push_many([]) == passing.flush() == []
    assert tombstones_for_record(records[0], reason="dropped") == []
    with pytest.raises(ValueError, match="max_batch=0"):
        CountingAccumulator(0)


@pytest.mark.parametrize("mixed", [False, True])
def test_tokens_by_dataset_are_known_behind_packing_and_stay_with_the_record(mixed: bool) -> None:
    seen: list[SampleMeta] = []

    def look(records: Records) -> Records:
        seen.extend(record.meta for record in records)
        return records

    pipeline = pipeline_of(rows=(20, 10), lanes=1, chunk=10, batch=1)
    pipeline._batched = False
    pipeline.map_transform(lambda row: {"input_ids": [row["id"]] * (1 + row["id"] % 5)}).pack_flat(8, algorithm="wrap")
    pipeline.add_op("first", process_many=lambda records: records)
    if mixed:
        pipeline.ensure_mixture(max_buffer_size=2)
    pipeline.add_op("look", process_many=look).batch(1)
    batches = unchecked(pipeline)
    assert len(batches) > 5
    assert any(len(meta.component_token_counts) == 2 for meta in seen)
    tokens = sum(count for meta in seen for count in meta.component_token_counts.values())
    assert tokens == sum(1 + i % 5 for i in (*range(20), *range(10)))
