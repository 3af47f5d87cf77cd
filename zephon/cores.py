"""How many cores this process may keep busy: what workers and engines are counted by where the user says nothing.

That is the cores of its affinity (`taskset`, `cpuset`), and no more than the time that a CPU quota above it allows
(a container's `cpus` or `limits.cpu`, systemd's `CPUQuota`): with a quota of four cores on a machine of 64 the kernel
stops every process of the group for most of each tenth of a second if more than four are at work. A part of a core
counts as one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zephon.transport.cgroups import CGROUPS, PROC, cgroup_levels


@dataclass(frozen=True)
class Cores:
    """`count` cores, and in words what sets that bound."""

    count: int
    limited_by: str


def allowed_cores(proc: Path = PROC, cgroups: Path = CGROUPS, affinity: int | None = None) -> Cores:
    """The tightest bound of the affinity (asked of the kernel if not given) and of every CPU quota above this process.

    `proc` and `cgroups` are the roots of the kernel's files.
    """
    if affinity is None:
        affinity = len(os.sched_getaffinity(0))
    bounds = [Cores(affinity, "its affinity"), *_quotas(proc, cgroups)]
    return min(bounds, key=lambda bound: bound.count)


def _quotas(proc: Path, cgroups: Path) -> Iterator[Cores]:
    for version, level in cgroup_levels("cpu", proc, cgroups):
        try:
            if version == 1:
                quota, period = ((level / f"cpu.cfs_{what}_us").read_text() for what in ("quota", "period"))
            else:
                quota, period = (level / "cpu.max").read_text().split()
            allowed, every = int(quota), int(period)
        except (OSError, ValueError):  # not to be seen, or "max": no quota
            continue
        if allowed > 0 and every > 0:
            yield Cores(-(-allowed // every), f"the quota of the cpu cgroup {level}")
