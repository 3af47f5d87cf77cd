"""The control groups that this process is in, by the kernel's files, of version 1 and 2 alike.

Every level counts: what a group may take is bounded by each group above it. A level whose files cannot be seen, as from
inside a container, is not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def cgroup_levels(controller: str, proc: Path = PROC, cgroups: Path = CGROUPS) -> Iterator[tuple[int, Path]]:
    """`(version, folder)` of each group of this process in which the controller may set a limit, innermost first."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            yield from ((1, level) for level in _levels(cgroups / controller, path))
        elif hierarchy == "0":
            for mount in (cgroups, cgroups / "unified"):
                yield from ((2, level) for level in _levels(mount, path))


def _levels(mount: Path, path: str) -> list[Path]:
    """The folders of this process's cgroup and of all above it, innermost first.

    Inside a container the path may begin with parts that only the host sees: they are dropped until a folder fits.
    """
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    for first in range(len(parts) + 1):
        if mount.joinpath(*parts[first:]).is_dir():
            return [mount.joinpath(*parts[first:last]) for last in range(len(parts), first - 1, -1)]
    return []
