"""A user's function on each record."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.ops.cuts import assert_cuts_do_not_show
from zephon.columns import Block
from zephon.errors import RecordError, SettingError
from zephon.ops.base import Faults
from zephon.ops.map_transform import MapTransform
from zephon.ops.records import NESTED
from zephon.ops.sending import sendable


def block_of(rows: list[dict[str, Any]]) -> Block:
    return Block.from_rows(rows, np.array([(0, 0, i) for i in range(len(rows))], np.int64).reshape(-1, 3))


def awkward(payload: dict[str, Any]) -> dict[str, Any] | None:
    number = payload["id"]
    if number % 5 == 0:
        return None
    if number % 7 == 3:
        raise ValueError("no sevens")
    if number % 3 == 1:
        payload["extra"] = [number]
    payload["id"] = number * 2
    return payload


@given(st.integers(0, 30), st.lists(st.integers(0, 30), max_size=5))
def test_records_come_out_the_same_however_they_are_cut_into_blocks(count: int, cuts: list[int]) -> None:
    block, transform = block_of([{"id": i, "text": f"t{i}"} for i in range(count)]), MapTransform(awkward)
    assert_cuts_do_not_show(transform, block, cuts)
    whole = transform.process(block, Faults("skip"))
    for row, (_, _, number) in zip(whole.to_rows(), whole.samples.tolist()):
        assert row["id"] == 2 * number
        assert ("extra" in row) == (number % 3 == 1)


def test_a_record_of_several_samples_keeps_them() -> None:
    rows = [{"id": i} for i in range(3)]
    block = Block.from_rows(rows, np.array([(0, 0, i) for i in range(5)], np.int64), np.array([0, 2, 3, 5]))
    out = MapTransform(lambda p: p if p["id"] != 1 else None).process(block, Faults())
    assert out.sample_offsets is not None
    assert (out.samples[:, 2].tolist(), out.sample_offsets.tolist()) == ([0, 1, 3, 4], [0, 2, 4])


def test_what_the_function_changes_in_place_is_its_own() -> None:
    rows = [{"tags": ["a", {"b": [1]}], "array": np.arange(2), "pair": np.ones((2, 2))}, {"tags": None}]

    def change(payload: dict[str, Any]) -> dict[str, Any]:
        if payload["tags"]:
            payload["tags"][1]["b"].append(2)
            payload["array"] += 1
            payload["pair"] *= 0
        return payload

    block = block_of(rows)
    first, second = (MapTransform(change).process(block, Faults()).to_rows()[0] for _ in range(2))
    assert first["tags"] == second["tags"] == ["a", {"b": [1, 2]}]
    assert first["array"].tolist() == second["array"].tolist() == [1, 2]
    assert rows[0]["tags"] == ["a", {"b": [1]}]


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda p: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda p: [p], "returned list, expected a dict or None"),
        (lambda p: {1: 2}, "the key 1 of type int"),
        (lambda p: None, "returned None"),
    ],
)
def test_a_failing_function_or_a_wrong_result_is_a_bad_record_with_its_cause(fn: Any, words: str) -> None:
    with pytest.raises(RecordError, match=words):
        MapTransform(fn, drop_none=False).process(block_of([{"id": 0}]), Faults())
    faults = Faults("skip")
    assert len(MapTransform(fn, drop_none=False).process(block_of([{"id": 0}, {"id": 1}]), faults)) == 0
    assert faults.skipped == 2
    assert words in faults.reports[1]


def test_dropping_every_record_leaves_an_empty_block() -> None:
    faults = Faults()
    assert len(MapTransform(lambda p: None).process(block_of([{"id": 0}]), faults)) == 0
    assert faults.skipped == 0


def test_the_function_is_part_of_the_identity() -> None:
    def adding(amount: int) -> MapTransform:
        return MapTransform(lambda p: {"id": p["id"] + amount})

    assert adding(1).describe() == adding(1).describe()
    assert adding(1).describe() != adding(2).describe()
    with pytest.raises(SettingError, match="fn must be a function"):
        MapTransform("text")  # type: ignore[arg-type]


def test_an_exception_whose_text_cannot_be_made_still_names_its_record() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def fail(payload: dict[str, Any]) -> dict[str, Any]:
        raise Mute

    with pytest.raises(RecordError, match="row 0: Mute"):
        MapTransform(fail).process(block_of([{"id": 0}]), Faults())
    faults = Faults("skip")
    assert len(MapTransform(fail).process(block_of([{"id": 0}, {"id": 1}]), faults)) == 0
    assert faults.skipped == 2


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def holding_itself() -> list[Any]:
    value: list[Any] = [1]
    value.append({"it": (value,)})
    return value


@pytest.mark.parametrize("value", [nested(NESTED + 1), nested(10**5), holding_itself()], ids=["deep", "abyss", "loop"])
@pytest.mark.parametrize("given", [True, False])
def test_a_value_that_cannot_be_copied_is_a_bad_record_wherever_it_comes_from(value: list[Any], given: bool) -> None:
    block = block_of([{"id": i, "x": value if given and i == 2 else [i]} for i in range(4)])
    transform = MapTransform(lambda row: {**row, "x": value} if not given and row["id"] == 2 else row)
    with pytest.raises(RecordError, match=f"map_transform: .*, row 2: .*more than {NESTED} levels deep"):
        transform.process(block, Faults())
    faults = Faults("skip")
    assert [row["id"] for row in transform.process(block, faults).to_rows()] == [0, 1, 3]
    assert faults.skipped == 1


def test_how_deep_a_value_may_be_does_not_depend_on_who_calls() -> None:
    def called(calls: int) -> int:
        if calls:
            return called(calls - 1)
        faults = Faults("skip")
        made = MapTransform(dict).process(block_of([{"x": nested(NESTED)}, {"x": nested(NESTED + 2)}]), faults)
        return len(sendable(made, "map_transform", faults))

    assert [called(calls) for calls in (0, 100, 300)] == [1, 1, 1]
