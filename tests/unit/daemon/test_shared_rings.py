"""Readers that share a group's rings keep what they like, each something else, and none of them stops a lane.

The engine's state machine and the ranks' slots are the real ones, over real memory; in between are lists.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
from zephon.transport import protocol as p
from zephon.transport.layout import read
from zephon.transport.rings import may_hold
from zephon.transport.segments import Segment
from zephon.windows import Front
from zephon_client.ready import Ready
from zephon_client.slots import Slots
from zephon_daemon.instructions import DropRing, Instruction, MakeRing, Write
from zephon_daemon.run import Run

ROWS, SIZE = 80, 2
LARGE = 60_000


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Batches travel alone that are large in these tests."""
    with mock.patch("zephon.transport.rings.ALONE", 1):
        yield


class Reader:
    """A rank of the group, as its training loop, its Loader and its connection act together."""

    def __init__(self, client: int, lanes: int, shared: bool) -> None:
        self.client, self.lanes = client, lanes
        self.slots = Slots(writable=not shared)
        self.came: dict[int, deque[Ready]] = {lane: deque() for lane in range(lanes)}
        self.kept: list[tuple[np.ndarray, list[int]]] = []
        self.got: list[int] = []
        self.taken = self.copies = 0
        self.told: tuple[int, int] | None = None

    @property
    def turn(self) -> tuple[int, int]:
        rounds, lane = divmod(self.taken, self.lanes)
        return lane, rounds * SIZE

    def next(self, keep: bool) -> bool:
        """The next batch, which stays here if it is kept and was not copied; False if it is not there."""
        queue = self.came[self.turn[0]]
        if not queue:
            return False
        ready = queue.popleft()
        copied = not self.slots.at_hand(ready) and self.slots.short(ready)
        data = self.slots.lease(ready)
        ready.source = None
        ids = read(data).fields["id"].to_list()
        if copied:
            self.copies += 1
        elif keep:
            self.kept.append((data, ids))
        self.got += ids
        self.taken += 1
        return True


class World:
    """One group of so many `readers`, whose lanes' rings have so many `slots`. Every `large`th row is."""

    def __init__(self, readers: int, lanes: int, slots: int, large: int = 0) -> None:
        rows = [{"id": i, "t": b"x" * (LARGE if large and i % large == large - 1 else i % 7)} for i in range(ROWS)]
        data = Dataset.from_dict("d", {"0": InMemoryShard(rows)})
        recipe = Pipeline(StaticMixtureWorkSource([data], mixture=None, seed=1, chunk_size=4)).batch(SIZE)
        plan = recipe.options(canonical_replicas=lanes).plan(dp_degree=1)
        self.front, self.run = Front(plan), Run(plan, dp_degree=1, slots=slots)
        self.segments: dict[tuple[int, int], Segment] = {}
        self.travelled_alone = 0
        self.readers = [Reader(client, lanes, readers > 1) for client in range(readers)]
        for reader in self.readers:
            self.do(self.run.join(reader.client, 0, readers))
        for reader in self.readers:
            self.do(self.run.begin(reader.client, 0))

    def do(self, instructions: list[Instruction]) -> None:
        """Carries out, and has workers do all that there is to do."""
        while True:
            for order in instructions:
                if isinstance(order, MakeRing):
                    segment = Segment.create("ring", order.slot_bytes * order.slots)
                    self.segments[order.lane, order.generation] = segment
                    self.travelled_alone += bool(order.alone)
                    new = p.NewSegment(*order[:4], bool(order.alone), order.parts)
                    for reader in self.readers:
                        reader.slots.map(new, os.dup(segment.fileno()))
                elif isinstance(order, DropRing):
                    self.segments.pop((order.lane, order.generation)).close()
                elif isinstance(order, Write):
                    array = self.segments[order.ready.lane, order.slot.generation].array
                    order.layout.write(array[order.slot.offset : order.slot.offset + order.ready.nbytes])
                    for reader in self.readers:
                        ready = Ready(*order.ready.rows[0])
                        reader.slots.came(ready)
                        reader.came[ready.lane].append(ready)
            self.run.check_invariants()
            chosen = self.run.choose(0, 1)
            task = None if chosen is None else self.run.next_task(chosen[1])
            if chosen is None or task is None:
                return
            outcome = self.front.run(task[1])
            instructions = self.run.outcome(chosen[1], 0, task[0], outcome._replace(block=outcome.block.copy()))

    def give_back(self, reader: Reader) -> None:
        numbers = reader.slots.to_return()
        if not numbers:
            return
        reader.told = None
        slots = zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
        self.do(self.run.returned(reader.client, list(slots), 0, reader.taken // reader.lanes))

    def asks(self, reader: Reader, keep: bool) -> bool:
        """A rank asks for its next batch. Where it waits, it returns what it need not hold, and says so once."""
        if not reader.next(keep):
            self.give_back(reader)
            if not reader.came[reader.turn[0]] and reader.told != reader.turn:
                reader.told = reader.turn
                self.do(self.run.waits(reader.client, reader.turn[0], 0, reader.turn[1]))
            return reader.next(keep)
        return True

    def ends(self, keeps: Callable[[Reader], bool] = lambda _: True) -> None:
        """All go on to the end of the data; `keeps` says who keeps its next batch, if it may."""
        moved = True
        while moved:
            moved = False
            for reader in self.readers:
                moved |= self.asks(reader, keeps(reader))

    def leaves(self, reader: Reader) -> None:
        self.readers.remove(reader)
        reader.kept.clear()
        reader.slots.close()
        self.do(self.run.leave(reader.client))

    def check(self) -> None:
        """Everyone has had everything, and nothing was written over what is kept."""
        for reader in self.readers:
            assert sorted(reader.got) == list(range(ROWS)), self.run.waits_for(reader.turn[0])
            for data, ids in reader.kept:
                assert read(data).fields["id"].to_list() == ids

    def close(self) -> None:
        for reader in self.readers:
            reader.slots.close()
        for segment in self.segments.values():
            segment.close()


@given(
    readers=st.integers(1, 5),
    lanes=st.sampled_from([1, 1, 2, 4]),
    slots=st.integers(1, 9),
    large=st.sampled_from([0, 0, 1, 5, 16]),
    acts=st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from(["keep", "keep", "pass", "pass", "drop", "return", "leave"]),
                  st.integers(0, 9)), max_size=60),
)  # fmt: skip
def test_whatever_the_readers_of_a_group_keep_and_in_whatever_order_every_one_gets_every_batch(
    readers: int, lanes: int, slots: int, large: int, acts: list[tuple[int, str, int]]
) -> None:
    world = World(readers, lanes, slots, large)
    for number, act, count in acts:
        reader = world.readers[number % len(world.readers)]
        if act in ("keep", "pass"):
            while count and world.asks(reader, act == "keep"):
                count -= 1
        elif act == "drop" and reader.kept:
            del reader.kept[count % len(reader.kept)]
        elif act == "return":
            world.give_back(reader)
        elif act == "leave" and len(world.readers) > 1 and count == 0:
            world.leaves(reader)
    world.ends()
    world.check()
    world.close()


