"""Engines that die and ranks that come back, simulated: whatever happens, every rank gets the reference, once.

The engine's state machine and the client's bookkeeping are the real ones; connections, memory, workers and the moments
of death are the seed's. An engine's death keeps a part of what it had sent to each rank, as a kernel does, and forgets
all else. Ranks notice when they want a batch, come back one by one with their statements, and some never had attached.
Ranks that train *together* ask for nothing of the next round before all have this one, as in a collective.
"""

from __future__ import annotations

import json
import random
from collections import deque
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.unit.daemon.test_run import lane_records, pipeline, small_tasks
from zephon.frontiers import Checkpoint, Frontier, complete_checkpoint
from zephon.lanes import owned_lanes
from zephon.plan import Plan
from zephon.transport import protocol as p
from zephon.transport.layout import read
from zephon.transport.statement import decode_statement
from zephon.windows import Front, run_window, window_of
from zephon_client.ready import Ready
from zephon_client.run import Run as ClientRun
from zephon_daemon.instructions import DropRing, MakeRing, Tell, Write
from zephon_daemon.run import Run
from zephon_daemon.scheduler import Scheduler

EPOCHS = 2
__all__ = ["small_tasks"]


@dataclass
class Memory:
    """A generation of a ring, as it is handed over."""

    lane: int
    generation: int
    slot_bytes: int
    array: np.ndarray[Any, Any]


@dataclass
class Rank:
    """A rank's side: the real bookkeeping over a made-up connection. `pipe` is what the kernel holds for it."""

    group: int
    run: ClientRun | None = None
    client: int = -1
    connected: bool = False
    begun: int = -1
    pipe: deque[Any] = field(default_factory=deque)
    rings: dict[tuple[int, int], Memory] = field(default_factory=dict)
    held: list[Ready] = field(default_factory=list)
    got: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    rounds: list[int] = field(default_factory=list)
    dead: bool = False
    lost: bool = False
    """Whether its engine died and it has not come back."""

    @property
    def done(self) -> bool:
        return self.dead or len(self.rounds) == EPOCHS


