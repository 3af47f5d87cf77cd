"""Tasks of later stages in the hands of workers: what is said of them, and what becomes of those that kill."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.unit.small_recipes import digest
from zephon import Dataset, InMemoryShard, Pipeline, SampleRecord, StaticMixtureWorkSource
from zephon.plan import Plan
from zephon.windows import Front, StageTask
from zephon_daemon.lane_waits import lane_waits
from zephon_daemon.named_work import given_up
from zephon_daemon.run import Run
from zephon_daemon.scheduler import CREDITS, DEATHS, Scheduler, Work
from zephon_daemon.stalls import Oversight
from zephon_daemon.watchdog import Patience
from zephon_daemon.worker_notes import OwnNotes, WorkerNotes


def doubled(records: list[SampleRecord]) -> list[SampleRecord]:
    return [record for record in records for _ in range(2)]


class Node:
    """A run whose first tasks are done, so that the worker named has one of the later stage."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.plan: Plan = pipeline.batch(2).options(canonical_replicas=1).plan()
        self.run, self.scheduler = Run(self.plan, dp_degree=1, task_samples=8), Scheduler()
        self.front = Front(self.plan)
        self.run.join(0, 0, 1)
        self.run.begin(0, 0)
        self.scheduler.add(1, lambda _: True)
        self.hand: dict[int, Work] = {}
        while not any(isinstance(work.task, StageTask) for work in self.hand.values()):
            self.do_one()
        self.finish_the_front()

    def pick(self, _: Any, worker: int, workers: int) -> tuple[int, int, Any] | None:
        chosen = self.run.choose(worker, workers)
        task = None if chosen is None else self.run.next_task(chosen[1])
        return None if task is None else (0, *task)

    def do_one(self) -> None:
        self.hand |= {task_id: work for _, task_id, work in self.scheduler.assign(self.pick)}
        if not any(isinstance(work.task, StageTask) for work in self.hand.values()):
            self.complete(next(iter(self.hand)))

    def complete(self, task_id: int) -> None:
        done = self.scheduler.done(1, task_id)
        assert done is self.hand.pop(task_id)
        assert done is not None
        self.run.outcome(done.task.lane, done.task.epoch, done.number, self.front.run(done.task))

    def finish_the_front(self) -> None:
        for task_id in [number for number, work in self.hand.items() if not isinstance(work.task, StageTask)]:
            self.complete(task_id)

    @property
    def task_id(self) -> int:
        return next(iter(self.hand))


def source() -> StaticMixtureWorkSource:
    data = Dataset.from_dict("d", {"s": InMemoryShard([{"id": i} for i in range(300)])})
    return StaticMixtureWorkSource([data], None, seed=2, chunk_size=100)


def test_a_lane_that_waits_for_a_later_stage_names_its_operator_and_the_record() -> None:
    pipeline = Pipeline(source()).map_transform(dict).shuffle(4).decode_text(parallelism=2)
    node = Node(pipeline.add_op("late", process_one=lambda record: [record], parallelism=2))
    clock = [0.0]
    oversight = Oversight(Patience(10.0, 100.0), node.scheduler, lambda _: node.plan, lambda: clock[0])
    own = OwnNotes()
    oversight.met(1, WorkerNotes([os.dup(fd) for fd in own.fds], os.getpid()), os.getpid())
    task = node.hand[node.task_id].task
    assert isinstance(task, StageTask)
    own.at.begin(node.task_id)
    own.at.enter(3)
    own.at.turn_to(int(task.block.samples[1, 3]))
    (wait,) = lane_waits(0, node.run, node.scheduler, oversight).values()
    assert wait.cause == "operator \"add_op 'late'\""
    assert wait.reason == "operator \"add_op 'late'\" on worker 1"
    row = int(task.block.samples[1, 2])
    assert str(oversight.place(1)) == f"operator \"add_op 'late'\", at dataset 'd', shard s, row {row}"
    oversight.gone(1, "")


@pytest.mark.parametrize("kills", [4, 99])
def test_a_task_of_a_later_stage_that_kills_is_cut_down_to_its_record_and_the_rest_is_put_together_again(
    kills: int,
) -> None:
    node = Node(Pipeline(source()).shuffle(4).add_op("late", process_one=lambda r: doubled([r]), parallelism=2))
    scheduler, run, lane = node.scheduler, node.run, node.run.lanes[0]
    first = node.hand[node.task_id].task
    assert isinstance(first, StageTask)
    deadly, deaths, worker = int(first.block.samples[2, 2]), 0, 1
    hopeless: list[Work] = []
    while not hopeless and lane.producer.stream.produced < 2 * first.high:
        scheduler.assign(node.pick)
        oldest = scheduler.workers[worker].oldest
        assert oldest is not None
        task = oldest[1].task
        if isinstance(task, StageTask) and deadly in task.block.samples[:, 2] and deaths < kills:
            deaths += 1
            hopeless = scheduler.lost(worker, "exit code 3")
            worker += 1
            scheduler.add(worker, lambda _: True)
            continue
        done = scheduler.done(worker, oldest[0])
        assert done is not None
        joined = scheduler.joined(done, node.front.run(done.task))
        if joined is not None:
            assert digest(joined[1].block) == digest(node.front.run(joined[0].task).block)
            run.outcome(joined[0].task.lane, 0, joined[0].number, joined[1])
    if not hopeless:
        assert deaths == kills
        return
    (left,) = hopeless
    assert left.task.high - left.task.low == 1
    assert deaths >= DEATHS
    said = given_up(node.plan, left, "operator \"add_op 'late'\"")
    assert f"{DEATHS} workers died on the same record (exit code 3): dataset 'd', shard s, row {deadly} " in said
    assert "in front of \"add_op 'late'\"" in said


def test_of_a_later_stage_no_more_is_in_work_than_it_may_and_it_is_served_before_the_front() -> None:
    node = Node(Pipeline(source()).shuffle(4).map_transform(dict, parallelism=2))
    for worker in (2, 3, 4):
        node.scheduler.add(worker, lambda _: True)
    stage = []
    for _ in range(4):
        given_out = node.scheduler.assign(node.pick)
        stage += [work for _, _, work in given_out if isinstance(work.task, StageTask)]
        node.run.check_invariants()
    assert len(stage) + 1 <= 2
    assert all(len(worker.tasks) <= CREDITS for worker in node.scheduler.workers.values())
