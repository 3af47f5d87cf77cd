"""Compressed JSON lines, expanded once into the cache folder so that any row can be read directly.

The expanded file is named after the archive's path and state and appears complete or not at all. From there on it is
read like any other file, and the content hash is of its bytes: how a shard was compressed is no part of its identity.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from zephon.datasets.cache_folder import Signature, entry_name, forget_older, written
from zephon.datasets.open_files import patiently
from zephon.datasets.progress import Tally
from zephon.errors import DatasetError
from zephon.extras import needing

_GZIP_PIECE = 1 << 20  # expanded bytes at a time
_ZSTD_PIECE = 16 << 10  # compressed bytes at a time: a piece may expand a thousandfold


def expanded_path(folder: str, path: str, signature: Signature) -> str:
    """Where the expanded copy of an archive in this state lies, or will lie."""
    return os.path.join(folder, "expanded", entry_name("jsonl", [path], [signature]))


def expand(path: str, target: str, compression: str, tally: Tally) -> None:
    """Writes the expanded copy. A damaged or cut archive is a `DatasetError` that names it."""
    with needing("reading compressed JSON lines"):
        import zstandard

    def attempt() -> None:
        with open(path, "rb") as packed:
            if os.fstat(packed.fileno()).st_size == 0:
                pieces: Iterator[bytes] = iter(())
            else:
                pieces = _gzip(packed) if compression == ".gz" else _zstd(packed)
            done = 0
            try:
                with written(target) as out:
                    for piece in pieces:
                        if tally.stopped:
                            raise DatasetError(f"expanding {path} was interrupted")
                        out.write(piece)
                        tally.add(size=packed.tell() - done)
                        done = packed.tell()
            except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
                raise DatasetError(
                    f"{path} is damaged or cut short after {packed.tell()} of its bytes ({error}); "
                    "get a whole copy of it"
                ) from error

    patiently(attempt, path)
    forget_older(target)


def _gzip(packed: BinaryIO) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=packed) as stream:
        while piece := stream.read(_GZIP_PIECE):
            yield piece


def _zstd(packed: BinaryIO) -> Iterator[bytes]:
    """Frame after frame; the library's own stream reader takes a file that was cut short for a whole one."""
    import zstandard

    def fresh() -> zstandard.ZstdDecompressionObj:
        return zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()

    frame, inside = fresh(), False
    while data := packed.read(_ZSTD_PIECE):
        while data:
            yield frame.decompress(data)
            data, inside = frame.unused_data, not frame.eof
            if frame.eof:
                frame = fresh()
    if inside:
        raise EOFError("the last frame is incomplete")
