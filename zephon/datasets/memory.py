"""Rows held in memory, for tests and notebooks.

What is given out never shares a list, dict or array with the rows, so a function that changes its input changes nothing
here. The digest is over the values, the same in every process: dicts by key, sets by their members' encoding.
"""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

import msgpack
import numpy as np

from zephon.columns import MISSING, IntArray, Objects, column_of
from zephon.datasets.source import Piece, Source, digest_of
from zephon.errors import DatasetError
from zephon.ops.base import said
from zephon.ops.sending import reduced_elsewhere
from zephon.words import many


class InMemoryShard:
    """Rows as a list of dicts with str keys. Raises DatasetError for anything else."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        unchecked: Sequence[Any] = rows
        for i, row in enumerate(unchecked):
            if not isinstance(row, Mapping) or not all(isinstance(key, str) for key in row):
                raise DatasetError(f"InMemoryShard: row {i} is {type(row).__name__}; each row is a dict with str keys")
        self.rows = list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"InMemoryShard({many(len(self.rows), 'row')})"


class MemorySource(Source):
    """Shards in the order given."""

    format = "memory"
    location = "memory"

    def __init__(self, name: str, shards: Mapping[str, InMemoryShard]) -> None:
        if not isinstance(shards, Mapping):
            raise DatasetError(f"dataset {name!r}: expected {{shard id: InMemoryShard(rows)}}, not {shards!r:.100}")
        for key, shard in shards.items():
            if not isinstance(shard, InMemoryShard):
                raise DatasetError(f"dataset {name!r}: shard {key!r} is {type(shard).__name__}, not an InMemoryShard")
        solid = {str(key): shard.rows for key, shard in shards.items() if len(shard)}
        if not solid:
            raise DatasetError(f"dataset {name!r} holds no row in {len(shards)} shard(s) in memory")
        self._names, self._shards = list(solid), list(solid.values())
        self._counts = np.array([len(rows) for rows in self._shards], np.int64)
        self._digest: str | None = None
        self._bytes = 0

    @property
    def counts(self) -> IntArray:
        return self._counts

    @property
    def raw_bytes(self) -> int:
        self._encode()
        return self._bytes

    @property
    def digest(self) -> str:
        return self._encode()

    def shard_path(self, shard: int) -> str:
        return self._names[shard]

    def read(self, shard: int, rows: IntArray, fields: frozenset[str] | None) -> Piece:
        chosen = [self._shards[shard][i] for i in rows.tolist()]
        names = dict.fromkeys(name for row in chosen for name in row) if fields is None else sorted(fields)
        columns = {name: column_of([row.get(name, MISSING) for row in chosen]) for name in names}
        for name, column in columns.items():
            if isinstance(column, Objects):
                columns[name] = Objects([copy.deepcopy(value) for value in column.values])
        return Piece(columns, [])

    def raw(self, shard: int, row: int) -> Any:
        """The row itself."""
        return copy.deepcopy(self._shards[shard][row])

    def _encode(self) -> str:
        if self._digest is None:
            contents: list[bytes] = []
            for rows in self._shards:
                whole = hashlib.blake2b(digest_size=32)
                for number, row in enumerate(rows):
                    try:
                        encoded = _packed(dict(row))
                    except Exception as error:
                        raise DatasetError(
                            f"shard {self._names[len(contents)]!r} in memory, row {number}: it holds a value that "
                            f"cannot be pickled and rebuilt, and so not be sent to another process: {said(error)}"
                        ) from error
                    whole.update(encoded)
                    self._bytes += len(encoded)
                contents.append(whole.digest())
            self._digest = digest_of(self.format, self.counts, b"".join(contents))
        return self._digest


def _packed(value: Any) -> bytes:
    packed: bytes = msgpack.packb(_plain(value), use_bin_type=True, unicode_errors="surrogatepass")
    return packed


def _plain(value: Any) -> Any:
    """The value in types that msgpack writes one way only; other types wrapped in a mark of their own."""
    kind = type(value)
    if value is None or kind in (bool, float, str, bytes):
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**64 else _marked("int", str(value))
    if kind is dict:
        if all(type(k) is str for k in value):
            return {k: _plain(value[k]) for k in sorted(value)}
        return _marked("dict", sorted([_packed(k), _packed(v)] for k, v in value.items()))
    if kind is list:
        return [_plain(v) for v in value]
    if kind is tuple:
        return _marked("tuple", [_plain(v) for v in value])
    if kind in (set, frozenset):
        return _marked(kind.__name__, sorted(_packed(v) for v in value))
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        array = np.asarray(value)
        return _marked("array", [kind.__name__, array.dtype.str, list(array.shape), array.tobytes()])
    made = io.BytesIO()
    _Pickler(made, protocol=4).dump(value)
    pickled = made.getvalue()
    pickle.loads(pickled)
    return _marked("pickle", pickled)


class _Pickler(pickle.Pickler):
    """Refuses objects that workers would look for in vain. They know the recipe's classes, and nothing else of it."""

    def reducer_override(self, value: Any) -> Any:
        return NotImplemented if isinstance(value, (type, FunctionType)) else reduced_elsewhere(value)


def _marked(name: str, value: Any) -> msgpack.ExtType:
    return msgpack.ExtType(1, msgpack.packb([name, value], use_bin_type=True))
