"""The engine's state machine against a simulated world: workers, readers and slots in any order, from a seed."""

from __future__ import annotations

import json
import random
from collections import Counter, deque
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import zephon.stages
from zephon import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
from zephon.budget import Budget
from zephon.columns import Block
from zephon.frontiers import Checkpoint, complete_checkpoint, furthest
from zephon.lanes import RoundRobin, owned_lanes
from zephon.plan import Plan
from zephon.recipe import Recipe
from zephon.transport import protocol as p
from zephon.transport.layout import read
from zephon.windows import Front, run_window, window_of
from zephon_daemon.instructions import DropRing, MakeRing, Tell, Write
from zephon_daemon.resolving import resolved
from zephon_daemon.run import Run
from zephon_daemon.scheduler import DEATHS, Scheduler


def pipeline(
    rows: int, *, shuffle: int, drop: bool, microbatch: int, drop_last: bool, even_ends: bool = True, stages: int = 0
) -> Pipeline:
    """`stages`: so many on workers behind the shuffle."""
    data = Dataset.from_dict("d", {"0": InMemoryShard([{"id": i, "t": "x" * (i % 7)} for i in range(rows)])})
    recipe = Pipeline(StaticMixtureWorkSource([data], mixture=None, seed=1, chunk_size=3))
    if drop:
        recipe.map_transform(lambda row: row if row["id"] % 3 else None)
    if shuffle:
        recipe.shuffle(shuffle)
        for number in range(stages):
            recipe.map_transform(lambda row: row if row["id"] % 7 else None, parallelism=2 - number)
            recipe.map_transform(dict, parallelism=3)
            if not number:
                recipe.shuffle(3)
    recipe.batch(microbatch, drop_last=drop_last)
    return recipe.options(canonical_replicas=6, flush_every_k_chunks=2, even_ends=even_ends)


def lane_records(plan: Plan, epoch: int, lane: int) -> list[int]:
    """What the reference execution says a lane is."""
    out: list[int] = []
    window = 0
    while window_of(plan, epoch, lane, window) is not None:
        for block in run_window(plan, epoch, lane, window):
            out += block.fields["id"].to_list()
        window += 1
    return out


@pytest.fixture(autouse=True)
def small_tasks() -> Iterator[None]:
    """Tasks of later stages hold two records at most."""
    with mock.patch.object(zephon.stages, "STAGE_RECORDS", 2):
        yield


class Rank:
    """A client, as far as the engine sees one."""

    def __init__(self, client: int, own: list[int], run: Run, world: World, readers: int) -> None:
        self.client, self.own, self.world = client, own, world
        self.starts = {lane: run.starts[lane].records for lane in own}
        self.most = furthest(run.starts.values())
        self.size = run.plan.microbatch_size
        self.epoch = run.first_epoch
        self.turns = RoundRobin(self.starts, self.most, self.size, {lane: run.starts[lane].stands for lane in own})
        self.batches: Counter[int] = Counter()
        self.got: dict[tuple[int, int], list[int]] = {}
        self.rounds: list[int] = []
        self.waiting: dict[tuple[int, int], deque[p.BatchReady]] = {}
        self.released: dict[int, p.Released] = {}
        self.held: list[p.BatchReady] = []
        self.ended = False

    def hear(self, message: Any) -> None:
        if isinstance(message, p.BatchReady):
            self.waiting.setdefault((message.epoch, message.lane), deque()).append(message)
        elif isinstance(message, p.Released):
            self.released[message.epoch] = message

    def step(self) -> bool:
        """Take one batch if it may; True if something was done."""
        if self.ended:
            return False
        lane, _, _, round_, _ = self.turns.turn()
        state = self.released.get(self.epoch)
        if state is None:
            return False
        if round_ > state.rounds:
            if state.final:
                self.ended = True
                self.rounds.append(self.turns.rounds)
            return state.final
        queue = self.waiting.get((self.epoch, lane))
        if not queue:
            return False
        ready = queue.popleft()
        block = self.world.read(ready)
        assert ready.first_record == self.turns.records[lane]
        self.got.setdefault((self.epoch, lane), []).extend(block.fields["id"].to_list() if len(block) else [])
        self.turns.deliver(len(block))
        self.batches[lane] += 1
        self.held.append(ready)
        return True

    def next_epoch(self) -> list[p.BatchReady]:
        """Begin the next epoch; what was never delivered is given back."""
        left = [ready for key, queue in self.waiting.items() if key[0] == self.epoch for ready in queue]
        self.waiting = {key: queue for key, queue in self.waiting.items() if key[0] != self.epoch}
        self.epoch += 1
        self.turns = RoundRobin(dict.fromkeys(self.own, 0), 0, self.size)
        self.ended = False
        return left


