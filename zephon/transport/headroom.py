"""How much memory can still be reserved before something is killed.

Shared memory counts against the machine and against every memory cgroup above this process, and an oversized
reservation does not fail: it feeds the OOM killer. So the least of all of them is measured first. Page cache that the
kernel would drop on demand counts as free, as in the kernel's own `MemAvailable`; shared memory does not, since it
cannot be dropped. Both cgroup versions are read; a level whose files cannot be seen sets no limit here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zephon.errors import MemoryLimit
from zephon.transport.cgroups import CGROUPS, PROC, cgroup_levels

MIB = 1 << 20

BUDGET_SETTING = "`zephon daemon --memory` (or `zephon launch --memory`)"
"""How the user sets the memory budget of a node."""

# Version 1 says "no limit" with a huge number.
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class FreeMemory:
    """`bytes` that can still be reserved, and what sets that bound."""

    bytes: int
    limited_by: str


@dataclass(frozen=True)
class MemoryHeadroom:
    """Measures free memory, and refuses what does not fit.

    `keep` bytes stay unreserved for page tables and the heaps of the processes. `setting` names, in an error, what
    the user can change. `proc` and `cgroups` are the roots of the kernel's files.
    """

    setting: str = "options(prefetch_batches=...) or `zephon daemon --memory`"
    keep: int = 16 * MIB
    proc: Path = PROC
    cgroups: Path = CGROUPS

    def measure(self) -> FreeMemory:
        """The tightest bound of the machine and of every cgroup level of this process."""
        bounds = [FreeMemory(_machine_free(self.proc), "the machine (MemAvailable)")]
        bounds.extend(_cgroup_bounds(self.proc, self.cgroups))
        return min(bounds, key=lambda bound: bound.bytes)

    def check(self, needed: int, purpose: str) -> None:
        """Raises MemoryLimit when `needed` more bytes for `purpose` would not leave `keep` bytes free."""
        free = self.measure()
        usable = max(0, free.bytes - self.keep)
        if needed > usable:
            raise MemoryLimit(
                f"{purpose} needs {needed} bytes ({needed / MIB:.1f} MiB) of shared memory, but {usable} bytes "
                f"({usable / MIB:.1f} MiB) are free, limited by {free.limited_by}. "
                f"Lower {self.setting}, or give the process more memory."
            )


def free_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes that can still be reserved: the least of `MemAvailable` and of every cgroup level of this process."""
    return MemoryHeadroom(proc=proc, cgroups=cgroups).measure().bytes


def _machine_free(proc: Path) -> int:
    rows = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines() if ":" in line)
    row = rows.get("MemAvailable") or rows["MemFree"]
    return int(row.split()[0]) * 1024


def _cgroup_bounds(proc: Path, cgroups: Path) -> Iterator[FreeMemory]:
    for version, level in cgroup_levels("memory", proc, cgroups):
        if version == 1:
            yield from _bound(
                level,
                limits=("memory.limit_in_bytes",),
                used="memory.usage_in_bytes",
                cache=("total_inactive_file", "total_active_file"),
            )
        else:
            # Past memory.high a process is not killed but slowed to a crawl: as bad for a reservation.
            yield from _bound(
                level,
                limits=("memory.max", "memory.high"),
                used="memory.current",
                cache=("inactive_file", "active_file"),
            )


def _bound(level: Path, *, limits: tuple[str, ...], used: str, cache: tuple[str, ...]) -> Iterator[FreeMemory]:
    found = [limit for name in limits if (limit := _number(level / name)) is not None and limit < _UNLIMITED]
    usage = _number(level / used)
    if not found or usage is None:
        return
    reclaimable = 0
    try:
        for line in (level / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key in cache:
                reclaimable += int(value)
    except OSError:
        pass
    free = min(found) - max(0, usage - reclaimable)
    yield FreeMemory(max(0, free), f"the memory cgroup {level}")


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