@given(slots=st.integers(1, 200), parts=st.integers(1, 64))
def test_the_parts_of_a_ring_leave_a_slot_free_and_one_part_all_but_two(slots: int, parts: int) -> None:
    assert 0 <= parts * may_hold(slots, parts) < slots
    if parts == 1:
        assert may_hold(slots) == max(min(2, slots - 1), slots - 2)


def test_readers_that_hold_five_and_three_others_of_eight_slots_go_on_in_a_divided_ring() -> None:
    world = World(readers=2, lanes=1, slots=8)
    first, second = world.readers
    assert all(world.asks(first, keep=True) for _ in range(5))
    assert all(world.asks(second, keep=False) for _ in range(5))
    assert all(world.asks(second, keep=True) for _ in range(3))
    assert all(world.asks(first, keep=False) for _ in range(3))
    assert not world.asks(first, keep=True)  # it waits, and so might the other for something else
    assert world.run.waits_for(0) == "the trainer"
    assert len(world.segments) == 1
    assert world.asks(second, keep=True)
    assert world.asks(first, keep=True)
    assert len(world.segments) == 2
    world.ends()
    world.check()
    assert len(world.segments) == 2
    assert [len(reader.kept) for reader in world.readers] == [5 + 3, 3 + 3]
    assert first.copies
    world.close()


@pytest.mark.parametrize("slots", [2, 3, 8])
@pytest.mark.parametrize("readers", [2, 8])
def test_readers_that_hold_the_same_batches_share_all_of_a_ring_and_one_that_is_slow_divides_nothing(
    readers: int, slots: int
) -> None:
    world = World(readers, lanes=1, slots=slots)
    held = may_hold(slots) - 1
    for _ in range(20):
        for reader in world.readers[1:]:
            while world.asks(reader, keep=True):
                del reader.kept[: len(reader.kept) - held]
        assert world.asks(world.readers[0], keep=True)
        del world.readers[0].kept[: len(world.readers[0].kept) - held]
    assert len(world.segments) == 1
    assert not any(reader.copies for reader in world.readers)
    world.close()


@pytest.mark.parametrize("readers", [1, 2, 3])
def test_batches_that_travel_alone_and_are_kept_by_one_reader_each_stop_nobody(readers: int) -> None:
    world = World(readers, lanes=1, slots=6, large=5)
    world.ends(lambda reader: reader.taken % readers == reader.client)
    assert world.travelled_alone > 2
    world.check()
    world.close()


def test_a_reader_that_stops_and_dies_frees_what_the_others_wait_for() -> None:
    world = World(readers=3, lanes=1, slots=8)
    first, second, third = world.readers
    assert all(world.asks(first, keep=index < 5) for index in range(8))
    assert all(world.asks(second, keep=index >= 5) for index in range(8))
    assert not world.asks(first, keep=True)
    assert not world.asks(second, keep=True)
    assert len(world.segments) == 1
    world.leaves(third)
    assert world.asks(second, keep=True)
    world.ends()
    world.check()
    world.close()
