"""Custom operators for tests, by name: `PIECES[name](pipeline)` adds one. All are honest; several show the borders of
the lists that they are given, so that a border in another place would be seen.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import zephon
from zephon import Dataset, InMemoryShard, MixtureSpec, Pipeline, SampleRecord, StaticMixtureWorkSource
from zephon.ops import Accumulator, BaseOp, CountingAccumulator, OpContext, OpTraits, spawn_child

Records = list[SampleRecord]


def stamp(records: Records) -> Records:
    """Each record with its place in the list that it came in."""
    for number, record in enumerate(records):
        record.payload["group"] = [*record.payload.get("group", []), number, len(records)]
    return records


def children(records: Records) -> Records:
    """None, one or two of each record, with lineage and tags."""
    made = []
    for record in records:
        for index in range(record.payload["id"] % 3):
            meta = spawn_child(record.meta, index)
            meta.tags["of"] = record.payload["id"]
            made.append(SampleRecord(meta, {**record.payload, "child": index}))
    return made


def told(records: Records) -> Records:
    """The metas, written down."""
    for record in records:
        meta = record.meta
        record.payload["meta"] = repr(replace(meta, sample_id=tuple(meta.sample_id)))
    return records


def noisy(records: Records) -> Records:
    for record in records:
        record.payload["noise"] = float(zephon.generator(record.meta).random())
    return records


def noisy_one(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "first": float(zephon.generator().random()), "second": float(zephon.generator().random())}


def hold_pairs(state: Records, records: Records) -> tuple[Records, Records]:
    """Records leave in pairs, the later one first."""
    out = []
    for record in records:
        state.append(record)
        if len(state) == 2:
            out += [state.pop(), state.pop()]
    return state, out


def counted(state: dict[str, int], records: Records) -> tuple[dict[str, int], Records]:
    for record in records:
        state["seen"] += 1
        record.payload["nth"] = state["seen"]
    return state, records


def hoard(state: Records, records: Records) -> tuple[Records, Records]:
    return [*state, *records], []


class Doubled(BaseOp):
    """Each record on its own, with a table that `setup` makes."""

    def setup(self, ctx: OpContext) -> None:
        self.factor = 2

    def process_one(self, record: SampleRecord) -> Records:
        record.payload["double"] = record.payload["id"] * self.factor
        return [record]


class Numbered(BaseOp):
    """Keeps its count in itself, and says so."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def traits(self) -> OpTraits:
        return OpTraits(requires_serial_state=True)

    def process_many(self, records: Records) -> Records:
        for record in records:
            self.seen.append(record.payload["id"])
            record.payload["serial"] = len(self.seen)
        return records


class Sorted(BaseOp):
    """Whole windows, by id."""

    class Everything(Accumulator):
        def __init__(self) -> None:
            self.held: Records = []

        def push_many(self, records: Records) -> list[Records]:
            self.held += records
            return []

        def flush(self, *, reset: bool = False) -> list[Records]:
            held, self.held = self.held, []
            return [held] if held else []

        def has_pending_data(self) -> bool:
            return bool(self.held)

    def accumulator(self, *, deterministic: bool, ctx: OpContext) -> Accumulator:
        return self.Everything()

    def process_many(self, records: Records) -> Records:
        return sorted(records, key=lambda record: -record.payload["id"])


PIECES: dict[str, Callable[[Pipeline], Pipeline]] = {
    "stamp": lambda p: p.add_op("stamp", process_many=stamp, batch_shape_sensitive=True),
    "children": lambda p: p.add_op("children", process_many=children),
    "told": lambda p: p.add_op("told", process_many=told),
    "noisy": lambda p: p.add_op("noisy", process_many=noisy),
    "noisy_one": lambda p: p.map_transform(noisy_one),
    "fours": lambda p: p.add_op("fours", process_many=stamp, accumulator=CountingAccumulator(4)),
    "doubled": lambda p: p.add_op(Doubled()),
    "numbered": lambda p: p.add_op(Numbered()),
    "sorted": lambda p: p.add_op(Sorted()),
    "pairs": lambda p: p.stateful_transform("pairs", init_state=[], push=hold_pairs, flush=lambda state: state),
    "counted": lambda p: p.stateful_transform("counted", init_state=lambda: {"seen": 0}, push=counted),
    "hoard": lambda p: p.stateful_transform(
        "hoard", init_state=list, push=hoard, flush=lambda state: state[::-1], transform=stamp,
        should_flush=lambda state: len(state) >= 100,
    ),
    "odd": lambda p: p.map_transform(lambda row: row if row["id"] % 4 else None),
    "shuffle": lambda p: p.shuffle(buffer_size=9),
}  # fmt: skip


def pipeline_of(
    *pieces: str, rows: tuple[int, ...] = (300, 150), lanes: int = 3, chunk: int = 50, batch: int = 4, **source: Any
) -> Pipeline:
    """A pipeline of these pieces over rows `{"id", "of"}` held in memory."""
    datasets = [
        Dataset.from_dict(f"d{i}", {f"s{j}": InMemoryShard([{"id": n, "of": i} for n in range(j, count, 2)])
                                    for j in range(2)})
        for i, count in enumerate(rows)
    ]  # fmt: skip
    mixture = MixtureSpec({f"d{i}": count for i, count in enumerate(rows)})
    settings = {"seed": 5, "chunk_size": chunk, **source}
    pipeline = Pipeline(StaticMixtureWorkSource(datasets, mixture, **settings))
    for piece in pieces:
        PIECES[piece](pipeline)
    return pipeline.batch(batch).options(canonical_replicas=lanes, flush_every_k_chunks=2)
