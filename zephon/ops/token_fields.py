"""The token sequences of a block, whatever kind of column holds them.

Packing needs, for each record, a one-dimensional run of token ids and perhaps a loss mask of the same length. A field
of tokens may come as `Ragged` (tokenised here, or Parquet lists), `Fixed` (all of one length) or `Objects` (lists of a
user's function, or fields that only some records have); each record is judged by its own values alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zephon.columns import HIDDEN, MISSING, AnyArray, Block, Column, Fixed, IntArray, Objects, Ragged, spans
from zephon.ops.base import Faults
from zephon.words import many

AUTO = ("input_ids", "tokens", "token_ids")
LOSS_MASK = "loss_mask"
SAMPLE_TOKENS = f"{HIDDEN}tokens"
"""How many tokens of a sequence each of its samples has: int64, as many a record as it has samples."""
_LARGEST = 2**31 - 1


class Documents(NamedTuple):
    """Token sequences end to end, from one block, without empty and bad ones."""

    tokens: AnyArray  # integers [m]
    offsets: IntArray  # [n + 1], from 0
    records: IntArray  # [n], the record of the block each came from
    mask: npt.NDArray[np.float32] | None  # [m], 1 where a document has none; None if no document has one
    masked: npt.NDArray[np.bool_]  # [n], which documents have one

    @property
    def lengths(self) -> IntArray:
        return self.offsets[1:] - self.offsets[:-1]

    def take(self, index: IntArray) -> Documents:
        starts, lengths = self.offsets[:-1][index], self.lengths[index]
        offsets = np.zeros(len(index) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        where = spans(starts, lengths, offsets)
        mask = None if self.mask is None else self.mask.take(where)
        return Documents(self.tokens.take(where), offsets, self.records[index], mask, self.masked[index])


def documents_of(block: Block, field: str, operator: str, faults: Faults) -> Documents:
    """The documents of a block. `field` is the tokens' field, or "auto" for the first of `AUTO` that a record has."""
    names = AUTO if field == "auto" else (field,)
    first = next((block.fields[name] for name in names if name in block.fields), None)
    tokens = None if first is None else _as_ragged(first)
    if tokens is None or not _fits(tokens.values):
        return _each(block, names, operator, faults)
    tokens = tokens.compact()
    mask = None
    if LOSS_MASK in block.fields and (mask := _as_weights(block.fields[LOSS_MASK], tokens.lengths)) is None:
        return _each(block, names, operator, faults)
    count = len(tokens)
    found = Documents(tokens.values, tokens.offsets, np.arange(count), mask, np.full(count, mask is not None))
    lengths = found.lengths
    return found if not count or lengths.min() > 0 else found.take(np.flatnonzero(lengths))


def _as_ragged(column: Column) -> Ragged | None:
    """The column as integers of varying length, if its kind alone says that it is that."""
    if isinstance(column, Ragged) and column.values.dtype.kind in "iu":
        return column
    if isinstance(column, Fixed) and column.values.ndim == 2 and column.values.dtype.kind in "iu":
        rows, width = column.values.shape
        return Ragged(np.ascontiguousarray(column.values).reshape(-1), np.arange(rows + 1, dtype=np.int64) * width)
    return None


def _as_weights(column: Column, lengths: IntArray) -> npt.NDArray[np.float32] | None:
    """The weights of all tokens, if the column's kind alone says that each record has one for each of its tokens."""
    if not isinstance(column, Ragged) or column.values.dtype.kind not in "iufb":
        return None
    if not np.array_equal(column.lengths, lengths):
        return None
    return column.compact().values.astype(np.float32, copy=False)


def _fits(values: AnyArray) -> bool:
    """Whether all ids are in 0.._LARGEST, and so fit int32."""
    if not values.size:
        return True
    if values.dtype.kind != "u" and values.min() < 0:
        return False
    return np.can_cast(values.dtype, np.int32) or bool(values.max() <= _LARGEST)


