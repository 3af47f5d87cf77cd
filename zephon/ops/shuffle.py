"""`shuffle`: the records of a window in a random order, within a buffer.

The order is defined without a loop. Record number `i` of a window has the key `i + u * buffer_size`, with `u` in
`[0, 1)` from a hash of the window's name and `i`; the window comes out in the order of keys, ties by `i`. Every later
record has a key of at least its own number, so a record may leave as soon as its key is below the number of records
seen: about `buffer_size` records are held, and what comes out cannot depend on how they were pushed.

Held records stay in a private copy of the block they came in, and leave by one gather from each of those blocks: a
record is copied once in and once out however long it waits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zephon.columns import Block, Column, Fixed, IntArray
from zephon.errors import SettingError
from zephon.ops.base import Accumulator, Faults, Stateful, WindowKey
from zephon.permutations import mix

_FRACTION = 20  # bits of `u`; keys are integers, in units of 2**-20 records
_LARGEST = 2**40


class Shuffle(Stateful):
    """A shuffle buffer for each lane: a record moves at most about `buffer_size` places."""

    name = "shuffle"

    def __init__(self, buffer_size: int = 1024, *, seed: int = 0, algorithm: str = "streaming") -> None:
        if algorithm == "block":
            raise SettingError("shuffle: algorithm='block' is not available yet; use 'streaming'")
        if algorithm != "streaming":
            raise SettingError(f"shuffle: algorithm={algorithm!r}: must be 'streaming'")
        if type(buffer_size) is not int or not 1 <= buffer_size <= _LARGEST:
            raise SettingError(f"shuffle: buffer_size={buffer_size!r}: must be a whole number from 1 to {_LARGEST}")
        if type(seed) is not int:
            raise SettingError(f"shuffle: seed={seed!r}: must be a whole number")
        self.buffer_size, self.seed, self.algorithm = buffer_size, seed, algorithm

    def describe(self) -> dict[str, Any]:
        return {"buffer_size": self.buffer_size, "seed": self.seed, "algorithm": self.algorithm}

    def accumulator(self, key: WindowKey) -> Accumulator:
        return _Buffer(self.buffer_size, mix("shuffle", key.seed, self.seed, key.epoch, key.lane, key.chunk))


class _Buffer(Accumulator):
    """The held records: their keys, and where each lies."""

    def __init__(self, size: int, seed: int) -> None:
        super().__init__()
        self.size, self.seed = size, seed
        self.seen = 0
        self.pushes = 0
        self.blocks: dict[int, Block] = {}  # by number of push, while a record of it is held
        self.keys, self.push_of, self.row = (np.empty(0, np.int64) for _ in range(3))

    def push(self, block: Block, faults: Faults) -> list[Block]:
        count = len(block)
        if not count:
            return []
        number = np.arange(self.seen, self.seen + count, dtype=np.int64)
        fraction = (mix(self.seed, number) >> np.uint64(64 - _FRACTION)).astype(np.int64)
        self.seen += count
        self.blocks[self.pushes] = block.copy()
        self.keys = np.concatenate((self.keys, (number << _FRACTION) + fraction * self.size))
        self.push_of = np.concatenate((self.push_of, np.full(count, self.pushes)))
        self.row = np.concatenate((self.row, number - number[0]))
        self.pushes += 1
        return self._release(self.keys < self.seen << _FRACTION)

    def flush(self, faults: Faults) -> list[Block]:
        return self._release(np.ones(len(self.keys), np.bool_))

    def _release(self, ready: np.ndarray[Any, np.dtype[np.bool_]]) -> list[Block]:
        where = np.flatnonzero(ready)
        if not len(where):
            return []
        where = where[np.argsort(self.keys[where], kind="stable")]
        out = _gathered(self.blocks, self.push_of[where], self.row[where])
        stays = np.flatnonzero(~ready)
        self.keys, self.push_of, self.row = self.keys[stays], self.push_of[stays], self.row[stays]
        held = self.push_of[np.diff(self.push_of, prepend=-1) > 0]  # ascending, so each once
        self.blocks = {push: self.blocks[push] for push in held.tolist()}
        return [out]


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


def _stacked(columns: list[Column | None], rows: list[IntArray], places: list[IntArray], count: int) -> Fixed | None:
    """The chosen rows of columns of one fixed shape, each copied straight to its place; None for other columns."""
    arrays = [column.values for column in columns if isinstance(column, Fixed)]
    if len(arrays) != len(columns) or len({(a.dtype, a.shape[1:]) for a in arrays}) != 1:
        return None
    out = np.empty((count, *arrays[0].shape[1:]), arrays[0].dtype)
    for values, index, place in zip(arrays, rows, places):
        out[place] = values[index]
    return Fixed(out)
