"""A block read back from shared memory is the block that was written, as views, or a ProtocolError."""

from __future__ import annotations

import gc
import importlib
import mmap
import pickle
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawn_records import packed_blocks, samples_of
from zephon.columns import Block, Bytes, Column, Fixed, Objects, Ragged, Text, canonical, column_of
from zephon.digests import block_digest
from zephon.errors import ProtocolError, RunFailed, SettingError
from zephon.ops.records import TAGS
from zephon.transport.layout import LyingBlock, measure, read

ALL_KINDS = Block(
    {
        "fixed": Fixed(np.arange(12, dtype=np.float32).reshape(3, 4)),
        "ragged": column_of([np.arange(2), np.arange(0), np.arange(3)]),
        "text": column_of(["a", "", "é"]),
        "bytes": column_of([b"", b"\x00", b"ab"]),
        "objects": Objects([None, {"k": 1}, [2]]),
    },
    samples_of(5),
    np.array([0, 1, 3, 5]),
)


def written(block: Block, spare: int = 0) -> Any:
    layout = measure(block)
    buffer = np.full(layout.nbytes + spare, 255, np.uint8)
    layout.write(buffer)
    assert (buffer[layout.nbytes :] == 255).all()
    return buffer


def arrays_of(column: Column) -> list[Any]:
    if isinstance(column, (Ragged, Bytes)):
        return [column.values, column.offsets]
    return [column.values] if isinstance(column, Fixed) else []


@given(packed_blocks(), st.integers(0, 200))
def test_a_block_read_is_the_block_written(block: Block, spare: int) -> None:
    back = read(written(block, spare))
    assert list(back.fields) == list(block.fields)
    assert [type(c) for c in back.fields.values() if not isinstance(c, Objects)] == [
        type(c) for c in block.fields.values() if not isinstance(c, Objects)
    ]
    assert len(back) == len(block)
    assert block_digest(back) == block_digest(block)
    assert np.array_equal(back.samples, block.samples)
    assert (back.sample_offsets is None) == (block.sample_offsets is None)
    assert block_digest(canonical(back)) == block_digest(canonical(block))


@given(packed_blocks(), st.permutations(["len", "fields", "samples", "sample_offsets", "pickle", "copy"]))
def test_a_block_read_part_by_part_in_any_order_is_the_block_read_at_once(block: Block, order: list[str]) -> None:
    buffer = written(block)
    whole, lying = read(buffer), LyingBlock(buffer)
    for part in order:
        if part == "len":
            assert len(lying) == len(whole)
        elif part in ("pickle", "copy"):
            again = lying.copy() if part == "copy" else pickle.loads(pickle.dumps(lying))
            assert type(again) is Block
            assert block_digest(again) == block_digest(whole)
        elif part == "fields":
            assert block_digest(lying) == block_digest(whole)
            assert lying.fields is lying.fields
        else:
            assert np.array_equal(getattr(lying, part), getattr(whole, part))


def test_a_corrupt_block_that_lies_there_is_a_protocol_error_when_it_is_touched_and_again() -> None:
    lying = LyingBlock(np.zeros(64, np.uint8))
    for _ in range(2):
        with pytest.raises(ProtocolError, match="no block begins here"):
            lying.fields
    with pytest.raises(AttributeError, match="nothing_such"):
        lying.nothing_such


@pytest.mark.parametrize("count", [1, 100])
def test_blocks_that_differ_in_one_length_are_each_read_as_they_were_written(count: int) -> None:
    for length in (5, 6, 5):
        block = Block({str(n): column_of([np.arange(n), np.arange(length)]) for n in range(count)}, samples_of(2))
        assert block_digest(read(written(block))) == block_digest(block)


@given(packed_blocks(min_size=1), st.data())
def test_a_slice_is_written_compact(block: Block, data: st.DataObject) -> None:
    low, high = sorted(data.draw(st.tuples(*[st.integers(0, len(block))] * 2)))
    part = read(written(block.slice(low, high)))
    assert block_digest(part) == block_digest(block.slice(low, high))
    for column in part.fields.values():
        if isinstance(column, (Ragged, Bytes)):
            assert column.offsets[0] == 0
            assert column.offsets[-1] == len(column.values)
    assert part.sample_offsets is None or part.sample_offsets[0] == 0


@given(st.data())
def test_a_corrupt_block_is_a_protocol_error_or_stays_within_its_bytes(data: st.DataObject) -> None:
    buffer = written(ALL_KINDS)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(buffer) - 1) | st.integers(0, 250))
        buffer[place] = data.draw(st.integers(0, 255))
    buffer = buffer[: data.draw(st.just(len(buffer)) | st.integers(0, len(buffer)))].copy()
    try:
        block = read(buffer)
    except ProtocolError:
        return
    low, high = np.lib.array_utils.byte_bounds(buffer) if hasattr(np.lib, "array_utils") else np.byte_bounds(buffer)
    for column in block.fields.values():
        assert len(column) == len(block)
        for array in arrays_of(column):
            if array.nbytes:
                start = array.__array_interface__["data"][0]
                assert low <= start
                assert start + array.nbytes <= high
        if isinstance(column, (Ragged, Bytes)):
            assert sum(map(len, column.slice(0, len(column)).to_list() if type(column) is not Text else [])) >= 0
            assert (np.diff(column.offsets) >= 0).all()


def forged(head: Any) -> Any:
    packed = msgpack.packb(head)
    prefix = b"ZB1\0" + len(packed).to_bytes(4, "little") + (1 << 12).to_bytes(8, "little")
    return np.frombuffer((prefix + packed).ljust(1 << 12, b"\0"), np.uint8)


