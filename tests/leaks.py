"""What a test left behind: processes, descriptors of this process, files in /dev/shm, sockets in its folder.

A process belongs to the test if it descends from this one, or if its environment or command line carries the test's
mark, so that a daemon that has left the process tree is found as well. Ends take a moment, so everything is waited for
until a deadline; what is still there is a leak, and leaked processes are then killed so that later tests start clean.
"""
from __future__ import annotations

import gc
import os
import stat
import threading
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TypeVar

import psutil

from zephon.datasets.open_files import _of_process

#: Seconds that a process or a descriptor has for its end after the test's.
GRACE = 10.0
SHM = Path("/dev/shm")
Found = TypeVar("Found")


class Leaks:
    """Takes stock when made, compares in `after_the_test`."""

    def __init__(self, mark: str, folder: Path) -> None:
        # What is here before is not searched each time that garbage is collected: that took longer than many a test.
        gc.freeze()
        self.mark = mark.encode()
        self.folder = folder
        self.before = {(p.pid, p.create_time()) for p in _children()}
        self.descriptors = _descriptors()
        self.shm = _listing(SHM)

    def after_the_test(self) -> list[str]:
        """A line for each thing that is still there; empty if the test was clean."""
        _of_process.cache_clear()  # the bounded set of files that a reading process keeps open, by design
        gc.collect()
        processes = _until_empty(self._processes)
        lines = [_describe(p) for p in processes]
        for process in processes:
            _kill(process)
        lines += _until_empty(self._new_descriptors)
        lines += _until_empty(self._new_files)
        return lines

    def _processes(self) -> list[psutil.Process]:
        found = {p.pid: p for p in _children() if (p.pid, _create_time(p)) not in self.before}
        for pid in psutil.pids():
            if pid not in found and pid != os.getpid() and self._carries_mark(pid):
                try:
                    found[pid] = psutil.Process(pid)
                except psutil.NoSuchProcess:
                    continue
        return [p for p in found.values() if p.pid != _tracker_pid()]

    def _carries_mark(self, pid: int) -> bool:
        for name, needle in (("environ", self.mark), ("cmdline", bytes(self.folder))):
            try:
                if needle in Path(f"/proc/{pid}/{name}").read_bytes():
                    return True
            except OSError:
                continue
        return False

    def _new_files(self) -> list[str]:
        shared = [f"file {SHM / name}" for name in sorted(_listing(SHM) - self.shm)]
        return shared + [f"socket {path}" for path in sorted(self.folder.rglob("*")) if _is_socket(path)]

    def _new_descriptors(self) -> list[str]:
        gc.collect()
        now = _descriptors()
        return [f"descriptor {fd} -> {target}" for fd, target in sorted(now.items())
                if self.descriptors.get(fd) != target]


def _until_empty(look: Callable[[], list[Found]]) -> list[Found]:
    """What `look` still finds when the grace is over; returns at once when it finds nothing."""
    end = time.monotonic() + GRACE
    nothing = threading.Event()
    while (found := look()) and time.monotonic() < end:
        nothing.wait(0.02)
    return found


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _create_time(process: psutil.Process) -> float:
    try:
        return float(process.create_time())
    except psutil.NoSuchProcess:
        return -1.0


def _tracker_pid() -> int | None:
    """Python's own resource tracker is one per process, started on first use, and stays by design."""
    return getattr(resource_tracker._resource_tracker, "_pid", None)


def _tracker_descriptor() -> int | None:
    return getattr(resource_tracker._resource_tracker, "_fd", None)


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the listing's own descriptor
            continue
    found.pop(_tracker_descriptor() or -1, None)
    return found


def _listing(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except OSError:
        return False


def _describe(process: psutil.Process) -> str:
    try:
        with process.oneshot():
            return f"process {process.pid} ({process.status()}): {' '.join(process.cmdline()) or process.name()}"
    except psutil.NoSuchProcess:
        return f"process {process.pid} (gone since)"


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
        process.wait(GRACE)
    except (psutil.NoSuchProcess, psutil.TimeoutExpired):
        pass
