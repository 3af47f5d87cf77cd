"""Records as a user's functions see them, made from a block, and turned into a block again.

A function gets payloads of its own, with lists, dicts and arrays of its own too, so that changing them in place cannot
reach another record or the data source; and what it returns is taken over in the same way, so that it may fill one
buffer again and again. Every record that comes back names the samples it was made from through its meta, which keeps
them out of sight. Lineage and tags travel in hidden fields of the block, where a record has any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from zephon.columns import HIDDEN, MISSING, Block, Column, Fixed, Objects, Ragged, Text, column_of
from zephon.errors import RunFailed
from zephon.ops.base import Faults, said
from zephon.ops.interrupts import is_interrupt
from zephon.ops.token_fields import AUTO, SAMPLE_TOKENS
from zephon.randomness import LINEAGE
from zephon.types import SampleMeta, SampleRecord

T = TypeVar("T")

TAGS = HIDDEN + "tags"

NESTED = 200
"""How deep lists, dicts and tuples may lie in one another in what a function gets and returns.

Python gives up at a thousand calls in one another, and a copy and a pickle take two a level. So it does not matter how
deep the calls are from which a run is driven, within reason.
"""

_SHARED = frozenset({str, bytes, int, float, bool, complex, type(None), np.int64, np.float64, np.bool_, range})
"""Types whose values cannot change, so that any number of owners may share one."""


class NestedTooDeep(ValueError):
    """A value that cannot be copied. One that holds itself is nested without an end."""

    def __init__(self) -> None:
        super().__init__(f"a value holds itself, or is nested more than {NESTED} levels deep")


def copied(make: Callable[[Block], T], block: Block, operator: str, faults: Faults) -> tuple[Block, T]:
    """The block, and `make` of it, which copies its values. Records that cannot be copied are bad, and in neither."""
    try:
        return block, make(block)
    except NestedTooDeep:
        good = []
        for record, row in enumerate(rows_apart(block)):
            if isinstance(row, NestedTooDeep):
                faults.bad(block.sample_of(record), operator, str(row))
            else:
                good.append(record)
        block = block.take(np.array(good, np.int64))
        return block, make(block)


def rows_apart(block: Block) -> Iterator[dict[str, Any] | NestedTooDeep]:
    """As `own_rows`, record by record, with the error of those that cannot be copied."""
    for record in range(len(block)):
        try:
            yield own_rows(block.slice(record, record + 1))[0]
        except NestedTooDeep as error:
            yield error


def own_rows(block: Block) -> list[dict[str, Any]]:
    """One dict a record, whose mutable values belong to no one else. May raise `NestedTooDeep`."""
    fields: dict[str, Column] = {
        name: Objects([own(value) for value in column.values])
        if isinstance(column, Objects)
        else column
        if isinstance(column, Text)
        else column.copy()
        for name, column in block.fields.items()
    }
    return block.with_fields(fields).to_rows()


def own(value: Any) -> Any:
    """The same value, copied where somebody could change it: lists, dicts, sets, tuples of them, arrays.

    One that is found in several places is copied once, and found in these places again. Raises `NestedTooDeep` if
    lists, dicts and tuples of such lie in one another on more than `NESTED` levels.
    """
    return value if type(value) in _SHARED else _owned(value, NESTED, {})[0]


def _owned(value: Any, levels: int, held: dict[int, tuple[Any, int]]) -> tuple[Any, int]:
    """The value's copy, and on how many levels lists, dicts and tuples lie in one another in it: at most `levels`.

    `held` has both of what was copied before, by id.
    """
    found = held.get(id(value))
    if found is not None:
        if found[1] > levels:
            raise NestedTooDeep
        return found
    kind, made, height = type(value), value, 0
    if kind is dict or kind is list or kind is tuple:
        items = value.values() if kind is dict else value
        if not _SHARED.issuperset(map(type, items)):
            if not levels:
                raise NestedTooDeep
            height, items = 1, list(items)
            for place, item in enumerate(items):
                if type(item) not in _SHARED:
                    items[place], below = _owned(item, levels - 1, held)
                    height = max(height, below + 1)
            made = dict(zip(value, items)) if kind is dict else items if kind is list else tuple(items)
        elif kind is not tuple:
            made = value.copy()
    elif isinstance(value, np.ndarray) or kind is set or kind is bytearray:
        made = value.copy()
    found = held[id(value)] = made, height
    return found


def fields_of(block: Block, record: int) -> dict[str, Any]:
    """What a record has, by field, as a function is given it."""
    return block.slice(record, record + 1).to_rows()[0]


def wrong_payload(payload: Any, expected: str = "a dict") -> str | None:
    """What is wrong with a payload that a function returned, if anything."""
    if not isinstance(payload, dict):
        return f"the function returned {type(payload).__name__}, expected {expected}"
    for key in payload:
        if type(key) is not str:
            return f"the function returned a dict with the key {key!r} of type {type(key).__name__}, expected str"
        if key.startswith(HIDDEN):
            return f"the function returned a dict with the key {key!r}: names that begin so are the operators' own"
    return None


def records_of(block: Block, faults: Faults) -> list[SampleRecord]:
    """The block's records, each with a payload of its own and a meta that says where it comes from.

    May raise `NestedTooDeep`.
    """
    scope = faults.scope
    lane, chunk_size = (scope.lane, scope.plan.chunk_size) if scope is not None else (0, 0)
    names = [dataset.name for dataset in faults.datasets]
    origins = _origins(block)
    tokens, lineages = _token_counts(block), _values(block, LINEAGE, ())
    kept = {name: _values(block, name, MISSING) for name in block.hidden if name not in (LINEAGE, TAGS)}
    records = []
    for number, (payload, tags) in enumerate(zip(own_rows(block), _values(block, TAGS, None))):
        origin = origins[number]
        _, shard, row, *place = origin[0]
        hidden = {name: values[number] for name, values in kept.items() if values[number] is not MISSING}
        of = [names[sample[0]] if sample[0] < len(names) else str(sample[0]) for sample in origin]
        samples_of = {name: of.count(name) for name in of} if len(of) > 1 else {of[0]: 1}
        tokens_of = _tokens_of(of, hidden.get(SAMPLE_TOKENS), tokens[number])
        chunk, offset = divmod(place[0], chunk_size) if place and chunk_size else (None, None)
        meta = SampleMeta(
            (of[0], shard, row), lane, chunk, offset, samples_of, tokens_of, tuple(lineages[number]),
            dict(tags or {}), origin, hidden,
        )  # fmt: skip
        records.append(SampleRecord(meta, payload))
    return records


def block_of(records: Sequence[SampleRecord], like: Block) -> Block:
    """Records that were `taken` from a function, as a block; `like` is one of those that it was given."""
    if not records:
        return like.slice(0, 0)
    origins = [record.meta._origin or () for record in records]  # never empty: see `taken`
    samples = np.array([sample for origin in origins for sample in origin], np.int64)
    offsets = None
    if like.sample_offsets is not None or len(samples) != len(records):
        offsets = np.zeros(len(records) + 1, np.int64)
        np.cumsum([len(origin) for origin in origins], out=offsets[1:])
    made = Block.from_rows([record.payload for record in records], samples, offsets)
    hidden: dict[str, Column] = {}
    if any(record.meta.lineage for record in records):
        hidden[LINEAGE] = Objects([tuple(record.meta.lineage) for record in records])
    if any(record.meta.tags for record in records):
        hidden[TAGS] = Objects([record.meta.tags for record in records])
    for name in dict.fromkeys(name for record in records for name in record.meta._hidden):
        hidden[name] = column_of([record.meta._hidden.get(name, MISSING) for record in records])
    return made.with_fields({**made.fields, **hidden})


def taken(result: Any, what: str, lane: int) -> list[SampleRecord] | str:
    """The records that a function returned, with payloads and tags that are nobody else's; or what is wrong with them.

    `what` is the function's name.
    """
    if not isinstance(result, list):
        return f"{what} returned {type(result).__name__}, expected a list of SampleRecord"
    records = []
    for record in result:
        if not isinstance(record, SampleRecord):
            return f"{what} returned a list with a {type(record).__name__} in it, expected SampleRecord"
        meta: Any = record.meta
        if not isinstance(meta, SampleMeta) or not meta._origin:
            return (
                f"{what} returned a record whose meta is of no record of the pipeline: give it the meta of the one it "
                "was made from (dataclasses.replace(meta, ...) keeps what it needs), or spawn_child(meta, index)"
            )
        if meta.lane_id != lane:
            return (
                f"{what} returned a record of lane {meta.lane_id} in lane {lane}: no record may outlive the state of "
                "its own lane, so keep records nowhere but in the state"
            )
        if type(meta.lineage) is not tuple or not all(isinstance(n, (int, np.integer)) for n in meta.lineage):
            return f"{what} returned a record with the lineage {meta.lineage!r}, expected a tuple of whole numbers"
        wrong = wrong_payload(record.payload)
        if wrong:
            return wrong.replace("the function returned", f"{what} returned a record with the payload", 1)
        try:
            payload = own(record.payload)
            if meta.tags:
                meta = replace(meta, tags=own(meta.tags))
        except NestedTooDeep as error:
            return f"{what} returned a record in which {error}"
        records.append(SampleRecord(meta, payload))
    return records


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`. StopIteration, which would end a loop of ours in silence, becomes a RuntimeError."""
    try:
        return function(*arguments)
    except StopIteration as error:
        raise RuntimeError("the function raised StopIteration") from error


