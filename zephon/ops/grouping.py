"""The lists of records that a user's functions are given: groups whose borders the lane's records alone decide.

How records are cut into blocks is an execution detail, so a function on a block would show it. In front of the first
stateful operator a group holds the records of up to `GROUP` samples that lie between two multiples of it in the lane
(after a filter fewer than that), and tasks are cut at its multiples only. Behind, it is every `GROUP` records of the
window, held back until they are there. Either way a group ends at the end of its window.

Rejected: lists of one record, which any function would do right with, but which make a list pointless; and any block
that is at hand, trusting the function, since one that is not what it says would then be right in every test.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from zephon.columns import Block
from zephon.ops.base import Accumulator, Faults

GROUP = 64
"""Records that a user's function is given at once, at most, unless an accumulator of its own says otherwise."""


def groups_of(block: Block) -> Iterator[tuple[int, int]]:
    """`(low, high)` of each group in a block of the front, whose records stand in the order of their places.

    Where a block knows no places, its records count from 0.
    """
    count = len(block)
    if block.sample_offsets is None and block.samples.shape[1] == 4:
        group = block.samples[:, 3] // GROUP
    else:
        group = np.arange(count) // GROUP
    bounds = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), count]
    yield from pairwise(bounds) if count else ()


class GroupedAccumulator(Accumulator):
    """Takes blocks however they are cut, and works on every `GROUP` records of the window."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[Block] = []
        self._count = 0

    @abstractmethod
    def group(self, block: Block, faults: Faults) -> list[Block]:
        """The window's next group; at the window's end it may be smaller. The block is valid during the call."""

    def end(self, faults: Faults) -> list[Block]:
        """The window is over, and all of its groups have been worked on."""
        return []

    def left_behind(self) -> int:
        """After a flush: how many records another flush would give out that the first should have. For checks."""
        return 0

    def push(self, block: Block, faults: Faults) -> list[Block]:
        self._count += len(block)
        if self._count < GROUP:
            self._held.append(block.copy())
            return []
        whole = Block.concat([*self._held, block])
        full = self._count - self._count % GROUP
        self._held = [whole.slice(full, self._count).copy()]
        self._count -= full
        return [
            made for low in range(0, full, GROUP) for made in self.group(whole.slice(low, low + GROUP), faults)
        ]

    def flush(self, faults: Faults) -> list[Block]:
        rest, self._held, self._count = Block.concat(self._held), [], 0
        out = self.group(rest, faults) if len(rest) else []
        return out + self.end(faults)
