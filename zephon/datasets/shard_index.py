"""What is known of every shard before a run: its rows, a hash of its content and, for JSON lines, where rows begin.

A `Survey` finds it in the cache folder or makes it, on all cores, with progress on stderr. The cache holds *tables*:
one for each large file, one for each group of small neighbours (so that a hundred thousand tiny files open a hundred
tables). A table is one `.npy` of int64 that other processes map; its name tells the files' real paths and their state
(size, time of change, inode), so a changed file simply has another table. One that is damaged, cut or not ours is made
again. Tables are never changed in place.

    [magic, version, shards, xor, sum]                     xor and sum of all that follows
    shards x [size, mtime_ns, inode, data size, rows, offsets, blanks, digest x 4]
    then for each shard: offsets, blanks
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from zephon.columns import IntArray
from zephon.datasets.cache_folder import Signature, cache_folder, entry_name, forget_older, written
from zephon.datasets.open_files import patiently, refuse_changed, resources
from zephon.datasets.progress import Progress, Tally
from zephon.errors import DatasetError

_MAGIC, _VERSION, _HEAD, _WIDTH = 0x5A_45_50_48_4F_4E, 1, 5, 11
_SMALL = 8 << 20
_GROUP_FILES, _GROUP_BYTES = 1024, 64 << 20


@dataclass(frozen=True)
class Entry:
    """One shard: `size` of its readable data, `rows`, a 32-byte `digest`; `offsets` and `blanks` as in `line_index`."""

    size: int
    rows: int
    digest: bytes
    offsets: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    blanks: IntArray = field(default_factory=lambda: np.empty(0, np.int64))


class Scanner(ABC):
    """How the files of one format are counted."""

    kind: str

    @abstractmethod
    def jobs(self, path: str, signature: Signature, tally: Tally) -> list[Callable[[], Any]]:
        """Parts of the work on one file, for any thread in any order."""

    @abstractmethod
    def join(self, parts: list[Any]) -> Entry:
        """The file's entry from what its jobs returned, in their order."""

    def usable(self, path: str, signature: Signature, size: int) -> bool:
        """Whether what lies beside the table, if anything does, is still there."""
        return True


@dataclass(frozen=True)
class Survey:
    """The shards that hold rows, in order. Light to pickle: row offsets stay in the tables."""

    files: list[str]
    sizes: IntArray
    """int64 `[shards]`, bytes on disk"""
    states: IntArray
    """int64 `[shards, 3]`: signatures"""
    data_sizes: IntArray
    rows: IntArray
    digests: IntArray
    """int64 `[shards, 4]`"""
    folder: str
    """the cache folder that it was made in"""
    tables: list[str]
    groups: list[list[int]]
    """for each table, the places of its files in `all_files`"""
    homes: IntArray
    """int64 `[shards, 2]`: table and place in it"""
    all_files: list[str]
    all_states: IntArray

    def signature(self, shard: int) -> Signature:
        return Signature(*self.states[shard].tolist())

    def lines(self, shard: int, scanner: Scanner) -> tuple[IntArray, IntArray]:
        """`(offsets, blanks)` of a shard, mapped. A table that has gone from the cache is made again."""
        group, place = self.homes[shard].tolist()
        path = self.tables[group]
        table: Table | None = resources().tables.find(path)
        if table is None:
            signatures = [Signature(*self.all_states[i].tolist()) for i in self.groups[group]]
            table = Table.open(path, signatures, verify=False)
            if table is None:
                _make(path, [self.all_files[i] for i in self.groups[group]], signatures, scanner)
                table = Table.open(path, signatures, verify=False)
            if table is None or table.entry(place).digest != self.digests[shard].tobytes():
                refuse_changed(self.files[shard], self.signature(shard))
                raise DatasetError(f"{self.files[shard]} no longer holds what was counted, or {path} cannot be kept")
            resources().tables.put(path, table)
        return table.lines(place)


