"""Which worker does which task. No I/O.

A worker has a few credits, one for each slot of its ring, so that it always has space for the outcome of what it was
given. Tasks go out to the lane with the least runway first. When a worker is lost its tasks are handed out again,
first of all.

The task that a lost worker was at work on is a *suspect*: it is cut in two, and each part is done again by a worker
that has nothing else in hand, one suspect at a time. A part that costs another worker is cut in two again, and so on
down to a single record (to a group of them where an operator works on groups). What is left in the end, when it has
cost three workers by itself, is given up; all else is put together again, and comes out as if nothing had happened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from zephon.windows import AnyTask, Outcome, end_to_end, halved

CREDITS = 3
DEATHS = 3


@dataclass
class Work:
    """A task in the hands of a worker, or waiting to be handed out again. `number` is its place in its lane."""

    run: int
    number: int
    task: AnyTask
    deaths: list[str] = field(default_factory=list)
    """How the workers ended that it, or the task that it is a part of, has cost."""
    tries: int = 0
    """How many of them since it was last cut."""
    whole: Whole | None = None

    def cut(self, grain: int) -> list[Work]:
        """It in two parts, or itself if it cannot be cut."""
        tasks = halved(self.task, grain)
        if tasks is None:
            return [self]
        if self.whole is None:
            self.whole = Whole(self)
        self.whole.parts += len(tasks) - 1
        return [Work(self.run, self.number, task, list(self.deaths), 0, self.whole) for task in tasks]


@dataclass
class Whole:
    """A task that is done in `parts`."""

    work: Work
    parts: int = 1
    done: dict[int, Outcome] = field(default_factory=dict)
    """By the parts' first samples."""


@dataclass
class Worker:
    """A worker; `serves` limits it to some runs (a pool inside the engine belongs to one run)."""

    credits: int
    serves: Callable[[int], bool]
    tasks: dict[int, Work] = field(default_factory=dict)
    done: int = 0
    busy_microseconds: int = 0

    @property
    def oldest(self) -> tuple[int, Work] | None:
        """What it is at work on: it does what it was given in order."""
        return next(iter(self.tasks.items()), None)


Pick = Callable[[Callable[[int], bool], int, int], tuple[int, int, AnyTask] | None]
"""`pick(serves, worker, workers)`: the next task (run, number, task) for one of so many workers, numbered from 0, among
the runs that it serves; or None."""


class Scheduler:
    """Tasks in flight and the workers that have them."""

    def __init__(self) -> None:
        self.workers: dict[Hashable, Worker] = {}
        self._again: deque[Work] = deque()
        self._suspects: deque[Work] = deque()
        self._numbers = 0
        self._retiring: set[Hashable] = set()

    def add(self, worker: Hashable, serves: Callable[[int], bool], credit: int = CREDITS) -> None:
        """A worker is ready for tasks."""
        self.workers[worker] = Worker(credit, serves)

    def retire(self, worker: Hashable) -> None:
        """A worker gets no further task."""
        at = self.workers.get(worker)
        if at is not None:
            at.credits, at.serves = 0, lambda run: False
            self._retiring.add(worker)

    def let_go(self) -> list[Hashable]:
        """Retired workers that have done all they had, once each."""
        if not self._retiring:
            return []
        done = [name for name in self._retiring if name not in self.workers or not self.workers[name].tasks]
        self._retiring.difference_update(done)
        return done

    def assign(self, pick: Pick) -> list[tuple[Hashable, int, Work]]:
        """Hand out tasks while workers have credit: (worker, task id, work)."""
        out: list[tuple[Hashable, int, Work]] = []
        places = {name: place for place, name in enumerate(self.workers)}
        reserved = self._reserved()
        if reserved is not None and not self.workers[reserved].tasks:
            out.append((reserved, *self._hand(self.workers[reserved], self._suspects.popleft())))
        open_to = [
            (name, worker)
            for name, worker in self.workers.items()
            if len(worker.tasks) < worker.credits and name != reserved and not any(map(_suspect, worker.tasks.values()))
        ]
        while open_to:
            open_to.sort(key=lambda item: len(item[1].tasks))
            name, worker = open_to[0]
            work = self._next(worker, places[name], pick)
            if work is None:
                open_to.pop(0)
                continue
            out.append((name, *self._hand(worker, work)))
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

    def joined(self, work: Work, outcome: Outcome) -> tuple[Work, Outcome] | None:
        """The task that was handed out at first, with all that came of it; None while parts of it are missing."""
        whole = work.whole
        if whole is None:
            return work, outcome
        whole.done[work.task.low] = outcome
        if len(whole.done) < whole.parts:
            return None
        return whole.work, end_to_end([whole.done[low] for low in sorted(whole.done)])

    def lost(
        self, worker: Hashable, how: str, *, grain: Callable[[int], int] = lambda run: 1, divides: bool = True
    ) -> list[Work]:
        """A worker is gone; its tasks will be handed out again. Returns those that have cost too many workers.

        `grain(run)` says where tasks of a run may be cut. `divides=False`: what it died of lies not in one record, or
        is known already, so the task stays whole.
        """
        gone = self.workers.pop(worker, None)
        oldest = gone.oldest if gone else None
        hopeless: list[Work] = []
        for number, work in gone.tasks.items() if gone else ():
            if oldest is None or number != oldest[0]:  # it only waited
                (self._suspects if _suspect(work) else self._again).append(work)
                continue
            work.deaths.append(how)
            work.tries += 1
            parts = work.cut(grain(work.run)) if divides else [work]
            if len(parts) == 1 and work.tries >= DEATHS:
                hopeless.append(work)
            else:
                self._suspects.extendleft(reversed(parts))
        return hopeless

    def forget(self, run: int) -> None:
        """A run has ended: what waits to be done again for it is dropped."""
        self._again = deque(work for work in self._again if work.run != run)
        self._suspects = deque(work for work in self._suspects if work.run != run)

    def _reserved(self) -> Hashable | None:
        """The worker that gets nothing more until it has nothing in hand, and then the next suspect."""
        if not self._suspects or any(_suspect(work) for at in self.workers.values() for work in at.tasks.values()):
            return None
        run = self._suspects[0].run
        fit = [(len(worker.tasks), name) for name, worker in self.workers.items() if worker.serves(run)]
        return min(fit, key=lambda item: item[0])[1] if fit else None

    def _hand(self, worker: Worker, work: Work) -> tuple[int, Work]:
        self._numbers += 1
        worker.tasks[self._numbers] = work
        return self._numbers, work

    def _next(self, worker: Worker, place: int, pick: Pick) -> Work | None:
        for _ in range(len(self._again)):
            work = self._again.popleft()
            if worker.serves(work.run):
                return work
            self._again.append(work)
        chosen = pick(worker.serves, place, len(self.workers))
        return Work(*chosen) if chosen else None


def _suspect(work: Work) -> bool:
    return bool(work.deaths)
