"""Work sources as users might write them, for tests; and recipes with one, as `small_recipes.Lockstep` runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.unit.small_recipes import STEPS, dataset
from zephon import Dataset, Pipeline, WorkChunk, WorkSource
from zephon.plan import Plan

ROWS = {"a": 50, "b": 31, "c": 7}


def datasets() -> dict[str, Dataset]:
    return {name: dataset(name, rows, 1 + rows % 3) for name, rows in ROWS.items()}


def pointer(data: Dataset, name: str, number: int) -> tuple[str, int, int]:
    """The pointer to a row by its number in the dataset, taken round and round."""
    number %= data.total
    for shard, count in enumerate(data.counts.tolist()):
        if number < count:
            return name, shard, number
        number -= count
    raise AssertionError


class Adaptive(WorkSource):
    """Its proportions follow from its own counters: a dataset drawn often is drawn less. Chunks differ in length, and
    lanes end at different times. A chunk has several components, with or without a seed.
    """

    def __init__(self, by_id: dict[str, Dataset], chunks: int, lane: int = 0, lanes: int = 1, seed: int = 0) -> None:
        self.datasets_by_id = by_id
        self.chunks, self.lane, self.lanes, self.seed = chunks, lane, lanes, seed
        self.done, self.drawn, self.epoch = 0, dict.fromkeys(by_id, 0), 0

    def clone_for_lane(self, lane_id: int, canonical_replicas: int) -> Adaptive:
        return Adaptive(self.datasets_by_id, self.chunks, lane_id, canonical_replicas, self.seed)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def next_chunk(self) -> WorkChunk | None:
        if self.done == self.chunks + self.lane % 3:
            return None
        count = 1 + (5 * self.done + self.lane) % 7
        components: dict[str, list[tuple[str, int, int]]] = {name: [] for name in self.datasets_by_id}
        for _ in range(count):
            name = min(self.drawn, key=lambda n: (self.drawn[n] * (1 + (self.done + ord(n)) % 3), n))
            number = self.drawn[name] * self.lanes + self.lane + self.epoch
            components[name].append(pointer(self.datasets_by_id[name], name, number))
            self.drawn[name] += 1
        self.done += 1
        return WorkChunk(components, seed=self.seed + self.done if self.done % 2 else None)

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "drawn": dict(self.drawn)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.done, self.drawn = state["done"], dict(state["drawn"])


class Generated(WorkSource):
    """A numpy generator inside: every row, and the length of every chunk, is drawn from it."""

    def __init__(self, by_id: dict[str, Dataset], chunks: int, lane: int = 0, seed: int = 0) -> None:
        self.datasets_by_id = by_id
        self.chunks, self.lane, self.seed, self.done = chunks, lane, seed, 0
        self.random = np.random.default_rng([seed, lane])

    def clone_for_lane(self, lane_id: int, canonical_replicas: int) -> Generated:
        return Generated(self.datasets_by_id, self.chunks, lane_id, self.seed)

    def set_epoch(self, epoch: int) -> None:
        self.random = np.random.default_rng([self.seed, self.lane, epoch])

    def next_chunk(self) -> WorkChunk | None:
        if self.done == self.chunks:
            return None
        self.done += 1
        names = list(self.datasets_by_id)
        pointers = np.empty((int(self.random.integers(1, 9)), 3), np.int64)
        for place in range(len(pointers)):
            name = names[int(self.random.integers(len(names)))]
            number = int(self.random.integers(10**6))
            pointers[place] = (names.index(name), *pointer(self.datasets_by_id[name], name, number)[1:])
        return WorkChunk({"drawn": pointers}, seed=int(self.random.integers(2**40)))

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "random": self.random.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.done = state["done"]
        self.random.bit_generator.state = state["random"]


SOURCES: dict[str, Callable[[int, int], WorkSource]] = {
    "adaptive": lambda chunks, seed: Adaptive(datasets(), chunks, seed=seed),
    "generated": lambda chunks, seed: Generated(datasets(), chunks, seed=seed),
}


@dataclass(frozen=True)
class OwnRecipe:
    """As `small_recipes.Recipe`, with a source of the user's own."""

    source: str = "adaptive"
    chunks: int = 9
    seed: int = 0
    steps: tuple[str, ...] = ()
    lanes: int = 4
    flush_every: int = 2
    drop_last: bool = True
    even_ends: bool = True
    strategy: str = "contiguous"

    def pipeline(self, microbatch_size: int = 2, **options: Any) -> Pipeline:
        pipeline = Pipeline(SOURCES[self.source](self.chunks, self.seed))
        for step in self.steps:
            STEPS[step](pipeline)
        pipeline.batch(microbatch_size, drop_last=self.drop_last)
        return pipeline.options(
            canonical_replicas=self.lanes,
            flush_every_k_chunks=self.flush_every,
            even_ends=self.even_ends,
            mapping_strategy=self.strategy,
            **options,
        )

    def plan(self, microbatch_size: int = 2) -> Plan:
        return self.pipeline(microbatch_size).plan()
