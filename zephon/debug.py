"""Looking at data by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from zephon.datasets import Dataset
from zephon.errors import SettingError
from zephon.ops.base import Faults


class DatasetInspector:
    """Reads single rows of a dataset."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def read(self, shard_id: int | str = 0, sample_index: int = 0) -> dict[str, Any]:
        """One row. `shard_id` is a shard's number, or its path (in memory: its id); `sample_index` the row in it.

        Raises `RecordError` for a row that cannot be read.
        """
        shard = self._shard(shard_id, sample_index)
        faults = Faults("raise", [self._dataset])
        return self._dataset.fetch(shard, np.array([sample_index]), None, faults).to_rows()[0]

    def raw(self, shard_id: int | str = 0, sample_index: int = 0) -> Any:
        """One row as it is stored, also one that cannot be read: the bytes of a line of JSON, or the fields of a row of
        Parquet with their text as bytes.
        """
        return self._dataset.source.raw(self._shard(shard_id, sample_index), sample_index)

    def _shard(self, shard_id: int | str, sample_index: int) -> int:
        """The shard's number, if it has such a row."""
        counts = self._dataset.counts
        if isinstance(shard_id, str):
            paths = [self._dataset.shard_path(i) for i in range(len(counts))]
            if shard_id not in paths:
                raise SettingError(f"shard_id={shard_id!r}: dataset {self._dataset.name!r} has no such shard")
            shard_id = paths.index(shard_id)
        if not 0 <= shard_id < len(counts):
            raise SettingError(f"shard_id={shard_id}: dataset {self._dataset.name!r} has shards 0 to {len(counts) - 1}")
        if not 0 <= sample_index < counts[shard_id]:
            raise SettingError(f"sample_index={sample_index}: shard {shard_id} has rows 0 to {counts[shard_id] - 1}")
        return shard_id
