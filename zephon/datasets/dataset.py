"""`Dataset`: a name for shards of one format, and the place where rows are counted and read.

Making one looks for files and nothing more; rows are counted at first use. A dataset is light to pickle, and its other
end reads the same shards: what was counted travels, row offsets are mapped from the cache folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from zephon.arguments import drop_ignored
from zephon.columns import Block, IntArray
from zephon.datasets.fetch import gather
from zephon.datasets.memory import InMemoryShard, MemorySource
from zephon.datasets.shards import find_shards
from zephon.datasets.source import Source
from zephon.errors import SettingError
from zephon.extras import needing

if TYPE_CHECKING:
    from zephon.ops.base import Faults


class Dataset:
    """An ordered set of shards under a name. Made by `from_path` or `from_dict`.

    Shards without a row are left out, so an empty file changes nothing. A dataset without any row is a `DatasetError`.
    """

    def __init__(self, name: str, source: Source) -> None:
        if not isinstance(name, str) or not name:  # type: ignore[redundant-expr]
            raise SettingError(f"a dataset's name is a str that is not empty, not {name!r}")
        self.name, self.source = name, source

    @staticmethod
    def from_path(name: str, path: str | os.PathLike[str], *, fmt: str | None = None, **ignored: Any) -> Dataset:
        """The shards at a file, a folder or a glob. `fmt` is `"jsonl"`, `"parquet"` or None: by suffix.

        Shards stand in natural order of their path (`zephon.datasets.shards` says what is left out). Raises
        DatasetError where there is none, SettingError for an unknown `fmt`.
        """
        drop_ignored("Dataset.from_path", ignored, ("name", "path", "fmt"))
        found = find_shards(name, path, fmt)
        if found.format == "parquet":
            with needing("Dataset.from_path of Parquet"):
                from zephon.datasets.parquet import Parquet

            return Dataset(name, Parquet(name, found.files, found.location))
        with needing("Dataset.from_path of JSON lines"):
            from zephon.datasets.jsonl import JsonLines

        return Dataset(name, JsonLines(name, found.files, found.location))

    @staticmethod
    def from_dict(name: str, shards: Mapping[str, InMemoryShard]) -> Dataset:
        """Rows held in memory; shards in the order given. Raises DatasetError if there is no row."""
        return Dataset(name, MemorySource(name, shards))

    def __repr__(self) -> str:
        return f"Dataset({self.name!r}, {self.format} at {self.location})"

    def __zephon_identity__(self) -> str:
        """What a function or a work source that holds it is known by (`zephon.function_digest`): no path, no cache."""
        return f"dataset {self.name} {self.digest}"

    @property
    def format(self) -> str:
        """`"jsonl"`, `"parquet"` or `"memory"`."""
        return self.source.format

    @property
    def location(self) -> str:
        """The absolute path or glob that it was found at, for messages."""
        return self.source.location

    @property
    def counts(self) -> IntArray:
        """Rows of each shard, int64 `[shards]`."""
        return self.source.counts

    @property
    def total(self) -> int:
        """Rows of all shards."""
        return int(self.counts.sum())

    @property
    def shard_count(self) -> int:
        """Shards that hold rows."""
        return len(self.counts)

    @property
    def raw_bytes(self) -> int:
        """Bytes of all shards as they are stored."""
        return self.source.raw_bytes

    @property
    def digest(self) -> str:
        """32 hex digits of format, row counts and content, in shard order; of no name or path.

        Of Parquet it takes the footer and the first and last 64 KiB of each file, of everything else all content.
        """
        return self.source.digest

    def shard_path(self, shard: int) -> str:
        """The absolute path of a shard; in memory, its id."""
        return self.source.shard_path(shard)

    def fetch(
        self, shard: int, rows: IntArray, fields: frozenset[str] | None, faults: Faults, dataset_index: int = 0
    ) -> Block:
        """Rows of one shard in the order given, any order, repeats allowed; of their fields those named (None: all).

        A bad row goes to `faults` and, if that returns, is absent. A field that a row lacks holds `MISSING` or its
        column is absent. Raises `DatasetError` for a file that is damaged or has changed.
        """
        pointers = np.empty((len(rows), 3), np.int64)
        pointers[:, 0], pointers[:, 1], pointers[:, 2] = dataset_index, shard, rows
        return gather(lambda _: self.source, pointers, fields, faults)
