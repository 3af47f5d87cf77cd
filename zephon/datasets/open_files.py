"""Files as this process has them open: few at a time, retried where storage stumbles, refused where they have changed.

What a process keeps (open files, mapped indexes, decoded blocks) is bounded and belongs to that process alone: after a
fork the child begins with nothing and shares no lock or file position with its parent. A file stays open as long as
somebody reads from it, also when it is dropped from the bounded set meanwhile.
"""

from __future__ import annotations

import errno
import functools
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from zephon.datasets.cache_folder import Signature
from zephon.errors import DatasetError

_T = TypeVar("_T")

USES_A_LANE = 2
_WAITS_S = (0.1, 0.5, 2.0)
_TRANSIENT = {
    getattr(errno, name)
    for name in (
        "EIO", "EAGAIN", "EINTR", "ESTALE", "ETIMEDOUT", "ECONNRESET", "ECONNABORTED", "EBUSY", "ENETUNREACH",
        "ENETDOWN", "EHOSTUNREACH", "EHOSTDOWN", "ENOBUFS", "EREMOTEIO", "ENOTCONN", "ESHUTDOWN", "ENOLINK",
        "EMFILE", "ENFILE",
    )
    if hasattr(errno, name)
}  # fmt: skip


class Recent:
    """The values used last, up to a total weight; the newest always stays. Safe for threads."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0
        self._most, self._uses, self._now = limit, 0, 0
        self._values: OrderedDict[Hashable, tuple[Any, int, int]] = OrderedDict()  # value, weight, last use
        self._lock = threading.Lock()

    def limit_to(self, limit: int, most: int = 0) -> None:
        """Keep no more than that from now on; `most` with those that are still in use (`in_use`)."""
        with self._lock:
            self._limit, self._most = limit, max(limit, most)

    def in_use(self, uses: int) -> None:
        """What is among the last so many uses (found, put in) counts as in use; of several numbers told, the most."""
        self._uses = max(self._uses, uses)

    def find(self, key: Hashable) -> Any:
        """The value, or None."""
        with self._lock:
            entry = self._values.get(key)
            if entry is None:
                return None
            self._now += 1
            self._values[key] = (*entry[:2], self._now)
            self._values.move_to_end(key)
            return entry[0]

    def put(self, key: Hashable, value: _T, weight: int = 1) -> _T:
        dropped = []  # what falls out is destroyed after the lock is released
        with self._lock:
            old = self._values.pop(key, None)
            if old is not None:
                self._held -= old[1]
                dropped.append(old)
            self._now += 1
            self._values[key] = (value, weight, self._now)
            self._held += weight
            while self._held > self._limit and len(self._values) > 1:
                oldest = next(iter(self._values.values()))
                if self._held <= self._most and oldest[2] > self._now - self._uses:
                    break
                dropped.append(self._values.popitem(last=False)[1])
                self._held -= oldest[1]
        return value

    def drop(self, key: Hashable) -> None:
        with self._lock:
            entry = self._values.pop(key, None)
            if entry is not None:
                self._held -= entry[1]

    @property
    def weight(self) -> int:
        return self._held

    def __len__(self) -> int:
        return len(self._values)


class Resources:
    """What one process keeps for reading."""

    def __init__(self) -> None:
        self.files = Recent(64)
        self.tables = Recent(256)
        self.parquet = Recent(32)
        self.row_groups = Recent(16 << 20)  # one that falls out costs its own decoding
        self.row_groups.limit_to(16 << 20, most=64 << 20)
        self.segments = Recent(64 << 20)  # of large row groups: to go back in one means to decode it from its start
        self.stumbles: deque[str] = deque(maxlen=1000)
        """What storage failed at for the moment and was tried again: taken out by who reports it."""

    def limit_to(self, nbytes: int) -> None:
        """Keep no more than `nbytes` decoded from now on.

        A fifth of it as whole row groups, or as much as lanes are at work on: data has small row groups or large ones,
        seldom both.
        """
        self.row_groups.limit_to(nbytes // 5, most=nbytes - nbytes // 5)
        self.segments.limit_to(nbytes - nbytes // 5)

    def serve(self, lanes: int) -> None:
        """So many lanes are read side by side. Each looks for one row group or two at a time, and soon again."""
        self.row_groups.in_use(USES_A_LANE * lanes)


@functools.lru_cache(maxsize=1)
def _of_process(_pid: int) -> Resources:
    return Resources()


def resources() -> Resources:
    """Those of the calling process."""
    return _of_process(os.getpid())


class OpenFile:
    """A file open for reading at any position, by several threads. Closed when the last reference goes."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = -1
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def read(self, low: int, high: int) -> bytes:
        """Bytes `low` to `high`; fewer are a `DatasetError`."""
        parts = []
        while low < high:
            part = os.pread(self._fd, min(high - low, 1 << 30), low)
            if not part:
                raise DatasetError(f"{self.path} ends at byte {low}, not {high}: it was cut short while in use")
            parts.append(part)
            low += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def read_open(path: str, state: Signature, action: Callable[[OpenFile], _T]) -> _T:
    """What `action` reads from a file in this state, which stays open for the next time; all of it again on a retry."""
    key = (path, state)

    def attempt() -> _T:
        file: OpenFile = resources().files.find(key) or resources().files.put(key, OpenFile(path))
        return action(file)

    return patiently(attempt, path, lambda: resources().files.drop(key))


def patiently(
    action: Callable[[], _T],
    path: str,
    before_retry: Callable[[], None] = lambda: None,
    wait: Callable[[float], None] = time.sleep,
) -> _T:
    """`action()`, again after a growing wait where storage fails for the moment; then `DatasetError` naming `path`."""
    for pause in (*_WAITS_S, None):
        try:
            return action()
        except OSError as error:
            if error.errno is None:
                raise  # a library's word for damaged contents: the caller knows what it means
            if error.errno not in _TRANSIENT or pause is None:
                tries = f" after {len(_WAITS_S) + 1} tries" if error.errno in _TRANSIENT else ""
                raise DatasetError(
                    f"{path} cannot be read{tries}: {error.strerror or error}; check the file and its storage"
                ) from error
            resources().stumbles.append(f"{path}: {error.strerror or error}; it is read again in {pause:g} s")
            before_retry()
            wait(pause)
    raise AssertionError("unreachable")


def refuse_changed(path: str, planned: Signature) -> None:
    """Raises `DatasetError` unless the file is still the one that was counted."""
    found = patiently(lambda: Signature.of(path), path)
    if (found.size, found.mtime_ns) != (planned.size, planned.mtime_ns):
        raise DatasetError(
            f"{path} changed while in use (it had {planned.size} bytes, now {found.size}, or was written again); "
            "a run needs its data unchanged: restore the file, or start again with the new one"
        )
