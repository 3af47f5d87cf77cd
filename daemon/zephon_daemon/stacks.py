"""The Python stack of a process, asked for from outside, whatever the process is doing.

The process gives away a piece of memory and installs a handler of C, which writes all threads' stacks there when a
signal comes. So it works while Python code sleeps, waits for a lock or is deep in a C library; system calls go on as
if nothing had happened. Where the process does not run at all (stopped, or in an uninterruptible read), nothing comes,
and the state that the kernel gives says why.

A debugger's way, reading the process from outside, was rejected: it needs a permission that containers withhold.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import re
import signal

SIGNAL = signal.SIGRTMIN + 11
"""A number that hardly any library uses, whose handlers a user's code may replace as it likes."""

MOST_BYTES = 1 << 16
DEPTH = 8
"""Calls named in a line of text."""

_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')
_STATES = {
    "T": "the process is stopped (SIGSTOP)",
    "t": "the process is stopped by a debugger",
    "D": "the process is in an uninterruptible wait: a disk or a file server does not answer",
    "Z": "the process has ended",
}


def offer_stack() -> int:
    """Called in the process itself: from now on `SIGNAL` writes its stacks into the memory returned."""
    fd = os.memfd_create("zephon:stack", os.MFD_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    faulthandler.register(SIGNAL, file=fd, all_threads=True, chain=False)
    return fd


class Stack:
    """The other side's: the memory, and the process by its pidfd, so that no other process is ever signalled.

    Both descriptors are used up.
    """

    def __init__(self, memory: int, pidfd: int, pid: int) -> None:
        self._memory, self._pidfd, self._pid = memory, pidfd, pid

    def ask(self) -> None:
        """What the process is doing now will be in `read` a moment later."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._memory, 0)
            signal.pidfd_send_signal(self._pidfd, SIGNAL)

    def kill(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def read(self) -> str:
        """The stacks as `faulthandler` writes them; empty while none has come."""
        with contextlib.suppress(OSError):
            return os.pread(self._memory, MOST_BYTES, 0).decode(errors="replace")
        return ""

    def described(self) -> str:
        """Where the process stands, in a line: the innermost call first. Without a stack, why there is none."""
        return calls(self.read()) or _STATES.get(state_of(self._pid), "its stack cannot be had")

    def close(self) -> None:
        for fd in (self._memory, self._pidfd):
            os.close(fd)


def calls(text: str) -> str:
    """The innermost calls of the main thread of a stack: `sleep (recipe.py:12) < …`; empty if there is none."""
    threads = [part for part in re.split(r"^(?=(?:Current thread|Thread) )", text, flags=re.M) if part.strip()]
    if not threads:
        return ""
    found = [_FRAME.match(line) for line in threads[-1].splitlines()]  # the main thread comes last
    frames = [frame for frame in found if frame is not None]
    ours = (os.sep + "zephon_daemon" + os.sep, os.sep + "zephon" + os.sep + "windows.py")
    shown = [f for f in frames if f["file"] != "<string>" and not any(part in f["file"] for part in ours)] or frames
    named = [f"{f['name']} ({os.path.basename(f['file'])}:{f['line']})" for f in shown[:DEPTH]]
    return " < ".join(named) + (" < …" if len(shown) > DEPTH else "")


def state_of(pid: int) -> str:
    """The kernel's letter for what a process does: "T" is stopped, "Z" has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(") ")[2][:1]
    except OSError:
        return "Z"
