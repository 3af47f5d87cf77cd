"""What each lane of a run waits for, in words and as a cause to be summed: source, operator, reorder, ring, ranks.

The state machine knows whether a lane waits for workers, for its ranks or for other lanes (`Run.waits_for`). Where it
waits for workers, the task at its head tells for what: the operator that its worker is in, or the worker's other work.
Later tasks that are done already wait for that one, to be put back in order.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from zephon_daemon.report import own_lanes
from zephon_daemon.run import Run
from zephon_daemon.scheduler import Scheduler
from zephon_daemon.stalls import Oversight


@dataclass(frozen=True)
class LaneWait:
    """`reason` is for people, `cause` the same without numbers; `moved` is another thing whenever the lane moves."""

    cause: str
    reason: str
    moved: Hashable


def lane_waits(number: int, run: Run, scheduler: Scheduler, oversight: Oversight) -> dict[int, LaneWait]:
    """The waits of this engine's lanes of run `number`."""
    hands = {
        (work.run, work.task.lane, work.number): (worker, at.oldest is not None and at.oldest[1] is work)
        for worker, at in scheduler.workers.items()
        for work in at.tasks.values()
    }
    found = {}
    for lane in own_lanes(run):
        cause = reason = run.waits_for(lane.number)
        moved = lane.epoch, lane.written, lane.producer.pushed
        if reason == "workers":
            head = lane.producer.head
            hand = None if head is None else hands.get((number, lane.number, lane.first_task + head))
            cause, reason = _of_head(*hand, scheduler, oversight) if hand else ("a free worker", "a free worker")
            if early := lane.producer.early:
                reason += f" ({early} later tasks are done and wait for their turn)"
        elif "attach" in reason or "begin" in reason or "have left" in reason:
            cause = "ranks"
        elif "another group" in reason:
            cause = "lanes of other groups"
        found[lane.number] = LaneWait(cause, reason, moved)
    return found


def _of_head(worker: Hashable, in_work: bool, scheduler: Scheduler, oversight: Oversight) -> tuple[str, str]:
    """Cause and reason of a lane whose next outcome is with a worker."""
    who = f"worker {worker}" if isinstance(worker, int) else "the engine's threads"
    cause = oversight.cause(worker)
    if in_work:
        return cause, f"{cause} on {who}"
    oldest = scheduler.workers[worker].oldest
    lane = oldest[1].task.lane if oldest is not None else -1
    return cause, f"{who}, at {cause} for lane {lane} before"