class Table:
    """One file of the cache, mapped."""

    def __init__(self, values: IntArray) -> None:
        self._values = values
        shards = int(values[2])
        self._rows = np.array(values[_HEAD : _HEAD + shards * _WIDTH]).reshape(shards, _WIDTH)
        lengths = self._rows[:, 5:7].reshape(-1)
        self._bounds = _HEAD + shards * _WIDTH + np.concatenate([[0], np.cumsum(lengths)])

    @staticmethod
    def open(path: str, signatures: Sequence[Signature], verify: bool = True) -> Table | None:
        """The table for files in this state, or None if there is none that is whole."""
        try:
            values = np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
        except Exception:  # a damaged header makes numpy raise errors of a dozen kinds
            return None
        if values.dtype != np.int64 or values.ndim != 1 or len(values) < _HEAD + len(signatures) * _WIDTH:
            return None
        if values[:3].tolist() != [_MAGIC, _VERSION, len(signatures)]:
            return None
        table = Table(values)
        if int(table._bounds[-1]) != len(values) or (table._rows[:, 5:7] < 0).any():
            return None
        if table._rows[:, :3].tolist() != [list(s) for s in signatures]:
            return None
        return None if verify and values[3:5].tolist() != _checks(values[_HEAD:]) else table

    def entry(self, place: int) -> Entry:
        """All but the offsets."""
        row = self._rows[place]
        return Entry(int(row[3]), int(row[4]), row[7:11].tobytes())

    def lines(self, place: int) -> tuple[IntArray, IntArray]:
        a, b, c = self._bounds[2 * place : 2 * place + 3].tolist()
        return self._values[a:b], self._values[b:c]

    @staticmethod
    def write(path: str, signatures: Sequence[Signature], entries: Sequence[Entry]) -> None:
        rows = []
        for s, e in zip(signatures, entries, strict=True):
            digest = np.frombuffer(e.digest, np.int64).tolist()
            rows.append(np.array([*s, e.size, e.rows, len(e.offsets), len(e.blanks), *digest], np.int64))
        body = np.concatenate([*rows, *(part for e in entries for part in (e.offsets, e.blanks))])
        with written(path) as file:
            np.save(file, np.concatenate([np.array([_MAGIC, _VERSION, len(entries), *_checks(body)], np.int64), body]))
        forget_older(path)


def _checks(values: IntArray) -> list[int]:
    return [int(np.bitwise_xor.reduce(values)), int(np.add.reduce(values))]


def survey(what: str, files: Sequence[str], scanner: Scanner) -> Survey:
    """Counts every file, from the cache where it can. `what` names the data in progress lines and errors."""
    folder = cache_folder()
    with ThreadPoolExecutor(_threads(), thread_name_prefix="zephon-index") as pool:
        slices = [files[i : i + 1024] for i in range(0, len(files), 1024)]
        signatures = [signature for some in pool.map(_signatures, slices) for signature in some]
        groups = _groups(signatures)
        members = [([files[i] for i in g], [signatures[i] for i in g]) for g in groups]
        paths = [os.path.join(folder, "index", entry_name(scanner.kind, *m)) for m in members]
        found = list(pool.map(lambda path, group: _known(path, group[0], group[1], scanner), paths, members))
        lacking = [i for i, entries in enumerate(found) if entries is None]
        if lacking:
            made = _make_all(what, [(paths[i], *members[i]) for i in lacking], scanner, pool)
            for i, entries in zip(lacking, made, strict=True):
                found[i] = entries
    homes = [(g, place) for g, group in enumerate(groups) for place in range(len(group))]
    order = np.argsort(np.array([i for group in groups for i in group], np.int64), kind="stable")
    flat = [entry for entries in found for entry in entries or []]
    every = [flat[i] for i in order.tolist()]
    kept = [i for i, entry in enumerate(every) if entry.rows]
    states = np.array(signatures, np.int64).reshape(len(files), 3)
    return Survey(
        files=[files[i] for i in kept],
        sizes=states[kept, 0],
        states=states[kept],
        data_sizes=np.array([every[i].size for i in kept], np.int64),
        rows=np.array([every[i].rows for i in kept], np.int64),
        digests=np.frombuffer(b"".join(every[i].digest for i in kept), np.int64).reshape(len(kept), 4),
        folder=folder,
        tables=paths,
        groups=groups,
        homes=np.array(homes, np.int64).reshape(len(files), 2)[order][kept],
        all_files=list(files),
        all_states=states,
    )


