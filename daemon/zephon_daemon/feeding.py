"""Which lane's task is next, for a worker that has room for one.

Tasks of later stages come before those of the front, so that what is on its way arrives before more sets out, and no
more of a stage are in work at once than its `parallelism` says. Of the front, the lane with the least runway is served
first: with the fewest records that are made, or are on their way, and not yet with its ranks. After a resume, while
lanes still work through what was delivered before, that is nothing for any of them: then they are served in the order
in which their first batches are due, each until enough is on its way for that, whatever a worker has decoded. Not so
where a round is held until all lanes are known to reach it (`zephon_daemon.gates`): there no lane helps alone.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from zephon.frontiers import Frontier, furthest
from zephon.plan import Plan
from zephon_daemon.lane import Lane
from zephon_daemon.scheduler import CREDITS

SIDE_BY_SIDE = 2
"""Tasks of one lane in work at once while its ring runs empty."""


class Feeding:
    """The choice for the lanes of one run. `lanes` is the run's own mapping, `starts` where they begin."""

    def __init__(
        self,
        plan: Plan,
        lanes: Mapping[int, Lane],
        starts: Mapping[int, Frontier],
        first_epoch: int,
        task_samples: int,
    ) -> None:
        self._plan, self._lanes, self._most = plan, lanes, furthest(starts.values())
        self._first_epoch, self._task_samples = first_epoch, task_samples
        self._later = plan.later
        self._held_rounds = not plan.counts_are_arithmetic and plan.ends(first_epoch) is not False
        self._records_made = self._tasks_pushed = 0

    def made(self, records: int, of_front: bool) -> None:
        """A task came back, and the lane has so many records more."""
        self._records_made += records
        self._tasks_pushed += of_front

    @property
    def closed(self) -> Container[int]:
        """The later stages of which enough tasks are in work."""
        if not self._later:
            return ()
        lanes = self._lanes.values()
        return {
            number
            for number, stage in enumerate(self._later, 1)
            if sum(lane.producer.in_work(number) for lane in lanes) >= stage.parallelism
        }

    def choose(self, worker: int, workers: int) -> tuple[float, int] | None:
        """The lane whose next task suits worker number `worker` of `workers` best, with the lane's runway.

        Among lanes that differ by no more than two tasks of the front, one is preferred of which the worker has, or
        will have, the data decoded already.
        """
        if self._later and (ready := min(self._ready(), default=None)) is not None:
            return ready
        found = list(self._candidates(workers))
        if not found:
            return None
        if (owing := min(self._owing(workers, {lane for _, lane in found}), default=None)) is not None:
            return 0.0, owing[-1]
        enough = min(found)[0] + 2 * self._records_a_task + 2e-3
        near = (each for each in found if each[0] <= enough)
        return min(near, key=lambda each: (self._home(each[1], workers) != worker, each))

    def check_invariants(self) -> None:
        """No later stage has more tasks in work than it may, and no lane waits for nothing."""
        for number, stage in enumerate(self._later, 1):
            assert sum(lane.producer.in_work(number) for lane in self._lanes.values()) <= stage.parallelism
        for lane in self._lanes.values():
            assert lane.producer.ended or lane.producer.outstanding or lane.producer.can_go_on

    def _ready(self) -> Iterator[tuple[float, int]]:
        """Lanes that have a task of a later stage, each with its runway in records."""
        closed = self.closed
        for lane in self._lanes.values():
            if lane.producer.later_ready(closed):
                yield len(lane.producer.stream) + self._in_ring(lane), lane.number

    def _candidates(self, workers: int) -> Iterator[tuple[float, int]]:
        """Lanes that could use another task of the front, each with its runway in records."""
        per_task = self._records_a_task
        at_once = self._at_once(workers)
        dry = any(lane.runs_dry for lane in self._lanes.values())
        for lane in self._lanes.values():
            producer = lane.producer
            behind = max(0, self._most - lane.written) if lane.epoch == self._first_epoch else 0
            enough = 2 * self._plan.microbatch_size + behind
            held, outstanding = len(producer.stream) + producer.to_come, producer.of_front
            runway = held + max(0.0, outstanding * per_task - producer.stream.to_drop)
            wanted = runway < enough or (dry and outstanding < at_once and held <= per_task)
            if wanted and not producer.full and not producer.exhausted:
                searched = 0 if producer.stream.produced else producer.upcoming  # in vain, so others first
                yield runway + self._in_ring(lane) + (outstanding + searched) * 1e-3, lane.number

    def _owing(self, workers: int, candidates: Container[int]) -> Iterator[tuple[int, int, int, int]]:
        """While lanes work through a window again: those whose next batch needs more than is on its way, by its turn.

        Their epoch, where they stand, the place among the lanes of the group, and the number.
        """
        lanes = self._lanes.values()
        if self._held_rounds or not any(lane.producer.stream.to_drop for lane in lanes):
            return
        per_task, at_once = self._records_a_task, self._at_once(workers)
        places: dict[int, int] = {}
        for lane in lanes:
            places[lane.group] = place = places.get(lane.group, -1) + 1
            stream, outstanding = lane.producer.stream, lane.producer.of_front
            missing = stream.to_drop + self._plan.microbatch_size - len(stream) - lane.producer.to_come
            under_way = outstanding * per_task if per_task else missing * (outstanding >= at_once)
            if lane.number in candidates and under_way < missing and not self._in_ring(lane):
                yield lane.epoch, lane.stands, place, lane.number

    def _at_once(self, workers: int) -> int:
        """Tasks of one lane that keep all workers busy, where the other lanes have as many."""
        return max(SIDE_BY_SIDE, -(-workers * CREDITS // max(1, len(self._lanes))))

    def _in_ring(self, lane: Lane) -> int:
        """Records that wait for the lane's ranks, or are with them."""
        return lane.ring.in_flight * self._plan.microbatch_size if lane.ring is not None else 0

    @property
    def _records_a_task(self) -> float:
        return self._records_made / self._tasks_pushed if self._tasks_pushed else 0.0

    def _home(self, lane: int, workers: int) -> int:
        """The worker that should do the lane's next task.

        Lanes stand side by side in the data. Where chunks are smaller than tasks, the same piece of all lanes lies in
        the same row groups, so workers take turns piece by piece. Where they are larger each chunk has row groups of
        its own and shares those at its ends, so each worker has neighbouring ones, and that of a round's last has the
        first of the next.
        """
        producer, chunk_size = self._lanes[lane].producer, self._plan.chunk_size
        if chunk_size > self._task_samples:
            chunk, lanes = producer.upcoming // chunk_size, self._plan.lanes
            place = self._plan.curriculum(producer.epoch).place(lane, chunk)
            return (lanes - 1 - place if chunk % 2 else place) * workers // lanes
        return (2 * lane + producer.upcoming // self._task_samples % 2) % workers
