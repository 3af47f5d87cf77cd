"""What processes use, read from /proc: memory by share, and processor time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


def pss(pids: Iterable[int]) -> int:
    """Bytes of memory, pages that several processes share counted by share."""
    return sum(_pss(pid) for pid in pids)


def _pss(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(b"Pss:"))
    except (OSError, StopIteration):  # it has ended
        return 0


def busy_cores(seconds: float) -> float:
    """How many cores the whole machine uses, measured for so long."""
    before = _used()
    time.sleep(seconds)
    return (_used() - before) / seconds


def _used() -> float:
    user, nice, system, _, _, interrupts, soft = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + interrupts + soft) / _TICK


def cpu_seconds(pids: Iterable[int]) -> float:
    """Seconds of processor time that the threads of those processes have used so far, to the nanosecond."""
    spent = 0
    for pid in pids:
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                spent += int(Path(task, "schedstat").read_text().split()[0])
        except OSError:  # it has ended
            continue
    return spent / 1e9
