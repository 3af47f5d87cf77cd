"""Which worker does which task: who has decoded the data before, nobody without work, no more than is wanted."""

from __future__ import annotations

from collections import Counter, deque

import pytest

from zephon import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
from zephon.frontiers import Checkpoint, Frontier
from zephon.lanes import RoundRobin
from zephon.windows import Front, Task, samples_a_task
from zephon_daemon.instructions import MakeRing, Write
from zephon_daemon.run import Run
from zephon_daemon.scheduler import CREDITS, Scheduler

MICROBATCH = 2


class Node:
    """Workers that each finish one task a round, and a rank that takes every batch at once, or none."""

    def __init__(self, lanes: int, workers: int, *, chunk: int, task: int, takes: bool, offset: int = 0) -> None:
        data = Dataset.from_dict("d", {"0": InMemoryShard([{"id": i} for i in range(100)])})
        source = StaticMixtureWorkSource([data], None, chunk_size=chunk, exhausted_policy="repeat")
        plan = Pipeline(source).batch(MICROBATCH).options(canonical_replicas=lanes).plan()
        starts = {lane: Frontier(0, offset, offset) for lane in range(lanes)}
        state = Checkpoint(plan.identity, 0, starts)
        self.run, self.front = Run(plan, dp_degree=1, task_samples=task, checkpoint=state), Front(plan)
        self.scheduler = Scheduler()
        self.workers, self.takes = workers, takes
        self.hands: list[deque[tuple[int, int, Task]]] = [deque() for _ in range(workers)]
        self.done: list[tuple[int, Task]] = []
        self.turns = RoundRobin(dict.fromkeys(range(lanes), offset), offset, MICROBATCH)
        self.delivered: list[int] = []
        self.ready: list[deque[list[int]]] = [deque() for _ in range(lanes)]
        for worker in range(workers):
            self.scheduler.add(worker, lambda _: True)
        self.run.join(0, 0, 1)
        self.follow(self.run.begin(0, 0))
        self.assign()

    def assign(self) -> None:
        def pick(_: object, worker: int, workers: int) -> tuple[int, int, Task] | None:
            chosen = self.run.choose(worker, workers)
            task = None if chosen is None else self.run.next_task(chosen[1])
            return None if task is None else (0, *task)

        for worker, task_id, work in self.scheduler.assign(pick):
            assert isinstance(worker, int)
            self.hands[worker].append((task_id, work.number, work.task))

    def follow(self, instructions: object) -> None:
        waiting = deque([instructions])
        while waiting:
            for order in waiting.popleft():  # type: ignore[attr-defined]
                if isinstance(order, Write):
                    self.ready[order.ready.lane].append([order.ready.lane, order.slot.generation, order.slot.index])
                assert not isinstance(order, MakeRing) or order.clients == (0,)
            while self.takes and self.ready[lane := self.turns.turn()[0]]:
                self.turns.deliver(MICROBATCH)
                self.delivered.append(lane)
                waiting.append(self.run.returned(0, [self.ready[lane].popleft()], 0, self.turns.rounds))

    def round(self) -> int:
        """Each worker finishes its oldest task; how many had one."""
        busy = [worker for worker in range(self.workers) if self.hands[worker]]
        for worker in busy:
            task_id, number, task = self.hands[worker].popleft()
            self.scheduler.done(worker, task_id)
            self.done.append((worker, task))
            self.follow(self.run.outcome(task.lane, 0, number, self.front.run(task)))
            self.assign()
        return len(busy)


def test_the_same_piece_of_all_lanes_is_read_by_one_worker_where_chunks_are_small() -> None:
    node = Node(8, 2, chunk=4, task=8, takes=True)
    for _ in range(200):
        assert node.round() == 2
    readers = Counter((task.low // 8, worker) for worker, task in node.done)
    mostly = sum(max(readers[piece, 0], readers[piece, 1]) for piece in {piece for piece, _ in readers})
    assert mostly > 0.9 * len(node.done)


def test_each_worker_has_neighbouring_chunks_where_they_are_large() -> None:
    node = Node(8, 4, chunk=64, task=8, takes=True)
    for _ in range(100):
        assert node.round() == 4
    pairs: Counter[tuple[int, int]] = Counter()  # of chunks that lie side by side in the data, by worker
    for worker, task in node.done:
        chunk = task.low // 64
        pairs[(chunk * 8 + node.run.plan.curriculum(0).place(task.lane, chunk)) // 2, worker] += 1
    of_one = sum(max(pairs[pair, worker] for worker in range(4)) for pair in {pair for pair, _ in pairs})
    assert of_one > 0.8 * len(node.done)


def test_the_last_chunk_of_a_round_and_the_first_of_the_next_are_read_by_one_worker() -> None:
    node = Node(8, 4, chunk=64, task=8, takes=True)
    for _ in range(400):
        assert node.round() == 4
    by: Counter[tuple[int, int]] = Counter()
    for worker, task in node.done:
        chunk = task.low // 64
        at = chunk * 8 + node.run.plan.curriculum(0).place(task.lane, chunk)
        if at % 8 in (0, 7):
            by[(at + 1) // 8, worker] += 1
    of_one = sum(max(by[end, worker] for worker in range(4)) for end in {end for end, _ in by})
    assert of_one > 0.8 * sum(by.values())


@pytest.mark.parametrize(("lanes", "workers"), [(1, 4), (2, 3), (3, 8)])
def test_a_few_lanes_keep_all_workers_busy(lanes: int, workers: int) -> None:
    node = Node(lanes, workers, chunk=4, task=8, takes=True)
    assert all(len(hand) == CREDITS for hand in node.hands)
    for _ in range(50):
        assert node.round() == workers


@pytest.mark.parametrize("lanes", [1, 8])
def test_production_stops_when_the_trainer_takes_nothing(lanes: int) -> None:
    node = Node(lanes, 2, chunk=4, task=8, takes=False)
    rounds = 0
    while node.round():
        rounds += 1
        assert rounds < 100
    for lane in node.run.lanes.values():
        assert lane.ring is not None
        assert not lane.ring.free
        assert len(lane.producer.stream) <= 2 * MICROBATCH + 8 * max(2, 2 * CREDITS)


@pytest.mark.parametrize("chunk", [1, 3, 64, 320, 400, 512, 513, 700, 1031, 2048, 100_000])
def test_a_task_is_whole_chunks_or_a_whole_part_of_one(chunk: int) -> None:
    task = samples_a_task(chunk)
    assert 256 < task <= 1024
    if chunk <= 512:
        assert task % chunk == 0
    else:
        parts = -(-chunk // task)
        assert parts * task - chunk < parts


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_after_a_resume_lanes_are_replayed_in_the_order_of_their_turns_and_no_worker_waits(workers: int) -> None:
    lanes, task, offset = 8, 8, 60  # each lane works through eight tasks to get at its first batch
    node = Node(lanes, workers, chunk=64, task=task, takes=True, offset=offset)
    first: dict[int, int] = {}
    for number in range(1, 10 * lanes):
        assert node.round() == workers
        for lane in node.delivered:
            first.setdefault(lane, number)
        if len(first) == lanes:
            break
    assert list(first) == list(range(lanes))
    tasks = -(-(offset + MICROBATCH) // task)
    for lane, number in first.items():
        ahead = CREDITS + 1  # what a worker had in hand before, of this lane and of the one before
        assert number <= -(-tasks * (lane + 1) // workers) + ahead, (lane, number)
