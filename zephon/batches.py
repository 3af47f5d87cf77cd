"""A batch: what a rank trains on, a mapping from field to array over the columns of one finished block.

The same class serves an embedded run and a daemon's client. Its arrays may be views of a slot in shared memory: a batch
and everything taken out of it refer to those arrays, so the slot stays leased while any of them lives, and no longer.
`copy` and pickling give private memory.

`len(batch)` counts records, not fields, so the mapping's methods are spelled out here and no mixin of `Mapping` that
counts by `len` is used. Batches compare by identity; compare their `digest`s to compare what is in them.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from itertools import pairwise
from typing import Any, TypeVar

from zephon.columns import AnyArray, Block, Fixed, Objects
from zephon.digests import column_digest, combined
from zephon.training import to_torch, to_training
from zephon.words import hinting, many

Sample = tuple[str, int, int]
"""(dataset name, shard, row)"""

_B = TypeVar("_B", bound="Batch")


class Batch(Mapping[str, Any]):
    """`microbatch_size` consecutive records of one lane.

    A field of one shape is an array `[len(batch), ...]`; one of varying length a `Ragged` (`.values`, `.offsets`,
    `[i]` a view); text and bytes are sequences of `str` (`Text`) and `bytes` (`Bytes`); anything else is a list of
    objects.

    `block` is canonical. `dataset_names` name the first column of its samples. `output` says what arrays of numbers
    come out as: `"numpy"`, `"torch"` (sharing memory where torch can: not where the array is read-only, and types that
    torch hardly supports stay numpy), or None, which is numpy for fields and, once torch is loaded, torch for
    `to_training`.
    """

    def __init__(
        self,
        block: Block,
        *,
        lane: int,
        first_record: int,
        ends_round: bool = False,
        dataset_names: Sequence[str] = (),
        packed: bool = False,
        output: str | None = None,
    ) -> None:
        self.block = block
        self.lane = lane
        """The lane whose records these are."""
        self.first_record = first_record
        """The place of the first record in its lane, from 0."""
        self.ends_round = ends_round
        """Whether this rank has now had one batch from each of its lanes."""
        self.dataset_names = tuple(dataset_names)
        self._packed = packed
        self.output = output
        self._digests: dict[str, bytes] = {}
        self._tensors: dict[str, Any] = {}  # private copies alone, so that a change in place is seen again

    def __getitem__(self, field: str) -> Any:
        column = self.block.fields.get(field)
        if column is None:
            names = ", ".join(self.block.fields) or "none"
            raise KeyError(f"{field!r}; this batch of {many(len(self), 'record')} has {names}")
        if isinstance(column, Fixed):
            return self._tensor(field, column.values) if self.output == "torch" else column.values
        return column.values if isinstance(column, Objects) else column

    def _tensor(self, field: str, values: AnyArray) -> Any:
        if values.flags.writeable:
            return to_torch(values)
        if field not in self._tensors:
            self._tensors[field] = to_torch(values.copy())
        return self._tensors[field]

    def __len__(self) -> int:
        return len(self.block)

    def __iter__(self) -> Iterator[str]:
        return iter(self.block.fields)

    def __contains__(self, field: object) -> bool:
        return field in self.block.fields

    def keys(self) -> KeysView[str]:
        return self.block.fields.keys()

    def values(self) -> ValuesView[Any]:
        return {name: self[name] for name in self.block.fields}.values()

    def items(self) -> ItemsView[str, Any]:
        return {name: self[name] for name in self.block.fields}.items()

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(lane {self.lane}, records {self.first_record} to {self.first_record + len(self)}"
            f"{', ends the round' if self.ends_round else ''}: {', '.join(self.block.fields)})"
        )

    @property
    def packed(self) -> bool:
        """Whether `samples` holds a list for each record, as in a pipeline that makes one record from several."""
        return self._packed or self.block.sample_offsets is not None

    @property
    def digest(self) -> str:
        """Hex, 128 bits: over the names, kinds, shapes, dtypes and bytes of all fields."""
        return combined({name: self._field_digest(name) for name in self.block.fields}, len(self)).hex()

    def field_digest(self, field: str) -> str:
        """Hex, 128 bits: of one field."""
        return self._field_digest(field).hex()

    def _field_digest(self, field: str) -> bytes:
        if field not in self._digests:
            self._digests[field] = column_digest(self.block.fields[field])
        return self._digests[field]

    @property
    def samples(self) -> list[Any]:
        """For each record the `(dataset name, shard, row)` it was made from; if `packed`, a list of them."""
        names, block = self.dataset_names, self.block.compact_samples()
        rows: list[Sample] = [(names[dataset], shard, row) for dataset, shard, row in block.samples.tolist()]
        if block.sample_offsets is None:
            return [[row] for row in rows] if self.packed else list(rows)
        bounds = block.sample_offsets.tolist()
        return [rows[low:high] for low, high in pairwise(bounds)]

    def copy(self: _B) -> _B:
        """The same batch in memory of its own."""
        return self._with(self.block.copy())

    def _with(self: _B, block: Block) -> _B:
        return type(self)(
            block,
            lane=self.lane,
            first_record=self.first_record,
            ends_round=self.ends_round,
            dataset_names=self.dataset_names,
            packed=self.packed,
            output=self.output,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        place = (self.lane, self.first_record, self.ends_round, self.dataset_names, self.packed, self.output)
        return _rebuilt, (type(self), self.block, *place)

    @hinting
    def to_training(
        self,
        *,
        return_labels: bool = False,
        dtype: Any = "auto",
        ignore_index: int = -100,
        rename_fields: Mapping[str, str] | None = None,
        exclude_fields: Sequence[str] = (),
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
        """Training arrays from the batch's tokens; `zephon.training.to_training` says what each argument does."""
        return to_training(
            self.block,
            output=self.output,
            return_labels=return_labels,
            dtype=dtype,
            ignore_index=ignore_index,
            rename_fields=rename_fields,
            exclude_fields=exclude_fields,
            extra_fields=extra_fields,
            flatten=flatten,
            return_num_valid_tokens=return_num_valid_tokens,
            return_loss_mask=return_loss_mask,
            return_cu_seqlens=return_cu_seqlens,
            return_padding_mask=return_padding_mask,
            eos_mask_loss=eos_mask_loss,
            eos_token_id=eos_token_id,
            position_mode=position_mode,
            tokens_field=tokens_field,
        )


def _rebuilt(
    kind: type[_B],
    block: Block,
    lane: int,
    first_record: int,
    ends_round: bool,
    dataset_names: tuple[str, ...],
    packed: bool,
    output: str | None,
) -> _B:
    return kind(
        block,
        lane=lane,
        first_record=first_record,
        ends_round=ends_round,
        dataset_names=dataset_names,
        packed=packed,
        output=output,
    )