def _each(block: Block, names: tuple[str, ...], operator: str, faults: Faults) -> Documents:
    """Record by record: for columns of mixed kinds, loss masks, and to name what is wrong."""
    columns = [(name, block.fields[name].to_list()) for name in names if name in block.fields]
    masks = block.fields[LOSS_MASK].to_list() if LOSS_MASK in block.fields else [MISSING] * len(block)
    parts: list[AnyArray] = []
    mask_parts: list[npt.NDArray[np.float32]] = []
    records, masked = [], []
    for record in range(len(block)):
        name, value = next(
            ((n, values[record]) for n, values in columns if values[record] is not MISSING), (names[0], MISSING)
        )
        tokens = _ids(value)
        mask = None if masks[record] is MISSING or masks[record] is None else _weights(masks[record])
        wrong = _wrong(name, value, tokens, mask, masks[record])
        if value is MISSING:
            faults.lacks(block.sample_of(record), operator, names, "token ids")
        elif wrong:
            faults.bad(block.sample_of(record), operator, wrong)
        elif tokens is not None and len(tokens):
            parts.append(tokens)
            records.append(record)
            masked.append(mask is not None)
            mask_parts.append(np.ones(len(tokens), np.float32) if mask is None else mask)
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    return Documents(
        np.concatenate(parts) if parts else np.empty(0, np.int32),
        offsets,
        np.array(records, np.int64),
        np.concatenate(mask_parts) if any(masked) else None,
        np.array(masked, np.bool_),
    )


def _wrong(
    name: str,
    value: Any,
    tokens: AnyArray | None,
    mask: AnyArray | None,
    given_mask: Any,
) -> str | None:
    if tokens is None:
        expected = f"token ids (a list of integers from 0 to {_LARGEST})"
        return f"field {name!r}: expected {expected}, found {_described(value)}"
    if given_mask is MISSING or given_mask is None:
        return None
    if mask is None:
        return f"field {LOSS_MASK!r}: expected a list of numbers, found {_described(given_mask)}"
    if len(mask) != len(tokens):
        return f"field {LOSS_MASK!r}: {many(len(mask), 'value')} for {many(len(tokens), 'token')} in {name!r}"
    return None


def _described(value: Any) -> str:
    ids = value.reshape(-1).tolist() if isinstance(value, np.ndarray) else value
    for place, item in enumerate(ids if isinstance(ids, (list, tuple)) else ()):
        if isinstance(item, (int, np.integer)) and not isinstance(item, bool) and not 0 <= item <= _LARGEST:
            return f"{item} at place {place}"
    if isinstance(value, np.ndarray):
        return f"a {value.ndim}-dimensional array of {value.dtype}"
    if isinstance(value, (list, tuple)) and value:
        kinds = sorted({type(item).__name__ for item in value})
        return f"a {type(value).__name__} of {', '.join(kinds)}"
    return "null" if value is None else type(value).__name__


def _ids(value: Any) -> AnyArray | None:
    """A record's token ids as int32, or None if they are none."""
    found = _numbers(value, "iu", (int,))
    return found.astype(np.int32) if found is not None and _fits(found) else None


def _weights(value: Any) -> npt.NDArray[np.float32] | None:
    found = _numbers(value, "iufb", (int, float, bool))
    return None if found is None else found.astype(np.float32)


def _numbers(value: Any, kinds: str, types: tuple[type, ...]) -> AnyArray | None:
    if isinstance(value, np.ndarray):
        found: AnyArray = value
    elif isinstance(value, (list, tuple)):
        if not all(type(item) in types or isinstance(item, np.number) for item in value):
            return None
        try:
            found = np.array(value) if value else np.empty(0, np.int64)
        except (ValueError, OverflowError):
            return None
    else:
        return None
    if found.ndim != 1:
        return None
    return found if found.dtype.kind in kinds or not len(found) else None


def masks_column(mask: npt.NDArray[np.float32] | None, masked: npt.NDArray[np.bool_]) -> Column | None:
    """The `loss_mask` field of sequences, which only those have that hold a document with one."""
    if mask is None or not masked.any():
        return None
    if masked.all():
        return Fixed(mask)
    return Objects([row if has else MISSING for row, has in zip(mask, masked.tolist())])
