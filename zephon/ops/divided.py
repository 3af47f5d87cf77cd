"""Stateful operators in two parts: what holds records, lane by lane, and what is done to each list that it gives out.

The second part depends on its list alone, so given `parallelism` it runs on workers, as a stage of its own
(`zephon.stages`). A hidden field numbers the lists of a window on their way there, and no list is ever cut. Where the
operator runs in one piece it does the same to the same lists.
"""

from __future__ import annotations

from abc import abstractmethod
from itertools import pairwise
from typing import Any

import numpy as np

from zephon.columns import HIDDEN, Block, Fixed, IntArray
from zephon.ops.base import Accumulator, Faults, Operator, Stateful, Stateless, WindowKey

LIST = HIDDEN + "list"
"""The hidden field with the number of a record's list."""


def list_borders(block: Block) -> IntArray:
    """The records with which other lists begin: int64, rising, without 0."""
    column = block.fields[LIST]
    assert isinstance(column, Fixed)
    return np.flatnonzero(np.diff(column.values)) + 1


class Divided(Stateful):
    """An operator that can run in two parts. `accumulator` is for one that does not."""

    _parts: tuple[Operator, ...] | None = None

    @property
    @abstractmethod
    def divides(self) -> bool:
        """Whether it is to run in two parts."""

    @abstractmethod
    def holding(self, key: WindowKey) -> Accumulator:
        """For one window, what gives out lists: a block for each."""

    @abstractmethod
    def on_list(self, block: Block, faults: Faults) -> Block:
        """What becomes of one list."""

    @property
    def parts(self) -> tuple[Operator, ...]:
        if not self.divides:
            return (self,)
        if self._parts is None:
            self._parts = Holding(self), OnLists(self)
        return self._parts


class Holding(Stateful):
    """The part that holds records."""

    users_code = True

    def __init__(self, whole: Divided) -> None:
        self.name, self._whole = whole.name, whole

    @property
    def whole(self) -> Operator:
        return self._whole

    def describe(self) -> dict[str, Any]:
        return self._whole.describe()

    def accumulator(self, key: WindowKey) -> Accumulator:
        return _Labelled(self._whole.holding(key))

    def setup(self) -> None:
        self._whole.setup()

    def teardown(self) -> None:
        self._whole.teardown()


class OnLists(Stateless):
    """The part that works on lists."""

    users_code = True
    of_lists = True

    def __init__(self, whole: Divided) -> None:
        self.name, self._whole, self.parallelism = whole.name, whole, whole.parallelism

    @property
    def whole(self) -> Operator:
        return self._whole

    def describe(self) -> dict[str, Any]:
        return self._whole.describe()

    def process(self, block: Block, faults: Faults) -> Block:
        plain = block.with_fields({name: column for name, column in block.fields.items() if name != LIST})
        bounds = pairwise([0, *list_borders(block).tolist(), len(block)])
        return Block.concat([self._whole.on_list(plain.slice(low, high), faults) for low, high in bounds])

    def setup(self) -> None:
        self._whole.setup()

    def teardown(self) -> None:
        self._whole.teardown()


class _Labelled(Accumulator):
    """An accumulator whose blocks, each a list, are numbered as they come out."""

    def __init__(self, inner: Accumulator) -> None:
        super().__init__()
        self._inner, self._count = inner, 0
        self.counters = inner.counters

    def push(self, block: Block, faults: Faults) -> list[Block]:
        return [self._labelled(made) for made in self._inner.push(block, faults)]

    def flush(self, faults: Faults) -> list[Block]:
        return [self._labelled(made) for made in self._inner.flush(faults)]

    def _labelled(self, block: Block) -> Block:
        self._count += 1
        return block.with_fields({**block.fields, LIST: Fixed(np.full(len(block), self._count))})
