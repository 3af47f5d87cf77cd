"""A number for each record from a user's function: its length, or its weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from zephon.columns import Block
from zephon.ops.base import Faults, Operator
from zephon.ops.interrupts import is_interrupt
from zephon.ops.records import NestedTooDeep, fields_of, own_rows, rows_apart
from zephon.randomness import Draws, drawing


def numbers_of(
    fn: Callable[[dict[str, Any]], Any], block: Block, operator: Operator, faults: Faults, wanted: str, *, whole: bool
) -> list[Any]:
    """`fn(payload)` of each record: a number from 0 on (a whole one, with `whole`), or None for a record that is bad
    because it is none or the function raised. `wanted` says in words what was expected.
    """
    numbers: list[Any] = []
    payloads: Iterable[Any]
    try:
        payloads = own_rows(block)
    except NestedTooDeep:
        payloads = rows_apart(block)
    with drawing(Draws(operator, faults.scope, block)) as draws:
        for record, payload in enumerate(payloads):
            draws.turn_to(record)
            try:
                if isinstance(payload, NestedTooDeep):
                    raise payload
                found = fn(payload)
                number: Any = found.item() if isinstance(found, np.generic) else found
                fits = (
                    isinstance(number, int if whole else (int, float))
                    and not isinstance(number, bool)
                    and 0 <= number < 2**62
                )
                cause: str | BaseException = "" if fits else f"the function returned {found!r:.80}, expected {wanted}"
            except BaseException as error:
                if is_interrupt(error):
                    raise
                number, cause = None, error
            if cause:
                faults.bad(block.sample_of(record), operator.name, cause, partial(fields_of, block, record))
            numbers.append(None if cause else number)
    return numbers
