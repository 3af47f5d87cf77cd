"""`map_transform`: a user's function on each record's payload.

The function gets a dict of its own, with lists, dicts and arrays of its own too, so that changing them in place cannot
reach another record or the data source. What it does is part of the run's identity (`zephon.function_digest`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from zephon.columns import Block, Objects, Text
from zephon.errors import SettingError
from zephon.function_digest import digest_of
from zephon.ops.base import Faults, Stateless


class MapTransform(Stateless):
    """`fn(payload) -> payload`, or None to drop the record."""

    name = "map_transform"
    changes_counts = True

    def __init__(self, fn: Callable[[dict[str, Any]], dict[str, Any] | None], *, drop_none: bool = True) -> None:
        if not callable(fn):
            raise SettingError(f"map_transform: fn must be a function of one record's dict, not {type(fn).__name__}")
        self.fn, self.drop_none = fn, bool(drop_none)

    def describe(self) -> dict[str, Any]:
        return {"fn": digest_of(self.fn), "drop_none": self.drop_none}

    def requires(self, downstream: frozenset[str] | None) -> frozenset[str] | None:
        return None

    def process(self, block: Block, faults: Faults) -> Block:
        rows, kept = [], []
        for record, payload in enumerate(_own_rows(block)):
            try:
                result = self.fn(payload)
                wrong = self._wrong(result)
            except Exception as error:
                faults.bad(block.sample_of(record), self.name, error)
                continue
            if wrong:
                faults.bad(block.sample_of(record), self.name, wrong)
            elif result is not None:
                rows.append(result)
                kept.append(record)
        of = block.select(()).take(np.array(kept, np.int64))
        made = Block.from_rows(rows, of.samples, of.sample_offsets)
        return made.with_fields({**made.fields, **of.fields})

    def _wrong(self, result: Any) -> str | None:
        """What is wrong with the function's result, if anything."""
        if result is None:
            return None if self.drop_none else "the function returned None, and drop_none=False keeps every record"
        if not isinstance(result, dict):
            return f"the function returned {type(result).__name__}, expected a dict or None"
        for key in result:
            if type(key) is not str:
                return f"the function returned a dict with the key {key!r} of type {type(key).__name__}, expected str"
        return None


def _own_rows(block: Block) -> list[dict[str, Any]]:
    """One dict a record, whose mutable values belong to no one else."""
    fields = {
        name: Objects([_own(value) for value in column.values])
        if isinstance(column, Objects)
        else column
        if isinstance(column, Text)
        else column.copy()
        for name, column in block.fields.items()
    }
    return block.with_fields(dict(fields)).to_rows()


def _own(value: Any) -> Any:
    if type(value) is list:
        return [_own(item) for item in value]
    if type(value) is dict:
        return {key: _own(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (set, bytearray):
        return value.copy()
    return value
