"""How long a rank waits for a daemon that has gone.

- A daemon that somebody starts again (`zephon launch`, systemd, Kubernetes, or whoever ZEPHON_SUPERVISOR names in the
  daemon's environment) is waited for up to `timeout` seconds of `connect`.
- One that nobody is known to start again: five seconds at most, enough for someone who does it by hand at once.
- One whose launcher has ended: not at all, since it is certain that none will come.

A daemon that answers is not absent, however long its engine needs to start; what it says is waited for as ever.
"""

from __future__ import annotations

import os
import select
import time

from zephon.errors import DaemonUnavailable

UNSUPERVISED_SECONDS = 5.0
LOSSES = 20
"""Connections in a row that may end before a batch has come over one of them."""

_LOOK_AGAIN_SECONDS = 0.05


class Absence:
    """One absence, from when it is noticed. `supervisor` is the daemon's own word for who starts it again."""

    def __init__(self, path: str, supervisor: str, timeout: float) -> None:
        self._path, self._supervisor = path, supervisor
        self._seconds = timeout if supervisor else min(timeout, UNSUPERVISED_SECONDS)
        self._since = time.monotonic()
        self._losses = 0

    def answered(self) -> None:
        """A daemon is there."""
        self._since = time.monotonic()
        self._losses += 1

    def wait(self, error: DaemonUnavailable) -> None:
        """Waits a moment before the next try. Raises DaemonUnavailable if none is due."""
        if _has_ended(self._supervisor):
            raise self._given_up(f"the launcher that would start it again ({self._supervisor}) has ended") from None
        if self._losses >= LOSSES:
            raise self._given_up(f"again {self._losses} times as soon as it was back, at last: {error}") from None
        gone = time.monotonic() - self._since
        if gone >= self._seconds:
            who = f"{self._supervisor} has not started it again" if self._supervisor else "nobody has started it again"
            raise self._given_up(f"{who} within {self._seconds:g} s") from None
        time.sleep(min(_LOOK_AGAIN_SECONDS, self._seconds - gone))

    def _given_up(self, why: str) -> DaemonUnavailable:
        return DaemonUnavailable(
            f"the daemon on {self._path} has gone: {why}. state_dict() still works. Start the daemon again (`zephon "
            "launch` does so by itself) and ask for the next batch to go on, or start the job again from its last "
            "checkpoint."
        )


def _has_ended(supervisor: str) -> bool:
    """Whether it is a launcher, and one that runs no more."""
    name, _, pid = supervisor.partition(" ")
    if name != "launch" or not pid.isdecimal():
        return False
    try:
        process = os.pidfd_open(int(pid))  # readable once it has ended, even if its parent has not taken note yet
    except ProcessLookupError:
        return True
    except OSError:  # not to be known here
        return False
    try:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(process)
