"""Random numbers for a user's functions that are the same wherever, whenever and in whatever company a record is worked
on.

`generator()` is keyed by the run's seed, the epoch, how often the sample was drawn before in that epoch, the place of
the operator in the pipeline, and the record's own identity: the samples that it was made from (dataset, shard, row)
and its lineage. So a record draws the same numbers on any worker and after any resume, others in every epoch and every
pass, and others than every other record. numpy's and Python's global generators know nothing of this: what they give
depends on which worker a record came to.

Records made of the very same samples, such as the pieces of a long document, are told apart by their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np

from zephon.columns import HIDDEN, MISSING, Block
from zephon.errors import RunFailed
from zephon.permutations import mix

if TYPE_CHECKING:
    from zephon.ops.base import Operator, Scope
    from zephon.types import SampleMeta

__all__ = ["generator"]

Samples = Sequence[tuple[int, ...]]
"""Of one record: (dataset, shard, row) or (dataset, shard, row, place in the lane) each."""

LINEAGE = HIDDEN + "lineage"
"""The hidden field that keeps a record's lineage between operators: a tuple of whole numbers."""
PIECE = HIDDEN + "piece"
"""A hidden field: which of the records made of one sample this is (`zephon.ops.numbering`)."""
SEQUENCE = HIDDEN + "sequence"
"""A hidden field: which packed record of the lane this is."""


class Draws:
    """Who draws: an operator at work on the records of a block, all of one lane."""

    def __init__(self, operator: Operator, scope: Scope | None, block: Block, part: str = "") -> None:
        """`part`: one of several functions of the operator that draw apart from one another."""
        self._operator, self._scope, self._block, self._part = operator, scope, block, part
        self._at = -1
        self._watched = None if scope is None or block.samples.shape[1] < 4 else scope.at
        self._places: list[int] = [] if self._watched is None else _places(block)
        self._passes: dict[int, int] = {}
        self._made: dict[tuple[Samples, tuple[int, ...], tuple[int, ...]], np.random.Generator] = {}

    def turn_to(self, record: int) -> None:
        """From now on `generator()` without a meta means this record of the block."""
        self._at = record
        if self._watched is not None and record >= 0:
            self._watched.turn_to(self._places[record])
        if self._made:
            self._made = {}

    def begin_again(self) -> None:
        """Every record's generator is new."""
        self._made = {}

    def of_record(self) -> np.random.Generator:
        """Of the record that the function is at work on."""
        if self._at < 0:
            raise RunFailed(
                f"{self._operator.name}: zephon.generator() of which record? The function has several in hand: call "
                "zephon.generator(record.meta)"
            )
        low, high = self._at, self._at + 1
        values = {name: column.slice(low, high).to_list()[0] for name, column in self._block.hidden.items()}
        hidden = {name: value for name, value in values.items() if value is not MISSING}
        return self.of(_samples_of(self._block, self._at), hidden.get(LINEAGE) or (), hidden)

    def of(self, samples: Samples, lineage: tuple[int, ...], hidden: Mapping[str, Any]) -> np.random.Generator:
        """Of the record made from these samples: the same generator, further on, if it was asked for before."""
        numbers = (int(hidden.get(PIECE) or 0), *(int(n) for n in hidden.get(SEQUENCE, ())))
        identity = tuple(samples), tuple(lineage), numbers
        if identity not in self._made:
            self._made[identity] = np.random.Generator(np.random.PCG64(self._key(*identity)))
        return self._made[identity]

    def _key(self, samples: Samples, lineage: tuple[int, ...], numbers: tuple[int, ...]) -> int:
        scope = self._scope
        if scope is None:
            raise RunFailed(f"{self._operator.name}: zephon.generator() outside a run: it has no seed and no epoch")
        place = next((i for i, op in enumerate(scope.plan.operators) if op is self._operator), 0)
        parts: list[int | str] = ["generator", scope.plan.seed, scope.epoch, place]
        parts += [self._part] if self._part else []
        names = scope.plan.dataset_names
        for dataset, shard, row, *where in samples:
            parts += [names[dataset], shard, row, self._pass(where[0]) if where else 0]
        return mix(*parts, "numbers", *numbers, "lineage", *lineage)

    def _pass(self, place: int) -> int:
        """How often the sample at a place of the lane was drawn before in its epoch."""
        if place not in self._passes:
            assert self._scope is not None
            places = [place, *self._block.samples[:, 3].tolist()] if self._block.samples.shape[1] == 4 else [place]
            passes = self._scope.plan.passes(self._scope.epoch, self._scope.lane, np.array(places))
            self._passes.update(zip(places, passes.tolist()))
        return self._passes[place]


class BatchDraws(Draws):
    """Who draws: a function at work on one batch, named by its lane and its first record."""

    def __init__(self, operator: Operator, scope: Scope | None, block: Block, first_record: int) -> None:
        super().__init__(operator, scope, block)
        self._first = first_record

    def of_record(self) -> np.random.Generator:
        lane = -1 if self._scope is None else self._scope.lane
        return self.of((), (), {SEQUENCE: (lane, self._first)})


def _places(block: Block) -> list[int]:
    """For each record the place in the lane of the first sample that it was made from."""
    first = slice(None) if block.sample_offsets is None else block.sample_offsets[:-1]
    places: list[int] = block.samples[first, 3].tolist()
    return places


def _samples_of(block: Block, record: int) -> Samples:
    offsets = block.sample_offsets
    low, high = (record, record + 1) if offsets is None else (int(offsets[record]), int(offsets[record + 1]))
    return [tuple(sample) for sample in block.samples[low:high].tolist()]


_at_work: ContextVar[Draws | None] = ContextVar("zephon_draws", default=None)


@contextmanager
def drawing(draws: Draws) -> Iterator[Draws]:
    """Functions that are called inside may ask for their `generator()`."""
    token = _at_work.set(draws)
    try:
        yield draws
    finally:
        _at_work.reset(token)


def generator(meta: SampleMeta | None = None) -> np.random.Generator:
    """numpy's `Generator` for one record, inside a function of `map_transform`, `stateful_transform` or `add_op`.

    Where the function gets one record at a time (`map_transform`, `process_one`), it needs no argument; where it gets a
    list of them, give it the `meta` of one; in a function of `map_batch` it is the batch's. Within one call of the
    function the same record has one generator, which goes on. Every epoch, every pass over the data within it, every
    operator and every record has another. Raises RunFailed outside such a function.
    """
    draws = _at_work.get()
    if draws is None:
        raise RunFailed(
            "zephon.generator() works inside a function that a running pipeline calls on records (map_transform, "
            "stateful_transform, add_op, map_batch), and nowhere else. In a thread of the function's own, make it "
            "before."
        )
    if meta is None:
        return draws.of_record()
    if meta._origin is None:
        raise RunFailed("zephon.generator(meta): this meta is of no record of the pipeline; give it record.meta")
    return draws.of(meta._origin, meta.lineage, meta._hidden)


def begin_again() -> None:
    """The functions at work are called once more on the same records: their generators start from the beginning."""
    draws = _at_work.get()
    if draws is not None:
        draws.begin_again()
