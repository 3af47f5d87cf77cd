"""What the formats have in common: a source of rows that a `Dataset` gives a name to."""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from zephon.columns import Column, IntArray
from zephon.datasets.shard_index import Scanner, Survey, survey
from zephon.errors import DatasetError
from zephon.words import many


class Piece(NamedTuple):
    """Rows of one shard: `columns` of the good ones in the order asked for, `bad` as (place in that order, cause)."""

    columns: dict[str, Column]
    bad: list[tuple[int, str]]


class Source(ABC):
    """Shards of one format. Shards without rows are left out, so that an empty file changes nothing."""

    format: str
    location: str

    @property
    @abstractmethod
    def counts(self) -> IntArray:
        """Rows of each shard, int64."""

    @property
    @abstractmethod
    def raw_bytes(self) -> int: ...

    @property
    @abstractmethod
    def digest(self) -> str: ...

    @abstractmethod
    def shard_path(self, shard: int) -> str: ...

    @abstractmethod
    def read(self, shard: int, rows: IntArray, fields: frozenset[str] | None) -> Piece:
        """Rows in ascending order (repeats allowed); of their fields those named, if they have them, or all."""

    @abstractmethod
    def raw(self, shard: int, row: int) -> Any:
        """One row as it is stored, whatever is wrong with it."""


class FileSource(Source):
    """Files, counted at first use."""

    scanner: Scanner

    def __init__(self, name: str, files: list[str], location: str) -> None:
        self.name, self.files, self.location = name, files, location
        self._survey: Survey | None = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    @property
    def survey(self) -> Survey:
        with self._lock:
            if self._survey is None:
                found = survey(repr(self.name), self.files, self.scanner)
                if not len(found.rows):
                    raise DatasetError(
                        f"dataset {self.name!r}: {self.location} holds no row in {many(len(self.files), 'file')}; "
                        "check that the data was written there"
                    )
                self._survey = found
            return self._survey

    @property
    def counts(self) -> IntArray:
        return self.survey.rows

    @property
    def raw_bytes(self) -> int:
        return int(self.survey.sizes.sum())

    @property
    def digest(self) -> str:
        found = self.survey
        return digest_of(self.format, found.rows, found.digests.tobytes())

    def shard_path(self, shard: int) -> str:
        return self.survey.files[shard]


def in_words(error: UnicodeDecodeError) -> str:
    """What is wrong with bytes that should be text, and where in them."""
    byte = error.object[error.start : error.start + 1].hex()
    return f"not valid UTF-8: {error.reason}, {byte} at byte {error.start} of it"


def digest_of(fmt: str, counts: IntArray, contents: bytes) -> str:
    """The digest of a dataset: format, rows of each shard and content of each shard, in order. No names."""
    return hashlib.blake2b(fmt.encode() + b"\0" + counts.tobytes() + contents, digest_size=16).hexdigest()
