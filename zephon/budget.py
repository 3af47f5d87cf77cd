"""The memory budget of a node: what a daemon may take for rings and caches, and how that is divided.

    lane rings      the rest, at least half     batches that wait for ranks, or are in their hands
    worker rings    a quarter                   blocks on their way from workers to the engine, and to later stages
    caches          a quarter at most           decoded row groups in workers: 80 MiB for each do them good

It is a bound, not a reservation: a ring is as large as its batches need, and is checked against free memory when it is
made. Where no size is given it is half of what is free when the daemon starts, on the machine and in every memory
cgroup above it. What processes need for themselves (some 60 MiB for each worker) comes on top.
"""

from __future__ import annotations

from dataclasses import dataclass

from zephon.errors import MemoryLimit
from zephon.transport.headroom import BUDGET_SETTING, MIB, FreeMemory, MemoryHeadroom

LEAST = 64 * MIB
SETTING = BUDGET_SETTING
CACHE_OF_A_WORKER = 80 * MIB


@dataclass(frozen=True)
class Budget:
    """`total` bytes for `workers` workers; `origin` says in words where the number comes from.

    Where several engines share a node's memory, each has an even part of it, and `engines` says in how many.
    """

    total: int
    workers: int
    origin: str
    engines: int = 1

    @classmethod
    def of(cls, asked: int | None, workers: int, headroom: MemoryHeadroom | None = None) -> Budget:
        """The budget that was asked for, or half of what is free. MemoryLimit where that cannot be had."""
        free = (headroom or MemoryHeadroom()).measure()
        if asked is None:
            half = free.bytes // 2
            if half < LEAST:
                raise MemoryLimit(_refusal("the least budget", 2 * LEAST, free, f"name one with {SETTING}"))
            origin = f"half of the {free.bytes / MIB:.0f} MiB that are free, limited by {free.limited_by}"
            return cls(half, workers, origin)
        if asked > free.bytes:
            raise MemoryLimit(_refusal(f"a budget of {asked} bytes", asked, free, f"lower {SETTING}"))
        return cls(asked, workers, "as told by --memory")

    @property
    def node(self) -> int:
        """Bytes of all engines' budgets."""
        return self.total * self.engines

    @property
    def cache(self) -> int:
        """Bytes that each worker may keep decoded."""
        return min(CACHE_OF_A_WORKER, self.total // 4 // max(1, self.workers))

    @property
    def worker_ring(self) -> int:
        """Bytes of the rings of each worker."""
        return self.total // 4 // max(1, self.workers)

    @property
    def lane_rings(self) -> int:
        """Bytes of all lane rings together."""
        return self.total - (self.cache + self.worker_ring) * max(1, self.workers)

    def refusal(self, what: str, needed: int, left: int, part: str) -> str:
        """Why a segment is not made."""
        return (
            f"{what} needs {needed} bytes ({needed / MIB:.1f} MiB) of shared memory, but {max(0, left)} bytes "
            f"({max(0, left) / MIB:.1f} MiB) are left for {part} in the memory budget of {self.total / MIB:.0f} MiB "
            f"({self.origin}). Raise {SETTING}, or lower options(prefetch_batches=...) or microbatch_size."
        )

    def describe(self) -> str:
        """For people."""
        lanes, ring, cache = (size / MIB for size in (self.lane_rings, self.worker_ring, self.cache))
        return (
            f"budget {self.total / MIB:.0f} MiB ({self.origin}): lane rings up to {lanes:.0f} MiB, for each of "
            f"{max(1, self.workers)} workers rings up to {ring:.0f} MiB and caches up to {cache:.0f} MiB"
        )


def _refusal(what: str, needed: int, free: FreeMemory, remedy: str) -> str:
    return (
        f"{what} needs {needed} bytes ({needed / MIB:.1f} MiB) of memory, but {free.bytes} bytes "
        f"({free.bytes / MIB:.1f} MiB) are free, limited by {free.limited_by}. Give it more memory, or {remedy}."
    )
