"""Worker processes for an embedded run (`runner="process"`): the daemon's workers without the daemon.

A fork server of its own starts them; a thread reads their outcomes and resolves futures. A worker that dies is replaced
and its tasks are done again, cut in halves and given up as under the daemon (`scheduler`).
"""

from __future__ import annotations

import selectors
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from zephon import errors
from zephon.errors import RecordError, RunFailed, ZephonError
from zephon.function_pickling import pickled
from zephon.plan import Plan
from zephon.recipe import recipe_folders
from zephon.transport.channels import Channel, pair
from zephon.transport.layout import read
from zephon.transport.messages import decode, encode
from zephon.transport.protocol import NewSegment
from zephon.transport.segments import Segment
from zephon.transport.worker_protocol import LoadStage, SlotFree, TaskDone, TaskFailed, WorkerReady
from zephon.windows import AnyTask, Front, Outcome
from zephon_daemon.block_ring import OtherRing
from zephon_daemon.forkserver import ForkServer
from zephon_daemon.inbox import Inbox
from zephon_daemon.lifelines import describe_end
from zephon_daemon.named_work import given_up
from zephon_daemon.scheduler import CREDITS, Scheduler
from zephon_daemon.stalls import Oversight
from zephon_daemon.start_check import warnings_from_child
from zephon_daemon.watchdog import Patience
from zephon_daemon.worker_notes import WorkerNotes

STAGE = 0


@dataclass
class _Port:
    """A worker's connection and its memory."""

    channel: Channel
    pid: int
    inbox: Inbox
    ring: OtherRing = field(default_factory=lambda: OtherRing("worker"))

    def close(self) -> None:
        """It has ended."""
        self.channel.close()
        self.inbox.close()
        self.ring.close()