class World:
    """A plan's run under `dp` groups of `readers` ranks. Every choice is the seed's."""

    def __init__(
        self, plan: Plan, dp: int, readers: int, seed: int, checkpoint: Checkpoint | None, together: bool = False
    ) -> None:
        self.random = random.Random(seed)
        self.together = together
        self.plan, self.dp, self.readers, self.checkpoint = plan, dp, readers, checkpoint
        self.first_epoch = checkpoint.epoch if checkpoint else 0
        self.front = Front(plan)
        self.groups = list(range(dp))
        self.ranks = [Rank(group) for group in self.groups for _ in range(readers)]
        self.engine: Run | None = None
        self.scheduler = Scheduler()
        self.memory: dict[tuple[int, int], Memory] = {}
        self.in_work: list[tuple[Any, int, Any]] = []
        self.clients = self.lives = 0
        self.story: list[str] = []

    # The engine's world

    def start(self, origin: Checkpoint | None, groups: tuple[int, ...]) -> Run:
        self.lives += 1
        self.engine = Run(
            self.plan, dp_degree=self.dp, checkpoint=origin, groups=groups, slots=self.random.choice([1, 2, 5]),
            task_samples=self.random.choice([1, 2, 5]),
        )  # fmt: skip
        self.scheduler, self.memory, self.in_work = Scheduler(), {}, []
        for worker in range(2):
            self.scheduler.add(worker, lambda run: True)
        return self.engine

    def tell(self, client: int, message: Any) -> None:
        for rank in self.ranks:
            if rank.client == client and rank.connected:
                rank.pipe.append(message)

    def do(self, instructions: list[Any]) -> None:
        assert self.engine is not None
        for order in instructions:
            if isinstance(order, MakeRing):
                memory = Memory(order.lane, order.generation, order.slot_bytes,
                                np.zeros(order.slot_bytes * order.slots, np.uint8))  # fmt: skip
                self.memory[order.lane, order.generation] = memory
                for client in order.clients:
                    self.tell(client, memory)
            elif isinstance(order, DropRing):
                del self.memory[order.lane, order.generation]
            elif isinstance(order, Write):
                array = self.memory[order.ready.lane, order.slot.generation].array
                order.layout.write(array[order.slot.offset : order.slot.offset + order.ready.nbytes])
                for client in order.clients:
                    self.tell(client, order.ready)
            elif isinstance(order, Tell) and not (order.droppable and self.random.random() < 0.1):
                self.tell(order.client, order.message)
        self.engine.check_invariants()

    def work(self) -> bool:
        assert self.engine is not None
        worker, task_id, _ = self.in_work.pop(self.random.randrange(len(self.in_work)))
        work = self.scheduler.done(worker, task_id)
        assert work is not None
        outcome = self.front.run(work.task)
        outcome = outcome._replace(block=outcome.block.copy())
        self.do(self.engine.outcome(work.task.lane, work.task.epoch, work.number, outcome))
        return True

    def assign(self) -> None:
        engine = self.engine
        if engine is None:
            return

        def pick(serves: Any, worker: int, workers: int) -> Any:
            chosen = engine.choose(worker, workers)
            task = None if chosen is None else engine.next_task(chosen[1])
            return None if task is None else (0, *task)

        self.in_work += self.scheduler.assign(pick)

    def kill_engine(self) -> bool:
        """Everything that it knew is gone; of what it had sent to a rank some may not have left its outbox."""
        self.story.append("engine dies")
        self.in_work = []
        self.engine = None
        for rank in self.ranks:
            if rank.connected:
                keep = self.random.choice([len(rank.pipe), self.random.randint(0, len(rank.pipe))])
                while len(rank.pipe) > keep:
                    rank.pipe.pop()
            rank.lost |= rank.connected
            rank.connected = False
        return True

    # Ranks

    def come(self, rank: Rank) -> bool:
        """A rank attaches, for the first time or again."""
        statement = None
        if rank.run is not None:
            rank.run.forget_undelivered()
            statement = decode_statement(rank.run.statement().encode())
            assert complete_checkpoint(json.loads(json.dumps(statement.origin.to_json()))) == statement.origin
        if self.engine is None:
            groups = () if statement else tuple(g for g in self.groups if self.random.random() < 0.5)
            self.start(statement.origin if statement else self.checkpoint, groups)
        engine = self.engine
        assert engine is not None
        self.clients += 1
        rank.client, rank.connected, rank.pipe, rank.held, rank.rings = self.clients, True, deque(), [], {}
        rank.lost = False
        if rank.run is None:
            rank.run = ClientRun(self.attached(engine, rank.group), self.readers)
        left = sum(other.group == rank.group and not other.dead for other in self.ranks)
        self.story.append(f"rank of group {rank.group} comes as {rank.client} at {rank.run.epoch.turns.stands}")
        self.do(engine.join(rank.client, rank.group, left, statement))
        if rank.begun == rank.run.epoch.number:
            self.do(engine.begin(rank.client, rank.begun))
        return True

    def attached(self, engine: Run, group: int) -> p.Attached:
        starts = [engine.starts[lane] for lane in range(self.plan.lanes)]
        own = owned_lanes(self.plan.lanes, self.dp, group)
        settings = self.plan.settings
        return p.Attached(
            json.dumps(self.plan.identity), self.plan.lanes, own, self.plan.microbatch_size, settings.drop_last,
            settings.even_ends, False, ["d"], engine.first_epoch,
            [[f.chunk, f.offset, f.records, f.skipped] for f in starts], [],
            stands={lane: f.stands for lane, f in enumerate(starts) if f.stands is not None},
        )  # fmt: skip

    def step_rank(self, rank: Rank) -> bool:
        """As a training loop asks for its next batch; False if there is nothing to be done."""
        if rank.run is None:
            return self.come(rank)
        run = rank.run
        if self.in_collective(rank):
            return False
        if rank.begun != run.epoch.number:
            rank.begun = run.epoch.number
            if rank.connected and self.engine is not None:
                self.do(self.engine.begin(rank.client, rank.begun))
        moved = False
        for _ in range(self.random.randint(0, len(rank.pipe))):
            moved = True
            message = rank.pipe.popleft()
            if isinstance(message, Memory):
                rank.rings[message.lane, message.generation] = message
            else:
                batch = Ready(*astuple(message)) if isinstance(message, p.BatchReady) else message
                run.take(deque([batch]))
        epoch, (lane, _) = run.epoch, run.epoch.place
        ready = epoch.due()
        if ready is not None:
            memory = rank.rings[lane, ready.generation]
            block = read(memory.array[ready.index * memory.slot_bytes :][: ready.nbytes].copy())
            if epoch.is_void(ready):
                epoch.pass_over(ready)
            else:
                rank.got.setdefault((epoch.number, lane), []).extend(block.fields["id"].to_list() if len(block) else [])
                epoch.deliver(ready)
            rank.held.append(ready)
            self.check_state(rank)
            return True
        if epoch.over:
            again = run.resumed_at_end
            rounds = epoch.turns.rounds
            rank.held += run.advance()
            if not again:
                rank.rounds.append(rounds)
            return True
        if rank.pipe or rank.connected:
            return moved
        return self.come(rank)

    @property
    def everyone(self) -> list[Rank]:
        """All ranks that train together."""
        return self.ranks

    def in_collective(self, rank: Rank) -> bool:
        """Whether it waits for ranks that have not come to the end of its round."""
        run = rank.run
        if not self.together or run is None or not run.epoch.turns.at_round_end:
            return False
        living = [other.run.rounds if other.run is not None else 0 for other in self.everyone if not other.dead]
        return run.rounds > min(living)

    def hand_back(self, rank: Rank) -> bool:
        assert rank.run is not None
        assert self.engine is not None
        self.random.shuffle(rank.held)
        count = self.random.randint(1, len(rank.held))
        some, rank.held = rank.held[:count], rank.held[count:]
        slots = [[r.lane, r.generation, r.index] for r in some]
        self.do(self.engine.returned(rank.client, slots, rank.run.epoch.number, rank.run.epoch.turns.rounds))
        return True

    def kill_rank(self, rank: Rank) -> bool:
        self.story.append(f"rank {rank.client} of group {rank.group} dies")
        rank.dead, was = True, rank.connected
        rank.connected = False
        left = sum(other.group == rank.group and not other.dead for other in self.ranks)
        if self.engine is not None:
            self.do(self.engine.leave(rank.client) if was else self.engine.expect(rank.group, left))
        return True

    def check_state(self, rank: Rank) -> None:
        """A state names windows that exist, and at a round's end of all lanes."""
        assert rank.run is not None
        if self.random.random() < 0.9:
            return
        state = rank.run.checkpoint()
        if rank.run.epoch.turns.at_round_end and rank.run.epoch.turns.rounds:
            assert not state.missing
        for lane, frontier in state.lanes.items():
            begins = windows_of(self.plan, state.epoch, lane)
            assert begins[frontier.chunk] == frontier.records - frontier.offset

    def step(self) -> bool:
        """One random thing happens; False if nothing can."""
        self.assign()
        able = [rank for rank in self.ranks if not rank.done]
        choices: list[Any] = [(self.step_rank, rank) for rank in able]
        # Those that are done would go on to the next epoch, if there were one: they too come back.
        gone = [rank for rank in self.ranks if rank.done and not rank.dead and not rank.connected]
        choices += [(self.come, rank) for rank in gone if not self.in_collective(rank)]
        if self.in_work:
            choices += [(lambda _: self.work(), None)] * 2
        if self.engine is not None:
            giving = [rank for rank in self.ranks if rank.held and rank.connected and not self.in_collective(rank)]
            choices += [(self.hand_back, rank) for rank in giving]
        chance = self.random.random()
        if self.engine is not None and self.lives < 8 and chance < 0.02:
            choices = [(lambda _: self.kill_engine(), None)]
        elif self.readers > 1 and chance > 0.998:
            lonely = [r for r in able if r.run is not None
                      and sum(o.group == r.group and not o.dead for o in self.ranks) > 1]  # fmt: skip
            if lonely:
                choices = [(self.kill_rank, self.random.choice(lonely))]
        elif chance > 0.99:  # a connection alone breaks; the engine lives
            joined = [r for r in able if r.connected and not r.held]
            if joined and self.engine is not None:
                rank = self.random.choice(joined)
                self.story.append(f"connection of {rank.client} breaks")
                rank.connected = False
                rank.pipe.clear()
                rank.run.forget_undelivered()  # type: ignore[union-attr]
                choices = [(lambda _: not self.do(self.engine.leave(rank.client)), None)]  # type: ignore[union-attr,func-returns-value]
        if self.engine is not None and self.random.random() < 0.004:  # seconds pass, in whatever state
            self.do(self.engine.go_without())
        self.random.shuffle(choices)
        return any(act(whom) for act, whom in choices)

    def play(self) -> None:
        for _ in range(60_000):
            if all(rank.done for rank in self.ranks):
                return
            idle = 0
            while not self.step():  # a rank may have chosen to read nothing of what is there
                idle += 1
                assert idle < 200, self.stuck()
                if idle > 100 and self.engine is not None:  # by now seconds have passed
                    self.do(self.engine.go_without())
        pytest.fail("too many events")

    def stuck(self) -> str:
        waits = {} if self.engine is None else {n: self.engine.waits_for(n) for n in self.engine.lanes}
        ranks = [(r.client, r.group, r.connected, r.rounds, r.run and r.run.epoch.turns.stands) for r in self.ranks]
        return f"stuck: {waits} {ranks} after {self.story}"


