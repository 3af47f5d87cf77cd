"""Which worker does which task. No I/O.

A worker has a few credits, one for each slot of its ring, so that it always has space for the outcome of what it was
given. Tasks go out to the lane with the least runway first. When a worker is lost its tasks are handed out again,
first of all; a task that has cost three workers is given up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from zephon.windows import Task

CREDITS = 3
DEATHS = 3


@dataclass
class Work:
    """A task in the hands of a worker, or waiting to be handed out again. `number` is its place in its lane."""

    run: int
    number: int
    task: Task
    deaths: list[str] = field(default_factory=list)


@dataclass
class Worker:
    """A worker; `serves` limits it to some runs (a pool inside the engine belongs to one run)."""

    credits: int
    serves: Callable[[int], bool]
    tasks: dict[int, Work] = field(default_factory=dict)
    done: int = 0
    busy_microseconds: int = 0


Pick = Callable[[Callable[[int], bool], int, int], tuple[int, int, Task] | None]
"""`pick(serves, worker, workers)`: the next task (run, number, task) for one of so many workers, numbered from 0, among
the runs that it serves; or None."""


class Scheduler:
    """Tasks in flight and the workers that have them."""

    def __init__(self) -> None:
        self.workers: dict[Hashable, Worker] = {}
        self._again: deque[Work] = deque()
        self._numbers = 0

    def add(self, worker: Hashable, serves: Callable[[int], bool], credit: int = CREDITS) -> None:
        """A worker is ready for tasks."""
        self.workers[worker] = Worker(credit, serves)

    def assign(self, pick: Pick) -> list[tuple[Hashable, int, Work]]:
        """Hand out tasks while workers have credit: (worker, task id, work)."""
        out: list[tuple[Hashable, int, Work]] = []
        places = {name: place for place, name in enumerate(self.workers)}
        open_to = [(name, worker) for name, worker in self.workers.items() if len(worker.tasks) < worker.credits]
        while open_to:
            open_to.sort(key=lambda item: len(item[1].tasks))
            name, worker = open_to[0]
            work = self._next(worker, places[name], pick)
            if work is None:
                open_to.pop(0)
                continue
            self._numbers += 1
            worker.tasks[self._numbers] = work
            out.append((name, self._numbers, work))
            if len(worker.tasks) >= worker.credits:
                open_to.pop(0)
        return out

    def done(self, worker: Hashable, task_id: int, microseconds: int = 0) -> Work | None:
        """A worker has finished a task; None if it was not its own."""
        at = self.workers.get(worker)
        work = at.tasks.pop(task_id, None) if at else None
        if at and work:
            at.done += 1
            at.busy_microseconds += microseconds
        return work

    def lost(self, worker: Hashable, how: str) -> list[Work]:
        """A worker is gone; its tasks will be handed out again. Returns those that have cost too many workers."""
        gone = self.workers.pop(worker, None)
        hopeless = []
        first = True
        for work in gone.tasks.values() if gone else ():
            if first:  # it was working on the oldest one; the others only waited
                work.deaths.append(how)
                first = False
            if len(work.deaths) >= DEATHS:
                hopeless.append(work)
            else:
                self._again.append(work)
        return hopeless

    def forget(self, run: int) -> None:
        """A run has ended: what waits to be done again for it is dropped."""
        self._again = deque(work for work in self._again if work.run != run)

    def _next(self, worker: Worker, place: int, pick: Pick) -> Work | None:
        for _ in range(len(self._again)):
            work = self._again.popleft()
            if worker.serves(work.run):
                return work
            self._again.append(work)
        chosen = pick(worker.serves, place, len(self.workers))
        return Work(*chosen) if chosen else None
