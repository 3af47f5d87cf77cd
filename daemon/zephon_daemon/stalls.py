"""The workers of an engine under its watchdog's eye: where each one is, and what is said of one that stalls or dies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from zephon.plan import Plan
from zephon.transport.rings import PAGE
from zephon.whereabouts import IDLE, LOADING, SETTING_UP
from zephon_daemon.named_work import operators_of, record_of, samples_of
from zephon_daemon.scheduler import Scheduler, Work
from zephon_daemon.stacks import calls
from zephon_daemon.watchdog import Act, Patience, Watchdog
from zephon_daemon.worker_notes import WorkerNotes, in_operator

TRACE_BYTES = 4000

_log = logging.getLogger("zephon.engine")


@dataclass
class Place:
    """Where a worker is. `cause` is the operator, or reading; `samples` what is in its hands."""

    work: Work
    cause: str
    record: str
    samples: str
    whole: bool
    """Whether it is at nothing that belongs to one record."""

    def __str__(self) -> str:
        return f"{self.cause}, at {self.record or self.samples}"


@dataclass
class Stall:
    """A worker that has not moved."""

    worker: Hashable
    pid: int
    place: Place
    since: float
    output: float
    """When it last finished a task, or came."""
    standing: str
    trace: str

    def text(self, now: float) -> str:
        """The report in one line."""
        who = f"worker {self.worker} (process {self.pid})" if self.pid else "a thread of the engine"
        of = f" (its task: {self.place.samples})" if self.place.record else ""
        stands = f" It stands in {self.standing}." if self.standing else ""
        return (
            f"lane {self.place.work.task.lane} is stalled: {who} has been in {self.place} for "
            f"{now - self.since:.0f} s{of}; its last output was {now - self.output:.0f} s ago.{stands}"
        )

    def report(self, now: float) -> dict[str, Any]:
        """The same as plain data."""
        task = self.place.work.task
        return {
            "worker": self.worker if self.pid else -1,
            "pid": self.pid,
            "lane": task.lane,
            "epoch": task.epoch,
            "operator": self.place.cause,
            "record": self.place.record,
            "samples": self.place.samples,
            "seconds": now - self.since,
            "seconds_without_output": now - self.output,
            "stack": self.trace[:TRACE_BYTES],
            "text": self.text(now),
        }


class Oversight:
    """Watches who has tasks of `scheduler`; `plan_of(run)` is the plan of a run that there is, `clock` the time.

    `tell(worker, why)` is called before a worker is ended.
    """

    def __init__(
        self,
        patience: Patience,
        scheduler: Scheduler,
        plan_of: Callable[[int], Plan | None],
        clock: Callable[[], float],
        tell: Callable[[Hashable, str], None] = lambda worker, why: None,
    ) -> None:
        self._tell = tell
        self._dog, self._scheduler, self._plan_of, self._clock = Watchdog(patience), scheduler, plan_of, clock
        self._notes: dict[Hashable, tuple[WorkerNotes, int]] = {}
        self._outputs: dict[Hashable, tuple[int, float]] = {}
        self._stalls: dict[Hashable, Stall] = {}
        self._ended: dict[Hashable, str] = {}

    def met(self, worker: Hashable, notes: WorkerNotes, pid: int) -> None:
        """A worker is ready."""
        if worker in self._notes:
            self._notes[worker][0].close()
        self._notes[worker] = notes, pid

    @property
    def nbytes(self) -> int:
        """Bytes of the workers' notes."""
        return PAGE * len(self._notes)

    @property
    def moves(self) -> int:
        """How often a worker was found at another record or operator than before."""
        return self._dog.moves

    def gone(self, worker: Hashable, how: str) -> tuple[str, bool]:
        """A worker has ended, and its tasks are still in its name: how and where, for people; whether its task may be
        cut to find out which record it died of.
        """
        place, stalled = self.place(worker), self._ended.pop(worker, "")
        found = self._notes.pop(worker, None)
        if found is not None:
            found[0].close()
        self._stalls.pop(worker, None)
        how = stalled or how
        return (how, True) if place is None else (f"{how}, in {place}", not stalled and not place.whole)

    def place(self, worker: Hashable) -> Place | None:
        """Where a worker is; None if it has nothing in hand."""
        at = self._scheduler.workers.get(worker)
        oldest = at.oldest if at is not None else None
        plan = self._plan_of(oldest[1].run) if oldest is not None else None
        if oldest is None or plan is None:
            return None
        task_id, work = oldest
        task, operator, sample = self._notes[worker][0].at.now if worker in self._notes else (-1, IDLE, -1)
        if task != task_id:  # it has not begun
            operator, sample = operator if operator in (LOADING, SETTING_UP) else IDLE, -1
        cause = in_operator(operators_of(plan), operator)
        record = record_of(plan, work.task, sample)
        return Place(work, cause, record, samples_of(plan, work.task), operator in (LOADING, SETTING_UP))

    def cause(self, worker: Hashable) -> str:
        """The operator that a worker is in, or reading."""
        at = self._scheduler.workers.get(worker)
        oldest = at.oldest if at is not None else None
        plan = self._plan_of(oldest[1].run) if oldest is not None else None
        if plan is None or worker not in self._notes:
            return "workers"
        return in_operator(operators_of(plan), self._notes[worker][0].at.now[1])

    def look(self) -> list[str]:
        """Look after everybody; what is to be reported now."""
        now, said = self._clock(), []
        positions: dict[Hashable, Hashable] = {}
        for worker, at in self._scheduler.workers.items():
            oldest = at.oldest
            notes = self._notes.get(worker)
            where = (notes[0].at.now, notes[0].at.moves) if notes else None
            positions[worker] = None if oldest is None else (oldest[0], where)
            if self._outputs.get(worker, (-1, 0.0))[0] != at.done:
                self._outputs[worker] = at.done, now
        for worker, act, seconds in self._dog.look(positions, now):
            said += self._act(worker, act, seconds, now)
        for stalled in self._stalls.keys() - self._dog.stalled.keys():
            del self._stalls[stalled]
        for worker in [worker for worker in self._stalls if self.place(worker) is None]:  # its run has ended since
            self._end(worker, self._dog.stalled[worker])
            del self._stalls[worker]
        return said

    def stalls(self) -> list[dict[str, Any]]:
        """Those that are stalled now, for progress."""
        now = self._clock()
        return [stall.report(now) for stall in self._stalls.values()]

    def stall_of(self, run: int, lane: int) -> str:
        """What holds a lane up: its own stall, else another one of the run's; empty if there is none."""
        found = [stall for stall in self._stalls.values() if stall.place.work.run == run]
        found.sort(key=lambda stall: stall.place.work.task.lane != lane)
        return found[0].text(self._clock()) if found else ""

    def _act(self, worker: Hashable, act: Act, seconds: float, now: float) -> list[str]:
        notes, pid = self._notes.get(worker, (None, 0))
        if act is Act.GOES_ON:
            self._stalls.pop(worker, None)
            return [f"worker {worker} goes on after {seconds:.0f} s"]
        if act is Act.ASK:
            if notes is not None:
                notes.stack.ask()
            return []
        place = self.place(worker)
        if act is Act.REPORT and place is not None:
            trace = notes.stack.read() if notes is not None else ""
            standing = notes.stack.described() if notes is not None else ""
            output = self._outputs.get(worker, (0, now))[1]
            stall = self._stalls[worker] = Stall(worker, pid, place, now - seconds, output, standing, trace)
            _log.warning("%s%s", stall.text(now), f"\n{trace}" if calls(trace) else "")
            return [stall.text(now)]
        self._end(worker, seconds)  # also if it is to be reported: where the run has ended nobody waits for its outcome
        return []

    def _end(self, worker: Hashable, seconds: float) -> None:
        notes, pid = self._notes.get(worker, (None, 0))
        if notes is None:
            return
        where = self.place(worker) or "work for a run that has ended"
        self._ended[worker] = why = f"ended by the watchdog after {seconds:.0f} s with no sign of progress"
        self._tell(worker, f"{why}, in {where}")
        _log.error("worker %s (process %d) is ended: it has been in %s for %.0f s", worker, pid, where, seconds)
        notes.stack.kill()
