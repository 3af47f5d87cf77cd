"""The check of operators at a run's start, in a process of its own.

A function that crashes, hangs or takes much memory on the first records must not do so in the engine, which serves
other runs too, nor in a training process whose user asked for worker processes. So a forked child runs the check and
writes down what to warn of; it is killed when it takes too long, and whatever becomes of it, the run starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
import warnings
from collections.abc import Collection

from zephon.ops.base import Operator
from zephon.plan import Plan
from zephon.validation import has_users_code, warnings_at_start
from zephon_daemon.lifelines import die_with

SECONDS = 1.0
"""How long a run's start waits for the check at most."""


def warnings_from_child(plan: Plan, ready: Collection[Operator] = ()) -> list[str]:
    """`zephon.validation.warnings_at_start`, isolated. `ready` are the operators that are set up in this process."""
    if not has_users_code(plan):
        return []
    parent = os.getpid()
    reading, writing = os.pipe()
    try:
        with warnings.catch_warnings():
            # Python warns of any second thread. A child that meets a lock which one of them held is killed in time.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
    except OSError:
        os.close(reading)
        os.close(writing)
        return []
    if pid == 0:
        _child(plan, ready, parent, writing)
    os.close(writing)
    try:
        said = _read(reading, time.monotonic() + SECONDS)
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # the program reaps its children itself
            os.waitpid(pid, 0)
    try:
        return [str(text) for text in json.loads(said)]
    except ValueError:  # it was killed, or killed itself
        return []


def _child(plan: Plan, ready: Collection[Operator], parent: int, writing: int) -> None:
    """The rest of the child's life: nothing of its parent's may run after it."""
    try:
        if die_with(parent, signal.SIGKILL):
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            quiet = os.open(os.devnull, os.O_RDWR)
            for standard in (0, 1, 2):  # what the functions print, they print again when the run calls them
                os.dup2(quiet, standard)
            found = warnings_at_start(plan, lambda operator: any(operator is other for other in ready))
            with open(writing, "w") as pipe:
                json.dump(found, pipe)
    finally:
        os._exit(0)


def _read(reading: int, deadline: float) -> bytes:
    """What the child wrote, up to its end or the deadline."""
    said = b""
    while (left := deadline - time.monotonic()) > 0 and select.select([reading], [], [], left)[0]:
        data = os.read(reading, 1 << 16)
        if not data:
            break
        said += data
    return said
