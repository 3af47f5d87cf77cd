"""`map_transform`: a user's function on each record's payload.

The function gets a dict of its own, and what it returns is copied where it could change later, so that neither the data
source nor another record can be reached through either. What it does is part of the run's identity
(`zephon.function_digest`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from zephon.columns import Block
from zephon.errors import SettingError
from zephon.function_digest import digest_of
from zephon.ops.base import Faults, Stateless
from zephon.ops.interrupts import is_interrupt
from zephon.ops.records import copied, fields_of, own, own_rows, wrong_payload
from zephon.randomness import Draws, drawing


class MapTransform(Stateless):
    """`fn(payload) -> payload`, or None to drop the record."""

    name = "map_transform"
    changes_counts = True
    users_code = True

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
        block, payloads = copied(own_rows, block, self.name, faults)
        with drawing(Draws(self, faults.scope, block)) as draws:
            for record, payload in enumerate(payloads):
                draws.turn_to(record)
                try:
                    result = self.fn(payload)
                    wrong = self._wrong(result)
                    mine = {} if wrong or result is None else own(dict(result))
                except BaseException as error:
                    if is_interrupt(error):
                        raise
                    faults.bad(block.sample_of(record), self.name, error, partial(fields_of, block, record))
                    continue
                if wrong:
                    faults.bad(block.sample_of(record), self.name, wrong)
                elif result is not None:
                    rows.append(mine)
                    kept.append(record)
        of = block.select(()).take(np.array(kept, np.int64))
        made = Block.from_rows(rows, of.samples, of.sample_offsets)
        return made.with_fields({**made.fields, **of.fields})

    def _wrong(self, result: Any) -> str | None:
        """What is wrong with the function's result, if anything."""
        if result is None:
            return None if self.drop_none else "the function returned None, and drop_none=False keeps every record"
        return wrong_payload(result, "a dict or None")