@pytest.mark.parametrize(
    "head",
    [
        [1 << 60, 1 << 60, False, []],
        [-1, -1, False, []],
        [2, 3, False, []],
        [1, 1, True, []],
        [1, 1, False, [["a", 0, "<i8", [1, 1 << 62]]]],
        [1, 1, False, [["a", 0, "<i8", [1, -1]]]],
        [1, 1, False, [["a", 0, "<i8", [2]]]],
        [1, 1, False, [["a", 0, "|O", [1]]]],
        [1, 1, False, [["a", 0, "<i4,<i4", [1]]]],
        [1, 1, False, [["a", 0, "nonsense", [1]]]],
        [1, 1, False, [["a", 0, "<i8", []]]],
        [1, 1, False, [["a", 0, "<i8", [1] + [1] * 200]]],
        [1, 1, False, [["a", 1, "<i8", [5]]]],
        [1, 1, False, [["a", 7, "|u1", [0]]]],
        [1, 1, False, [["a", 0, "<i8", [1]], ["a", 0, "<i8", [1]]]],
        [1, 1, False, [[5, 0, "<i8", [1]]]],
        [1.0, 1, False, []],
        "text",
        7,
    ],
)
def test_a_forged_header_is_a_protocol_error(head: Any) -> None:
    with pytest.raises(ProtocolError):
        read(forged(head))


def test_bytes_that_are_no_block_are_a_protocol_error() -> None:
    for junk in (b"", b"ZB1", b"ZB1\0" + b"\xff" * 12, bytes(64)):
        with pytest.raises(ProtocolError):
            read(np.frombuffer(junk, np.uint8))


def test_arrays_are_aligned_views_that_keep_the_buffer_alive() -> None:
    layout = measure(ALL_KINDS)
    memory = mmap.mmap(-1, 1 << 16)
    buffer = np.frombuffer(memoryview(memory)[4096:], np.uint8)
    layout.write(buffer)
    block = read(buffer)
    died: list[bool] = []
    weakref.finalize(buffer, died.append, True)
    start = buffer.__array_interface__["data"][0]
    views = [a for c in block.fields.values() for a in arrays_of(c)] + [block.samples, block.sample_offsets]
    for view in views:
        assert np.shares_memory(view, buffer)
        assert (view.__array_interface__["data"][0] - start) % 64 == 0
    objects = block.fields["objects"]
    last = block.fields["fixed"].slice(1, 2).values[0, 1:]  # type: ignore[attr-defined]
    del buffer, block, views, view
    gc.collect()
    assert not died
    del last
    assert not died
    assert objects.to_list() == [None, {"k": 1}, [2]]
    del objects
    assert died


def test_views_of_read_only_memory_are_read_only() -> None:
    buffer = written(ALL_KINDS)
    assert read(buffer).fields["fixed"].values.flags.writeable  # type: ignore[attr-defined]
    buffer.flags.writeable = False
    block = read(buffer)
    assert not any(a.flags.writeable for c in block.fields.values() for a in arrays_of(c))


def test_objects_stay_a_pickle_until_touched_and_changes_in_place_are_written_on() -> None:
    block = read(written(ALL_KINDS))
    objects = block.fields["objects"]
    assert read(written(block)).fields["objects"].to_list() == [None, {"k": 1}, [2]]
    objects.to_list()[1]["k"] = 5
    assert read(written(block)).fields["objects"].to_list()[1] == {"k": 5}
    assert objects.copy().to_list()[1] == {"k": 5}


def test_objects_that_cannot_be_rebuilt_are_an_error_that_names_the_field() -> None:
    buffer = written(Block({"odd": Objects([{}])}, samples_of(1)))
    buffer[-3:] = 255
    block = read(buffer)
    with pytest.raises(ProtocolError, match="field 'odd'"):
        block.fields["odd"].to_list()


def test_what_cannot_be_laid_out_is_refused_by_name() -> None:
    with pytest.raises(RunFailed, match=r"'f' of the record made from .* \(1, 1, 1\) holds a function"):
        measure(Block({"f": Objects([1, lambda: 0])}, samples_of(2)))
    with pytest.raises(SettingError, match="names of fields are str"):
        measure(Block.from_rows([{5: 1}], samples_of(1)))  # type: ignore[dict-item]
    for name in ("a", np.str_("a")):  # equal ones, the first of which may be laid out
        with pytest.raises(SettingError, match="names of fields are str") if type(name) is not str else nullcontext():
            measure(Block.from_rows([{name: 1}], samples_of(1)))
    with pytest.raises(SettingError, match="dtype object"):
        measure(Block({"f": Fixed(np.array([{}]))}, samples_of(1)))
    with pytest.raises(ValueError, match="does not fit"):
        measure(ALL_KINDS).write(np.zeros(10, np.uint8))
    with pytest.raises(ValueError, match="contiguous"):
        read(np.zeros(200, np.uint8)[::2])


@pytest.mark.parametrize(("name", "shown"), [("box", "field 'box'"), (TAGS, "the tags of the records' metas")])
def test_objects_that_cannot_be_rebuilt_here_name_their_field_and_say_what_to_do(
    name: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "boxes_of_the_recipe.py").write_text("class Box: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    box = importlib.import_module("boxes_of_the_recipe").Box()
    layout = measure(Block({name: Objects([box])}, np.zeros((1, 3), np.int64)))
    buffer = np.zeros(layout.nbytes, np.uint8)
    layout.write(buffer)
    column = read(buffer).fields[name]
    sys.modules.pop("boxes_of_the_recipe")
    monkeypatch.undo()
    expected = f"^{shown}: its Python objects cannot be rebuilt.*boxes_of_the_recipe.*PYTHONPATH"
    with pytest.raises(ProtocolError, match=expected):
        column.to_list()
