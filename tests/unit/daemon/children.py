"""What tests fork from a fork server: small entry functions with the signature of engines and workers."""
from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

from zephon.transport.channels import Channel


def tell(fd: int, *values: Any) -> None:
    """Says what it was given and what it finds around itself, then ends."""
    import numpy

    channel = Channel.from_fd(fd)
    fds = sorted(int(n) for n in os.listdir("/proc/self/fd"))
    found = {
        "values": list(values),
        "fds": [n for n in fds if os.path.exists(f"/proc/self/fd/{n}")],
        "session": os.getsid(0) == os.getpid(),
        "sigint": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        "main": getattr(sys.modules["__main__"], "__file__", None),
        "random": [random.random(), float(numpy.random.random())],
        "stdout_is_stderr": os.fstat(1).st_ino == os.fstat(2).st_ino,
    }
    channel.send(repr(found).encode())


def leave(fd: int, code: int) -> int:
    """Ends with an exit code."""
    return code


def fail(fd: int) -> None:
    """Ends with an exception."""
    raise ValueError("on purpose")


def exit_by(fd: int, number: int) -> None:
    """Ends by a signal."""
    os.kill(os.getpid(), number)
    time.sleep(60)


def stay(fd: int, deaf: bool = False) -> None:
    """Stays until it is ended; deaf to SIGTERM if so asked. Says when it is ready."""
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if fd >= 0:
        Channel.from_fd(fd).send(str(os.getpid()).encode())
        os.close(os.open("/dev/null", os.O_RDONLY))
    while True:
        signal.pause()


def leave_a_process(fd: int) -> int:
    """Starts a process of its own and ends without it."""
    left = subprocess.Popen(["sleep", "600"], close_fds=True)
    Channel.from_fd(fd).send(str(left.pid).encode())
    left.returncode = 0  # so that its finalizer does not complain
    return 0
