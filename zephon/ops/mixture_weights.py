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
    """The tokens of each record, or its samples where it has none."""
    for name in ("sequence_length", *AUTO):
        column = block.fields.get(name)
        if column is None:
            continue
        if name == "sequence_length":
            if isinstance(column, Fixed) and column.values.ndim == 1 and column.values.dtype.kind in "iu":
                return column.values.astype(np.float64)
            continue
        lengths = _lengths(column)
        if lengths is not None:
            return np.where(np.isnan(lengths), samples, lengths)
    return samples


def _lengths(column: Column) -> FloatArray | None:
    """How long each value is; nan for one that has no length. None if none has."""
    if isinstance(column, Ragged):
        return column.lengths.astype(np.float64)
    if isinstance(column, Fixed):
        return np.full(len(column), float(column.values.shape[1])) if column.values.ndim > 1 else None
    values = column.to_list()
    return np.array([len(v) if hasattr(v, "__len__") else np.nan for v in values], np.float64)


def _of_field(block: Block, field: str, operator: Operator, faults: Faults) -> FloatArray:
    """A field's number, or the length of its value."""
    column = block.fields.get(field)
    if isinstance(column, Fixed) and column.values.ndim == 1 and column.values.dtype.kind in "iuf":
        found = column.values.astype(np.float64)
        found[~(np.isfinite(found) & (found >= 0))] = np.nan
    elif isinstance(column, (Ragged, Fixed)) and (lengths := _lengths(column)) is not None:
        return lengths
    else:
        values = [MISSING] * len(block) if column is None else column.to_list()
        found = np.array([_number(value) for value in values], np.float64)
    for record in np.flatnonzero(np.isnan(found)).tolist():
        value = MISSING if column is None else column.slice(record, record + 1).to_list()[0]
        if value is MISSING:
            faults.lacks(block.sample_of(record), operator.name, (field,), "a weight")
        else:
            cause = f"field {field!r}: expected a number from 0, or a value with a length, found {value!r:.80}"
            faults.bad(block.sample_of(record), operator.name, cause)
    return found


def _number(value: Any) -> float:
    if isinstance(value, (int, float, np.number)) and not isinstance(value, bool):
        return float(value) if 0 <= value < 2**62 else np.nan
    return float(len(value)) if hasattr(value, "__len__") else np.nan
