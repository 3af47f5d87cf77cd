"""What ties the life of one process to another's, and says how a process ended.

A pidfd names one process for ever: no process that gets the same number later is taken for it.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_HINTS = {
    signal.SIGKILL: ": maybe out of memory",
    signal.SIGBUS: ": maybe out of shared memory, or a file was cut short while it was read",
}


def die_with(parent: int, number: int) -> bool:
    """This process gets signal `number` when its parent ends. False if `parent` is its parent no more."""
    _prctl(_PR_SET_PDEATHSIG, number)
    return os.getppid() == parent


def adopt_orphans() -> None:
    """Processes below this one whose parent dies become its children, so that it can reap them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def watch(pid: int) -> int | None:
    """A pidfd, readable once the process has ended; None if there is no such process, or it may not be watched."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def describe_end(code: int) -> str:
    """How a process ended, for people. `code` is an exit code, or minus the number of the signal that killed it."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"killed by signal {-code}"
    return f"killed by signal {-code} ({name}){_HINTS.get(signal.Signals(-code), '')}"


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "prctl")