class World:
    """Workers, memory and ranks around a run; every choice is the seed's."""

    def __init__(
        self, plan: Plan, dp: int, seed: int, checkpoint: Checkpoint | None, readers: int, early: bool
    ) -> None:
        self.random = random.Random(seed)
        groups = tuple(range(dp)) if early else ()
        self.run = Run(
            plan, dp_degree=dp, checkpoint=checkpoint, groups=groups, task_samples=self.random.choice([1, 2, 5])
        )
        self.front = Front(plan)
        self.scheduler = Scheduler()
        self.workers = 0
        self.kills = 2 * DEATHS
        self.memory: dict[tuple[int, int], np.ndarray[Any, Any]] = {}
        self.slot_bytes: dict[tuple[int, int], int] = {}
        self.ranks: dict[int, Rank] = {}
        for group in range(dp):
            for _ in range(readers):
                client = len(self.ranks)
                self.ranks[client] = Rank(client, owned_lanes(plan.lanes, dp, group), self.run, self, readers)
        self.readers = readers
        self.to_join = [(c, c // readers) for c in self.ranks]
        self.in_work: list[tuple[Any, int, Any]] = []
        for _ in range(2):
            self.add_worker()

    def add_worker(self) -> None:
        self.workers += 1
        self.scheduler.add(self.workers, lambda run: True)

    def read(self, ready: p.BatchReady) -> Block:
        offset = ready.index * self.slot_bytes[ready.lane, ready.generation]
        return read(self.memory[ready.lane, ready.generation][offset : offset + ready.nbytes].copy())

    def do(self, instructions: list[Any]) -> None:
        for order in instructions:
            if isinstance(order, MakeRing):
                self.memory[order.lane, order.generation] = np.zeros(order.slot_bytes * order.slots, np.uint8)
                self.slot_bytes[order.lane, order.generation] = order.slot_bytes
            elif isinstance(order, DropRing):
                del self.memory[order.lane, order.generation]
            elif isinstance(order, Write):
                memory = self.memory[order.ready.lane, order.slot.generation]
                order.layout.write(memory[order.slot.offset : order.slot.offset + order.ready.nbytes])
                for client in order.clients:
                    self.ranks[client].hear(order.ready)
            elif isinstance(order, Tell):
                self.ranks[order.client].hear(order.message)
        self.run.check_invariants()

    def assign(self) -> None:
        def pick(serves: Any, worker: int, workers: int) -> Any:
            chosen = self.run.choose(worker, workers)
            task = None if chosen is None else self.run.next_task(chosen[1])
            return None if task is None else (0, *task)

        self.in_work += self.scheduler.assign(pick)

    def step(self) -> bool:
        """One random thing happens; False if nothing can."""
        self.assign()
        choices = ["work"] * bool(self.in_work) + ["join"] * bool(self.to_join)
        choices += ["kill"] if self.kills and self.random.random() < 0.1 else []
        joined = [r for c, r in self.ranks.items() if c in self.run.readers]
        able = [r for r in joined if not r.ended]
        choices += ["take"] * len(able) + ["hand_back"] * bool([r for r in joined if r.held])
        self.random.shuffle(choices)
        return any(getattr(self, choice)() for choice in choices)

    def work(self) -> bool:
        worker, task_id, _ = self.in_work.pop(self.random.randrange(len(self.in_work)))
        work = self.scheduler.done(worker, task_id)
        if work is None:
            return True
        outcome = self.front.run(work.task)
        joined = self.scheduler.joined(work, outcome)
        if joined is None:
            return True
        work, outcome = joined
        if self.run.takes_borrowed(work.task.lane, work.task.epoch, work.number):
            layout_free = outcome.block.copy()
            self.do(self.run.outcome(work.task.lane, work.task.epoch, work.number, outcome._replace(block=layout_free)))
            for (
                column
            ) in layout_free.fields.values():  # the memory was lent: what is still needed must have been copied
                if getattr(column, "values", None) is not None and isinstance(column.values, np.ndarray):
                    column.values.flags.writeable = True
                    column.values.fill(77)
            layout_free.samples.fill(-7)
        else:
            self.do(self.run.outcome(work.task.lane, work.task.epoch, work.number, outcome))
        return True

    def kill(self) -> bool:
        self.kills -= 1
        worker = self.random.choice(list(self.scheduler.workers))
        oldest = self.scheduler.workers[worker].oldest
        if oldest is not None and oldest[1].tries == DEATHS - 1:
            return False  # one more, and the record would be given up
        assert not self.scheduler.lost(worker, "killed", grain=lambda run: self.run.plan.grain)
        self.in_work = [w for w in self.in_work if w[0] != worker]
        self.add_worker()
        return True

    def join(self) -> bool:
        client, group = self.to_join.pop(self.random.randrange(len(self.to_join)))
        self.do(self.run.join(client, group, self.readers))
        self.do(self.run.begin(client, self.ranks[client].epoch))
        return True

    def take(self) -> bool:
        ranks = [self.ranks[c] for c in self.run.readers]
        self.random.shuffle(ranks)
        return any(rank.step() for rank in ranks)

    def give_back(self, rank: Rank, some: list[p.BatchReady]) -> None:
        slots = [[r.lane, r.generation, r.index] for r in some]
        self.do(self.run.returned(rank.client, slots, rank.epoch, rank.turns.rounds))

    def hand_back(self) -> bool:
        rank = self.random.choice([self.ranks[c] for c in self.run.readers if self.ranks[c].held])
        self.random.shuffle(rank.held)
        count = self.random.randint(1, len(rank.held))
        some, rank.held = rank.held[:count], rank.held[count:]
        self.give_back(rank, some)
        return True

    def play(self) -> None:
        """Until every rank has ended its epoch."""
        for _ in range(200_000):
            if not self.to_join and all(rank.ended for rank in self.ranks.values()):
                return
            assert self.step(), f"stuck: {[self.run.waits_for(lane) for lane in self.run.lanes]}"
        pytest.fail("too many events")


@given(
    seed=st.integers(0, 10**6),
    dp=st.sampled_from([1, 2, 3, 6]),
    rows=st.integers(2, 121),  # of one row alone, with `drop`, nothing would come through
    shuffle=st.sampled_from([0, 5]),
    drop=st.booleans(),
    microbatch=st.integers(1, 3),
    drop_last=st.booleans(),
    readers=st.sampled_from([1, 1, 2]),
    early=st.booleans(),
    stages=st.sampled_from([0, 0, 1, 2]),
)
def test_every_interleaving_delivers_the_reference_and_all_ranks_end_together(
    seed: int, dp: int, rows: int, shuffle: int, drop: bool, microbatch: int, drop_last: bool, readers: int,
    early: bool, stages: int,
) -> None:  # fmt: skip
    recipe = pipeline(rows, shuffle=shuffle, drop=drop, microbatch=microbatch, drop_last=drop_last, stages=stages)
    plan = recipe.plan(dp_degree=dp)
    world = World(plan, dp, seed, None, readers, early)
    for epoch in range(2):
        world.play()
        whole = {lane: lane_records(plan, epoch, lane) for lane in range(plan.lanes)}
        if drop_last:
            rounds = min(len(records) for records in whole.values()) // microbatch
        else:
            rounds = max(-(-len(records) // microbatch) for records in whole.values())
        for rank in world.ranks.values():
            assert rank.rounds[-1] == rounds
            for lane in rank.own:
                assert rank.got.get((epoch, lane), []) == whole[lane][: rounds * microbatch]
        for rank in world.ranks.values():
            left = rank.next_epoch()
            world.give_back(rank, left)
            world.do(world.run.begin(rank.client, rank.epoch))


@given(
    seed=st.integers(0, 10**6),
    rounds=st.integers(1, 7),  # with a stage that drops records the epoch has eight
    shuffle=st.sampled_from([0, 5]),
    dp=st.sampled_from([1, 2, 6]),
    stages=st.sampled_from([0, 1, 2]),
)
def test_a_restored_run_goes_on_where_the_checkpoint_says(
    seed: int, rounds: int, shuffle: int, dp: int, stages: int
) -> None:
    def make() -> Pipeline:
        rows = 320 if stages else 200  # stages drop some, and there have to be more rounds than are taken
        return pipeline(rows, shuffle=shuffle, drop=True, microbatch=2, drop_last=True, stages=stages)

    embedded = make()
    batches = iter(embedded)
    for _ in range(rounds * 6 + random.Random(seed).randrange(6)):
        next(batches)
    checkpoint = complete_checkpoint(embedded.checkpoint())
    plan = make().plan(dp_degree=dp, checkpoint=checkpoint)
    world = World(plan, dp, seed, checkpoint, 1, True)
    world.play()
    whole = {lane: lane_records(plan, 0, lane) for lane in range(plan.lanes)}
    most = checkpoint.most
    ends = most + (min(len(r) for r in whole.values()) - most) // 2 * 2
    for rank in world.ranks.values():
        for lane in rank.own:
            assert rank.got.get((0, lane), []) == whole[lane][checkpoint.lanes[lane].records : ends]


@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(7, 60),
    stop=st.floats(0, 0.999),
    drop=st.booleans(),
    dp=st.sampled_from([1, 2, 6]),
)
@example(seed=0, rows=20, stop=0.95, drop=False, dp=2)
def test_a_run_restored_in_a_round_in_which_lanes_had_run_out_has_the_rest_of_its_batches(
    seed: int, rows: int, stop: float, drop: bool, dp: int
) -> None:
    def make() -> Pipeline:
        return pipeline(rows, shuffle=5, drop=drop, microbatch=2, drop_last=False)

    whole = Counter(batch.lane for batch in make())
    stopped, before = make(), Counter[int]()
    batches = iter(stopped)
    while before.total() < int(stop * whole.total()):
        before[next(batches).lane] += 1
    checkpoint = complete_checkpoint(stopped.checkpoint())
    world = World(make().plan(dp_degree=dp, checkpoint=checkpoint), dp, seed, checkpoint, 1, True)
    world.play()
    rest = Counter[int]()
    for rank in world.ranks.values():
        rest += rank.batches
    assert before + rest == whole


def test_lanes_that_had_run_out_go_on_as_in_one_process_with_data_that_were_added_knowingly() -> None:
    def make(rows: int) -> Pipeline:
        source = [{"id": i} for i in range(rows)]
        dataset = Dataset.from_dict("m", {"s": InMemoryShard(source)})
        recipe = Pipeline(StaticMixtureWorkSource([dataset], None, chunk_size=3, seed=1)).batch(3, drop_last=False)
        return recipe.options(canonical_replicas=4)

    before = make(61)
    for _ in zip(range(21), before):
        pass
    state = before.checkpoint()
    assert any(lane["stands"] > lane["records"] for lane in state["lanes"].values())
    expected: dict[tuple[int, int], list[int]] = {}
    batches = Counter[int]()
    for batch in make(90).restore(state, allow_changed=["datasets"]):
        expected.setdefault((0, batch.lane), []).extend(batch["id"].tolist() if len(batch) else [])
        batches[batch.lane] += 1
    module = ModuleType("recipe")
    module.pipeline = make(90)  # type: ignore[attr-defined]
    order, budget = p.StartRun(1, "pipeline", 1, ["datasets"], []), Budget(256 << 20, 1, "as told")
    live = resolved(Recipe("recipe.py", module, "pipeline"), order, json.dumps(state).encode(), budget)
    world = World(live.run.plan, 1, 0, Checkpoint(live.run.plan.identity, 0, live.run.starts), 1, True)
    world.play()
    assert (world.ranks[0].got, world.ranks[0].batches) == (expected, batches)
