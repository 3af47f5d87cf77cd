"""The writer's bookkeeping: a slot is never lost, never given out twice, and every mistake is an error."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from zephon.errors import ProtocolError
from zephon.transport.rings import ALONE, Generation, RingWriter, Slot, ring_shape


class RingMachine(RuleBasedStateMachine):
    """Any order of writes, returns, deaths and regrowths, beside a model that only keeps who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = RingWriter(100, 3)
        self.writing: list[Slot] = []
        self.reading: dict[Slot, set[int]] = {}
        self.alive = {0}
        self.retired: set[int] = set()
        self.made = 0

    def _capacity(self) -> int:
        current = self.ring.generation
        busy = [slot for slot in [*self.writing, *self.reading] if slot.generation == current.id]
        return current.slots - len(busy)

    @rule(nbytes=st.integers(0, 400))
    def acquire(self, nbytes: int) -> None:
        expected = self._capacity() > 0 and nbytes <= self.ring.generation.slot_bytes
        slot = self.ring.acquire(nbytes)
        assert (slot is not None) == expected
        if slot is not None:
            assert slot not in self.writing
            assert slot not in self.reading
            assert slot.offset == slot.index * self.ring.generation.slot_bytes
            self.writing.append(slot)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), readers=st.frozensets(st.integers(0, 3)))
    def publish(self, data: st.DataObject, readers: frozenset[int]) -> None:
        slot = self.writing.pop(data.draw(st.integers(0, len(self.writing) - 1)))
        assert self.ring.publish(slot, readers) == (not readers)
        if readers:
            self.reading[slot] = set(readers)

    @precondition(lambda self: self.writing)
    @rule()
    def abandon(self) -> None:
        self.ring.abandon(self.writing.pop())

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), reader=st.integers(0, 3))
    def give_back(self, data: st.DataObject, reader: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.reading, key=lambda slot: (slot.generation, slot.index))))
        if reader not in self.reading[slot]:
            with pytest.raises(ProtocolError):
                self.ring.returned(slot.generation, slot.index, reader)
            return
        self.reading[slot].remove(reader)
        last = not self.reading[slot]
        assert self.ring.returned(slot.generation, slot.index, reader) == last
        if last:
            del self.reading[slot]

    @rule(reader=st.integers(0, 3))
    def die(self, reader: int) -> None:
        held = {slot for slot, readers in self.reading.items() if reader in readers}
        assert set(self.ring.held_by(reader)) == held
        freed = {slot for slot in held if self.reading[slot] == {reader}}
        assert set(self.ring.drop_reader(reader)) == freed
        for slot in held:
            self.reading[slot].remove(reader)
        for slot in freed:
            del self.reading[slot]

    @rule(nbytes=st.integers(0, 4000))
    def acquire_alone(self, nbytes: int) -> None:
        before = self.ring.generation
        slot = self.ring.acquire_alone(nbytes + 1)
        self.made += 1
        assert slot == Slot(self.made, 0, 0)
        assert self.ring.generation == before
        self.writing.append(slot)

    @rule(slot_bytes=st.integers(1, 300), slots=st.integers(1, 4))
    def regrow(self, slot_bytes: int, slots: int) -> None:
        self.made += 1
        assert self.ring.regrow(slot_bytes, slots) == Generation(self.made, slot_bytes, slots)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.ring.check_invariants()
        assert self.ring.free == self._capacity()
        assert self.ring.in_flight == len(self.writing) + len(self.reading)
        newly = self.ring.retired()
        assert not set(newly) & self.retired
        self.retired.update(newly)
        current = self.ring.generation.id
        draining = {slot.generation for slot in [*self.writing, *self.reading]} - {current}
        assert self.retired == set(range(self.made + 1)) - draining - {current}


TestRingMachine = RingMachine.TestCase


