"""What a custom operator is written with: `BaseOp`, its traits, and accumulators to build on.

An operator of a user's works on lists of `SampleRecord`. Stateless ones give `process_many` (or `process_one`) and run
on workers. One with an accumulator holds records back: `push_many` takes the lane's records in order and gives groups
that are ready, which then go through `process_many`; `flush` gives the rest at the end of each window. Each window of
each lane has an accumulator of its own, so nothing that it holds can reach another lane or outlive a flush.

Whatever list of records one of these functions is given, its borders depend on the lane's records alone
(`zephon.ops.grouping`), never on workers, queues or a restart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from zephon.types import SampleMeta, SampleRecord

__all__ = [
    "Accumulator",
    "BaseOp",
    "CountingAccumulator",
    "OpContext",
    "OpTraits",
    "PassthroughAccumulator",
    "spawn_child",
    "tombstones_for_record",
]


@dataclass(frozen=True)
class OpTraits:
    """What an operator says of itself.

    - `preserves_cursor_order`: records come out in the order in which they went in.
    - `parallelism`: how many calls may run at once in one process, where a runner has threads; behind an operator that
      holds records, from 2 on, on how many workers at once it runs. An execution hint.
    - `batch_shape_sensitive`: the result for a record depends on the others in its list. It is exact all the same, but
      the check of operators does not then compare records alone with records together.
    - `requires_serial_state`: the instance itself keeps state from call to call. It then runs in lane order, with a
      copy of the instance for each window of each lane.
    """

    preserves_cursor_order: bool = True
    parallelism: int = 1
    batch_shape_sensitive: bool = False
    requires_serial_state: bool = False


@dataclass(frozen=True)
class OpContext:
    """What `setup` and `accumulator` are told. The window's fields are None in `setup`."""

    name: str
    """The operator's name."""
    seed: int | None = None
    epoch: int | None = None
    lane_id: int | None = None
    chunk_id: int | None = None
    """The lane's chunk that the window begins with."""


class Accumulator(ABC):
    """Holds the records of one window of one lane until groups of them are ready."""

    @abstractmethod
    def push_many(self, records: list[SampleRecord]) -> list[list[SampleRecord]]:
        """Take records in; give the groups that are ready, in order."""

    @abstractmethod
    def flush(self, *, reset: bool = False) -> list[list[SampleRecord]]:
        """Give all that is held. With `reset` the accumulator is to be as new."""

    @abstractmethod
    def has_pending_data(self) -> bool:
        """Whether it holds records. False after a flush."""


class PassthroughAccumulator(Accumulator):
    """Holds nothing: every list is a group."""

    def push_many(self, records: list[SampleRecord]) -> list[list[SampleRecord]]:
        return [records] if records else []

    def flush(self, *, reset: bool = False) -> list[list[SampleRecord]]:
        return []

    def has_pending_data(self) -> bool:
        return False


class CountingAccumulator(Accumulator):
    """Groups of `max_batch` records, and a smaller one at a flush."""

    def __init__(self, max_batch: int) -> None:
        if type(max_batch) is not int or max_batch < 1:
            raise ValueError(f"CountingAccumulator: max_batch={max_batch!r}: must be a whole number from 1")
        self.max_batch = max_batch
        self._held: list[SampleRecord] = []

    def push_many(self, records: list[SampleRecord]) -> list[list[SampleRecord]]:
        held = [*self._held, *records]
        whole = len(held) - len(held) % self.max_batch
        self._held = held[whole:]
        return [held[low : low + self.max_batch] for low in range(0, whole, self.max_batch)]

    def flush(self, *, reset: bool = False) -> list[list[SampleRecord]]:
        held, self._held = self._held, []
        return [held] if held else []

    def has_pending_data(self) -> bool:
        return bool(self._held)


class BaseOp:
    """A custom operator. Override `process_many` or `process_one`, and whatever else is needed.

    An instance is pickled to the workers before `setup`, so files, connections and models are opened there. What
    `setup` sets stays in its process; the instance that the recipe made does not change. The class's code and the
    instance's attributes are part of the run's identity.
    """

    name: str = ""
    """How messages and plans call it; the class's name if it is empty."""

    def setup(self, ctx: OpContext) -> None:
        """Called once in every process that runs the operator, before its first record."""

    def teardown(self) -> None:
        """Called when the process is done with the operator; not if it is killed."""

    def traits(self) -> OpTraits:
        """What the operator says of itself."""
        return OpTraits()

    def accumulator(self, *, deterministic: bool, ctx: OpContext) -> Accumulator:
        """An empty accumulator for one window of one lane. `deterministic` is always True here.

        Overriding it makes the operator stateful.
        """
        return PassthroughAccumulator()

    def process_many(self, records: list[SampleRecord]) -> list[SampleRecord]:
        """The records that come of a list of them."""
        return [made for record in records for made in self.process_one(record)]

    def process_one(self, record: SampleRecord) -> list[SampleRecord]:
        """The records that come of one. An operator that has only this gets each record alone."""
        return self.process_many([record])

    def validation_samples(self) -> Sequence[SampleRecord]:
        """Records to check the operator with; none: the first ones of the run's own data."""
        return ()


def spawn_child(meta: SampleMeta, index: int) -> SampleMeta:
    """The meta of child number `index` of a record: the same samples, and a lineage one longer."""
    if type(index) is not int or index < 0:
        raise ValueError(f"spawn_child: index={index!r}: must be a whole number from 0")
    return replace(
        meta,
        lineage=(*meta.lineage, index),
        tags=dict(meta.tags),
        component_sample_counts=dict(meta.component_sample_counts),
        component_token_counts={},
        _hidden={},
    )


def tombstones_for_record(*arguments: Any, **settings: Any) -> list[SampleRecord]:
    """Nothing. Records that are dropped or held need no mark here: a lane counts what comes out."""
    return []
