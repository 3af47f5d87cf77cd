"""The engine and its workers as processes: started from the fork server, watched, replaced.

- A worker that ends is replaced at once, under a new number; the engine is told how it ended. Workers that die as soon
  as they start, before they have done a task, are replaced more and more slowly, and in the end given up.
- When the engine ends, its workers are ended too, and a new engine gets new ones. So it is when the fork server ends,
  since the kernel then ends everything that it forked.
- With several engines each has a supervision of its own, which knows nothing of the others; `label` tells them apart.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from zephon.errors import DaemonUnavailable, RunFailed, ZephonError
from zephon.transport.channels import Channel, pair
from zephon.transport.messages import encode
from zephon.transport.protocol import AddWorker, RetireWorker, WorkerEnds, WorkerGone, WorkerServes
from zephon_daemon.forkserver import END_SECONDS, ForkServer
from zephon_daemon.lifelines import adopt_orphans, describe_end

QUICK_SECONDS = 1.0
"""A worker that lived shorter than that, and did no task, died of its start."""

QUICK_DEATHS = 8
"""Such deaths in a row, for each worker wanted, after which no more are started."""

ENGINE_STARTS = 3
"""Engines in a row that may die before they are ready."""

_RETRY_SECONDS = 1.0

_log = logging.getLogger("zephon.daemon")


class CannotGoOn(ZephonError):
    """Processes die faster than it makes sense to replace them."""


@dataclass(frozen=True)
class Targets:
    """The entry functions of the children."""

    engine: str = "zephon_daemon.engine:main"
    worker: str = "zephon_daemon.worker:main"


@dataclass
class _Worker:
    number: int
    started: float
    serves: bool = False
    ended: str = ""
    """Why the engine has ended it, if it has."""
    retiring: bool = False


class Supervision:
    """Owns the processes. `engine` is the channel to the engine, None while there is none.

    `label` is the engine's number where there are several, else empty.
    """

    def __init__(
        self,
        recipe: str,
        settings: dict[str, Any],
        *,
        path: Sequence[str] = (),
        targets: Targets | None = None,
        label: str = "",
        clock: Callable[[], float] = time.monotonic,
        make_server: Callable[..., ForkServer] = ForkServer,
    ) -> None:
        self._recipe, self._settings, self._path = recipe, settings, path
        self._targets, self._clock, self._make_server = targets or Targets(), clock, make_server
        self.label = label
        self._name, self._worker_name = (f" {label}", f"{label}.") if label else ("", "")
        self._who = f"engine {label}" if label else "the engine"
        self._server: ForkServer | None = None
        self._workers: dict[int, _Worker] = {}
        self._numbers = 0
        self._wanted = 0
        self._quick_deaths = self._failed_starts = 0
        self._start_engine_at: float | None = None
        self._start_workers_at: list[float] = []
        self._ready = self._was_ready = False
        self.engine: Channel | None = None
        self.engine_pid: int | None = None
        self.died = 0
        """Workers that have died so far."""
        self.hear: Callable[[], None] = lambda: None
        """Reads what the engine has sent; called before ends are judged, some of which it has explained."""

    def start(self) -> None:
        """Start the fork server and the engine."""
        adopt_orphans()
        self._start_engine_at = self._clock()

    def fileno(self) -> int:
        """For a selector: readable when a process has ended; -1 while there is no fork server."""
        return self._server.fileno() if self._server is not None else -1

    @property
    def pids(self) -> dict[str, int]:
        """The living processes by name, for progress."""
        found = {} if self._server is None else {f"forkserver{self._name}": self._server.pid}
        if self.engine_pid is not None:
            found[f"engine{self._name}"] = self.engine_pid
        workers = sorted(self._workers.items())
        return {**found, **{f"worker {self._worker_name}{worker.number}": pid for pid, worker in workers}}

    @property
    def server_pid(self) -> int | None:
        """The fork server, while it runs: nobody but its owner is to take note of its end."""
        return self._server.pid if self._server is not None and self._server.ended() is None else None

    @property
    def wake_at(self) -> float | None:
        """When `step` has something to do even if nothing ends."""
        times = [*self._start_workers_at, *([self._start_engine_at] if self._start_engine_at is not None else [])]
        return min(times, default=None)

    def engine_ready(self, workers: int) -> None:
        """The engine is ready and wants so many workers."""
        self._ready = self._was_ready = True
        self._failed_starts = 0
        self._wanted = workers
        self._start_workers_at = [self._clock()] * workers

    def want(self, workers: int) -> None:
        """So many workers from now on. Those that are too many do what they have in hand first."""
        self._wanted = workers
        if not self._ready or self.engine is None:
            return
        staying = sorted((w for w in self._workers.values() if not w.retiring), key=lambda worker: worker.number)
        del self._start_workers_at[max(0, workers - len(staying)) :]
        self._start_workers_at += [self._clock()] * (workers - len(staying) - len(self._start_workers_at))
        for worker in staying[workers:]:
            worker.retiring = True
            self.engine.send(encode(RetireWorker(worker.number)))

    def told(self, said: WorkerServes | WorkerEnds) -> None:
        """The engine says of a worker that it has got a task, so its start is past, or that it is ended, and why."""
        for worker in self._workers.values():
            if worker.number == said.worker:
                worker.serves = worker.serves or isinstance(said, WorkerServes)
                worker.ended = said.why if isinstance(said, WorkerEnds) else ""

    def step(self) -> str | None:
        """Notice ends, replace what ended. Raises `CannotGoOn`.

        Where the engine has ended it says how, and the caller calls `lose_engine`.
        """
        how = self._notice()
        if how is None:
            try:
                self._start_due()
                how = self._notice()  # ends that were reported while a start was awaited wake nobody
            except DaemonUnavailable as error:
                how = self._notice() or self._lose_server(str(error))
        return how

    def lose_engine(self, how: str) -> None:
        """The engine has ended: its workers go with it, and a new one is due. Raises `CannotGoOn`."""
        self._drop_engine()
        if self._server is not None:
            for pid in self._workers:
                self._server.kill(pid)
        self._workers.clear()
        self._start_workers_at.clear()
        if not self._ready:
            self._failed_starts += 1
            if not self._was_ready or self._failed_starts >= ENGINE_STARTS:
                raise CannotGoOn(f"{self._who} died while it loaded the recipe: {how}")
        self._ready = False
        self._start_engine_at = self._clock() + 0.1 * 2**self._failed_starts
        _log.warning("%s died: %s. A new one is started", self._who, how)

    def kill_engine(self) -> None:
        """End the engine by force; its end is noticed like any other."""
        if self.engine is not None:
            self.engine.close()
        if self._server is not None and self.engine_pid is not None:
            self._server.kill(self.engine_pid)

    def ask_to_end(self, seconds: float = END_SECONDS) -> None:
        """Tell all processes to end, for `close` to wait for."""
        self._drop_engine()
        if self._server is not None:
            self._server.ask_to_end(seconds)

    def close(self, seconds: float = END_SECONDS) -> None:
        """End all processes."""
        self._drop_engine()
        if self._server is not None:
            self._server.close(seconds)
            self._server = None
        self._workers.clear()

    def force(self) -> None:
        """End all processes at once, from within a signal handler while `close` waits."""
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._server.pid, signal.SIGKILL)

    # Noticing

    def _notice(self) -> str | None:
        if self._server is None:
            return None
        ended = self._server.exits()
        if ended or not self._server.alive:
            self.hear()
        if not self._server.alive:
            code = self._server.ended(1.0)
            return self._lose_server("its fork server ended" + (f", {describe_end(code)}" if code is not None else ""))
        died = None
        for pid, code in ended:
            if pid == self.engine_pid:
                died = describe_end(code)
            elif (worker := self._workers.pop(pid, None)) is not None:
                self._lose_worker(worker, describe_end(code))
        return died

    def _lose_server(self, how: str) -> str:
        server, self._server = self._server, None
        if server is not None:
            server.close(0.0)
        return how

    def _drop_engine(self) -> None:
        if self.engine is not None:
            self.engine.close()
        self.engine = self.engine_pid = None

    def _lose_worker(self, worker: _Worker, how: str) -> None:
        now = self._clock()
        how = worker.ended or how
        how = "" if worker.retiring and how == describe_end(0) else how
        self.died += bool(how)
        if self.engine is not None:
            self.engine.send(encode(WorkerGone(worker.number, how)))
        if worker.retiring:
            return
        if worker.serves or now - worker.started >= QUICK_SECONDS:
            self._quick_deaths, delay = 0, 0.0
        else:
            self._quick_deaths += 1
            if self._quick_deaths >= QUICK_DEATHS * max(1, self._wanted):
                raise CannotGoOn(f"{self._quick_deaths} workers in a row died within a second of their start: {how}")
            delay = min(5.0, 0.1 * 2 ** (self._quick_deaths // max(1, self._wanted)))
        self._start_workers_at.append(now + delay)
        _log.warning("worker %s%d ended: %s. It is replaced", self._worker_name, worker.number, how)

    # Starting

    def _start_due(self) -> None:
        now = self._clock()
        if self._start_engine_at is not None and self._start_engine_at <= now:
            self._start_engine()
        due = [at for at in self._start_workers_at if at <= now]
        for at in due:
            self._start_workers_at.remove(at)
            try:
                self._start_worker()
            except RunFailed as error:
                _log.warning("%s. It is tried again", error)
                self._start_workers_at.append(now + _RETRY_SECONDS)

    def _start_engine(self) -> None:
        self._start_engine_at = None
        if self._server is None:
            self._server = self._make_server(path=self._path)
            self._server.start()
        mine, its = pair()
        try:
            self.engine_pid = self._server.spawn(
                self._targets.engine, [self._recipe, self._settings], its, title=f"zephon engine{self._name}"
            )
        except RunFailed as error:
            mine.close()
            _log.warning("%s. It is tried again", error)
            self._start_engine_at = self._clock() + _RETRY_SECONDS
            return
        except DaemonUnavailable:
            mine.close()
            raise
        finally:
            its.close()
        self.engine = mine

    def _start_worker(self) -> None:
        assert self._server is not None
        if self.engine is None:
            return
        self._numbers += 1
        number = self._numbers
        engines, workers = pair()
        try:
            title = f"zephon worker {self._worker_name}{number}"
            pid = self._server.spawn(self._targets.worker, [number], workers, title=title)
            self._workers[pid] = _Worker(number, self._clock())
            self.engine.send(encode(AddWorker(number, pid)), (engines.fileno(),))
        finally:
            engines.close()
            workers.close()


def end_leftovers() -> None:
    """Once all else has ended: end what user code has left behind, adopted by this process."""
    for left in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    reap(())


def reap(servers: Collection[int | None]) -> None:
    """Take away adopted processes that have ended, but for the fork servers."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if found.si_pid in servers:
                return
            os.waitpid(found.si_pid, 0)
