"""Records that cannot be sent to another process are bad ones, the same in every execution."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.unit.custom_operators import Records
from tests.unit.small_recipes import quiet
from zephon import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
from zephon.columns import Block, Objects, column_of
from zephon.embedded import EmbeddedRun
from zephon.errors import DatasetError, RecordError
from zephon.ops import CountingAccumulator
from zephon.ops.base import Faults
from zephon.ops.sending import sendable
from zephon.runners import make_pool
from zephon.windows import Front


class Unforgiving(Exception):
    """Pickled without a word, and rebuilt never."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(one)


@dataclass
class Box:
    value: int


MAIN_BOX = type("Box", (), {"__module__": "__main__"})()
"""An object of a class that only the running script knows."""

MAIN_NAME = type("Named", (), {"__module__": "__main__", "__reduce__": lambda self: "MAIN_NAME"})()
"""An object of which a pickle has nothing but its name in the running script."""


VALUES: dict[str, tuple[Callable[[], Any], str]] = {
    "lambda": (lambda: lambda: 1, "a function that cannot be sent"),
    "lock": (threading.Lock, "a lock that cannot be sent to another process (TypeError: cannot pickle"),
    "generator": (lambda: (i for i in "ab"), "a generator that cannot be sent"),
    "inside": (lambda: {"deep": [threading.Lock()]}, "a dict that cannot be sent"),
    "no way back": (lambda: Unforgiving(1, 2), "an Unforgiving that cannot be sent to another process (TypeError"),
    "the recipe's": (lambda: MAIN_BOX, "the class Box is the recipe's own, which ranks do not import"),
    "a name": (lambda: MAIN_NAME, "the object MAIN_NAME is the recipe's own, which ranks do not import"),
}

BAD = 13


def holding(row: dict[str, Any], make: Callable[[], Any] = threading.Lock) -> dict[str, Any]:
    return {**row, "held": make()} if row["id"] == BAD else row


def made(records: Records) -> Records:
    return [replace(record, payload=holding(record.payload)) for record in records]


def tagged(records: Records) -> Records:
    for record in records:
        if record.payload["id"] == BAD:
            record.meta.tags["guard"] = threading.Lock()
    return records


def on_batch(batch: Any) -> Any:
    return {"id": batch["id"], "held": [holding({"id": i}).get("held") for i in batch["id"].tolist()]}


def pushed(state: Any, records: Records) -> tuple[Any, Records]:
    return state, made(records)


OPERATORS: dict[str, Callable[[Pipeline, int | None], Pipeline]] = {
    "map_transform": lambda p, n: p.map_transform(holding, parallelism=n),
    "add_op 'op'": lambda p, n: p.add_op(
        "op", process_many=made, preserves_cursor_order=True, accumulator=CountingAccumulator(5), parallelism=n or 1
    ),
    "stateful_transform 'st'": lambda p, n: p.stateful_transform(
        "st", init_state=list, push=pushed, parallelism=n or 1
    ),
    "stateful_transform 'tr'": lambda p, n: p.stateful_transform(
        "tr", init_state=list, push=pushed, transform=lambda records: records, parallelism=n or 1
    ),
    "add_op 'tags'": lambda p, n: p.add_op(
        "tags", process_many=tagged, preserves_cursor_order=True, parallelism=n or 1
    ),
}
EXECUTIONS = [("inline", 1, None), ("threads", 3, 2)]


def rows() -> StaticMixtureWorkSource:
    shards = {name: InMemoryShard([{"id": i} for i in of]) for name, of in (("a", range(10)), ("b", range(10, 40)))}
    return StaticMixtureWorkSource([Dataset.from_dict("numbers", shards)], None, seed=3, chunk_size=8)


def ids(pipeline: Pipeline, runner: str, workers: int) -> list[list[int]]:
    plan = pipeline.plan()
    pool = make_pool(runner, Front(plan), workers)
    try:
        run = EmbeddedRun(plan, pool)
        return [batch["id"].tolist() if len(batch) else [] for batch in iter(run.next_batch, None) if batch.digest]
    finally:
        pool.close()


def refused(pipeline: Pipeline, runner: str, workers: int) -> RecordError:
    with pytest.raises(RecordError) as caught:
        quiet(lambda: ids(pipeline, runner, workers))
    return caught.value


