"""Training arrays from a batch of tokens: inputs, labels, positions, masks and boundaries of documents.

Everything is arithmetic on one rectangle `[records, width]`. Packed rows are that rectangle; records of varying length
are padded on the right with 0. A token is padding beyond its record's length, beyond its row's `sequence_length` (int
`[records]`), or where `attention_mask` is 0.

With labels every row is used once: inputs are its tokens but the last, labels its tokens but the first, so rows packed
to sequence length + 1 give inputs of the sequence length. A label is `ignore_index` where its token is padding, where
`loss_mask` is 0 for it and, with `eos_mask_loss`, where its input is the end token. Otherwise the first token of a
packed document is the label of the last token of the one before: to leave out such predictions, end documents with the
end token and ask for `eos_mask_loss`.

Results are always memory of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from zephon.columns import AnyArray, Block, Column, Fixed, Objects, Ragged
from zephon.errors import SettingError

BoolArray = npt.NDArray[np.bool_]

TOKEN_FIELDS = ("input_ids", "tokens", "token_ids")
"""Where `tokens_field="auto"` looks, in this order."""
_OUTPUTS = (
    "input_ids", "labels", "positions", "loss_mask", "padding_mask", "cu_seqlens", "max_seqlen", "num_valid_tokens",
)  # fmt: skip
TORCH_DTYPES = tuple(map(np.dtype, ("?", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16")))
"""What torch has full support for; arrays of other types stay numpy."""


def to_training(
    batch: Block,
    *,
    output: str | None = None,
    return_labels: bool = False,
    dtype: Any = "auto",
    ignore_index: int = -100,
    rename_fields: Mapping[str, str] | None = None,
    exclude_fields: Collection[str] = (),
    extra_fields: Sequence[str] = (),
    flatten: bool = False,
    return_num_valid_tokens: bool = False,
    return_loss_mask: bool = False,
    return_cu_seqlens: bool = False,
    return_padding_mask: bool = False,
    eos_mask_loss: bool = False,
    eos_token_id: int | None = None,
    position_mode: str = "preserve",
    tokens_field: str = "auto",
) -> dict[str, Any]:
    """A dict of arrays `[records, width]`, or with `flatten` `[tokens]`.

    - `input_ids`, and with `return_labels` `labels`, in `dtype` (a name or a dtype of numpy or torch; `"auto"`: int64).
    - `positions` in `dtype`: the field `positions` as packing made it, or with `position_mode="sequence"`, and where
      there is no such field, 0, 1, 2, … in each row.
    - `loss_mask` (float32): the weight of each label: the field `loss_mask`, or 1, and 0 where the label is ignored.
      Without labels, the weight of each token as the one to be predicted.
    - `padding_mask` (bool): True at padding, as torch's `key_padding_mask` has it.
    - `cu_seqlens` (int32 `[segments + 1]`) and `max_seqlen` (int): where segments begin among all input tokens end to
      end, from 0 to their number, strictly increasing. A segment begins with each row, where the field `positions` is
      0, and with a row's padding, which is one segment.
    - `num_valid_tokens` (int): labels that are not `ignore_index`; without labels, tokens that are not padding.

    `flatten` lays rows end to end: packed rows whole, records of varying length without padding (and, with labels,
    without the last token of each, which has nothing to predict). `extra_fields` are passed through whole, as arrays
    where they are numbers. `exclude_fields` and then `rename_fields` {from: to} apply to the names of the result.

    `output`: `"torch"`, `"numpy"`, or None for torch if it is already loaded. Raises `SettingError`.
    """
    if position_mode not in ("preserve", "sequence"):
        raise SettingError(f"position_mode is {position_mode!r}: it is 'preserve' or 'sequence'")
    if eos_mask_loss and eos_token_id is None:
        raise SettingError("eos_mask_loss=True needs eos_token_id, the number of the token that ends a document")
    if eos_token_id is not None and not (_is_whole(eos_token_id) and 0 <= eos_token_id < 2**31):
        raise SettingError(f"eos_token_id is {eos_token_id!r}: it is the token's number, from 0 to 2147483647")
    if isinstance(extra_fields, str):
        raise SettingError(f"extra_fields is {extra_fields!r}: it is a list of names, such as [{extra_fields!r}]")
    integer = _integer(dtype)
    rows = _Rows(batch, tokens_field)
    records, length = rows.tokens.shape
    width = max(length - 1, 0) if return_labels else length
    targets = slice(1, None) if return_labels else slice(None)

    padding = rows.padding[:, :width]
    supervised = rows.supervised(eos_token_id if eos_mask_loss else None)
    kept = None
    if flatten and rows.lengths is not None:
        kept = np.arange(width) < (rows.lengths - return_labels)[:, None]

    def shaped(array: AnyArray) -> AnyArray:
        return array if not flatten else array.reshape(-1) if kept is None else array[kept]

    out: dict[str, Any] = {"input_ids": shaped(rows.tokens[:, :width].astype(integer))}
    valid = ~padding if kept is None else kept & ~padding
    if return_labels:
        valid = supervised[:, targets]
        labels = np.where(valid, rows.tokens[:, targets], np.array(ignore_index, integer)).astype(integer)
        out["labels"] = shaped(labels)
        valid = labels != ignore_index
    positions = rows.companion("positions") if position_mode == "preserve" or return_cu_seqlens else None
    if position_mode == "sequence" or positions is None:
        out["positions"] = shaped(np.tile(np.arange(width, dtype=integer), (records, 1)))
    else:
        out["positions"] = shaped(positions[:, :width].astype(integer))
    if return_loss_mask:
        weights = rows.companion("loss_mask")
        mask = supervised.astype(np.float32) if weights is None else np.where(supervised, weights, 0).astype(np.float32)
        out["loss_mask"] = shaped(mask[:, targets])
    if return_padding_mask:
        out["padding_mask"] = shaped(padding.copy())
    if return_cu_seqlens:
        bounds = _boundaries(shaped(_starts(positions, padding)), out["input_ids"].size)
        out["cu_seqlens"] = bounds
        out["max_seqlen"] = int(np.diff(bounds).max(initial=0))
    if return_num_valid_tokens:
        out["num_valid_tokens"] = int(np.count_nonzero(valid))

    as_torch = output == "torch" or (output is None and "torch" in sys.modules)
    arrays = {n: _own(v, as_torch) for n, v in out.items()}
    arrays.update({name: _passed_on(batch, name, as_torch) for name in extra_fields})
    return _named(arrays, exclude_fields, rename_fields or {}, (*_OUTPUTS, *extra_fields))


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


class _Rows:
    """The tokens of a batch as a rectangle, and what its other fields say of them."""

    def __init__(self, batch: Block, tokens_field: str) -> None:
        self._batch = batch
        self.field = _tokens_field(batch, tokens_field)
        self.lengths: npt.NDArray[np.int64] | None = None
        """Lengths of the records, where they vary (int64 `[records]`)."""
        column = batch.fields.get(self.field)
        if not len(batch):
            whole = isinstance(column, Fixed) and column.values.ndim == 2
            self.tokens = column.values if whole and isinstance(column, Fixed) else np.empty((0, 0), np.int64)
            self.padding: BoolArray = np.zeros(self.tokens.shape, np.bool_)
            return
        if isinstance(column, Ragged) and column.values.dtype.kind in "iu":
            self.lengths = column.lengths
            self.padding = np.arange(int(self.lengths.max())) >= self.lengths[:, None]
            self.tokens = self._rectangle(column)
        elif isinstance(column, Fixed) and column.values.ndim == 2 and column.values.dtype.kind in "iu":
            self.tokens = column.values
            self.padding = self._known_padding()
        else:
            raise SettingError(
                f"field {self.field!r} does not hold one list of whole numbers a record, so it cannot be tokens "
                f"({_described(column)}). Name the field that does with tokens_field."
            )
        mask = self._like_tokens("attention_mask")
        if mask is not None:
            self.padding = self.padding | (mask == 0)

    def companion(self, name: str) -> AnyArray | None:
        """A field with one number for each token, as a rectangle; None if the batch has no such field."""
        if name not in self._batch.fields or not len(self._batch):
            return None
        found = self._like_tokens(name)
        if found is None:
            raise SettingError(
                f"field {name!r} does not hold one number for each token of {self.field!r} "
                f"({_described(self._batch.fields[name])}). Rename it in the recipe if it means something else."
            )
        return found

    def supervised(self, eos_token_id: int | None) -> BoolArray:
        """Which tokens are to be learnt as predictions of the ones before them."""
        weights = self.companion("loss_mask")
        chosen = ~self.padding if weights is None else ~self.padding & (weights != 0)
        if eos_token_id is not None:
            chosen[:, 1:] &= self.tokens[:, :-1] != eos_token_id
        return chosen

    def _known_padding(self) -> BoolArray:
        column = self._batch.fields.get("sequence_length")
        if isinstance(column, Fixed) and column.values.ndim == 1 and column.values.dtype.kind in "iu":
            return np.asarray(np.arange(self.tokens.shape[1]) >= column.values[:, None], np.bool_)
        return np.zeros(self.tokens.shape, np.bool_)

    def _like_tokens(self, name: str) -> AnyArray | None:
        column = self._batch.fields.get(name)
        if not isinstance(column, (Fixed, Ragged)) or column.values.dtype.kind not in "biuf":
            return None
        if isinstance(column, Fixed):
            return column.values if column.values.shape == self.tokens.shape else None
        alike = self.lengths is not None and np.array_equal(column.lengths, self.lengths)
        return self._rectangle(column) if alike else None

    def _rectangle(self, column: Ragged) -> AnyArray:
        out = np.zeros(self.padding.shape, column.values.dtype)
        out[np.arange(self.padding.shape[1]) < column.lengths[:, None]] = column.compact().values
        return out


def _tokens_field(batch: Block, wanted: str) -> str:
    found = [name for name in (TOKEN_FIELDS if wanted == "auto" else (wanted,)) if name in batch.fields]
    if not found and not len(batch):
        return wanted
    if not found:
        missing = f"none of {', '.join(TOKEN_FIELDS)}" if wanted == "auto" else f"no field {wanted!r}"
        raise SettingError(
            f"to_training needs tokens, and this batch has {missing}; its fields are "
            f"{', '.join(batch.fields) or 'none'}. Name the field with tokens_field, or use the batch's own arrays."
        )
    return found[0]


def _described(column: Column | None) -> str:
    if isinstance(column, Fixed):
        return f"{column.values.dtype} {list(column.values.shape)}"
    return f"{type(column).__name__} of {column.values.dtype}" if isinstance(column, Ragged) else type(column).__name__


def _starts(positions: AnyArray | None, padding: BoolArray) -> BoolArray:
    """Where a segment begins: each row, each document in it, and its padding."""
    starts = np.zeros(padding.shape, np.bool_) if positions is None else positions[:, : padding.shape[1]] == 0
    starts &= ~padding
    starts[:, 1:] |= padding[:, 1:] != padding[:, :-1]
    starts[:, :1] = True
    return starts


def _boundaries(starts: BoolArray, total: int) -> npt.NDArray[np.int32]:
    return np.append(np.flatnonzero(starts), total).astype(np.int32)


def _integer(dtype: Any) -> np.dtype[Any]:
    name = str(dtype).removeprefix("torch.") if not isinstance(dtype, (type, np.dtype)) else dtype
    try:
        found = np.dtype(np.int64 if name == "auto" else name)
    except TypeError:
        found = np.dtype(object)
    if found.kind not in "iu":
        raise SettingError(f"dtype is {dtype!r}: it is 'auto' (int64) or a type of whole numbers, such as 'int32'")
    return found


def to_torch(array: AnyArray) -> Any:
    """A tensor over the array's memory; the array itself where torch hardly supports its dtype."""
    import torch

    return torch.from_numpy(array) if array.dtype in TORCH_DTYPES else array


def _own(value: Any, as_torch: bool) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    value = np.ascontiguousarray(value)
    return to_torch(value) if as_torch else value


def _passed_on(batch: Block, name: str, as_torch: bool) -> Any:
    column = batch.fields.get(name)
    if column is None and not len(batch):  # of a lane that has run out, with drop_last=False
        return _own(np.empty(0, np.int64), as_torch)
    if column is None:
        raise SettingError(f"extra_fields names {name!r}; this batch has {', '.join(batch.fields) or 'no fields'}")
    if isinstance(column, Fixed):
        return _own(column.values.copy(), as_torch)
    return column.to_list() if isinstance(column, Objects) else column.copy()


def _named(
    arrays: dict[str, Any], excluded: Collection[str], renamed: Mapping[str, str], known: Collection[str]
) -> dict[str, Any]:
    for name in [*excluded, *renamed]:
        if name not in known:
            raise SettingError(f"to_training makes no {name!r}; it makes {', '.join(known)}")
    names = {name: renamed.get(name, name) for name in arrays if name not in excluded}
    if len(set(names.values())) < len(names):
        raise SettingError(f"rename_fields gives two fields one name: {names}")
    return {new: arrays[old] for old, new in names.items()}
