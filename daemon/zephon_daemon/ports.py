"""What the engine holds for each run, each worker and each client: connections and mapped memory."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from zephon.budget import Budget
from zephon.errors import ProtocolError, ZephonError
from zephon.pipeline import Pipeline
from zephon.runners import Pool
from zephon.transport import protocol as p
from zephon.transport.channels import Channel
from zephon.transport.messages import encode
from zephon.transport.segments import PAGE, Segment
from zephon.windows import Task, pointers_of
from zephon_daemon.lane_waits import LaneWait, lane_waits
from zephon_daemon.report import run_report
from zephon_daemon.run import Run
from zephon_daemon.scheduler import Scheduler
from zephon_daemon.stages import Stage
from zephon_daemon.stalls import Oversight
from zephon_daemon.waits import Waits

STALL_TEXT = 2000
_log = logging.getLogger("zephon.engine")


@dataclass
class LiveRun:
    """A run with what the shell holds for it."""

    number: int
    name: str
    pipeline: Pipeline
    run: Run
    segments: dict[tuple[int, int], Segment] = field(default_factory=dict)
    pool: Pool | None = None
    stage: int | None = None
    failed: p.Failed | None = None
    reported: int = 0
    through: str = ""
    """The operators that run in the engine, for the black box."""
    careful: bool = False
    """Whether the black box is to name the samples in work, too."""

    waits: Waits = field(default_factory=Waits)

    def doing(self, task: Task) -> str:
        """What the engine is at when it takes in a task's outcome, for the black box."""
        if not self.careful:
            return self.through
        dataset, shard, row = pointers_of(self.run.plan, task)[0].tolist()
        name = self.run.plan.dataset_names[dataset]
        return f"{self.through}, beginning with dataset {name!r}, shard {shard}, row {row}"

    def attached(self, warnings: list[str], budget: Budget) -> p.Attached:
        """What clients must know of the run; which lanes each owns is the daemon's to say."""
        plan, run = self.run.plan, self.run
        starts = [run.starts[lane] for lane in range(plan.lanes)]
        return p.Attached(
            identity=json.dumps(plan.identity),
            lanes=plan.lanes,
            owned=[],
            microbatch_size=plan.microbatch_size,
            drop_last=plan.settings.drop_last,
            even_ends=plan.settings.even_ends,
            packed=plan.packed,
            dataset_names=list(plan.dataset_names),
            epoch=run.first_epoch,
            starts=[[f.chunk, f.offset, f.records, f.skipped] for f in starts],
            sources={lane: f.source for lane, f in enumerate(starts) if f.source},
            memory=budget.node,
            warnings=warnings,
        )

    def alive(self, lane: int, working: bool, scheduler: Scheduler, oversight: Oversight) -> p.Alive:
        """A sign of life for a client that waits for a lane."""
        wait = lane_waits(self.number, self.run, scheduler, oversight).get(lane)
        reason = wait.reason if wait is not None else self.run.waits_for(lane)
        return p.Alive(working, f"lane {lane} waits for {reason}", oversight.stall_of(self.number, lane)[:STALL_TEXT])

    def close(self) -> None:
        """The run is over."""
        if self.pool is not None:
            self.pool.close()
        for operator in self.run.plan.back:
            try:
                operator.teardown()
            except ZephonError as error:  # there is nobody left to tell but the log
                _log.warning("%s", error)
        for segment in self.segments.values():
            segment.close()

    def look(self, scheduler: Scheduler, oversight: Oversight, now: float) -> dict[int, LaneWait]:
        """Put the lanes' waits to account."""
        found = lane_waits(self.number, self.run, scheduler, oversight)
        self.waits.look({lane: (wait.cause, wait.moved) for lane, wait in found.items()}, now)
        return found

    def report(self, scheduler: Scheduler, oversight: Oversight, now: float) -> dict[str, Any]:
        """The run for `zephon progress`."""
        rings_bytes = sum(segment.size for segment in self.segments.values())
        report = run_report(self.name, self.run, rings_bytes, self.failed.text if self.failed is not None else None)
        found = self.look(scheduler, oversight, now)
        for lane in report["lanes"]:
            wait = found[lane["lane"]]
            lane["waits_for"], lane["cause"] = wait.reason, wait.cause
            lane["waits_seconds"] = self.waits.seconds(lane["lane"], now)
        report["waited"] = self.waits.spent
        return report


