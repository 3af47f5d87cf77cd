"""Bytes to text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.ops.cuts import cuts_of
from zephon.columns import Block, Text
from zephon.errors import RecordError
from zephon.ops.base import Faults
from zephon.ops.decode_text import DecodeText


def block_of(values: list[Any]) -> Block:
    samples = np.array([(0, 0, i) for i in range(len(values))], np.int64).reshape(-1, 3)
    return Block.from_rows([{"id": i, "raw": v} for i, v in enumerate(values)], samples)


def is_text(value: Any) -> bool:
    try:
        return bool(value.decode("utf-8") or True)
    except UnicodeDecodeError:
        return False


pieces = st.binary(max_size=4) | st.text(max_size=6).map(lambda text: text.encode("utf-8", "ignore"))
mixed = st.lists(pieces, max_size=12) | st.lists(pieces | st.text(max_size=3) | st.integers(0, 9), max_size=12)


@given(mixed, st.lists(st.integers(0, 12), max_size=4))
def test_each_record_is_judged_by_its_own_bytes(values: list[Any], cuts: list[int]) -> None:
    block, faults = block_of(values), Faults("skip")
    rows = [row for part in cuts_of(block, cuts) for row in DecodeText().process(part, faults).to_rows()]
    good = [(i, v) for i, v in enumerate(values) if type(v) is not bytes or is_text(v)]
    assert rows == [{"id": i, "raw": v.decode() if type(v) is bytes else v} for i, v in good]
    assert faults.skipped == len(values) - len(good)


def test_a_character_cut_in_two_by_records_is_not_valid_in_either() -> None:
    faults = Faults("skip")
    assert len(DecodeText().process(block_of(["é".encode()[:1], "é".encode()[1:], b"ok"]), faults)) == 1
    assert faults.skipped == 2


def test_valid_bytes_keep_their_memory() -> None:
    block = block_of([b"a", b"bc"])
    column = DecodeText().process(block, Faults()).fields["raw"]
    assert type(column) is Text
    assert np.shares_memory(column.values, block.fields["raw"].values)  # type: ignore[attr-defined]


def test_invalid_bytes_are_named_by_field_and_position() -> None:
    with pytest.raises(RecordError, match="field 'raw': not valid UTF-8 at byte 2 of 4") as error:
        DecodeText().process(block_of([b"fine", b"ab\xff\xfe"]), Faults())
    assert error.value.row == 1
