"""Records made of the very same samples, told apart, so that each draws random numbers of its own.

A long text that is split, and a document that packing cuts over several sequences, become records that name the same
samples. Two hidden fields number them, only where a user's function that may ask for random numbers comes later:

- `PIECE`: a sample's number of this record among those made of it. They leave one operator side by side, in one block.
- `SEQUENCE`: (first chunk of the window, number in the window) of a record that a packing operator made.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zephon.columns import MISSING, Block, Column, Fixed, IntArray
from zephon.ops.base import Accumulator, Faults
from zephon.randomness import PIECE, SEQUENCE


def told_apart(block: Block) -> Block:
    """The records, where several of one sample bear the same number numbered anew from 0 in their order."""
    if block.samples.shape[1] != 4 or block.sample_offsets is not None or len(block) < 2:
        return block
    place = block.samples[:, 3]
    piece = _numbers(block.fields.get(PIECE), len(block))
    begins = np.flatnonzero(np.append(True, place[1:] != place[:-1]))
    same = np.append(False, (place[1:] == place[:-1]) & (piece[1:] == piece[:-1]))
    if not same.any():
        return block
    run = np.repeat(np.arange(len(begins)), np.diff(np.append(begins, len(block))))
    anew = np.logical_or.reduceat(same, begins)[run]
    numbers = np.where(anew, np.arange(len(block)) - begins[run], piece)
    return block.with_fields({**block.fields, PIECE: Fixed(numbers)})


def _numbers(column: Column | None, count: int) -> IntArray:
    if column is None:
        return np.zeros(count, np.int64)
    if isinstance(column, Fixed):
        return column.values
    return np.array([0 if value is MISSING else value for value in column.to_list()], np.int64)


class Numbered(Accumulator):
    """An accumulator whose records are numbered as they come out."""

    def __init__(self, inner: Accumulator, chunk: int) -> None:
        super().__init__()
        self._inner, self._chunk, self._count = inner, chunk, 0
        self.counters = inner.counters

    def push(self, block: Block, faults: Faults) -> list[Block]:
        return self._with_numbers(self._inner.push(block, faults))

    def flush(self, faults: Faults) -> list[Block]:
        return self._with_numbers(self._inner.flush(faults))

    def _with_numbers(self, blocks: list[Block]) -> list[Block]:
        out = []
        for block in blocks:
            numbers: Any = np.empty((len(block), 2), np.int64)
            numbers[:, 0] = self._chunk
            numbers[:, 1] = np.arange(self._count, self._count + len(block))
            self._count += len(block)
            out.append(block.with_fields({**block.fields, SEQUENCE: Fixed(numbers)}))
        return out
