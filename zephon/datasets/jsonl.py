"""JSON lines: rows read where the line index says they lie, close ones together, and decoded at once (`json_rows`).

A file compressed with gzip or zstandard is read from its expanded copy in the cache folder. A file that is no longer
the one that was counted is refused before its lines are taken for bad rows.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from zephon.columns import IntArray
from zephon.datasets.cache_folder import Signature, cache_folder
from zephon.datasets.expand import expand, expanded_path
from zephon.datasets.json_rows import REFUSALS, decode_together, decoder, why
from zephon.datasets.line_index import STRETCH, Lines, join_chunks, line_number, scan_stretch
from zephon.datasets.open_files import OpenFile, patiently, read_open, refuse_changed
from zephon.datasets.progress import Tally
from zephon.datasets.shard_index import Entry, Scanner
from zephon.datasets.shards import compression_of
from zephon.datasets.source import FileSource, Piece

_GAP = 16 << 10  # rows closer than this are read in one go
_TOGETHER = 1 << 20


class LineScanner(Scanner):
    """Counts lines; large files in parts."""

    kind = "lines"

    def jobs(self, path: str, signature: Signature, tally: Tally) -> list[Callable[[], Any]]:
        compression = compression_of(path)
        if compression is not None:
            target = expanded_path(cache_folder(), path, signature)
            return [functools.partial(_expand_and_scan, path, target, compression, tally)]
        bounds = [*range(0, signature.size, STRETCH), signature.size]
        return [functools.partial(scan_stretch, path, a, b, tally) for a, b in pairwise(bounds)]

    def join(self, parts: list[Any]) -> Entry:
        lines: Lines = join_chunks([chunk for part in parts for chunk in part])
        return Entry(lines.size, len(lines.offsets), lines.digest, lines.offsets, lines.blanks)

    def usable(self, path: str, signature: Signature, size: int) -> bool:
        return compression_of(path) is None or _size(expanded_path(cache_folder(), path, signature)) == size


def _expand_and_scan(path: str, target: str, compression: str, tally: Tally) -> list[Any]:
    expand(path, target, compression, tally)
    return scan_stretch(target, 0, os.stat(target).st_size, Tally())


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


class JsonLines(FileSource):
    """The files of a JSON lines dataset."""

    format = "jsonl"
    scanner = LineScanner()

    def read(self, shard: int, rows: IntArray, fields: frozenset[str] | None) -> Piece:
        survey = self.survey
        refuse_changed(survey.files[shard], survey.signature(shard))
        offsets, blanks = survey.lines(shard, self.scanner)
        path, size = self._readable(shard), int(survey.data_sizes[shard])
        lines = _Lines(rows, offsets[rows], _ends(rows, offsets, size))
        decode = decoder(None if fields is None else tuple(sorted(fields)))
        data, begins = read_open(path, survey.signature(shard), lambda file: _read_lines(file, lines))
        values = decode_together(data, begins, decode)
        if values is not None:
            return Piece(decode.columns(values), [])
        bad: list[tuple[int, str]] = []
        values = []
        lengths = lines.ends - lines.starts
        for place, (begin, length) in enumerate(zip(begins.tolist(), lengths.tolist(), strict=True)):
            try:
                values.append(decode.one(data[begin : begin + length]))
            except REFUSALS as error:
                line, byte = line_number(int(rows[place]), blanks), int(lines.starts[place])
                bad.append((place, f"line {line} (byte {byte}): {why(error)}"))
        return Piece(decode.columns(values), bad)

    def raw(self, shard: int, row: int) -> bytes:
        """The bytes of the row's line."""
        refuse_changed(self.survey.files[shard], self.survey.signature(shard))
        rows = np.array([row])
        offsets, _ = self.survey.lines(shard, self.scanner)
        lines = _Lines(rows, offsets[rows], _ends(rows, offsets, int(self.survey.data_sizes[shard])))
        path, signature = self._readable(shard), self.survey.signature(shard)
        return read_open(path, signature, lambda file: _read_lines(file, lines))[0].rstrip(b"\r\n")

    def _readable(self, shard: int) -> str:
        """The file that holds the shard's lines as they are; an expanded copy that has gone is made again."""
        path, signature = self.survey.files[shard], self.survey.signature(shard)
        compression = compression_of(path)
        if compression is None:
            return path
        target = expanded_path(self.survey.folder, path, signature)
        if _size(target) != int(self.survey.data_sizes[shard]):
            expand(path, target, compression, Tally())
            patiently(lambda: os.stat(target), target)
        return target


class _Lines(NamedTuple):
    """Rows of a file with the bytes where each begins and ends (at the next row, past any blank lines)."""

    rows: IntArray
    starts: IntArray
    ends: IntArray


def _ends(rows: IntArray, offsets: IntArray, size: int) -> IntArray:
    last = len(offsets) - 1
    ends: IntArray = offsets[np.minimum(rows + 1, last)]
    return np.where(rows < last, ends, size)


def _read_lines(file: OpenFile, lines: _Lines) -> tuple[bytes, IntArray]:
    """The bytes of all lines in order, and where each begins in them."""
    if not len(lines.rows):
        return b"", np.empty(0, np.int64)
    follows = lines.starts[1:] == lines.ends[:-1]
    if follows.all():
        return file.read(int(lines.starts[0]), int(lines.ends[-1])), lines.starts - lines.starts[0]
    run_of = np.concatenate([[0], np.cumsum(~follows)])
    firsts = np.flatnonzero(np.concatenate([[True], ~follows]))
    lows, highs = lines.starts[firsts], lines.ends[np.append(firsts[1:], len(run_of)) - 1]
    runs = _read_runs(file, lows.tolist(), highs.tolist())
    parts = [run if run.endswith(b"\n") else run + b"\n" for run in runs]
    run_begins = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
    return b"".join(parts), run_begins[run_of] + lines.starts - lows[run_of]


def _read_runs(file: OpenFile, lows: list[int], highs: list[int]) -> Iterator[bytes]:
    """The bytes of each run of lines; runs that lie close together come with one read."""
    held, held_low, held_high = b"", 0, 0
    for i, (low, high) in enumerate(zip(lows, highs, strict=True)):
        if not held_low <= low <= high <= held_high or not held:
            held_low, held_high = low, high
            ahead = i + 1
            while ahead < len(lows) and lows[ahead] - held_high <= _GAP and highs[ahead] - held_low <= _TOGETHER:
                held_high = max(held_high, highs[ahead])
                ahead += 1
            held = file.read(held_low, held_high)
        yield held[low - held_low : high - held_low]
