"""What the engine holds for each run, each worker and each client: connections and mapped memory."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from zephon.errors import ProtocolError
from zephon.pipeline import Pipeline
from zephon.runners import Pool
from zephon.transport import protocol as p
from zephon.transport.channels import Channel
from zephon.transport.segments import Segment
from zephon_daemon.lane_waits import LaneWait, lane_waits
from zephon_daemon.report import run_report
from zephon_daemon.run import Run
from zephon_daemon.scheduler import Scheduler
from zephon_daemon.stalls import Oversight
from zephon_daemon.waits import Waits


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


@dataclass
class ClientPort:
    """A client's connection."""

    channel: Channel
    run: int
    hungry: int | None = None
    seen: int = 0


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