def _signatures(files: Sequence[str]) -> list[Signature]:
    return [patiently(lambda f=file: Signature.of(f), file) for file in files]  # type: ignore[misc]


def _threads() -> int:
    return min(16, max(4, len(os.sched_getaffinity(0))))


def _groups(signatures: Sequence[Signature]) -> list[list[int]]:
    """Large files alone, small ones together with their neighbours."""
    groups: list[list[int]] = []
    small: list[int] = []
    held = 0
    for i, signature in enumerate(signatures):
        if signature.size >= _SMALL:
            groups.append([i])
            continue
        if small and (len(small) == _GROUP_FILES or held + signature.size > _GROUP_BYTES):
            groups.append(small)
            small, held = [], 0
        small.append(i)
        held += signature.size
    return [*groups, small] if small else groups


def _known(path: str, files: list[str], signatures: list[Signature], scanner: Scanner) -> list[Entry] | None:
    table = Table.open(path, signatures)
    if table is None:
        return None
    entries = [table.entry(place) for place in range(len(files))]
    whole = all(scanner.usable(f, s, e.size) for f, s, e in zip(files, signatures, entries, strict=True))
    return entries if whole else None


def _make_all(
    what: str, groups: list[tuple[str, list[str], list[Signature]]], scanner: Scanner, pool: ThreadPoolExecutor
) -> list[list[Entry]]:
    tally = Tally()
    total = [s for _, _, signatures in groups for s in signatures]
    progress = Progress(f"zephon: indexing {what}", len(total), sum(s.size for s in total), tally)
    finishing: list[Future[list[Entry]]] = []
    try:
        for path, files, signatures in groups:
            if len(files) > 1:
                finishing.append(pool.submit(_make, path, files, signatures, scanner, tally))
            else:
                parts = [pool.submit(job) for job in scanner.jobs(files[0], signatures[0], tally)]
                finishing.append(pool.submit(_finish, path, files[0], signatures[0], scanner, parts, tally))
        pending = set(finishing)
        while pending:
            done, pending = wait(pending, timeout=0.2, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            progress.show()
        progress.finish()
    except BaseException:
        tally.stopped = True
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    return [future.result() for future in finishing]


def _finish(
    path: str, file: str, signature: Signature, scanner: Scanner, parts: list[Future[Any]], tally: Tally
) -> list[Entry]:
    """Joins the parts of one file. They were submitted before this, so all threads may wait here without a deadlock."""
    entry = scanner.join([part.result() for part in parts])
    return _keep(path, [file], [signature], [entry], tally)


def _make(
    path: str, files: list[str], signatures: list[Signature], scanner: Scanner, tally: Tally | None = None
) -> list[Entry]:
    tally = tally or Tally()
    entries = []
    for file, signature in zip(files, signatures, strict=True):
        if tally.stopped:
            break
        entries.append(scanner.join([job() for job in scanner.jobs(file, signature, tally)]))
        if len(files) > 1:
            tally.add(files=1)
    return _keep(path, files, signatures, entries, tally)


def _keep(path: str, files: list[str], signatures: list[Signature], entries: list[Entry], tally: Tally) -> list[Entry]:
    if tally.stopped:
        return entries
    for file, signature in zip(files, signatures, strict=True):
        refuse_changed(file, signature)
    Table.write(path, signatures, entries)
    if len(files) == 1:
        tally.add(files=1)
    empty = np.empty(0, np.int64)
    return [replace(entry, offsets=empty, blanks=empty) for entry in entries]
