"""Where the lines of a JSON lines file begin, and a hash of its contents, from one pass that uses all cores.

A row is a physical line that is not blank (only spaces, tabs and carriage returns). The file is cut into *stretches*
that threads scan side by side, each in *chunks* whose summaries join in order, like the digits of a long addition: a
line that crosses a cut is put together when they are joined. Newlines are found by numpy and chunks hashed by blake2b,
which both release the interpreter's lock. The content hash is that of the chunks' hashes, so it does not depend on
the number of threads.

Blank lines are remembered as the row that each comes before, so a row's physical line number needs no second pass.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zephon.columns import IntArray
from zephon.datasets.open_files import OpenFile, patiently
from zephon.datasets.progress import Tally

CHUNK = 4 << 20
STRETCH = 16 * CHUNK
_BOM = b"\xef\xbb\xbf"
_NEWLINE = 10
_SPACES = np.zeros(256, np.bool_)
_SPACES[[9, 10, 13, 32]] = True


@dataclass(frozen=True)
class Lines:
    """The rows of one file: `offsets` int64 `[rows]`, `blanks` int64: for each blank line, the rows before it."""

    size: int
    digest: bytes
    offsets: IntArray
    blanks: IntArray


@dataclass(frozen=True)
class _Chunk:
    """What one chunk says by itself: `starts` of lines that begin after a newline in it, and whether each is `solid`.

    `head` is where its first byte of text lies (behind a byte-order mark, if the file has one), `head_solid` whether
    there is content before the first newline.
    """

    head: int
    end: int
    digest: bytes
    has_newline: bool
    head_solid: bool
    starts: IntArray
    solid: npt.NDArray[np.bool_]


def scan_stretch(path: str, low: int, high: int, tally: Tally) -> list[_Chunk]:
    """The chunks of bytes `low` to `high`; `low` is a multiple of `CHUNK`."""
    file = patiently(lambda: OpenFile(path), path)
    chunks = []
    for start in range(low, high, CHUNK):
        if tally.stopped:
            break
        end = min(start + CHUNK, high)
        chunks.append(_scan_chunk(patiently(lambda a=start, b=end: file.read(a, b), path), start))  # type: ignore[misc]
        tally.add(size=end - start)
    return chunks


def _scan_chunk(data: bytes, base: int) -> _Chunk:
    digest = hashlib.blake2b(data, digest_size=32).digest()
    skipped = len(_BOM) if base == 0 and data.startswith(_BOM) else 0
    chars = np.frombuffer(data, np.uint8)
    newlines = np.flatnonzero(chars == _NEWLINE)
    starts = newlines + 1  # lines that begin in this chunk; the last may begin at its very end
    segments = np.concatenate([np.array([skipped], np.int64), starts])
    inside = segments[segments < len(chars)]
    first = chars[inside]
    solid = np.zeros(len(segments), np.bool_)
    solid[: len(inside)] = ~_SPACES[first]
    if (_SPACES[first] & (first != _NEWLINE)).any():  # a line that begins with space: blank only if it is so throughout
        solid[: len(inside)] = np.logical_or.reduceat(~_SPACES[chars], inside)
    head = base + skipped
    return _Chunk(head, base + len(data), digest, len(newlines) > 0, bool(solid[0]), starts + base, solid[1:])


def join_chunks(chunks: list[_Chunk]) -> Lines:
    """The lines of a file from all its chunks in order."""
    if not chunks:
        return Lines(0, hashlib.blake2b(digest_size=32).digest(), np.empty(0, np.int64), np.empty(0, np.int64))
    whole = hashlib.blake2b(digest_size=32)
    starts: list[IntArray] = []
    solids: list[npt.NDArray[np.bool_]] = []
    open_start, open_solid = chunks[0].head, False
    for chunk in chunks:
        whole.update(chunk.digest)
        open_solid |= chunk.head_solid
        if chunk.has_newline:
            starts += [np.array([open_start], np.int64), chunk.starts[:-1]]
            solids += [np.array([open_solid]), chunk.solid[:-1]]
            open_start, open_solid = int(chunk.starts[-1]), bool(chunk.solid[-1])
    if open_solid:
        starts.append(np.array([open_start], np.int64))
        solids.append(np.array([True]))
    lines = np.concatenate([np.empty(0, np.int64), *starts])
    solid = np.concatenate([np.empty(0, np.bool_), *solids])
    rows_before = np.cumsum(solid) - solid
    return Lines(chunks[-1].end, whole.digest(), lines[solid], rows_before[~solid].astype(np.int64))


def line_number(row: int, blanks: IntArray) -> int:
    """The physical line, counted from 1, that holds a row."""
    return row + 1 + int(np.searchsorted(blanks, row, side="right"))
