"""Blocks give back the values they were made of, and a batch never tells how its records were cut into blocks."""

from __future__ import annotations

import pickle
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawn_records import Colour, cut, packed_blocks, rows, samples_of
from zephon.columns import (
    MISSING,
    Block,
    Bytes,
    Fixed,
    Objects,
    Ragged,
    Text,
    canonical,
    column_of,
    joined,
    spans,
)
from zephon.digests import block_digest, column_digest
from zephon.transport.layout import measure, read

PLACES = st.lists(st.integers(0, 100), max_size=4)


def through_memory(block: Block) -> Block:
    layout = measure(block)
    buffer = np.zeros(layout.nbytes, np.uint8)
    layout.write(buffer)
    return read(buffer)


def finished(block: Block) -> tuple[bytes, list[str]]:
    final = canonical(block)
    return block_digest(final), [
        f"{name} {type(column).__name__}" for name, column in final.fields.items() if len(block)
    ]


@given(rows(), PLACES)
def test_a_batch_does_not_tell_how_its_records_were_cut_into_blocks(
    drawn: list[dict[str, Any]], places: list[int]
) -> None:
    whole = finished(Block.from_rows(drawn, samples_of(len(drawn))))
    parts = cut(drawn, places)
    assert finished(Block.concat(parts)) == whole
    assert finished(Block.concat([through_memory(part) for part in parts])) == whole
    assert finished(through_memory(canonical(Block.concat(parts)))) == whole


@pytest.mark.parametrize(
    "values",
    [
        [np.array(5), np.array(6), "x"],
        [np.array(1.5, np.float32), np.float32(2), None],
        [np.array([1], ">i4"), np.array([2], ">i4"), np.array([3], "<i4")],
        [np.array([1], ">i4"), np.array([2], ">i4"), "x"],
        [np.datetime64("2020"), np.datetime64("2020-01-01"), "x"],
        [np.zeros(1, [("a", "i1"), ("b", "i8")]), np.zeros(1, [("a", "i1"), ("b", "i8")]), None],
        [np.ma.masked_array([1, 2], [True, False]), np.ma.masked_array([1, 2], [False, True]), np.array([1, 2])],
        [np.array([], np.int32), np.array([], np.float32), np.array([], np.int64)],
        [np.array([], np.int32), np.array([], np.float32), np.array([1.5])],
        [[], np.array([1], np.int16), [2]],
        [np.bool_(True), 1, np.int64(2)],
        [np.longlong(1), 2, np.int8(3)],
        [1, 2**63, np.uint64(2**63)],
        [np.int8(1), np.uint8(200), 3],
        [Colour.RED, 1, Colour.BLUE],
        [np.str_("a"), "a", b"a"],
        [-0.0, np.float64(0), np.float32("nan")],
    ],
    ids=str,
)  # fmt: skip
def test_odd_neighbours_change_no_value_wherever_the_cut_between_them(values: list[Any]) -> None:
    for order in permutations(values):
        drawn = [{"a": v} for v in order]
        for low, high in [(0, 1), (0, 2), (0, 3), (1, 3)]:
            whole = finished(Block.from_rows(drawn[low:high], samples_of(high - low)))
            for place in range(4):
                assert finished(Block.concat(cut(drawn, [place])).slice(low, high)) == whole


@given(rows(), PLACES, st.data())
def test_records_taken_or_sliced_from_blocks_make_the_batch_that_they_alone_would(
    drawn: list[dict[str, Any]], places: list[int], data: st.DataObject
) -> None:
    joint = Block.concat(cut(drawn, places))
    samples = samples_of(len(drawn))
    low, high = sorted(data.draw(st.tuples(*[st.integers(0, len(drawn))] * 2)))
    assert finished(joint.slice(low, high)) == finished(Block.from_rows(drawn[low:high], samples[low:high]))
    index = np.array(data.draw(st.lists(st.integers(0, len(drawn) - 1), max_size=6)) if drawn else [], np.int64)
    taken = Block.from_rows([drawn[i] for i in index], samples[index])
    assert finished(joint.take(index)) == finished(taken)
    assert np.array_equal(joint.take(index).samples, taken.samples)


@given(rows(min_size=1), PLACES)
def test_finishing_a_batch_twice_changes_nothing(drawn: list[dict[str, Any]], places: list[int]) -> None:
    once = canonical(Block.concat(cut(drawn, places)))
    assert finished(once) == finished(once.copy()) == (block_digest(once), finished(once)[1])


@given(rows(min_size=2), st.data())
def test_a_batch_with_another_value_has_another_digest(drawn: list[dict[str, Any]], data: st.DataObject) -> None:
    changed = [dict(row) for row in drawn]
    changed[data.draw(st.integers(0, len(drawn) - 1))]["a"] = "no such value was drawn"
    samples = samples_of(len(drawn))
    assert finished(Block.from_rows(changed, samples))[0] != finished(Block.from_rows(drawn, samples))[0]


@given(rows())
def test_rows_come_back_with_their_fields(drawn: list[dict[str, Any]]) -> None:
    back = Block.from_rows(drawn, samples_of(len(drawn))).to_rows()
    assert [set(row) for row in back] == [set(row) for row in drawn]
    for name in {name for row in drawn for name in row}:
        before = Objects([row.get(name) for row in drawn])
        after = Objects([row.get(name) for row in back])
        assert column_digest(column_of(before.values)) == column_digest(column_of(after.values))