def of_lanes(pipeline: Pipeline, **options: Any) -> Pipeline:
    return pipeline.options(canonical_replicas=2, flush_every_k_chunks=2, **options)


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_value_that_cannot_be_sent_is_a_bad_record_of_the_operator_that_made_it(name: str, behind: bool) -> None:
    for runner, workers, parallelism in EXECUTIONS:
        def pipeline(on_error: str, parallelism: int | None = parallelism) -> Pipeline:
            source = Pipeline(rows())
            operators = OPERATORS[name](source.shuffle(4) if behind else source, parallelism if behind else None)
            return of_lanes(operators.batch(3, drop_last=False), on_error=on_error)

        skipping = pipeline("skip")
        error = refused(pipeline("raise"), runner, workers)
        assert (error.operator, error.dataset, error.shard, error.row) == (name, "numbers", "b", BAD - 10)
        where = "its meta's tags hold, as 'guard'," if "tags" in name else "field 'held' holds"
        assert error.cause.startswith(f"{where} a lock that cannot be sent to another process")
        found = quiet(partial(ids, skipping, runner, workers))
        assert sorted(i for batch in found for i in batch) == [i for i in range(40) if i != BAD]


def test_a_batch_with_a_value_that_cannot_be_sent_names_its_record_or_is_delivered_empty() -> None:
    def pipeline(on_error: str) -> Pipeline:
        return of_lanes(Pipeline(rows()).batch(3, drop_last=False).map_batch(on_batch), on_error=on_error)

    error = refused(pipeline("raise"), "inline", 1)
    assert error.operator.startswith("map_batch (lane ")
    assert (error.dataset, error.shard, error.row) == ("numbers", "b", BAD - 10)
    found = quiet(lambda: ids(pipeline("skip"), "inline", 1))
    assert found.count([]) == 1
    assert not any(BAD in batch for batch in found)


@pytest.mark.parametrize("name", VALUES)
def test_what_a_process_cannot_rebuild_is_as_bad_as_what_it_cannot_be_sent(name: str) -> None:
    make, text = VALUES[name]
    values = [1, make(), Box(2), np.arange(3), None, [1, "a"]]
    block = Block({"held": column_of(values)}, np.array([[0, 0, i] for i in range(6)], np.int64))
    with pytest.raises(RecordError) as caught:
        sendable(block, "op", Faults())
    assert text in caught.value.cause
    assert caught.value.row == 1
    faults = Faults("skip")
    assert sendable(block, "op", faults).samples[:, 2].tolist() == [0, 2, 3, 4, 5]
    assert faults.skipped == 1


@pytest.mark.parametrize("beside", [[np.arange(2), np.zeros((2, 2))], [1, "a", None]])
def test_an_array_of_objects_among_plain_values_is_looked_into(beside: list[Any]) -> None:
    block = Block({"held": Objects([*beside, np.array([threading.Lock()])])}, np.zeros((len(beside) + 1, 3), np.int64))
    faults = Faults("skip")
    assert len(sendable(block, "op", faults)) == len(beside)
    assert sendable(block.slice(0, len(beside)), "op", Faults()).fields["held"].to_list() == beside


def test_rows_in_memory_that_cannot_be_sent_are_named_with_no_function_in_front_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value in (threading.Lock(), Unforgiving(1, 2)):
        held = Dataset.from_dict("held", {"a": InMemoryShard([{"v": 1}, {"v": value}])})
        with pytest.raises(DatasetError, match="shard 'a' in memory, row 1: it holds a value that cannot be pickled"):
            assert held.digest
    monkeypatch.setattr(sys.modules["__main__"], "MAIN_NAME", MAIN_NAME, raising=False)
    held = Dataset.from_dict("held", {"a": InMemoryShard([{"v": [MAIN_NAME]}])})
    with pytest.raises(DatasetError, match="row 0: it holds a value that cannot be .* the object MAIN_NAME"):
        assert held.digest
    monkeypatch.setattr(sys.modules["__main__"], "Box", type(MAIN_BOX), raising=False)
    source = StaticMixtureWorkSource([Dataset.from_dict("held", {"a": InMemoryShard([{"v": MAIN_BOX}] * 4)})], None)
    error = refused(of_lanes(Pipeline(source).batch(1)), "inline", 1)
    assert (error.operator, error.dataset, error.shard) == ("read", "held", "a")