def tried(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """A call that must not fail, as it would leave a state that nobody knows: raises `RunFailed`, which says `what`."""
    try:
        return call(function, *arguments)
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise RunFailed(f"{what} failed: {said(error)}") from error


def _tokens_of(names: Sequence[str], each: Any, whole: int | None) -> dict[str, int]:
    """A record's tokens by dataset: of each of its samples, or of all that are of one dataset; else unknown."""
    if isinstance(each, np.ndarray) and len(each) == len(names):
        counts: dict[str, int] = {}
        for name, tokens in zip(names, each.tolist()):
            counts[name] = counts.get(name, 0) + tokens
        return counts
    return {names[0]: whole} if whole is not None and len(set(names)) == 1 else {}


def _origins(block: Block) -> list[tuple[tuple[int, ...], ...]]:
    """The samples of each record."""
    compact = block.compact_samples()
    samples = list(map(tuple, compact.samples.tolist()))
    if compact.sample_offsets is None:
        return [(sample,) for sample in samples]
    return [tuple(samples[low:high]) for low, high in pairwise(compact.sample_offsets.tolist())]


def _values(block: Block, name: str, missing: Any) -> list[Any]:
    """A hidden field's values."""
    column = block.fields.get(name)
    if column is None:
        return [missing] * len(block)
    return [missing if value is MISSING else value for value in column.to_list()]


def _token_counts(block: Block) -> list[int | None]:
    """How many tokens each record has, by the first of its fields that says it."""
    counts: list[int | None] = [None] * len(block)
    for name in ("sequence_length", *AUTO):
        column = block.fields.get(name)
        if column is not None and None in counts:
            counts = [had if had is not None else here for had, here in zip(counts, _amounts(column, name))]
    return counts


def _amounts(column: Column, name: str) -> Sequence[int | None]:
    """The lengths of a column's values, or of `sequence_length` the numbers; None where it has neither."""
    numbers = name not in AUTO
    if isinstance(column, Ragged) and not numbers:
        lengths: list[int | None] = column.lengths.tolist()
        return lengths
    if isinstance(column, Fixed) and not numbers:
        return [column.values.shape[1] if column.values.ndim == 2 else None] * len(column)
    if numbers:
        whole = (int, np.integer)
        return [int(v) if isinstance(v, whole) and type(v) is not bool else None for v in column.to_list()]
    values: list[Any] = column.values if isinstance(column, Objects) else [None] * len(column)
    return [len(v) if type(v) in (list, tuple) or _is_row(v) else None for v in values]


def _is_row(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 1