class WorkerPool:
    """Tasks on worker processes. `submit` and `close` belong to one thread."""

    def __init__(self, front: Front, workers: int) -> None:
        self.ahead = workers * CREDITS
        self._plan = front.plan
        self._scheduler = Scheduler()
        self._oversight = Oversight(Patience(0.0, 0.0), self._scheduler, lambda _: self._plan, time.monotonic)
        stage = pickled(front)
        self._stage_bytes = len(stage)
        self._stage = Segment.create("zephon-stage", len(stage))
        self._stage.array[: len(stage)] = memoryview(stage)
        self._waiting: deque[tuple[int, AnyTask]] = deque()
        self._futures: dict[int, Future[Outcome]] = {}
        self._numbers = self._submitted = 0
        self._lock = threading.Lock()
        self._closing = False
        self._failure: RunFailed | None = None
        self._wake_us, self._wake_them = pair()
        self._server = ForkServer(path=recipe_folders())
        self._server.start()
        self._ports: dict[int, _Port] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_us, selectors.EVENT_READ, None)
        self._selector.register(self._server, selectors.EVENT_READ, self._server)
        for _ in range(workers):
            self._start_worker()
        self._thread = threading.Thread(target=self._serve, name="zephon-pool", daemon=True)
        self._thread.start()

    def submit(self, task: AnyTask) -> Future[Outcome]:
        """Have a task done; its future raises what the task raised."""
        future: Future[Outcome] = Future()
        with self._lock:
            if self._failure is not None:
                future.set_exception(self._failure)
                return future
            self._submitted += 1
            self._futures[self._submitted] = future
            self._waiting.append((self._submitted, task))
        self._wake_them.send(b"w")
        return future

    def check(self, plan: Plan) -> list[str]:
        """What to warn of before a run: the check of operators that run a user's code."""
        return warnings_from_child(plan)

    def close(self) -> None:
        """End the workers."""
        if threading.current_thread() is self._thread:  # a run that was dropped may be collected in any thread
            threading.Thread(target=self.close).start()
            return
        if self._closing:
            return
        self._closing = True
        self._wake_them.send(b"c")
        self._thread.join()
        self._server.close()
        for port in self._ports.values():
            self._oversight.gone(port.pid, "")
            port.close()
        self._stage.close()
        self._selector.close()
        self._wake_us.close()
        self._wake_them.close()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()

    def _start_worker(self) -> None:
        ours, theirs = pair()
        number = self._numbers
        self._numbers += 1
        pid = self._server.spawn("zephon_daemon.worker:main", (number,), theirs, title=f"zephon worker {number}")
        theirs.close()
        port = _Port(ours, pid, Inbox(ours, lambda failed: self._failed(pid, failed)))
        ours.send(encode(LoadStage(STAGE, self._stage_bytes)), (self._stage.fileno(),))
        self._ports[pid] = port
        self._selector.register(ours, selectors.EVENT_READ, port)

    def _serve(self) -> None:
        try:
            while not self._closing:
                for key, _ in self._selector.select():
                    if key.data is None:
                        self._wake_us.receive()
                    elif isinstance(key.data, _Port):
                        self._from_worker(key.data)
                    else:
                        self._replace_dead()
                self._hand_out()
        except Exception as error:  # the pool's thread must not end in silence: whoever waits is told
            self._fail_all(error)

    def _hand_out(self) -> None:
        for pid, task_id, work in self._scheduler.assign(self._pick):
            assert isinstance(pid, int)
            self._ports[pid].inbox.give(task_id, STAGE, work.task)

    def _pick(self, *_: object) -> tuple[int, int, AnyTask] | None:
        with self._lock:
            while self._waiting:
                number, task = self._waiting.popleft()
                if not self._futures[number].cancelled():
                    return 0, number, task
                del self._futures[number]
        return None

    def _from_worker(self, port: _Port) -> None:
        if port.pid not in self._ports:  # its end was noticed first, in the same round of events
            return
        for payload, fds in port.channel.receive():
            message = decode(payload, expect=(WorkerReady, NewSegment, TaskDone, TaskFailed))
            if isinstance(message, NewSegment):
                port.ring.take(message, fds)
            elif isinstance(message, TaskDone):
                block = read(port.ring.slot(message.generation, message.index, message.nbytes)).copy()
                port.channel.send(encode(SlotFree(message.generation, message.index)))
                port.inbox.done(message.task)
                work = self._scheduler.done(port.pid, message.task, message.microseconds)
                outcome = Outcome(block, message.skipped, message.reports, message.counters)
                joined = self._scheduler.joined(work, outcome) if work is not None else None
                if joined is not None:
                    self._resolve(joined[0].number, joined[1])
            elif isinstance(message, TaskFailed):
                port.inbox.done(message.task)
                self._failed(port.pid, message)
            else:
                self._oversight.met(port.pid, WorkerNotes(fds, port.pid), port.pid)
                self._scheduler.add(port.pid, lambda _: True)
        if port.channel.closed:
            self._selector.unregister(port.channel)

    def _failed(self, pid: int, message: TaskFailed) -> None:
        """A task came to an error, in the worker or on its way there."""
        work = self._scheduler.done(pid, message.task)
        if work is not None:
            self._resolve(work.number, error_from(message.kind, message.text, message.record))

    def _replace_dead(self) -> None:
        while ended := self._server.exits():  # while a start is awaited, further ends may be reported
            for pid, code in ended:
                if (port := self._ports.pop(pid, None)) is not None:
                    self._take_back(port, describe_end(code))
                    self._start_worker()

    def _take_back(self, port: _Port, how: str) -> None:
        """What a dead worker had in hand is to be done again, unless it costs too many workers."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(port.channel)
        port.close()
        place = self._oversight.place(port.pid)
        how, divides = self._oversight.gone(port.pid, how)
        for work in self._scheduler.lost(port.pid, how, grain=lambda _: self._plan.grain, divides=divides):
            where = "reading" if place is None else place.cause
            self._resolve(work.number, RunFailed(given_up(self._plan, work, where)))

    def _fail_all(self, error: Exception) -> None:
        failure = RunFailed(f"the worker pool failed: {error}")
        with self._lock:
            self._failure = failure
            numbers = list(self._futures)
        for number in numbers:
            self._resolve(number, failure)

    def _resolve(self, number: int, result: Outcome | ZephonError) -> None:
        """A task is done. One of which another part has failed before is done already."""
        future = self._futures.pop(number, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if isinstance(result, ZephonError):
            future.set_exception(result)
        else:
            future.set_result(result)


def error_from(kind: str, text: str, record: list[str]) -> ZephonError:
    """The error that a worker reported."""
    if kind == "RecordError" and record:
        return RecordError.from_parts(record)
    found = getattr(errors, kind, RunFailed)
    return found(text) if isinstance(found, type) and issubclass(found, ZephonError) else RunFailed(text)