@given(packed_blocks(), packed_blocks())
def test_records_keep_their_samples_when_blocks_are_joined_sliced_and_taken(one: Block, other: Block) -> None:
    def named(block: Block) -> list[list[list[int]]]:
        compact, ends = block.compact_samples(), block.sample_offsets
        if ends is None:
            return [[row] for row in block.samples.tolist()]
        rows_of, base = compact.samples.tolist(), int(ends[0])
        return [rows_of[a - base : b - base] for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]

    both = Block.concat([one, other])
    assert named(both) == named(one) + named(other)
    middle = len(both) // 2
    assert named(both.slice(middle, len(both))) == named(both)[middle:]
    backwards = np.arange(len(both))[::-1].copy()
    assert named(both.take(backwards)) == named(both)[::-1]
    for record in range(len(both)):
        assert list(both.sample_of(record)) == named(both)[record][0]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), max_size=8))
def test_spans_are_the_indices_of_every_span_end_to_end(pairs: list[tuple[int, int]]) -> None:
    starts, lengths = (np.array([p[k] for p in pairs], np.int64) for k in (0, 1))
    assert spans(starts, lengths).tolist() == [i for s, n in pairs for i in range(s, s + n)]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, 2], Fixed),
        ([1, np.int64(2)], Fixed),
        ([1.5, float("nan")], Fixed),
        (["a", ""], Text),
        (["\ud800", "b"], Text),
        ([b"", b"\xff"], Bytes),
        ([np.array([1]), np.array([2, 3])], Ragged),
        ([np.zeros((2, 2)), np.ones((2, 2))], Fixed),
        ([np.zeros((2, 2)), np.ones((2, 3))], Objects),
        ([1, 2**63], Objects),
        ([1, True], Objects),
        ([1, None], Objects),
        ([[1], [2]], Objects),
        ([np.ma.masked_array([1], [True])], Objects),
    ],
)
def test_a_column_is_of_the_narrowest_kind_that_gives_its_values_back(values: list[Any], kind: type) -> None:
    column = column_of(values)
    assert type(column) is kind
    assert repr(column.to_list()) == repr([v.item() if type(v) is np.int64 else v for v in values])


@pytest.mark.parametrize(
    ("values", "kind", "dtype"),
    [
        ([np.array([1, 2], np.int32), np.array([3, 4], np.int32)], Fixed, "int32"),
        ([np.array([1, 2], np.int32), np.array([3], np.int64)], Ragged, "int64"),
        ([[1, 2], [3]], Ragged, "int64"),
        ([[1.5], [2.5]], Fixed, "float64"),
        ([[], []], Fixed, "int64"),
        ([[], np.array([1], np.int16)], Ragged, "int16"),
        ([1, np.int8(2)], Fixed, "int64"),
        ([np.float32(1), np.float32(2)], Fixed, "float32"),
    ],
)
def test_numbers_of_a_finished_batch_have_one_dtype(values: list[Any], kind: type, dtype: str) -> None:
    column = canonical(Block({"a": column_of(values)}, samples_of(len(values)))).fields["a"]
    assert type(column) is kind
    assert column.values.dtype == dtype  # type: ignore[attr-defined]


def test_a_field_that_some_records_lack_is_none_there_and_one_that_all_lack_is_left_out() -> None:
    block = Block.from_rows([{"a": 1}, {"b": "x"}], samples_of(2))
    assert block.to_rows() == [{"a": 1}, {"b": "x"}]
    assert {n: c.to_list() for n, c in canonical(block).fields.items()} == {"a": [1, None], "b": [None, "x"]}
    assert list(canonical(block.slice(0, 1)).fields) == ["a"]
    assert pickle.loads(pickle.dumps(MISSING)) is MISSING
    assert not MISSING


def test_a_slice_shares_memory_and_a_copy_does_not() -> None:
    values = np.arange(10)
    column = Ragged(values, np.array([0, 3, 7, 10]))
    assert np.shares_memory(column.slice(1, 3).values, values)
    assert np.shares_memory(column.slice(1, 3).compact()[0], values)
    assert not np.shares_memory(column.slice(1, 3).copy().values, values)
    assert [a.tolist() for a in column.slice(1, 3).copy()] == [[3, 4, 5, 6], [7, 8, 9]]


def test_text_and_bytes_are_sequences_that_compare_with_lists() -> None:
    text = Text(*joined([b"a", "é".encode(), b""]))
    assert text == ["a", "é", ""]
    assert text[-2] == "é"
    assert list(text.slice(1, 3)) == ["é", ""]
    assert Bytes(*joined([b"a"])) != [b"b"]
    with pytest.raises(IndexError, match="record 3 of 3"):
        text[3]


def test_the_order_of_fields_in_a_row_does_not_depend_on_the_records_beside_it():
    rows = [{"b": 1, "a": 2}, {"a": 3, "c": 4, "b": 5}]
    together, alone = Block.from_rows(rows, samples_of(2)), Block.from_rows(rows[1:], samples_of(1))
    assert list(together.to_rows()[1]) == list(alone.to_rows()[0]) == ["a", "b", "c"]