_windows: dict[tuple[str, int, int], dict[int, int]] = {}


def windows_of(plan: Plan, epoch: int, lane: int) -> dict[int, int]:
    """The record at which each window of a lane begins, by its first chunk."""
    key = json.dumps([plan.identity, plan.settings.on_error]), epoch, lane
    if key not in _windows:
        begins, at, window = {0: 0}, 0, 0
        while (found := window_of(plan, epoch, lane, window)) is not None:
            begins[found.chunk] = at
            at += sum(len(block) for block in run_window(plan, epoch, lane, window))
            window += 1
        _windows[key] = begins
    return _windows[key]


def expected(plan: Plan, epoch: int, lanes: list[int], starts: dict[int, int], most: int) -> tuple[int, dict[int, int]]:
    """Rounds of an epoch from where it starts, and the record at which each lane's delivery ends."""
    size, totals = plan.microbatch_size, {lane: len(lane_records(plan, epoch, lane)) for lane in range(plan.lanes)}
    scope = range(plan.lanes) if plan.settings.even_ends else lanes
    if plan.settings.drop_last:
        rounds = min((totals[lane] - most) // size for lane in scope)
    else:
        rounds = max(0, *(-(-(totals[lane] - most) // size) for lane in scope))
    return max(0, rounds), {lane: max(starts[lane], min(totals[lane], most + rounds * size)) for lane in lanes}


@pytest.mark.timeout(3600)
@given(
    seed=st.integers(0, 10**9),
    dp=st.sampled_from([1, 2, 3]),
    readers=st.sampled_from([1, 1, 2, 3]),
    rows=st.integers(2, 90),
    shuffle=st.sampled_from([0, 5]),
    drop=st.booleans(),
    microbatch=st.integers(1, 3),
    drop_last=st.booleans(),
    even_ends=st.sampled_from([True, True, False]),
    stopped_after=st.sampled_from([0, 0, 5, 12]),
    stages=st.sampled_from([0, 0, 1, 2]),
    together=st.booleans(),
)
def test_engines_and_readers_die_at_any_moment_and_every_rank_gets_the_reference_once(
    seed: int, dp: int, readers: int, rows: int, shuffle: int, drop: bool, microbatch: int, drop_last: bool,
    even_ends: bool, stopped_after: int, stages: int, together: bool,
) -> None:  # fmt: skip
    def make() -> Any:
        return pipeline(
            rows, shuffle=shuffle, drop=drop, microbatch=microbatch, drop_last=drop_last, even_ends=even_ends,
            stages=stages,
        )  # fmt: skip

    checkpoint = None
    if stopped_after:
        embedded = make()
        batches = iter(embedded)
        for _ in range(stopped_after):
            next(batches, None)
        checkpoint = complete_checkpoint(embedded.checkpoint())
    plan = make().plan(dp_degree=dp, checkpoint=checkpoint)
    # Of data of which no record passes there is nothing to tell: the run ends with an error.
    assume(has_records(plan))
    world = World(plan, dp, readers, seed, checkpoint, together and even_ends)
    world.play()
    check_ranks(world)


def has_records(plan: Plan) -> bool:
    """Whether every epoch that matters has a record at all."""
    return all(any(lane_records(plan, epoch, lane) for lane in range(plan.lanes)) for epoch in range(EPOCHS + 2))


def check_ranks(world: World) -> None:
    """Every rank that lives got what the reference says, each record once, and ended where all end."""
    plan, checkpoint = world.plan, world.checkpoint
    starts = checkpoint.lanes if checkpoint else dict.fromkeys(range(plan.lanes), Frontier())
    for rank in world.ranks:
        if rank.dead:
            continue
        own = owned_lanes(plan.lanes, world.dp, rank.group)
        at, most = {lane: starts[lane].records for lane in own}, max(f.records for f in starts.values())
        reached = []
        for epoch in range(world.first_epoch, world.first_epoch + EPOCHS + 1):
            rounds, ends = expected(plan, epoch, own, at, most)
            reached.append(rounds)
            for lane in own:
                got = rank.got.get((epoch, lane), [])
                assert got == lane_records(plan, epoch, lane)[at[lane] : at[lane] + len(got)]
                if epoch < rank.run.epoch.number:  # type: ignore[union-attr]
                    assert at[lane] + len(got) == ends[lane], (epoch, lane, world.story)
            at, most = dict.fromkeys(own, 0), 0
        assert rank.rounds in (reached[:EPOCHS], reached[1 : EPOCHS + 1]), world.story
