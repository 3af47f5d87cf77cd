"""`shuffle`: the records of a window in a random order, within a buffer.

*Streaming* is defined without a loop. Record number `i` of a window has the key `i + u * buffer_size`, with `u` in
`[0, 1)` from a hash of the window's name and `i`; the window comes out in the order of keys, ties by `i`. Every later
record has a key of at least its own number, so a record may leave as soon as its key is below the number of records
seen: about `buffer_size` records are held, and what comes out cannot depend on how they were pushed.

*Block* cuts the window into blocks of `buffer_size` records, the last one shorter, and permutes each whole: within a
block every order is as likely as any other, and no record leaves its block.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zephon.columns import Block
from zephon.errors import SettingError
from zephon.ops.base import Accumulator, Faults, Stateful, WindowKey
from zephon.ops.held_records import HeldRecords
from zephon.permutations import mix, permute

_FRACTION = 20  # bits of `u`; keys are integers, in units of 2**-20 records
_LARGEST = 2**40


class Shuffle(Stateful):
    """A shuffle buffer for each lane: a record moves at most about `buffer_size` places ("streaming"), or within its
    block of `buffer_size` records ("block").
    """

    name = "shuffle"

    def __init__(self, buffer_size: int = 1024, *, seed: int = 0, algorithm: str = "streaming") -> None:
        if algorithm not in ("streaming", "block"):
            raise SettingError(f"shuffle: algorithm={algorithm!r}: must be 'streaming' or 'block'")
        if type(buffer_size) is not int or not 1 <= buffer_size <= _LARGEST:
            raise SettingError(f"shuffle: buffer_size={buffer_size!r}: must be a whole number from 1 to {_LARGEST}")
        if type(seed) is not int:
            raise SettingError(f"shuffle: seed={seed!r}: must be a whole number")
        self.buffer_size, self.seed, self.algorithm = buffer_size, seed, algorithm

    def describe(self) -> dict[str, Any]:
        return {"buffer_size": self.buffer_size, "seed": self.seed, "algorithm": self.algorithm}

    def accumulator(self, key: WindowKey) -> Accumulator:
        seed = mix("shuffle", key.seed, self.seed, key.epoch, key.lane, key.chunk)
        return _Buffer(self.buffer_size, seed) if self.algorithm == "streaming" else _Blocks(self.buffer_size, seed)


class _Buffer(Accumulator):
    """The held records and their keys."""

    def __init__(self, size: int, seed: int) -> None:
        super().__init__()
        self.size, self.seed = size, seed
        self.held = HeldRecords()
        self.keys = np.empty(0, np.int64)  # of the held records, by number

    def push(self, block: Block, faults: Faults) -> list[Block]:
        number = self.held.add(block)
        fraction = (mix(self.seed, number) >> np.uint64(64 - _FRACTION)).astype(np.int64)
        self.keys = np.concatenate((self.keys, (number << _FRACTION) + fraction * self.size))
        return self._release(self.keys < self.held.seen << _FRACTION)

    def flush(self, faults: Faults) -> list[Block]:
        return self._release(np.ones(len(self.keys), np.bool_))

    def _release(self, ready: np.ndarray[Any, np.dtype[np.bool_]]) -> list[Block]:
        where = np.flatnonzero(ready)
        if not len(where):
            return []
        where = where[np.argsort(self.keys[where], kind="stable")]
        self.keys = self.keys[~ready]
        return [self.held.take(self.held.numbers[where])]


class _Blocks(Accumulator):
    """Every `size` records are permuted whole; at the flush, so are those that are left."""

    def __init__(self, size: int, seed: int) -> None:
        super().__init__()
        self.size, self.seed = size, seed
        self.held = HeldRecords()

    def push(self, block: Block, faults: Faults) -> list[Block]:
        self.held.add(block)
        whole = len(self.held) // self.size * self.size
        return self._release(whole, self.size)

    def flush(self, faults: Faults) -> list[Block]:
        return self._release(len(self.held), len(self.held))

    def _release(self, count: int, size: int) -> list[Block]:
        """The first `count` held records, in blocks of `size`."""
        if not count:
            return []
        numbers = self.held.numbers[:count]
        place = np.arange(count)
        key = mix(self.seed, numbers // self.size)
        return [self.held.take(numbers[place - place % size + permute(place % size, size, key)])]
