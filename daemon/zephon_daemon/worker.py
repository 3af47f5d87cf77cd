"""A worker process: it runs the front of pipelines (reading and the leading stateless operators) and later stages, one
task at a time.

It gets stages and tasks over one connection and writes each outcome as a block into a slot of its own ring. The engine
gives it no more tasks than the ring has slots, and returns each slot as soon as the block is consumed, so the worker
never waits for space. The records of a later stage's task lie in a ring of the engine's (`inbox`), until the task is
done. When its engine is gone the connection ends, and so does the worker.
"""

from __future__ import annotations

import os
import select
import sys
import time
import traceback
from collections import deque
from typing import Any

import cloudpickle

from zephon.datasets.open_files import resources
from zephon.errors import RecordError, RunFailed, ZephonError
from zephon.transport.channels import MAX_DESCRIPTOR, Channel
from zephon.transport.layout import measure, read
from zephon.transport.messages import decode, encode
from zephon.transport.protocol import NewSegment
from zephon.transport.segments import Segment
from zephon.transport.worker_protocol import (
    DoStageTask,
    DoTask,
    DropStage,
    LoadStage,
    SlotFree,
    TaskDone,
    TaskFailed,
    WorkerReady,
    WorkerShare,
)
from zephon.whereabouts import IDLE, LOADING, SETTING_UP
from zephon.windows import AnyTask, Front, Outcome, StageTask, Task
from zephon_daemon.block_ring import BlockRing, Bytes, OtherRing
from zephon_daemon.pages import give_back
from zephon_daemon.scheduler import CREDITS
from zephon_daemon.worker_notes import OwnNotes

FROM_ENGINE = (LoadStage, DropStage, DoTask, DoStageTask, NewSegment, SlotFree, WorkerShare)
SLOTS = CREDITS
MAX_REPORTS = 50
TEXT_LIMIT = 8000


class Worker:
    """The loop of one worker process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._stages: dict[int, Front] = {}
        self._unusable: dict[int, Exception] = {}
        self._fresh: set[int] = set()
        self._tasks: deque[DoTask | tuple[DoStageTask, Bytes]] = deque()
        self._ring = BlockRing(f"zephon-worker-{os.getpid()}", SLOTS, lambda made, fd: self._send(made, (fd,)))
        self._inbox = OtherRing("tasks")
        self._notes = OwnNotes()

    def run(self) -> None:
        """Until the engine is gone."""
        self._send(WorkerReady(os.getpid()), self._notes.fds)
        while not self._channel.closed:
            self._receive(wait=not self._tasks)
            if self._tasks:
                self._do(self._tasks.popleft())
        for stage in list(self._stages):
            self._end(stage)

    def _end(self, stage: int) -> None:
        front = self._stages.pop(stage, None)
        try:
            if front is not None:
                front.teardown()
        except ZephonError:  # its run is over: there is nobody left to tell but the log
            traceback.print_exc()

    def _receive(self, wait: bool) -> None:
        poller = select.poll()
        poller.register(self._channel, select.POLLIN | (select.POLLOUT if self._channel.wants_write else 0))
        if not poller.poll(None if wait else 0):
            return
        self._channel.flush()
        for payload, fds in self._channel.receive():
            message = decode(payload, expect=FROM_ENGINE)
            if isinstance(message, DoTask):
                self._tasks.append(message)
            elif isinstance(message, DoStageTask):
                self._tasks.append((message, self._inbox.slot(message.generation, message.index, message.nbytes)))
            elif isinstance(message, NewSegment):
                self._inbox.take(message, fds)
            elif isinstance(message, SlotFree):
                self._ring.free(message.generation, message.index)
            elif isinstance(message, LoadStage):
                self._load(message, fds)
            elif isinstance(message, WorkerShare):
                self._ring.limit = message.ring_bytes
                resources().limit_to(message.cache_bytes)
            else:
                self._end(message.stage)

    def _load(self, message: LoadStage, fds: list[int]) -> None:
        memory = Segment.attach(fds[0], writable=False, name="stage")
        data = memory.array[: message.nbytes].tobytes()
        memory.close()
        self._notes.at.enter(LOADING)
        try:
            front: Front = cloudpickle.loads(data)
        except Exception as error:  # whoever asks for a task of it is told
            self._unusable[message.stage] = error
            return
        finally:
            self._notes.at.enter(IDLE)
        self._stages[message.stage] = front
        self._fresh.add(message.stage)

    def _do(self, given: DoTask | tuple[DoStageTask, Bytes]) -> None:
        order = given if isinstance(given, DoTask) else given[0]
        started = time.perf_counter_ns()
        self._notes.at.begin(order.task)
        try:
            if order.stage in self._unusable:
                error = self._unusable[order.stage]
                raise RunFailed(
                    f"the recipe's functions cannot be rebuilt in a worker: {type(error).__name__}: {error}. Modules "
                    "of your own that it imports must lie beside the recipe, or be installed"
                ) from error
            front = self._stages[order.stage]
            self._notes.at.enter(SETTING_UP)
            front.setup()
            if order.stage in self._fresh:
                self._fresh.discard(order.stage)
                give_back()
            task: AnyTask
            if isinstance(given, DoTask):
                task = Task(given.epoch, given.lane, given.low, given.high, given.pointers)
            else:
                of = given[0]
                task = StageTask(of.epoch, of.lane, of.low, of.high, of.later, read(given[1]))
            self._deliver(order.task, front.run(task, self._notes.at), started)
        except (Exception, KeyboardInterrupt, SystemExit) as error:  # whatever a user's function raises is reported
            self._send(failure(order.task, error))
        self._notes.at.begin(-1)

    def _deliver(self, task: int, outcome: Outcome, started: int) -> None:
        layout = measure(outcome.block)
        slot = self._ring.write(layout)
        spent = (time.perf_counter_ns() - started) // 1000
        reports = [text[:500] for text in outcome.reports[:MAX_REPORTS]]
        done = (slot.generation, slot.index, layout.nbytes, outcome.skipped, reports, outcome.counters, spent)
        self._send(TaskDone(task, *done))

    def _send(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        self._channel.send(encode(message, limit=MAX_DESCRIPTOR), fds)


def failure(task: int, error: BaseException) -> TaskFailed:
    """An error as it travels: `RecordError` with its parts, other errors of ours by name, the rest as a failed run."""
    trace = "".join(traceback.format_exception(error))[-TEXT_LIMIT:]
    if isinstance(error, RecordError):
        parts = [part[:TEXT_LIMIT] for part in error.parts]
        return TaskFailed(task, "RecordError", str(error)[:TEXT_LIMIT], parts, trace)
    kind = type(error).__name__ if isinstance(error, ZephonError) else "RunFailed"
    text = str(error) if isinstance(error, ZephonError) else f"{type(error).__name__}: {error}"
    return TaskFailed(task, kind, text[:TEXT_LIMIT], [], trace)


def main(fd: int, worker: int) -> None:
    """Entry of the forked child: `fd` is its end of the connection to the engine."""
    import pyarrow as pa

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    Worker(Channel.from_fd(fd)).run()
    if "torch" in sys.modules:
        print(f"zephon worker {worker}: torch was imported here, at 3 s and 140 MiB for each worker", file=sys.stderr)
