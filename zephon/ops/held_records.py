"""Records that an accumulator holds: copied once when they come, and once when they leave, in any order.

They are numbered in the order of their coming. Held records stay in a private copy of the block they came in, and leave
by one gather from each of those blocks. Where few records keep many blocks alive, those few move to a block of their
own, so that what is held stays proportional to the number of records.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zephon.columns import Block, Bytes, Column, Fixed, IntArray, Ragged, cut, laid
from zephon.positions import Positions

_SPARSE = 4  # copied records for each one held, from which those held are moved
_LONG = 64  # values a record from which copying record by record is cheaper than an index for each value
_FEW = 2048  # copied records that are never worth moving


class HeldRecords:
    """What an accumulator holds of the records pushed into it."""

    def __init__(self) -> None:
        self.seen = 0
        self._blocks: dict[int, Block] = {}
        self._pushes = 0
        self._number, self._block, self._row = (np.empty(0, np.int64) for _ in range(3))  # ascending numbers

    def __len__(self) -> int:
        return len(self._number)

    @property
    def numbers(self) -> IntArray:
        """The numbers of the records held, ascending."""
        return self._number

    def add(self, block: Block, *, owned: bool = False) -> IntArray:
        """Hold a copy of the block's records, or the block itself if nobody else has it; their numbers."""
        count = len(block)
        numbers = np.arange(self.seen, self.seen + count)
        self.seen += count
        if count:
            self._blocks[self._pushes] = block if owned else block.copy()
            self._number = np.concatenate((self._number, numbers))
            self._block = np.concatenate((self._block, np.full(count, self._pushes)))
            self._row = np.concatenate((self._row, np.arange(count)))
            self._pushes += 1
        return numbers

    def take(self, numbers: IntArray) -> Block:
        """These records, in this order. They are held no more."""
        out = self.drop(numbers, taken=True)
        assert out is not None
        return out

    def drop(self, numbers: IntArray, *, taken: bool = False) -> Block | None:
        """Hold these records no more; with `taken`, they are returned."""
        where = np.searchsorted(self._number, numbers)
        out = _gathered(self._blocks, self._block[where], self._row[where]) if taken and len(where) else None
        stays = np.ones(len(self._number), np.bool_)
        stays[where] = False
        self._number, self._block, self._row = self._number[stays], self._block[stays], self._row[stays]
        used = np.unique(self._block)
        self._blocks = {block: self._blocks[block] for block in used.tolist()}
        copied = sum(map(len, self._blocks.values()))
        if copied > max(_FEW, _SPARSE * len(self)):
            self._blocks = {self._pushes: _gathered(self._blocks, self._block, self._row)}
            self._block, self._row = np.full(len(self), self._pushes), np.arange(len(self))
            self._pushes += 1
        return out if out is not None or not taken else Block.empty()


def _gathered(blocks: dict[int, Block], source: IntArray, row: IntArray) -> Block:
    """The records `row[i]` of `blocks[source[i]]`, in this order."""
    grouped = np.argsort(source, kind="stable")
    numbers, firsts = np.unique(source[grouped], return_index=True)
    if len(numbers) == 1:
        return blocks[int(numbers[0])].take(row)
    chosen = [blocks[number] for number in numbers.tolist()]
    places = np.split(grouped, firsts[1:])  # for each block, where its records go
    rows = [row[place] for place in places]
    stacked: dict[str, Column] = {}
    for name in chosen[0].fields:
        column = _stacked([block.fields.get(name) for block in chosen], rows, places, len(row))
        if column is not None:
            stacked[name] = column
    parts = [
        block.with_fields({n: c for n, c in block.fields.items() if n not in stacked}).take(index)
        for block, index in zip(chosen, rows)
    ]
    back = np.empty(len(row), np.int64)
    back[grouped] = np.arange(len(row))
    joined = Block.concat(parts).take(back)
    return joined.with_fields({**stacked, **joined.fields})


def _stacked(columns: list[Column | None], rows: list[IntArray], places: list[IntArray], count: int) -> Column | None:
    """The chosen rows of columns that are all arrays of one kind, each copied straight to its place; else None.

    So for positions, which are little until they are made.
    """
    if any(isinstance(column, Positions) for column in columns):
        return None
    kinds = {(type(c), c.values.dtype) for c in columns if isinstance(c, (Ragged, Bytes))}
    if len(kinds) == 1 and all(isinstance(c, (Ragged, Bytes)) for c in columns):
        return _laid([c for c in columns if isinstance(c, (Ragged, Bytes))], rows, places, count)
    arrays = [column.values for column in columns if isinstance(column, Fixed)]
    if len(arrays) != len(columns) or len({(a.dtype, a.shape[1:]) for a in arrays}) != 1:
        return None
    out = np.empty((count, *arrays[0].shape[1:]), arrays[0].dtype)
    for values, index, place in zip(arrays, rows, places):
        out[place] = values[index]
    return Fixed(out)


def _laid(
    columns: Sequence[Ragged | Bytes], rows: list[IntArray], places: list[IntArray], count: int
) -> Ragged | Bytes | None:
    """The same for values of varying length, where they are long enough that a copy for each is cheap."""
    lengths = np.empty(count, np.int64)
    for column, index, place in zip(columns, rows, places):
        lengths[place] = column.lengths[index]
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] <= _LONG * count:
        return None
    parts: list[bytes | memoryview] = [b""] * count
    for column, index, place in zip(columns, rows, places):
        for at, part in zip(place.tolist(), cut(column.values, column.offsets[:-1][index], lengths[place])):
            parts[at] = part
    return type(columns[0])(laid(parts, columns[0].values.dtype), offsets)
