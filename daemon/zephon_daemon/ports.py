"""What the engine holds for each run, each worker and each client: connections and mapped memory."""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zephon.budget import Budget
from zephon.errors import ZephonError
from zephon.pipeline import Pipeline
from zephon.runners import Pool
from zephon.skips import FirstReports
from zephon.transport import protocol as p
from zephon.transport import worker_protocol as w
from zephon.transport.channels import Channel
from zephon.transport.messages import encode
from zephon.transport.segments import PAGE, Segment
from zephon.windows import AnyTask, pointers_of
from zephon_daemon.block_ring import OtherRing
from zephon_daemon.inbox import Inbox
from zephon_daemon.lane_waits import LaneWait, lane_waits
from zephon_daemon.report import run_report
from zephon_daemon.run import Run
from zephon_daemon.scheduler import Scheduler
from zephon_daemon.stages import Stage
from zephon_daemon.stalls import Oversight
from zephon_daemon.waits import Waits

STALL_TEXT = 2000
GO_WITHOUT_SECONDS = 1.0
"""How long ranks that came back to a run wait for the others, whom the daemon's or the engine's start kept as long."""
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
    first: FirstReports = field(default_factory=lambda: FirstReports(_log.warning))
    """Reports for the log."""
    through: str = ""
    """The operators that run in the engine, for the black box."""
    careful: bool = False
    """Whether the black box is to name the samples in work, too."""

    waits: Waits = field(default_factory=Waits)
    here: tuple[frozenset[int], tuple[int, ...]] = (frozenset(), ())
    here_since: float = 0.0
    """The run's readers and the groups that are lost, and since when they are these."""

    def doing(self, task: AnyTask) -> str:
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
            stands={lane: f.stands for lane, f in enumerate(starts) if f.stands is not None},
            warnings=warnings,
        )

    def say(self, reports: Sequence[str], errors: deque[str]) -> None:
        """Reports into `errors`, and the first ones into the log."""
        errors.extend(reports)
        self.first.say(reports)

    def alive(self, lane: int, working: bool, scheduler: Scheduler, oversight: Oversight) -> p.Alive:
        """A sign of life for a client that waits for a lane."""
        wait = lane_waits(self.number, self.run, scheduler, oversight).get(lane)
        reason = wait.reason if wait is not None else self.run.waits_for(lane)
        return p.Alive(working, f"lane {lane} waits for {reason}", oversight.stall_of(self.number, lane)[:STALL_TEXT])

    def close(self) -> None:
        """The run is over."""
        if self.pool is not None:
            self.pool.close()
        for operator in self.run.plan.lane_by_lane:
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

    def waits_in_vain(self, now: float) -> bool:
        """Whether ranks that came back have waited so long for others that these may be waiting for them."""
        here = frozenset(self.run.readers), tuple(self.run.others.lost)
        if here != self.here:
            self.here, self.here_since = here, now
        return now - self.here_since >= GO_WITHOUT_SECONDS and self.run.waits_for_ranks

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


@dataclass
class WorkerPort:
    """A worker's connection, its memory, and the stages it has been given."""

    channel: Channel
    pid: int
    inbox: Inbox
    ring: OtherRing = field(default_factory=lambda: OtherRing("worker"))
    stages: set[int] = field(default_factory=set)

    def give_stage(self, stage: Stage) -> None:
        """Send it a stage that it does not have yet."""
        if stage.number not in self.stages:
            self.stages.add(stage.number)
            self.channel.send(encode(w.LoadStage(stage.number, stage.nbytes)), (stage.memory.fileno(),))

    def drop_stages(self, numbers: Iterable[int]) -> None:
        """Have it forget those of the stages that it has."""
        for number in self.stages.intersection(numbers):
            self.stages.discard(number)
            self.channel.send(encode(w.DropStage(number)))

    def share(self, budget: Budget, later: bool) -> None:
        """Tell it what it may take. Where there are `later` stages, half of what is for blocks is for their records."""
        room = budget.worker_ring // 2 if later else budget.worker_ring
        self.inbox.limit = room
        self.channel.send(encode(w.WorkerShare(room, budget.cache)))

    def close(self) -> None:
        """It has ended."""
        self.channel.close()
        self.inbox.close()
        self.ring.close()


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
    rings = sum(port.ring.nbytes + port.inbox.nbytes for port in workers)
    all_parts = {**parts, "worker_rings": rings, "black_box": PAGE}
    return {"budget": budget.total, **all_parts, "segments": sum(all_parts.values())}


def read_memory(fd: int) -> bytes:
    """The text behind a memory descriptor, which is closed."""
    try:
        return os.pread(fd, os.fstat(fd).st_size, 0).rstrip(b"\0")
    finally:
        os.close(fd)
