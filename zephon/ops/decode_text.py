"""`decode_text`: every field of bytes becomes text.

A field held as `Bytes` keeps its memory and only changes its kind, once it is known to be valid UTF-8. Bytes that are
not make the record a bad one, named by field and position.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zephon.columns import Block, Bytes, Column, Objects, Text, column_of
from zephon.ops.base import Faults, Stateless


class DecodeText(Stateless):
    """Bytes to `str`, field by field; all other values pass."""

    name = "decode_text"

    def describe(self) -> dict[str, Any]:
        return {}

    def process(self, block: Block, faults: Faults) -> Block:
        bad: dict[int, str] = {}
        fields = {name: _decoded(name, column, bad) for name, column in block.fields.items()}
        if not bad:
            return block.with_fields(fields)
        for record in sorted(bad):
            faults.bad(block.sample_of(record), self.name, bad[record])
        kept = np.setdiff1d(np.arange(len(block)), np.fromiter(bad, np.int64))
        return self.process(block.take(kept), faults)


def _decoded(name: str, column: Column, bad: dict[int, str]) -> Column:
    """The column as text. Adds records that are not valid UTF-8 to `bad`, with the reason."""
    if type(column) is Bytes:
        if not _is_valid(column):
            for record, value in enumerate(column.to_list()):
                _text(name, record, value, bad)
        return Text(column.values, column.offsets)
    if isinstance(column, Objects) and any(type(value) is bytes for value in column.values):
        return column_of([_text(name, i, v, bad) if type(v) is bytes else v for i, v in enumerate(column.values)])
    return column


def _is_valid(column: Bytes) -> bool:
    """Whether every record is valid UTF-8: all of them end to end are, and none begins inside a character."""
    data = column.compact()
    try:
        data.values.tobytes().decode("utf-8")
    except UnicodeDecodeError:
        return False
    starts = data.offsets[:-1]
    starts = starts[starts < len(data.values)]
    return not ((data.values[starts] & 0xC0) == 0x80).any()


def _text(name: str, record: int, value: bytes, bad: dict[int, str]) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        bad.setdefault(record, f"field {name!r}: not valid UTF-8 at byte {error.start} of {len(value)}")
        return ""