@dataclass(frozen=True)
class WorkerRing:
    """One segment of a worker's: `slots` slots of `slot_bytes` bytes."""

    segment: Segment
    slot_bytes: int
    slots: int
    alone: bool


@dataclass
class WorkerPort:
    """A worker's connection, its memory, and the stages it has been given."""

    channel: Channel
    pid: int
    segments: dict[int, WorkerRing] = field(default_factory=dict)
    stages: set[int] = field(default_factory=set)

    def give_stage(self, stage: Stage) -> None:
        """Send it a stage that it does not have yet."""
        if stage.number not in self.stages:
            self.stages.add(stage.number)
            self.channel.send(encode(p.LoadStage(stage.number, stage.nbytes)), (stage.memory.fileno(),))

    def drop_stages(self, numbers: Iterable[int]) -> None:
        """Have it forget those of the stages that it has."""
        for number in self.stages.intersection(numbers):
            self.stages.discard(number)
            self.channel.send(encode(p.DropStage(number)))

    def take_segment(self, message: p.NewSegment, fds: list[int]) -> None:
        """Another ring, in place of the one before, or the memory of a block that travels alone."""
        if not fds:
            raise ProtocolError("a segment came without its descriptor")
        segment = Segment.attach(fds.pop(), writable=False, name=f"worker-{self.pid}")
        if message.slots < 1 or message.slot_bytes < 1 or message.slots * message.slot_bytes > segment.size:
            raise ProtocolError(f"{message.slots} slots of {message.slot_bytes} bytes do not fit {segment.size}")
        if not message.alone:
            for generation, old in list(self.segments.items()):
                if not old.alone:
                    self.segments.pop(generation).segment.close()
        self.segments[message.generation] = WorkerRing(segment, message.slot_bytes, message.slots, message.alone)


@dataclass
class ClientPort:
    """A client's connection."""

    channel: Channel
    run: int
    hungry: int | None = None
    seen: int = 0


def workers_report(workers: Mapping[int, WorkerPort], scheduler: Scheduler) -> list[dict[str, Any]]:
    """The workers for `zephon progress`."""
    return [
        {"worker": number, "pid": port.pid, "tasks": at.done, "busy_seconds": at.busy_microseconds / 1e6}
        for number, port in workers.items()
        if (at := scheduler.workers.get(number)) is not None
    ]


def memory_report(parts: Mapping[str, int], workers: Iterable[WorkerPort], budget: Budget) -> dict[str, int]:
    """Bytes of all segments that there are, and of the budget."""
    rings = sum(ring.segment.size for port in workers for ring in port.segments.values())
    all_parts = {**parts, "worker_rings": rings, "black_box": PAGE}
    return {"budget": budget.total, **all_parts, "segments": sum(all_parts.values())}


def worker_slot(port: WorkerPort, done: p.TaskDone) -> npt.NDArray[np.uint8]:
    """The bytes of a block in a worker's memory."""
    ring = port.segments.get(done.generation)
    if ring is None or not 0 <= done.index < ring.slots or not 0 <= done.nbytes <= ring.slot_bytes:
        raise ProtocolError(
            f"a block of {done.nbytes} bytes in slot {done.index} of generation {done.generation}, which is not there"
        )
    offset = done.index * ring.slot_bytes
    return ring.segment.array[offset : offset + done.nbytes]


def read_memory(fd: int) -> bytes:
    """The text behind a memory descriptor, which is closed."""
    try:
        return os.pread(fd, os.fstat(fd).st_size, 0).rstrip(b"\0")
    finally:
        os.close(fd)
