"""A work source of one's own: the share of code grows from a tenth to six tenths as the epoch goes on.

Each lane has rows of its own, each once an epoch, in an order drawn from the seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zephon import Dataset, Pipeline, WorkChunk, WorkSource

DATA = Path(__file__).parent / "data"
CHUNK = 32


class Ramp(WorkSource):
    def __init__(self, datasets: Iterable[Dataset], seed: int = 0) -> None:
        self.datasets_by_id = {dataset.name: dataset for dataset in datasets}
        self.seed = seed

    def clone_for_lane(self, lane_id: int, canonical_replicas: int) -> Ramp:
        clone = Ramp(self.datasets_by_id.values(), self.seed)
        clone.lane, clone.lanes = lane_id, canonical_replicas
        clone.set_epoch(0)
        return clone

    def set_epoch(self, epoch: int) -> None:
        """This lane's rows of each dataset: every `lanes`-th, as pointers (dataset number, shard, row), shuffled."""
        random = np.random.default_rng([self.seed, epoch, self.lane])
        self.rows = {}
        for number, (name, dataset) in enumerate(self.datasets_by_id.items()):
            begins = np.cumsum(dataset.counts) - dataset.counts
            shards = np.repeat(np.arange(dataset.shard_count), dataset.counts)
            rows = np.arange(dataset.total) - begins[shards]
            pointers = np.column_stack((np.full_like(rows, number), shards, rows))
            self.rows[name] = random.permutation(pointers[self.lane :: self.lanes])
        self.taken = dict.fromkeys(self.rows, 0)

    def next_chunk(self) -> WorkChunk | None:
        done = sum(self.taken.values()) / sum(map(len, self.rows.values()))
        code = round(CHUNK * (0.1 + 0.5 * done))
        components = {}
        for name, count in (("web", CHUNK - code), ("code", code)):
            low = self.taken[name]
            components[name] = self.rows[name][low : low + count]
            self.taken[name] += len(components[name])
        return WorkChunk(components) if any(map(len, components.values())) else None

    def state_dict(self) -> dict[str, Any]:
        return {"taken": dict(self.taken)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.taken = dict(state["taken"])


pipeline = (
    Pipeline(Ramp([Dataset.from_path("web", DATA / "web"), Dataset.from_path("code", DATA / "code")], seed=42))
    .tokenize(tokenizer_id=DATA / "tokenizer.json", field="text", special_tokens="eos")
    .pack_flat(max_length=65, algorithm="wrap")
    .shuffle(buffer_size=32)
    .batch(microbatch_size=4)
    .options(canonical_replicas=8)
)
