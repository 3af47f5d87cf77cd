"""A segment: one long-lived, nameless piece of shared memory.

Guarantees:
- It has no name in any file system, so nothing is left after `kill -9` of everybody. Who wants it gets its file
  descriptor over a Unix socket.
- All its pages are reserved, and checked against free memory before, when it is made: later use can neither fail, nor
  raise SIGBUS, nor wake the OOM killer.
- It is sealed against resizing. `attach` refuses one that is not, since a peer could otherwise shrink it and kill
  this process with SIGBUS.
- `close` never fails and never pulls memory from under an array: the mapping goes when the last view of it dies.

Rejected: `/dev/shm` names and `multiprocessing.shared_memory` (both leak on SIGKILL, and a small `/dev/shm` is a bus
error), `MADV_DONTFORK` (a forked child may read the batches that it inherited), a segment per batch (first touch of a
page runs at a tenth of the speed of a warm one).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import sys
from types import TracebackType
from typing import TYPE_CHECKING

from zephon.errors import MemoryLimit, ProtocolError
from zephon.transport.headroom import FreeMemory, MemoryHeadroom, free_memory

__all__ = ["PAGE", "FreeMemory", "MemoryHeadroom", "Segment", "free_memory", "round_to_pages"]

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PAGE = mmap.PAGESIZE

# Not in the standard library of every Python we support.
_MADV_POPULATE_WRITE = 23
_MFD_NOEXEC_SEAL = 0x8
_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 0x1, 0x2, 0x4
_SEALS = _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW

# Free memory is measured again before each step, since others reserve at the same time.
_RESERVE_STEP = 256 << 20


def round_to_pages(size: int) -> int:
    """`size` rounded up to whole pages: what a segment of that size really takes."""
    return -(-size // PAGE) * PAGE


class Segment:
    """Shared memory of `size` bytes, as the uint8 array `array`. Made by `create` or `attach`, never directly.

    A creator keeps its descriptor, to hand it on; `attach` keeps none of its own unless asked. (The standard library's
    mapping holds one more until Python 3.13.)
    """

    def __init__(self, name: str, size: int, fd: int, mapping: mmap.mmap) -> None:
        self.name = name
        self.size = size
        self._fd = fd
        self._mapping: mmap.mmap | None = mapping
        self._array: npt.NDArray[np.uint8] | None = None

    @classmethod
    def create(cls, name: str, size: int, *, limit: MemoryHeadroom | None = None) -> Segment:
        """Reserves, populates and seals `size` bytes (rounded up to pages), or raises MemoryLimit before it takes any.

        `name` is for people: it shows in `/proc/<pid>/maps` and in errors. `limit` measures free memory.
        """
        if size <= 0:
            raise ValueError(f"segment {name!r}: the size must be positive, not {size}")
        size = round_to_pages(size)
        headroom = limit if limit is not None else MemoryHeadroom()
        headroom.check(size, f"segment {name!r}")
        fd = _memfd(name)
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, size)
            _reserve(fd, size, headroom, name)
            mapping = _map(fd, size, writable=True)
            _populate(mapping)
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
            return cls(name, size, fd, mapping)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, writable: bool = True, *, name: str = "", keep: bool = False) -> Segment:
        """Maps the segment behind `fd`, which now belongs to the segment: it is closed, in every case.

        `keep=True` holds it open instead, so that `fileno()` can hand it on. Raises ProtocolError for what is not a
        sealed segment. `writable=False` maps it read-only: a write through such an array, from torch say, would end
        the process.
        """
        kept = -1
        try:
            try:
                seals = fcntl.fcntl(fd, _F_GET_SEALS)
            except OSError as error:
                raise ProtocolError(f"segment {name!r}: the descriptor received is no memfd ({error})") from error
            size = os.fstat(fd).st_size
            if seals & _SEALS != _SEALS or size <= 0:
                raise ProtocolError(
                    f"segment {name!r}: not sealed against resizing (seals {seals:#x}, {size} bytes), so it could be "
                    "cut short under this process. Use the same version of zephon on both sides."
                )
            mapping = _map(fd, size, writable=writable)
            if keep:
                kept = fd
        finally:
            if kept < 0:
                os.close(fd)
        return cls(name, size, kept, mapping)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The whole mapping, uint8 `[size]`; views of it keep the memory alive, also after `close`."""
        if self._array is None:
            import numpy as np

            self._array = np.frombuffer(self.memory, dtype=np.uint8)
        return self._array

    @property
    def memory(self) -> memoryview:
        """The whole mapping, for a process that does without numpy; a view keeps the memory alive, as with `array`."""
        if self._mapping is None:
            raise ValueError(f"segment {self.name!r} is closed")
        return memoryview(self._mapping)

    @property
    def closed(self) -> bool:
        return self._mapping is None

    def fileno(self) -> int:
        """The descriptor to hand to another process; it stays this segment's own."""
        if self._fd < 0:
            raise ValueError(f"segment {self.name!r} holds no descriptor: it was attached without keep=True, or closed")
        return self._fd

    def close(self) -> None:
        """Gives up the descriptor at once, and the memory as soon as no array views it. May be called again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        mapping, self._mapping, self._array = self._mapping, None, None
        if mapping is not None:
            # While a view lives this is refused, and the mapping dies with the last one.
            with contextlib.suppress(BufferError):
                mapping.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    def __enter__(self) -> Segment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Segment({self.name!r}, {self.size} bytes{', closed' if self.closed else ''})"


def _memfd(name: str) -> int:
    label = os.fsencode(f"zephon:{name}")[:249].decode(errors="ignore").replace("\0", "")
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(label, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.memfd_create(label, flags)  # A kernel before 6.3.


def _reserve(fd: int, size: int, headroom: MemoryHeadroom, name: str) -> None:
    for start in range(0, size, _RESERVE_STEP):
        if start:
            headroom.check(size - start, f"the rest of segment {name!r}")
        try:
            os.posix_fallocate(fd, start, min(_RESERVE_STEP, size - start))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise MemoryLimit(
                f"segment {name!r} needs {size} bytes of shared memory, but the kernel gave only {start} of them "
                f"({error.strerror}); {headroom.measure().bytes} bytes are free. Lower {headroom.setting}."
            ) from error


def _map(fd: int, size: int, *, writable: bool) -> mmap.mmap:
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=access, trackfd=False)
    return mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=access)


def _populate(mapping: mmap.mmap) -> None:
    """Fills the page tables now, so that no write to the segment takes a fault."""
    try:
        mapping.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        for start in range(0, len(mapping), PAGE):  # A kernel before 5.14.
            mapping[start] = 0
