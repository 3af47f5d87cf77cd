"""Tasks that cost workers: they are cut down to what kills, alone; all else comes out as if nothing had happened."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.columns import Block
from zephon.pointers import packed
from zephon.windows import Outcome, Task, halved
from zephon_daemon.scheduler import CREDITS, DEATHS, Scheduler, Work

GRAINS = st.sampled_from([1, 1, 4, 8])


def rows(low: int, high: int) -> np.ndarray[Any, Any]:
    """Samples of one shard, at rows of those numbers."""
    pointers = np.zeros((high - low, 3), np.int64)
    pointers[:, 2] = np.arange(low, high)
    return pointers


def outcome_of(task: Task) -> Outcome:
    block = Block.from_rows([{"at": at} for at in range(task.low, task.high)], rows(task.low, task.high))
    return Outcome(block, task.high - task.low, [f"from {task.low}"], {"seen": task.high - task.low})


class Pool:
    """Workers that die of some samples, and now and then of nothing at all."""

    def __init__(self, seed: int, workers: int, deadly: set[int], samples: int, grain: int) -> None:
        self.random, self.deadly, self.grain = random.Random(seed), deadly, grain
        self.tasks = [Task(0, 0, low, low + samples) for low in range(0, 10 * samples, samples)]
        self.scheduler, self.workers = Scheduler(), 0
        self.at: dict[int, list[tuple[int, Work]]] = {}
        self.came: dict[int, Outcome] = {}
        self.hopeless: list[Work] = []
        self.deaths = 0
        for _ in range(workers):
            self.add()

    def add(self) -> None:
        self.workers += 1
        self.at[self.workers] = []
        self.scheduler.add(self.workers, lambda run: True)

    def pick(self, *_: Any) -> tuple[int, int, Task] | None:
        return (0, self.tasks[0].low, self.tasks.pop(0)) if self.tasks else None

    def run(self, stray: int = 0) -> None:
        while True:
            for worker, task_id, work in self.scheduler.assign(self.pick):
                assert isinstance(worker, int)
                assert not self.at[worker] or not work.deaths, "a suspect is alone"
                self.at[worker].append((task_id, work))
                assert len(self.at[worker]) <= CREDITS
            hands = list(self.at.values())
            assert sum(bool(work.deaths) for hand in hands for _, work in hand) <= 1
            assert all(len(hand) == 1 for hand in hands if any(work.deaths for _, work in hand))
            busy = [worker for worker, hand in self.at.items() if hand]
            if not busy:
                return
            worker = self.random.choice(busy)
            task_id, work = self.at[worker][0]
            killed = stray > 0 and self.random.random() < 0.2
            stray -= killed
            if killed or self.deadly.intersection(range(work.task.low, work.task.high)):
                self.deaths += 1
                del self.at[worker]
                self.hopeless += self.scheduler.lost(worker, "killed", grain=lambda _: self.grain)
                self.add()
                continue
            self.at[worker].pop(0)
            assert self.scheduler.done(worker, task_id) is work
            joined = self.scheduler.joined(work, outcome_of(work.task))
            if joined is not None:
                assert joined[0].number not in self.came
                self.came[joined[0].number] = joined[1]


@given(st.integers(0, 1000), st.integers(1, 4), st.sampled_from([1, 8, 50]), GRAINS, st.integers(0, 2))
def test_tasks_whose_workers_were_killed_come_out_as_they_would_have(
    seed: int, workers: int, samples: int, grain: int, stray: int
) -> None:
    pool = Pool(seed, workers, set(), samples, grain)
    expected = {task.low: outcome_of(task) for task in pool.tasks}
    pool.run(stray)
    assert not pool.hopeless
    assert pool.came.keys() == expected.keys()
    for number, outcome in pool.came.items():
        whole = expected[number]
        assert outcome.block.to_rows() == whole.block.to_rows()
        assert (outcome.skipped, outcome.counters) == (whole.skipped, whole.counters)


@given(st.integers(0, 1000), st.integers(1, 4), st.sampled_from([1, 8, 50, 512]), GRAINS, st.data())
def test_a_record_that_kills_is_found_alone_or_with_its_group_and_all_others_come(
    seed: int, workers: int, samples: int, grain: int, data: st.DataObject
) -> None:
    deadly = data.draw(st.integers(0, 10 * samples - 1))
    pool = Pool(seed, workers, {deadly}, samples, grain)
    total = {task.low for task in pool.tasks}
    pool.run()
    (work,) = pool.hopeless
    assert work.task.low <= deadly < work.task.high
    assert work.task.high - work.task.low <= grain
    assert work.tries == DEATHS
    assert pool.deaths <= DEATHS + samples.bit_length()
    assert len(total - pool.came.keys()) == 1


@given(st.integers(0, 1000), st.integers(1, 500), st.integers(1, 64))
def test_a_task_is_cut_at_multiples_of_the_grain_alone(low: int, count: int, grain: int) -> None:
    task = Task(0, 3, low, low + count)
    parts = halved(task, grain)
    inside = [at for at in range(low + 1, low + count) if at % grain == 0]
    assert (parts is None) == (not inside)
    if parts is not None:
        left, right = parts
        assert (left.low, left.high, right.high) == (low, right.low, low + count)
        assert left.high in inside


def test_pointers_that_a_task_carries_are_cut_with_it() -> None:
    parts = halved(Task(0, 0, 10, 15, packed(rows(10, 15))), 1)
    assert parts is not None
    assert [part.pointers for part in parts] == [packed(rows(10, 12)), packed(rows(12, 15))]


@pytest.mark.parametrize("divides", [True, False])
def test_a_task_that_stays_whole_is_given_up_after_three_workers(divides: bool) -> None:
    pool = Pool(0, 1, {3}, 8, 1)
    pool.tasks = pool.tasks[:1]
    lost = pool.scheduler.lost
    pool.scheduler.lost = lambda *given, **more: lost(*given, **more, divides=divides)  # type: ignore[method-assign]
    pool.run()
    (work,) = pool.hopeless
    size = work.task.high - work.task.low
    assert (size, pool.deaths) == ((1, 6) if divides else (8, 3))


def test_what_only_waited_at_a_dead_worker_is_no_suspect_and_a_forgotten_run_leaves_nothing() -> None:
    pool = Pool(0, 1, set(), 8, 1)
    handed = pool.scheduler.assign(pool.pick)
    assert [work.task.low for _, _, work in handed] == [0, 8, 16]
    assert not pool.scheduler.lost(1, "killed")
    assert [work.deaths for _, _, work in handed] == [["killed"], [], []]
    pool.scheduler.forget(0)
    pool.add()
    assert [work.task.low for _, _, work in pool.scheduler.assign(pool.pick)] == [24, 32, 40]


@given(seed=st.integers(0, 10**6), stay=st.integers(1, 3), go=st.integers(1, 3))
def test_retired_workers_do_what_they_have_get_nothing_more_and_are_let_go_once(seed: int, stay: int, go: int) -> None:
    pool = Pool(seed, stay + go, set(), 4, 1)
    names = list(pool.scheduler.workers)
    chance = random.Random(seed)
    in_hand = [(worker, task_id) for worker, task_id, _ in pool.scheduler.assign(pool.pick)]
    retired = set(chance.sample(names, go))
    for name in retired:
        pool.scheduler.retire(name)
    pool.scheduler.retire("nobody")
    let_go = []
    while in_hand:
        worker, task_id = in_hand.pop(chance.randrange(len(in_hand)))
        assert worker not in let_go, "it has work in hand"
        assert pool.scheduler.done(worker, task_id) is not None
        let_go += pool.scheduler.let_go()
        given_out = [(worker, task_id) for worker, task_id, _ in pool.scheduler.assign(pool.pick)]
        assert not retired & {worker for worker, _ in given_out}
        in_hand += given_out
    let_go += pool.scheduler.let_go()
    assert sorted(map(str, let_go)) == sorted(map(str, retired))