def test_slots_return_in_any_order_and_the_last_reader_frees_them() -> None:
    ring = RingWriter(8, 2)
    first, second = ring.acquire(8), ring.acquire(1)
    assert first is not None
    assert second is not None
    assert ring.acquire(1) is None
    ring.publish(first, {1, 2})
    ring.publish(second, {1})
    assert ring.returned(second.generation, second.index, 1)
    assert not ring.returned(first.generation, first.index, 2)
    assert ring.returned(first.generation, first.index, 1)
    assert ring.free == 2


def test_a_payload_too_large_for_any_slot_is_told_from_a_full_ring() -> None:
    ring = RingWriter(8, 1)
    assert ring.acquire(9) is None
    assert not ring.fits(9)
    assert ring.acquire(8) is not None
    assert ring.acquire(8) is None
    assert ring.fits(8)


def test_a_stranger_a_double_return_and_unknown_slots_are_errors_that_change_nothing() -> None:
    ring = RingWriter(8, 2)
    slot = ring.acquire(8)
    assert slot is not None
    with pytest.raises(ProtocolError, match="does not hold it"):
        ring.returned(slot.generation, slot.index, 1)
    ring.publish(slot, {1})
    for wrong in ((0, slot.index, 2), (7, 0, 1), (0, 2, 1), (0, -1, 1)):
        with pytest.raises(ProtocolError):
            ring.returned(*wrong)
    with pytest.raises(ValueError, match="not acquired"):
        ring.publish(slot, {1})
    assert ring.in_flight == 1
    ring.check_invariants()
    assert ring.returned(0, slot.index, 1)
    with pytest.raises(ProtocolError, match="returned twice"):
        ring.returned(slot.generation, slot.index, 1)


def test_after_regrowing_the_old_generation_retires_with_its_last_slot_and_knows_no_return_any_more() -> None:
    ring = RingWriter(8, 2)
    kept = ring.acquire(8)
    assert kept is not None
    ring.publish(kept, {1})
    ring.regrow(64, 1)
    assert ring.retired() == []
    assert ring.free == 1
    assert ring.returned(kept.generation, kept.index, 1)
    assert ring.retired() == [0]
    assert ring.retired() == []
    with pytest.raises(ProtocolError, match="no such generation"):
        ring.returned(kept.generation, kept.index, 1)


def test_a_payload_several_times_too_large_travels_alone_unless_it_is_one_of_many() -> None:
    ring = RingWriter(ALONE // 2, 2)
    assert not ring.outgrows(ALONE // 2)
    assert not ring.outgrows(ALONE)  # the ring had better grow
    assert ring.outgrows(3 * ALONE)
    slot = ring.acquire_alone(3 * ALONE)
    assert (ring.alone, ring.free, ring.generation.id) == (1, 2, 0)
    ring.publish(slot, {1})
    assert ring.returned(slot.generation, slot.index, 1)
    assert (ring.alone, ring.retired()) == (0, [1])
    assert not ring.outgrows(1)
    assert [ring.outgrows(3 * ALONE) for _ in range(5)] == [True, True, True, False, False]
    assert not RingWriter(8, 2).outgrows(ALONE)  # small ones never do


def test_a_ring_has_fewer_slots_where_memory_is_short_but_two_at_least_and_as_many_as_were_told() -> None:
    assert [ring_shape(size)[1] for size in (4096, 64 << 10, 200 << 10, 1 << 20)] == [16, 16, 8, 8]
    assert ring_shape(4096, most=5 * 8192) == (8192, 5)
    assert ring_shape(4096, most=1) == (8192, 2)
    assert ring_shape(4096, 6, most=1) == (8192, 6)
    assert ring_shape(0) == (4096, 16)
    assert ring_shape(1 << 30)[1] == 4


def test_a_restarted_writer_takes_over_the_slots_that_readers_still_hold() -> None:
    ring = RingWriter(8, 3, generation=4, held={1: [7], 2: []})
    assert ring.free == 2
    assert ring.held_by(7) == [Slot(4, 1, 8)]
    assert ring.returned(4, 1, 7)
    with pytest.raises(ValueError, match="does not exist"):
        RingWriter(8, 3, held={3: [7]})
