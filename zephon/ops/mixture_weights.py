"""What each record of a block weighs, and for which datasets.

A record that is one sample weighs for its dataset alone. One that was made of several (after packing) weighs for each
dataset by what it holds of it: by its samples, or by their tokens where packing says how many each has in it, else in
equal parts for each sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from zephon.columns import MISSING, Block, Column, Fixed, IntArray, Ragged
from zephon.ops.base import Faults, Operator
from zephon.ops.fair_order import Charge
from zephon.ops.record_numbers import numbers_of
from zephon.ops.token_fields import AUTO, SAMPLE_TOKENS

FloatArray = npt.NDArray[np.float64]
SAMPLES, TOKENS = "samples", "tokens"
_LARGEST = 2.0**62
WeightBy = str | Callable[[dict[str, Any]], float]
"""`SAMPLES`, `TOKENS` (samples where a record has no tokens), a field with a "field:" before it, or a function."""


def weighed(
    block: Block, by: WeightBy, shares: Sequence[float], operator: Operator, faults: Faults
) -> tuple[IntArray, list[int], list[Charge]]:
    """`(records that have a weight, the dataset that each waits for, its charge)`; the others are bad ones."""
    weights, parts = _weights(block, by, operator, faults)
    good = np.flatnonzero(np.isfinite(weights))
    if block.sample_offsets is None:
        datasets = block.samples[:, 0]
        if len(good) < len(block):
            datasets, weights = datasets[good], weights[good]
        return good, datasets.tolist(), weights.tolist()
    per_share = np.array([1 / share if share else np.inf for share in shares])
    owners: list[int] = []
    charges: list[Charge] = []
    bounds = block.sample_offsets
    for record in good.tolist():
        low, high = int(bounds[record]), int(bounds[record + 1])
        if low == high:
            owners.append(0)
            charges.append(0.0)
            continue
        datasets, of = np.unique(block.samples[low:high, 0], return_inverse=True)
        if parts is not None:
            held = np.bincount(of, parts[low - int(bounds[0]) : high - int(bounds[0])], len(datasets))
        else:
            held = np.bincount(of, minlength=len(datasets)) * (weights[record] / (high - low))
        owners.append(int(datasets[np.argmax(held * per_share[datasets])]))
        pairs = tuple(zip(datasets.tolist(), held.tolist()))
        charges.append(pairs[0][1] if len(pairs) == 1 else pairs)
    return good, owners, charges


def _weights(block: Block, by: WeightBy, operator: Operator, faults: Faults) -> tuple[FloatArray, FloatArray | None]:
    """`(weight of each record, nan for bad ones, weight of each sample if that is known)`."""
    offsets = block.sample_offsets
    samples = np.ones(len(block)) if offsets is None else np.diff(offsets).astype(np.float64)
    if by == SAMPLES:
        return samples, None
    if by == TOKENS:
        if offsets is not None and SAMPLE_TOKENS in block.fields:
            each = block.fields[SAMPLE_TOKENS]
            if isinstance(each, Ragged):
                parts = each.compact().values.astype(np.float64)
                return np.add.reduceat(np.append(parts, 0.0), each.offsets[:-1] - each.offsets[0]), parts
        return _tokens(block, samples), None
    if isinstance(by, str):
        return _of_field(block, by.removeprefix("field:"), operator, faults), None
    wanted = "a weight, a finite number from 0"
    numbers = numbers_of(by, block, operator, faults, wanted, whole=False)
    return np.array([np.nan if number is None else number for number in numbers], np.float64), None


def _tokens(block: Block, samples: FloatArray) -> FloatArray:
    """The tokens of each record, by the first field that it has of them, or its samples where it has none."""
    found = np.full(len(block), np.nan)
    for name in ("sequence_length", *AUTO):
        if name in block.fields:
            found = np.where(np.isnan(found), _amounts(block.fields[name], numbers=name not in AUTO), found)
    return np.where(np.isnan(found), samples, found)


def _of_field(block: Block, field: str, operator: Operator, faults: Faults) -> FloatArray:
    """A field's number, or the length of its value; nan for a record that has neither, which is a bad one."""
    column = block.fields.get(field)
    found = np.full(len(block), np.nan) if column is None else _amounts(column, numbers=True)
    for record in np.flatnonzero(np.isnan(found)).tolist():
        value = MISSING if column is None else column.slice(record, record + 1).to_list()[0]
        if value is MISSING:
            faults.lacks(block.sample_of(record), operator.name, (field,), "a weight")
        else:
            cause = f"field {field!r}: expected a number from 0, or a value with a length, found {value!r:.80}"
            faults.bad(block.sample_of(record), operator.name, cause)
    return found


def _amounts(column: Column, *, numbers: bool) -> FloatArray:
    """How long each value is, or with `numbers` what number it is; nan for one that is neither."""
    if isinstance(column, Ragged):
        return column.lengths.astype(np.float64)
    if isinstance(column, Fixed) and column.values.ndim > 1:
        return np.full(len(column), float(column.values.shape[1]))
    if isinstance(column, Fixed) and column.values.dtype.kind in "iuf" and numbers:
        found = column.values.astype(np.float64)
        return np.where((found >= 0) & (found < _LARGEST), found, np.nan)
    return np.array([_amount(value, numbers) for value in column.to_list()], np.float64)


def _amount(value: Any, numbers: bool) -> float:
    if isinstance(value, (int, float, np.number)) and not isinstance(value, bool):
        return float(value) if numbers and 0 <= value < _LARGEST else np.nan
    return float(len(value)) if hasattr(value, "__len__") else np.nan
