"""Parquet: counted from footers, read by *segments* of row groups, only the columns that are needed.

A small row group is one segment. A large one (a million rows is what many writers make by default) is decoded step by
step by a *cursor* that stands in it, segments of a few MB at a time: lanes that walk through it side by side find each
other's segments in a cache of bounded size, and no reader ever holds it whole. Going back in a large row group decodes
it again from its start. A segment of which as many rows were read as it has is kept no longer: an epoch needs each
row once.

Consecutive rows of one segment are views of Arrow's memory. A file with damaged pages or footer is a `DatasetError`.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from zephon.columns import Block, IntArray
from zephon.datasets.arrow_columns import column_from_arrow, raw_value
from zephon.datasets.cache_folder import Signature
from zephon.datasets.open_files import OpenFile, Recent, patiently, refuse_changed, resources
from zephon.datasets.progress import Tally
from zephon.datasets.shard_index import Entry, Scanner
from zephon.datasets.source import FileSource, Piece
from zephon.errors import DatasetError
from zephon.words import many

T = TypeVar("T")

_MARK = b"PAR1"
_TAIL = 64 << 10
_WHOLE = 4 << 20  # a row group up to this size is one segment
_SEGMENT = 4 << 20


class FooterScanner(Scanner):
    """Counts rows from footers. The digest covers the footer, and the first and last bytes of the data."""

    kind = "footers"

    def jobs(self, path: str, signature: Signature, tally: Tally) -> list[Callable[[], Any]]:
        return [functools.partial(_read_footer, path, signature.size, tally)]

    def join(self, parts: list[Any]) -> Entry:
        entry: Entry = parts[0]
        return entry


def _read_footer(path: str, size: int, tally: Tally) -> Entry:
    if size == 0:
        return Entry(0, 0, hashlib.blake2b(digest_size=32).digest())
    tail, head = patiently(lambda: _ends_of(path, size), path)
    length = int.from_bytes(tail[-8:-4], "little")
    if size < 12 or tail[-4:] != _MARK or not head.startswith(_MARK):
        raise damaged(path, "it does not begin and end with the mark PAR1")
    if length + 12 > size:
        raise damaged(path, f"its footer would be {length} bytes long, the file has {size}")
    try:
        metadata = pq.read_metadata(pa.BufferReader(_MARK + tail[-8 - length :]))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise damaged(path, error) from error
    _rows_of_groups(path, metadata)
    tally.add(size=size)
    return Entry(size, metadata.num_rows, hashlib.blake2b(head + tail, digest_size=32).digest())


def _rows_of_groups(path: str, metadata: pq.FileMetaData) -> list[int]:
    """The rows of each row group, which are all rows."""
    rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    if min(rows, default=0) < 0 or sum(rows) != metadata.num_rows:
        raise damaged(path, f"its footer counts {many(metadata.num_rows, 'row')}, and {sum(rows)} in row groups")
    return rows


def _ends_of(path: str, size: int) -> tuple[bytes, bytes]:
    file = OpenFile(path)
    tail = file.read(max(0, size - _TAIL), size)
    wanted = int.from_bytes(tail[-8:-4], "little") + 8 + _TAIL
    if tail[-4:] == _MARK and len(tail) < wanted:
        tail = file.read(max(0, size - wanted), size)
    return tail, file.read(0, min(size, _TAIL))


def damaged(path: str, cause: object) -> DatasetError:
    said = str(cause).strip()
    return DatasetError(f"{path} is not a whole Parquet file: {said}; write it again or get a whole copy of it")


class Parquet(FileSource):
    """The files of a Parquet dataset."""

    format = "parquet"
    scanner = FooterScanner()

    def read(self, shard: int, rows: IntArray, fields: frozenset[str] | None) -> Piece:
        return self._in_file(shard, lambda file: file.read(rows, fields))

    def raw(self, shard: int, row: int) -> dict[str, Any]:
        """The row's fields, text as the bytes that stand there."""
        return self._in_file(shard, lambda file: file.raw(row))

    def _in_file(self, shard: int, act: Callable[[_OpenParquet], T]) -> T:
        path, signature = self.survey.files[shard], self.survey.signature(shard)
        refuse_changed(path, signature)
        key = (path, signature)

        def attempt() -> T:
            file: _OpenParquet = resources().parquet.find(key) or resources().parquet.put(key, _OpenParquet(*key))
            return act(file)

        try:
            return patiently(attempt, path, lambda: resources().parquet.drop(key))
        except (pa.ArrowException, OSError, ValueError) as error:  # names of damaged columns are not UTF-8, say
            resources().parquet.drop(key)
            refuse_changed(path, signature)
            raise damaged(path, error) from error


