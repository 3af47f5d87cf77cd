"""What a user's own code sees: records with their names, and the batch of an embedded run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zephon.batches import Batch, Sample
from zephon.columns import Block

__all__ = ["SampleBatch", "SampleMeta", "SampleRecord"]


@dataclass(frozen=True)
class SampleMeta:
    """Where a record comes from. A record that an operator returns keeps the meta of the one that it was made from."""

    sample_id: Sample
    """(dataset id, shard id, row): the dataset's name and the place in it."""
    lane_id: int = 0
    chunk_id: int | None = None
    """The lane's chunk that the sample belongs to, where that is known."""
    chunk_offset: int | None = None
    component_sample_counts: dict[str, int] = field(default_factory=dict)
    component_token_counts: dict[str, int] = field(default_factory=dict)
    lineage: tuple[int, ...] = ()
    """Which child of which child of the sample this is; empty for the sample itself."""
    tags: dict[str, Any] = field(default_factory=dict)
    """Marks of the user's own. They stay with the record up to the next custom operator and beyond."""
    _origin: tuple[tuple[int, ...], ...] | None = field(default=None, repr=False, compare=False)
    """All samples that the record was made from, as the run numbers them. None: the meta is of no run's record."""
    _hidden: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """What built-in operators keep with the record for one another."""


@dataclass
class SampleRecord:
    """One record: its meta, and its fields as a plain dict."""

    meta: SampleMeta
    payload: dict[str, Any]


class SampleBatch(Batch):
    """A batch that also shows its records one by one. They are made when touched."""

    @property
    def records(self) -> list[SampleRecord]:
        """One `SampleRecord` for each record; after packing, named by the first sample in it and counting all."""
        made = []
        for samples, payload in zip(self.samples, self.block.to_rows(), strict=True):
            several = samples if isinstance(samples, list) else [samples]
            counts: dict[str, int] = {}
            for name, _, _ in several:
                counts[name] = counts.get(name, 0) + 1
            meta = SampleMeta(several[0], lane_id=self.lane, component_sample_counts=counts)
            made.append(SampleRecord(meta, payload))
        return made

    @property
    def lane_ids(self) -> list[int]:
        """The lane of each record."""
        return [self.lane] * len(self)

    @classmethod
    def from_records(cls, records: Sequence[SampleRecord], *, first_record: int = 0) -> SampleBatch:
        """A batch of records of one lane."""
        lanes = {record.meta.lane_id for record in records}
        if len(lanes) > 1:
            raise ValueError(f"a batch holds records of one lane, not of lanes {sorted(lanes)}")
        numbers: dict[str, int] = {}
        samples = np.empty((len(records), 3), np.int64)
        for place, record in enumerate(records):
            name, shard, row = record.meta.sample_id
            samples[place] = numbers.setdefault(name, len(numbers)), shard, row
        block = Block.from_rows([record.payload for record in records], samples)
        return cls(block, lane=min(lanes, default=0), first_record=first_record, dataset_names=tuple(numbers))
