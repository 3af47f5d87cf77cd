"""A worker process: it runs the front of pipelines (reading and the leading stateless operators), one task at a time.

It gets stages and tasks over one connection and writes each outcome as a block into a slot of its own ring. The engine
gives it no more tasks than the ring has slots, and returns each slot as soon as the block is consumed, so the worker
never waits for space. When its engine is gone the connection ends, and so does the worker.
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

from zephon.budget import SETTING
from zephon.datasets.open_files import resources
from zephon.errors import MemoryLimit, RecordError, RunFailed, ZephonError
from zephon.transport.channels import MAX_DESCRIPTOR, Channel
from zephon.transport.layout import measure
from zephon.transport.messages import decode, encode
from zephon.transport.protocol import (
    DoTask,
    DropStage,
    LoadStage,
    NewSegment,
    SlotFree,
    TaskDone,
    TaskFailed,
    WorkerReady,
    WorkerShare,
)
from zephon.transport.rings import LARGE_RING, RingWriter, Slot
from zephon.transport.segments import MemoryHeadroom, Segment
from zephon.whereabouts import IDLE, LOADING, SETTING_UP
from zephon.windows import Front, Outcome, Task
from zephon_daemon.pages import give_back
from zephon_daemon.scheduler import CREDITS
from zephon_daemon.worker_notes import OwnNotes

HEADROOM = MemoryHeadroom(setting=f"{SETTING} or --workers")
SLOTS = CREDITS
SMALLEST_SLOT = 256 << 10
MAX_REPORTS = 50
TEXT_LIMIT = 8000


class Worker:
    """The loop of one worker process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._stages: dict[int, Front] = {}
        self._unusable: dict[int, Exception] = {}
        self._fresh: set[int] = set()
        self._tasks: deque[DoTask] = deque()
        self._ring: RingWriter | None = None
        self._segments: dict[int, Segment] = {}
        self._ring_bytes: int | None = None
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
            message = decode(payload, expect=(LoadStage, DropStage, DoTask, SlotFree, WorkerShare))
            if isinstance(message, DoTask):
                self._tasks.append(message)
            elif isinstance(message, SlotFree):
                self._free(message)
            elif isinstance(message, LoadStage):
                self._load(message, fds)
            elif isinstance(message, WorkerShare):
                self._ring_bytes = message.ring_bytes
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

    def _free(self, message: SlotFree) -> None:
        assert self._ring is not None
        self._ring.returned(self._ring.slot(message.generation, message.index), 0)
        for generation in self._ring.retired():
            self._segments.pop(generation).close()

    def _do(self, order: DoTask) -> None:
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
            outcome = front.run(Task(order.epoch, order.lane, order.low, order.high, order.pointers), self._notes.at)
            self._deliver(order, outcome, started)
        except (Exception, KeyboardInterrupt, SystemExit) as error:  # whatever a user's function raises is reported
            self._send(failure(order.task, error))
        self._notes.at.begin(-1)

    def _deliver(self, order: DoTask, outcome: Outcome, started: int) -> None:
        layout = measure(outcome.block)
        slot = self._slot_for(layout.nbytes)
        assert self._ring is not None
        layout.write(self._segments[slot.generation].array[slot.offset : slot.offset + layout.nbytes])
        self._ring.publish(slot, (0,))
        spent = (time.perf_counter_ns() - started) // 1000
        reports = [text[:500] for text in outcome.reports[:MAX_REPORTS]]
        done = (slot.generation, slot.index, layout.nbytes, outcome.skipped, reports, outcome.counters, spent)
        self._send(TaskDone(order.task, *done))

    def _slot_for(self, nbytes: int) -> Slot:
        """Room for a block. One too large for the ring, or for this worker's share, gets a segment of its own."""
        if self._ring is None:
            self._grow(nbytes if nbytes <= LARGE_RING else 0)
        assert self._ring is not None
        if self._ring.outgrows(nbytes) or (not self._ring.fits(nbytes) and self._too_large(nbytes)):
            slot = self._ring.acquire_alone(nbytes)
            self._make(slot.generation, nbytes, 1, alone=True)
            return slot
        if not self._ring.fits(nbytes):
            self._grow(nbytes)
        room = self._ring.acquire(nbytes)
        assert room is not None, "the engine gave more tasks than the ring has slots"
        return room

    def _too_large(self, nbytes: int) -> bool:
        """Whether a ring for such blocks could not grow once more with the old one still in use."""
        return self._ring_bytes is not None and 2 * _slot_bytes(nbytes) * SLOTS > self._ring_bytes

    def _grow(self, nbytes: int) -> None:
        size = _slot_bytes(nbytes)
        if self._ring is None:
            self._ring = RingWriter(size, SLOTS)
        else:
            self._ring.regrow(size, SLOTS)
            for retired in self._ring.retired():
                self._segments.pop(retired).close()
        self._make(self._ring.generation.id, size, SLOTS)

    def _make(self, generation: int, slot_bytes: int, slots: int, alone: bool = False) -> None:
        used = sum(segment.size for segment in self._segments.values())
        size = slot_bytes * slots
        if alone and self._ring_bytes is not None and used + size > self._ring_bytes:
            raise MemoryLimit(
                f"a block of {size} bytes needs a segment of its own, but only {max(0, self._ring_bytes - used)} bytes "
                f"are left for this worker in the memory budget. Raise {SETTING}, or lower --workers."
            )
        segment = Segment.create(f"zephon-worker-{os.getpid()}", size, limit=HEADROOM)
        self._segments[generation] = segment
        self._send(NewSegment(-1, generation, slot_bytes, slots, alone), (segment.fileno(),))

    def _send(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        self._channel.send(encode(message, limit=MAX_DESCRIPTOR), fds)


def _slot_bytes(nbytes: int) -> int:
    size = max(SMALLEST_SLOT, 1 << (nbytes * 5 // 4 - 1).bit_length() if 0 < nbytes < 1 << 20 else nbytes * 5 // 4)
    return -(-size // 4096) * 4096


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