class _OpenParquet:
    """One file open in this process. A lock lets one thread at a time decode from it."""

    def __init__(self, path: str, signature: Signature) -> None:
        self._key = (path, signature)
        self._file = pq.ParquetFile(path, pre_buffer=False, buffer_size=256 << 10, page_checksum_verification=True)
        self._ends = np.cumsum([0, *_rows_of_groups(path, self._file.metadata)], dtype=np.int64)
        self.names = self._file.schema_arrow.names
        if len(set(self.names)) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise DatasetError(f"{path} has two columns named {twice!r}; rename one of them")
        self._steps: dict[tuple[int, tuple[str, ...]], int] = {}
        self._cursors = Recent(4)
        self._lock = threading.Lock()

    def read(self, rows: IntArray, fields: frozenset[str] | None) -> Piece:
        names = tuple(n for n in self.names if fields is None or n in fields)
        if not names or not len(rows):
            return Piece({}, [])
        blocks, bad = [], []
        for low, high, batch, first in self._segments(rows, names):
            inside = rows[low:high] - first
            if int(inside[-1]) - int(inside[0]) == high - low - 1 and (np.diff(inside) == 1).all():
                batch = batch.slice(int(inside[0]), high - low)
            else:
                batch = batch.take(pa.array(inside))
            block, wrong = _block(batch)
            blocks.append(block)
            bad += [(low + i, cause) for i, cause in sorted(wrong.items())]
        return Piece(Block.concat(blocks).fields, bad)

    def raw(self, row: int) -> dict[str, Any]:
        """A row's fields, text as the bytes that stand there."""
        ((_, _, batch, first),) = self._segments(np.array([row]), tuple(self.names))
        return {name: raw_value(batch.column(name).slice(row - first, 1)) for name in self.names}

    def _segments(self, rows: IntArray, names: tuple[str, ...]) -> Iterator[tuple[int, int, pa.RecordBatch, int]]:
        """For each segment that holds some of the rows: their places `low` to `high`, its batch, its first row."""
        low = 0
        while low < len(rows):
            group = int(np.searchsorted(self._ends, rows[low], side="right")) - 1
            begin, step = int(self._ends[group]), self._step(group, names)
            number = (int(rows[low]) - begin) // step
            end = min(begin + (number + 1) * step, int(self._ends[group + 1]))
            high = int(np.searchsorted(rows, end, side="left"))
            yield low, high, self._segment(group, number, names, step, high - low), begin + number * step
            low = high

    def _step(self, group: int, names: tuple[str, ...]) -> int:
        """Rows in a segment of a row group."""
        step = self._steps.get((group, names))
        if step is None:
            rows, size = self._file.metadata.row_group(group).num_rows, self._size(group, names)
            step = self._steps[group, names] = rows if size <= _WHOLE else max(1, rows * _SEGMENT // size)
        return step

    def _size(self, group: int, names: tuple[str, ...]) -> int:
        """Bytes of a row group's columns, uncompressed; of all of them, if these are few."""
        metadata = self._file.metadata.row_group(group)
        if metadata.total_byte_size <= _WHOLE:
            return int(metadata.total_byte_size)
        with self._lock:
            # Over the damaged metadata of a column pyarrow ends the process, unless its reader has been asked before.
            next(self._file.iter_batches(1, row_groups=[group], columns=list(names), use_threads=False), None)
        paths = [self._file.schema.column(i).path for i in range(metadata.num_columns)]
        return sum(metadata.column(i).total_uncompressed_size for i, p in enumerate(paths) if _belongs(p, names))

    def _segment(self, group: int, number: int, names: tuple[str, ...], step: int, rows: int) -> pa.RecordBatch:
        """A segment of which so many rows are read now."""
        whole = step >= self._file.metadata.row_group(group).num_rows
        decoded = resources().row_groups if whole else resources().segments
        key = (self._key, group, names, number)
        found: _Segment | None = decoded.find(key)
        if found is None:
            found = self._decode(decoded, group, number, names, step)
        found.unread -= rows
        if found.unread <= 0:
            decoded.drop(key)
        return found.batch

    def _decode(self, decoded: Recent, group: int, number: int, names: tuple[str, ...], step: int) -> _Segment:
        """That segment, and those that lie before it and were not decoded yet, put with what is decoded."""
        with self._lock:
            found: _Segment | None = decoded.find((self._key, group, names, number))  # by another thread meanwhile
            if found is not None:
                return found
            cursor = self._cursors.find((group, names))
            if cursor is None or cursor.next > number:
                cursor = self._cursors.put((group, names), _Cursor(self._file, group, names, step))
            try:
                while True:
                    at, batch = cursor.next, cursor.advance()
                    found = _Segment(batch, batch.num_rows)
                    decoded.put((self._key, group, names, at), found, max(1, batch.get_total_buffer_size()))
                    if at == number:
                        break
            except BaseException:
                self._cursors.drop((group, names))
                raise
            if cursor.finished:
                self._cursors.drop((group, names))
            return found


@dataclass
class _Segment:
    """Decoded rows, and how many of them have not been read."""

    batch: pa.RecordBatch
    unread: int


class _Cursor:
    """A place in a row group; `next` is the number of the segment that comes next."""

    def __init__(self, file: pq.ParquetFile, group: int, names: tuple[str, ...], step: int) -> None:
        self._batches = file.iter_batches(step, row_groups=[group], columns=list(names), use_threads=False)
        self._names, self._step, self._left = list(names), step, file.metadata.row_group(group).num_rows
        self._rest: pa.RecordBatch | None = None
        self.next = 0

    @property
    def finished(self) -> bool:
        return bool(self._left == 0)

    def advance(self) -> pa.RecordBatch:
        parts, wanted = [], min(self._step, self._left)
        held = 0
        while held < wanted:
            batch = next(self._batches, None) if self._rest is None else self._rest
            self._rest = None
            if batch is None:
                raise pa.ArrowInvalid(f"a row group ends after {held} of {many(wanted, 'row')}")
            if batch.num_rows > wanted - held:  # all cursors of a file get batches as long as its newest one asked for
                batch, self._rest = batch.slice(0, wanted - held), batch.slice(wanted - held)
            parts.append(batch)
            held += batch.num_rows
        self._left -= wanted
        self.next += 1
        whole = parts[0] if len(parts) == 1 else pa.Table.from_batches(parts).combine_chunks().to_batches()[0]
        return whole.select(self._names)


def _belongs(path: str, names: tuple[str, ...]) -> bool:
    return any(path == name or path.startswith(name + ".") for name in names)


def _block(batch: pa.RecordBatch) -> tuple[Block, dict[int, str]]:
    """The good records as columns, and why the others are bad."""
    fields, bad = {}, {}
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        fields[name], wrong = column_from_arrow(array)
        bad.update({i: f"field {name!r} is {cause}" for i, cause in wrong.items() if i not in bad})
    block = Block(fields, np.zeros((batch.num_rows, 3), np.int64))
    if bad:
        block = block.take(np.array([i for i in range(batch.num_rows) if i not in bad], np.int64))
    return block, bad
