"""Positions that are made when they are asked for are the same as those that lie there, whatever was done before."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.columns import Block, Column, Fixed, Ragged, canonical
from zephon.digests import column_digest
from zephon.errors import ProtocolError
from zephon.ops.held_records import HeldRecords
from zephon.positions import Positions, positions_in, restarting
from zephon.transport.layout import measure, read


def through_shared_memory(column: Column) -> Column:
    layout = measure(Block({"f": column}, np.zeros((len(column), 3), np.int64)))
    buffer = np.zeros(layout.nbytes, np.uint8)
    layout.write(buffer)
    return read(buffer).fields["f"]


@st.composite
def columns(draw: st.DrawFn, width: int) -> tuple[Positions, Fixed]:
    """Positions, and the values that they stand for."""
    runs: list[int] = []
    for _ in range(draw(st.integers(1, 5))):
        cuts = sorted(draw(st.lists(st.integers(0, width), max_size=4)))
        runs += np.diff([0, *cuts, width]).tolist()  # some of them empty
    lengths = np.array(runs, np.int64)
    return positions_in(lengths, width), Fixed(
        np.concatenate([np.arange(n, dtype=np.int32) for n in runs]).reshape(-1, width)
    )


STEPS = ("take", "slice", "copy", "join", "join with values", "touch", "change", "pickle", "share")


@given(st.data())
def test_positions_do_as_their_values_would(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 9))
    lazy: Column
    solid: Column
    lazy, solid = data.draw(columns(width))
    for step in data.draw(st.lists(st.sampled_from(STEPS), max_size=6)):
        count = len(solid)
        if step == "take":
            index = np.array(data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=6)), np.int64)
            lazy, solid = lazy.take(index), solid.take(index)
        elif step == "slice":
            low = data.draw(st.integers(0, count - 1))
            high = data.draw(st.integers(low + 1, count))
            lazy, solid = lazy.slice(low, high), solid.slice(low, high)
        elif step == "copy":
            lazy, solid = lazy.copy(), solid.copy()
        elif step.startswith("join"):
            other, values = data.draw(columns(width))
            lazy = _end_to_end(lazy, values if "values" in step else other)
            solid = _end_to_end(solid, values)
        elif step == "touch":
            assert np.array_equal(_values(lazy), _values(solid))
        elif step == "change":
            lazy, solid = lazy.copy(), solid.copy()
            _values(lazy)[-1, 0] = _values(solid)[-1, 0] = 77
        else:
            lazy = pickle.loads(pickle.dumps(lazy)) if step == "pickle" else through_shared_memory(lazy)
        assert isinstance(lazy, Fixed)
        assert (lazy.shape, len(lazy)) == (_values(solid).shape, len(solid))
    assert _values(lazy).dtype == np.int32
    assert np.array_equal(_values(lazy), _values(solid))
    assert column_digest(lazy) == column_digest(solid)
    assert np.array_equal(np.array(lazy.to_list()), np.array(solid.to_list()))


def _values(column: Column) -> Any:
    assert isinstance(column, Fixed)
    return column.values


def _end_to_end(first: Column, second: Column) -> Column:
    block = Block.concat([Block({"f": c}, np.zeros((len(c), 3), np.int64)) for c in (first, second)])
    return block.fields["f"]


def test_nothing_on_the_way_to_a_rank_makes_them() -> None:
    made = positions_in(np.array([3, 5, 8, 1, 7]), 8)
    block = Block.concat([Block({"positions": made}, np.zeros((3, 3), np.int64)) for _ in range(2)])
    arrived = through_shared_memory(canonical(block.slice(1, 6)).copy().take(np.array([0, 4])).fields["positions"])
    assert isinstance(arrived, Positions)
    assert not made.touched
    assert not arrived.touched
    assert arrived.nbytes < arrived.values.nbytes
    assert arrived.values.tolist() == [list(range(8)), [0, *range(7)]]


def test_nor_does_an_operator_that_holds_records_and_gives_them_out_in_another_order() -> None:
    held = HeldRecords()
    for lengths in ([3, 5, 8, 1, 7], [2, 6, 4, 4]):
        made = positions_in(np.array(lengths), 8)
        held.add(Block({"positions": made}, np.zeros((len(made), 3), np.int64)))
    order = np.array([4, 0, 2, 3])
    out = held.take(order).fields["positions"]
    assert isinstance(out, Positions)
    assert not out.touched
    solid = np.concatenate([positions_in(np.array(each), 8).values for each in ([3, 5, 8, 1, 7], [2, 6, 4, 4])])
    assert out.values.tolist() == solid[order].tolist()


@pytest.mark.parametrize("runs", [[4, 3], [9, -1], [5, 4], [0, 0], [3, 5]])
def test_runs_that_do_not_fill_their_records_are_no_positions(runs: list[int]) -> None:
    corrupt = Positions(Ragged(np.array(runs, np.int32), np.array([0, 1, 2])), 4)
    with pytest.raises(ProtocolError, match="do not fill 2 records of 4"):
        assert corrupt.values.size


def test_positions_are_read_only_where_their_runs_lie_in_read_only_memory() -> None:
    column = positions_in(np.array([2, 3, 5]), 5)
    layout = measure(Block({"f": column}, np.zeros((2, 3), np.int64)))
    buffer = np.zeros(layout.nbytes, np.uint8)
    layout.write(buffer)
    for writable in (True, False):
        buffer.flags.writeable = writable
        there = read(buffer).fields["f"]
        assert isinstance(there, Positions)
        assert there.slice(1, 2).values.flags.writeable == writable  # type: ignore[attr-defined]
        assert there.values.flags.writeable == writable
        assert there.values.tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]]
        assert there.copy().values.flags.writeable
        assert there.take(np.array([1])).values.flags.writeable


def test_there_are_positions_of_no_record() -> None:
    empty = positions_in(np.empty(0, np.int64), 8)
    assert (len(empty), empty.values.shape) == (0, (0, 8))
    assert restarting(np.empty(0, np.int64)).tolist() == []
