"""Which files are the shards of a dataset, and in which order.

A path is a file, a folder (searched in full, through links too) or a glob. Shards come in natural order of their path
relative to it (`part-2` before `part-10`). Left out are names that begin with `.` or `_` (as Spark, Hive and Arrow
write their side files), temporary files, well-known description files (`dataset_info.json`, `index.json`, …) and
whatever has no suffix of a known format. Nothing that looks like data is left out in silence: a compression that cannot
be read is an error, and so are two formats in one dataset.

A path that names one file takes that file, whatever it is called.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from zephon.errors import DatasetError, SettingError, whence

FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
COMPRESSIONS = (".gz", ".zst")
_UNREADABLE = (".bz2", ".xz", ".lzma", ".lz4", ".br", ".zip", ".7z", ".snappy", ".z")
_TEMPORARY = {"tmp", "temp", "partial", "part", "incomplete", "inprogress", "crdownload", "swp", "lock", "crc", "bak"}
_DESCRIPTIONS = {
    "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "index.json", "metadata.json",
    "manifest.json", "schema.json", "tokenizer.json", "tokenizer_config.json", "config.json",
}  # fmt: skip
_MAGIC = re.compile(r"[*?\[]")


class Shards(NamedTuple):
    """The files of a dataset: `files` are absolute paths in order."""

    format: str
    files: list[str]
    location: str


def find_shards(name: str, path: str | os.PathLike[str], fmt: str | None = None) -> Shards:
    """The shards at `path`. Raises `DatasetError` where there are none, `SettingError` for an unknown `fmt`."""
    if fmt is not None and fmt not in FORMATS.values():
        raise SettingError(f"dataset {name!r}: fmt={fmt!r} is unknown; it is 'jsonl', 'parquet' or None (by suffix)")
    location = _local(name, os.fspath(path))
    if os.path.isfile(location):
        return Shards(fmt or _format_of_file(name, location), [location], location)
    if os.path.isdir(location):
        base, seen = location, list(_walk(location))
    elif _MAGIC.search(location):
        base, seen = _glob(location)
    else:
        start = whence(path) if "://" not in os.fspath(path) else ""
        given = f" {os.fspath(path)!r}{start}; in a recipe, Path(__file__).parent is its own folder" if start else ""
        raise DatasetError(f"dataset {name!r}: {location} does not exist; check the path{given}")
    chosen = _choose(name, location, seen, fmt)
    formats = {fmt} if fmt is not None else {found for file in chosen if (found := format_of(file))}
    if len(formats) > 1:
        examples = ", ".join(f"{f} ({next(c for c in chosen if format_of(c) == f)})" for f in sorted(formats))
        raise DatasetError(
            f"dataset {name!r}: {location} holds shards of two formats, {examples}; a dataset has one: "
            'name it with fmt="jsonl" or fmt="parquet", or move the files apart'
        )
    chosen.sort(key=lambda file: natural(os.path.relpath(file, base)))
    return Shards(formats.pop(), chosen, location)


def format_of(path: str) -> str | None:
    """The format that a file's suffix names, or None."""
    stem, suffix = os.path.splitext(os.path.basename(path).lower())
    if suffix in COMPRESSIONS:
        inner = FORMATS.get(os.path.splitext(stem)[1])
        return inner if inner == "jsonl" else None
    return FORMATS.get(suffix)


def compression_of(path: str) -> str | None:
    """`".gz"`, `".zst"` or None."""
    suffix = os.path.splitext(path.lower())[1]
    return suffix if suffix in COMPRESSIONS else None


def natural(relative: str) -> tuple[tuple[tuple[int, int, str], ...], ...]:
    """A sort key under which numbers count as numbers, folder by folder; paths that differ never compare equal."""
    parts = []
    for part in relative.split(os.sep):
        pieces = re.split(r"([0-9]+)", part)
        key = [(0, int(p), "") if i % 2 else (1, 0, p) for i, p in enumerate(pieces) if p]
        parts.append((*key, (-1, 0, part)))
    return tuple(parts)


def _local(name: str, path: str) -> str:
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", path)
    if scheme is None:
        return os.path.abspath(os.path.expanduser(path))
    if scheme[1].lower() != "file":
        raise DatasetError(
            f"dataset {name!r}: {path}: only local files are supported so far, not {scheme[1]}://; "
            "copy the data to a disk or a mounted file system and give that path"
        )
    return os.path.abspath(unquote(urlsplit(path).path))


def _format_of_file(name: str, path: str) -> str:
    _refuse_compression(name, path)
    found = format_of(path)
    if found is None:
        raise DatasetError(
            f"dataset {name!r}: the suffix of {path} names no known format ({', '.join(FORMATS)}, "
            f'JSON lines also with {" or ".join(COMPRESSIONS)}); say which it is with fmt="jsonl" or fmt="parquet"'
        )
    return found


def _refuse_compression(name: str, path: str) -> None:
    stem, suffix = os.path.splitext(path.lower())
    inner = format_of(stem)
    if (inner and suffix in _UNREADABLE) or (inner == "parquet" and suffix in COMPRESSIONS):
        readable = "; Parquet compresses its own pages" if inner == "parquet" else f"; use {' or '.join(COMPRESSIONS)}"
        raise DatasetError(f"dataset {name!r}: {path}: {inner} compressed as {suffix} cannot be read{readable}")


def _skipped(entry: str) -> bool:
    lowered = entry.lower()
    return (
        entry.startswith((".", "_"))
        or entry.endswith(("~", "#"))
        or lowered in _DESCRIPTIONS
        or any(re.sub(r"[0-9]+$", "", part) in _TEMPORARY for part in lowered.split(".")[1:])
    )


def _walk(folder: str) -> Iterator[str]:
    """Every file under `folder` that is not skipped. A link that leads back to a folder above it is not followed."""
    pending: list[tuple[str, frozenset[str]]] = [(folder, frozenset())]
    while pending:
        here, above = pending.pop()
        real = os.path.realpath(here)
        if real in above:
            continue
        with os.scandir(here) as entries:
            for entry in entries:
                if _skipped(entry.name):
                    continue
                if entry.is_dir():
                    pending.append((entry.path, above | {real}))
                elif entry.is_file():
                    yield entry.path


def _glob(pattern: str) -> tuple[str, list[str]]:
    base = pattern
    while _MAGIC.search(base):
        base = os.path.dirname(base)
    found: dict[str, None] = {}
    for match in glob.iglob(pattern, recursive=True):
        inside = os.path.relpath(match, base).split(os.sep)
        if any(_skipped(part) for part in inside):
            continue
        found.update(dict.fromkeys(_walk(match) if os.path.isdir(match) else [match]))
    return base, list(found)


def _choose(name: str, location: str, found: list[str], fmt: str | None) -> list[str]:
    """The shards among the files: those with a suffix of the format, or all where `fmt` is given and none has one."""
    for path in found:
        _refuse_compression(name, path)
    formats = [fmt] if fmt is not None else list(FORMATS.values())
    chosen = [path for path in found if format_of(path) in formats]
    if fmt is not None and not chosen:
        chosen = [path for path in found if format_of(path) is None]
    if not chosen:
        suffixes = sorted({os.path.splitext(path)[1] or "no suffix" for path in found})
        saw = f"only files with {', '.join(suffixes[:6])}" if found else "at most hidden or temporary files"
        raise DatasetError(
            f"dataset {name!r}: {location} holds no shard ({saw}); shards end in {', '.join(FORMATS)}, "
            f'JSON lines also in {" or ".join(COMPRESSIONS)}; other names need fmt="jsonl" or fmt="parquet"'
        )
    return chosen
