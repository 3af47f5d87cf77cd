"""`map_batch`: a user's function on each finished batch, whose arrays or whose records it may change in place.

It runs after batching, where a batch is cut and before it is written, so it sees exactly the records that a rank gets,
in their final form and in memory of its own. What a lane has delivered is counted in the records that went in, whatever
comes out: a result of another length, or an empty batch for None, still takes its turn. Since the cut into batches now
shows in the data, the microbatch size is part of the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import numpy as np

from zephon.batches import Batch
from zephon.columns import Block, Column, Fixed, IntArray, canonical, column_of
from zephon.digests import block_digest
from zephon.errors import SettingError
from zephon.function_digest import digest_of
from zephon.ops.base import Faults, Operator
from zephon.ops.interrupts import is_interrupt
from zephon.ops.sending import unsendable
from zephon.randomness import BatchDraws, drawing
from zephon.types import SampleBatch, SampleRecord


class HandedBatch(SampleBatch):
    """The batch that a function gets. Its records are made once, so that what is done to them is found again."""

    _records: list[SampleRecord] | None = None
    _given: tuple[SampleRecord, ...] = ()
    _before: tuple[bytes, bytes] = (b"", b"")

    @property
    def records(self) -> list[SampleRecord]:
        if self._records is None:
            self._records = [SampleRecord(record.meta, deepcopy(record.payload)) for record in super().records]
            self._given = tuple(self._records)
            self._before = block_digest(self.block), block_digest(self._of(self._records))
        return self._records

    def result(self) -> Block:
        """The batch as the function leaves it. TypeError if both its arrays and its records were changed."""
        if self._records is None:
            return self.block
        of_records, (arrays_before, records_before) = self._of(self._records), self._before
        same = list(map(id, self._records)) == list(map(id, self._given))
        if same and block_digest(of_records) == records_before:
            return self.block
        if block_digest(self.block) != arrays_before:
            raise TypeError("the function changed the batch's arrays and its records too: change one of the two")
        return of_records

    def _of(self, records: list[SampleRecord]) -> Block:
        columns = Block.from_rows([record.payload for record in records], np.empty((len(records), 3), np.int64)).fields
        place_of = {id(record): place for place, record in enumerate(self._given)}
        if not all(id(record) in place_of for record in records):
            return _of_records(columns, self.block, len(records))
        places = np.array([place_of[id(record)] for record in records], np.int64)
        return self.block.select(()).take(places).with_fields(columns)


class MapBatch(Operator):
    """`fn(batch) -> batch`, a mapping from field to array, or None for an empty batch."""

    name = "map_batch"

    def __init__(self, fn: Callable[[SampleBatch], Any], *, drop_none: bool = True) -> None:
        if not callable(fn):
            raise SettingError(f"map_batch: fn must be a function of one SampleBatch, not {type(fn).__name__}")
        self.fn, self.drop_none = fn, bool(drop_none)

    def describe(self) -> dict[str, Any]:
        return {"fn": digest_of(self.fn), "drop_none": self.drop_none}

    def requires(self, downstream: frozenset[str] | None) -> frozenset[str] | None:
        return None

    def apply(self, block: Block, lane: int, first_record: int, names: tuple[str, ...], faults: Faults) -> Block:
        """The block of the batch that comes of this one. A failing one goes to `faults`, and is then empty."""
        if not len(block):
            return block
        batch = HandedBatch(block.copy(), lane=lane, first_record=first_record, dataset_names=names)
        name = f"{self.name} (lane {lane}, from record {first_record} on)"
        try:
            with drawing(BatchDraws(self, faults.scope, block, first_record)):
                result = self.fn(batch)
            made = self._block(result, block, names)
        except BaseException as error:
            if is_interrupt(error):
                raise
            faults.bad(block.sample_of(0), name, error)
            return block.slice(0, 0)
        wrong = next(unsendable(made), None)
        if wrong is None:
            return made
        faults.bad(made.sample_of(wrong[0]), name, wrong[1])
        return block.slice(0, 0)

    def _block(self, result: Any, block: Block, names: tuple[str, ...]) -> Block:
        if result is None:
            if not self.drop_none:
                raise TypeError("the function returned None, and drop_none=False keeps every batch")
            return block.slice(0, 0)
        if isinstance(result, Batch):
            left = result.result() if isinstance(result, HandedBatch) else result.block
            return canonical(Block(left.fields, _renumbered(left.samples, result, names), left.sample_offsets))
        if not isinstance(result, Mapping):
            raise TypeError(f"the function returned {type(result).__name__}, expected a batch, a mapping or None")
        columns = {name: _column(name, value) for name, value in result.items()}
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the function returned fields of different lengths: {lengths}")
        return canonical(_of_records(columns, block, next(iter(lengths.values()), len(block))))


def _column(name: Any, value: Any) -> Column:
    if type(name) is not str:
        raise TypeError(f"the function returned a field named {name!r}, expected str")
    if isinstance(value, Column):
        return value
    if isinstance(value, (list, tuple)):
        return column_of(value)
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    if not array.ndim:
        raise TypeError(
            f"the function returned the single value {value!r} as field {name!r}: a field has one value for each "
            "record, so give an array with the records along its first axis"
        )
    return column_of(list(array)) if array.dtype.kind in "OVT" else Fixed(array)


def _of_records(columns: dict[str, Column], block: Block, count: int) -> Block:
    """The columns with the samples that they were made from: record by record, or of the whole batch each."""
    if count == len(block):
        return block.with_fields(columns)
    samples = block.compact_samples().samples
    offsets = np.arange(count + 1, dtype=np.int64) * len(samples)
    return Block(columns, np.tile(samples, (count, 1)).reshape(-1, samples.shape[1]), offsets)


def _renumbered(samples: IntArray, batch: Batch, names: tuple[str, ...]) -> IntArray:
    """The samples of a batch with datasets numbered as in the run. KeyError for one that the run does not have."""
    if batch.dataset_names == names or not len(samples):
        return samples
    unknown = [name for name in batch.dataset_names if name not in names]
    if unknown:
        raise KeyError(f"the returned batch names datasets {unknown}, which the run does not have")
    number_of = np.array([names.index(name) for name in batch.dataset_names], np.int64)
    return np.column_stack((number_of[samples[:, 0]], samples[:, 1:]))


