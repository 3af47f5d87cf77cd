"""The check of operators before a run: what breaks the promise is found, what is honest is left in peace."""
from __future__ import annotations

import random
import re
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import zephon
from tests.unit.custom_operators import PIECES, Records, hoard, pipeline_of
from zephon import Pipeline, SampleMeta, SampleRecord
from zephon.errors import RecipeError
from zephon.ops import BaseOp, CountingAccumulator, OpContext

Add = Callable[[Pipeline], Any]


def pipeline(add: Add, *before: str) -> Pipeline:
    made = pipeline_of(*before, rows=(60, 30))
    made._batched = False
    add(made)
    return made.batch(4)


def warned(add: Add, *before: str) -> list[str]:
    """What a run says at its first batch."""
    made = pipeline(add, *before)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        next(iter(made))
    made.close()
    assert all(issubclass(warning.category, UserWarning) for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("piece", sorted(PIECES))
def test_an_honest_operator_is_not_warned_of(piece: str) -> None:
    assert warned(PIECES[piece]) == []
    report = pipeline(PIECES[piece]).validate(strict=True)
    assert report.ok
    assert len(report.checked) == (piece != "shuffle")


class Clocked(BaseOp):
    def process_one(self, record: SampleRecord) -> Records:
        record.payload["at"] = time.perf_counter_ns()
        return [record]


class Counting:
    """A function with a memory."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        self.count += 1
        return {**row, "count": self.count}


def first_of_each() -> Callable[[dict[str, Any]], dict[str, Any]]:
    seen: set[int] = set()

    def told(row: dict[str, Any]) -> dict[str, Any]:
        new = row["id"] not in seen
        seen.add(row["id"])
        return {**row, "new": new}

    return told


def half(state: Records) -> Records:
    out = state[: len(state) // 2]
    del state[: len(state) // 2]
    return out


def sized(records: Records) -> Records:
    return [SampleRecord(record.meta, {"size": len(records)}) for record in records]


def remember(state: list[int], records: Records) -> tuple[list[int], Records]:
    state.append(len(records))
    return state, [SampleRecord(record.meta, {"so far": len(state)}) for record in records]


class Leaky(CountingAccumulator):
    def flush(self, *, reset: bool = False) -> list[Records]:
        held, self._held = self._held[:1], self._held[1:]
        return [held] if held else []

    def has_pending_data(self) -> bool:
        return False


DISHONEST: dict[str, tuple[Add, str]] = {
    "numpy's generator": (
        lambda p: p.map_transform(lambda row: {**row, "r": np.random.random()}),
        "map_transform: draws from numpy.random, which no seed",
    ),
    "Python's generator": (
        lambda p: p.map_transform(lambda row: row if random.random() < 0.99 else None),
        "map_transform: draws from random, which no seed",
    ),
    "the clock": (lambda p: p.add_op(Clocked()), "add_op 'Clocked': gives another result for the same records"),
    "a counter": (lambda p: p.map_transform(Counting()), "field 'count' of the record made from dataset 'd"),
    "a memory": (lambda p: p.map_transform(first_of_each()), "gives another result for the same records in a second"),
    "its company": (
        lambda p: p.add_op("sized", process_many=sized),
        "add_op 'sized': gives another result for records one by one.*batch_shape_sensitive",
    ),
    "a shared state": (
        lambda p: p.stateful_transform("kept", init_state=lambda kept=[]: kept, push=remember),
        "stateful_transform 'kept': gives another result for the same records in a second window",
    ),
    "half a flush": (
        lambda p: p.stateful_transform("half", init_state=list, push=hoard, flush=half),
        "stateful_transform 'half': flush leaves [0-9]+ records? behind",
    ),
    "a leaking accumulator": (
        lambda p: p.add_op("leaky", process_many=list, accumulator=lambda: Leaky(6)),
        "add_op 'leaky': flush leaves [0-9]+ records? behind",
    ),
}


@pytest.mark.parametrize("what", sorted(DISHONEST))
def test_a_dishonest_operator_is_warned_of_by_name_and_strict_validation_refuses_it(what: str) -> None:
    add, words = DISHONEST[what]
    (text,) = warned(add)
    assert re.search(words, text), text
    report = pipeline(add).validate()
    assert not report.ok
    assert re.search(words, str(report))
    with pytest.raises(RecipeError, match=words):
        pipeline(add).validate(strict=True)


def batch_counter() -> Callable[[Any], dict[str, Any]]:
    count = iter(range(10**6))
    return lambda batch: {"id": batch["id"], "batch": [next(count)] * len(batch)}


ON_BATCHES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a counter": (batch_counter(), "map_batch: gives another result for the same records in a second call: field 'b"),
    "numpy's generator": (
        lambda batch: {"id": np.random.permutation(batch["id"])},
        "map_batch: draws from numpy.random, which no seed",
    ),
}


@pytest.mark.parametrize("what", sorted(ON_BATCHES))
def test_a_function_of_batches_is_checked_like_any_other(what: str) -> None:
    function, words = ON_BATCHES[what]

    def batches(made: Pipeline) -> Pipeline:
        return made.map_batch(lambda batch: {"id": batch["id"][::-1]}).map_batch(function)

    made = batches(pipeline(lambda p: p))
    with pytest.warns(UserWarning, match=words):
        next(iter(made))
    made.close()
    report = batches(pipeline(lambda p: p)).validate()
    assert [finding.operator for finding in report.findings] == ["map_batch"]
    assert re.search(words, str(report))
    assert report.checked == ("map_batch", "map_batch")


def test_a_function_of_batches_gets_the_batches_that_the_one_before_left() -> None:
    seen: list[list[int]] = []

    def halved(batch: Any) -> Any:
        return {"id": batch["id"][:2]} if batch.first_record else None

    def look(batch: Any) -> None:
        seen.append(batch["id"].tolist())

    made = pipeline(lambda p: p).map_batch(halved).map_batch(look)
    assert made.validate(strict=True).ok
    assert seen
    assert {len(ids) for ids in seen} == {2}


def test_the_company_of_records_may_matter_where_the_operator_says_so() -> None:
    assert warned(lambda p: p.add_op("sized", process_many=sized, batch_shape_sensitive=True)) == []


def test_a_generator_that_the_function_seeds_itself_is_no_fault() -> None:
    def seeded(row: dict[str, Any]) -> dict[str, Any]:
        np.random.seed(row["id"])
        return {**row, "r": np.random.random()}

    assert warned(lambda p: p.map_transform(seeded)) == []


def test_the_check_leaves_the_global_generators_as_they_were() -> None:
    np.random.seed(3)
    random.seed(3)
    expected = np.random.random(3).tolist(), random.random()
    np.random.seed(3)
    random.seed(3)
    pipeline(DISHONEST["numpy's generator"][0]).validate()
    pipeline(DISHONEST["Python's generator"][0]).validate()
    assert (np.random.random(3).tolist(), random.random()) == expected


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyError])
def test_what_a_function_raises_is_left_to_the_run_and_told_by_validate(error: type[BaseException]) -> None:
    calls = []

    def fail(records: Records) -> tuple[None, Records]:
        calls.append(len(records))
        raise error("not this one")

    def add(p: Pipeline) -> Any:
        return p.stateful_transform("failing", init_state=None, push=lambda state, records: fail(records))

    with pytest.raises(zephon.ZephonError, match="push failed"):
        warned(add)
    assert calls[0] <= 16
    assert "fails on a sample" in str(pipeline(add).validate())


def test_only_records_that_reach_an_operator_check_it() -> None:
    report = pipeline(lambda p: p.map_transform(lambda row: None).map_transform(Counting())).validate()
    assert report.ok
    assert report.left_out == ("map_transform (no record came to it)",)


def test_an_operator_brings_its_own_samples() -> None:
    class Picky(BaseOp):
        def process_one(self, record: SampleRecord) -> Records:
            odd = record.payload["id"] == -1
            return [SampleRecord(record.meta, {"r": time.perf_counter_ns() if odd else 0})]

        def validation_samples(self) -> list[SampleRecord]:
            return [SampleRecord(SampleMeta(("anything", 0, 0)), {"id": -1})]

    (text,) = warned(lambda p: p.add_op(Picky()))
    assert "add_op 'Picky': gives another result" in text


def test_an_operator_behind_a_slow_one_is_checked_by_validate_alone() -> None:
    def slow(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] < 16:
            threading.Event().wait(0.2)
        return row

    def add(p: Pipeline) -> Any:
        return p.map_transform(slow).map_transform(Counting())

    report = pipeline(lambda p: p.map_transform(lambda row: row).map_transform(Counting())).validate()
    assert len(report.findings) == 1
    assert warned(add) == []


class Holder(BaseOp):
    def __init__(self) -> None:
        self.database = sqlite3.connect(":memory:")

    def process_many(self, records: Records) -> Records:
        return records


def closing_over(value: Any) -> Callable[[Any], Any]:
    return lambda row: (value, row)[1]


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("add", "words"),
    [
        (lambda p: p.map_transform(closing_over(LOCK)), "map_transform: fn closes over 'value', a _thread.lock"),
        (
            lambda p: p.map_transform(closing_over({"deep": [closing_over(LOCK)]})),
            "closes over 'value' holds under 'deep' holds closes over 'value', a _thread.lock",
        ),
        (lambda p: p.add_op(Holder()), "op has the attribute 'database', a sqlite3.Connection"),
        (
            lambda p: p.add_op("mine", process_many=closing_over(iter([LOCK]))),
            "process_many closes over 'value', a list_iterator, which cannot be sent",
        ),
    ],
)
def test_what_cannot_be_sent_to_workers_is_named_with_the_way_to_it(add: Add, words: str) -> None:
    assert words in str(pipeline(add).validate())
    made = pipeline(add).options(runner="process", max_workers=1)
    with pytest.raises(zephon.errors.SettingError) as caught:
        next(iter(made))
    assert words in str(caught.value)


def test_lambdas_and_closures_are_sent() -> None:
    table = {"factor": 3}
    made = pipeline(lambda p: p.map_transform(lambda row: {"id": row["id"] * table["factor"]}))
    assert made.validate(strict=True).ok


def test_setup_is_left_alone_by_the_check_unless_the_run_needs_it_here() -> None:
    from zephon.validation import warnings_at_start

    calls: list[str] = []

    class Heavy(BaseOp):
        def setup(self, ctx: OpContext) -> None:
            calls.append(ctx.name)

        def process_one(self, record: SampleRecord) -> Records:
            return [record]

    plan = pipeline(lambda p: p.add_op(Heavy()).map_transform(Counting())).plan()
    assert warnings_at_start(plan, lambda operator: False) == []
    assert calls == []
