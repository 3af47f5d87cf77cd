"""One of the daemon's engines: its processes, the connection to it, and the eye on it.

Engines are alike and independent: each has a fork server, workers and memory of its own, and is replaced alone when it
dies. With one engine there is one seat.
"""

from __future__ import annotations

import time
from typing import Any

from zephon.transport.channels import Channel
from zephon_daemon.black_box import BlackBox
from zephon_daemon.engine_watch import EngineWatch
from zephon_daemon.progress import cpu_seconds
from zephon_daemon.stacks import Stack
from zephon_daemon.supervision import Supervision
from zephon_daemon.watchdog import Patience


class EngineSeat:
    """An engine, and the next one when it has died. `workers` is its share of the daemon's."""

    def __init__(self, number: int, supervision: Supervision, patience: Patience, workers: int) -> None:
        self.number, self.supervision, self.workers = number, supervision, workers
        self.label = supervision.label
        self.watch = EngineWatch(patience, time.monotonic)
        self.started = self.ready = False
        self.watched_engine = self.watched_server = -1
        """The descriptors that the daemon waits for on its behalf."""
        self._box: BlackBox | None = None

    @property
    def channel(self) -> Channel | None:
        """The connection to the engine; None while there is none."""
        return self.supervision.engine

    def start(self) -> None:
        """Start the first engine, once."""
        if not self.started:
            self.started = True
            self.supervision.start()

    def give(self, workers: int) -> None:
        """Its share of the workers from now on."""
        if workers != self.workers:
            self.workers = workers
            self.supervision.want(workers)

    def loads(self, fds: list[int]) -> None:
        """The engine loads the recipe. Its descriptors (memory, stack, process) are taken out of the list."""
        self.close()
        if fds:
            self._box = BlackBox.attach(fds.pop(0))
        if self._box is not None and len(fds) == 2:
            self.watch.met(self._box, Stack(fds.pop(0), fds.pop(0), self.supervision.engine_pid or 0))

    def met(self) -> None:
        """The engine has loaded the recipe."""
        self.supervision.engine_ready(self.workers)
        self.ready = True

    def lost(self, how: str) -> str:
        """The engine has died: how, for people, with what it was at work on. The next one is due; raises `CannotGoOn`.

        To be called when all that it had said has been read.
        """
        how = self.watch.gone() or how
        work = self.close()
        how = f"{how}, {work}" if work else how
        self.ready = False
        self.supervision.lose_engine(how)
        return how

    def look(self) -> None:
        """Look after the engine; one that stands still for too long is ended."""
        if self.watch.look():
            self.supervision.kill_engine()

    def close(self) -> str:
        """No more of this engine's memory; what was in work, for people."""
        self.watch.gone()
        box, self._box = self._box, None
        if box is None:
            return ""
        work = str(box)
        box.close()
        return work

    def named(self, text: str) -> str:
        """What is said of the engine, with its number where there are several."""
        return f"{text} (engine {self.label})" if self.label else text

    def report(self, state: str) -> dict[str, Any]:
        """For `zephon progress`."""
        pid = self.supervision.engine_pid
        return {
            "engine": self.number,
            "pid": pid,
            "state": self.watch.state() or state,
            "workers": self.workers,
            "cpu_seconds": cpu_seconds(pid) if pid is not None else 0.0,
        }
