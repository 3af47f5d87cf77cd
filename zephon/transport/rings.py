"""Slots: who may write one, who still reads one, and when it is free again.

A ring is a segment cut into equal slots, one payload each:

    generation 0   | slot 0 | slot 1 | slot 2 | ...        offset of slot i = i * slot_bytes
    generation 1   |  slot 0  |  slot 1  | ...             a new segment, after `regrow`
    generation 2   |            slot 0            |        a payload `alone`: a segment for it only, the ring stays

Writer's side, `RingWriter`: bookkeeping alone, it touches no byte of the segment. A slot goes
`free -> acquired -> published to a set of readers -> free` when the last of these has returned it or is gone, in any
order. After `regrow` the old generation gives out no slot and retires once all of its slots are back, as does the
generation of a payload alone.

Reader's side, `LeaseKeeper`: the lease on a slot is the lifetime of the arrays over it. A numpy view refers to the
array at the end of its chain of bases, but the chain is followed past no array whose base is of another type. So an
ndarray subclass instance, the `SlotLease`, sits between the mapping and what the user gets:

    mapping  <-  anchor (another subclass)  <-  SlotLease  <-  plain arrays, views of them, tensors, memoryviews

and when the last of those dies, so does the SlotLease, and the weak reference to it is appended to a queue. That is all
that happens then: in any thread, in the middle of anything, without a lock or a line of Python. What a forked child's
copies of the arrays append stays in the child.

Rejected: `weakref.finalize` (a module-wide registry, `atexit` hooks, runs in forked children), reference counts kept
in shared memory (a killed reader leaves them wrong), returning slots on `del batch` (a kept view would be overwritten).
"""

from __future__ import annotations

import os
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zephon.errors import ProtocolError

Bytes = npt.NDArray[np.uint8]


PAGE = 4096
SLOTS, MANY_SLOTS = 8, 16
SMALL_RING, LARGE_RING = 2 << 20, 64 << 20


ALONE = 1 << 20
"""Smaller payloads never travel alone: to make the ring larger costs less than a segment for each."""

ALONE_AT_ONCE = 2
"""Payloads of one ring that travel alone at once: the next one waits until one of them is back."""

_UINT8 = np.dtype(np.uint8)
_OUTGROWN = 4
_IN_A_ROW = 4


def ring_shape(nbytes: int, slots: int | None = None, most: int | None = None) -> tuple[int, int]:
    """`(slot_bytes, slots)` of a ring for payloads of about `nbytes`: with a quarter to spare, and, unless told
    otherwise, eight slots; up to sixteen while the ring is under 2 MiB, since messages are sent for several slots at
    once, and from 64 MiB on fewer, but four at least.

    Where it would take more than `most` bytes it has fewer slots, unless their number was told, but two at least.
    """
    slot_bytes = max(1, -(-nbytes * 5 // 4 // PAGE)) * PAGE
    if slots is not None:
        return slot_bytes, slots
    wanted = max(4, min(SLOTS, LARGE_RING // slot_bytes), min(MANY_SLOTS, SMALL_RING // slot_bytes))
    return slot_bytes, wanted if most is None else max(2, min(wanted, most // slot_bytes))


def may_hold(slots: int, parts: int = 1) -> int:
    """How many slots of a ring the reader of one of so many parts may hold: of all but two, so that there are some to
    write ahead into, and two of few slots, since a plain loop still holds its last batch while it asks for the next.

    One slot at least is in no part.
    """
    return max(min(2, (slots - 1) // parts), (slots - 2) // parts)


class Slot(NamedTuple):
    """One slot: `offset` bytes into the segment of its generation."""

    generation: int
    index: int  # type: ignore[assignment]  # in place of a method of tuples that no slot needs
    offset: int


SlotKey = tuple[int, int, int]
"""(lane, generation, index): what a reader gives back."""


@dataclass(frozen=True)
class Generation:
    """The shape of one segment of a ring: `slots` slots of `slot_bytes` bytes."""

    id: int
    slot_bytes: int
    slots: int

    @property
    def nbytes(self) -> int:
        return self.slot_bytes * self.slots


@dataclass
class _Drain:
    """Where the slots of one generation are. A published slot maps to the readers that have not returned it."""

    shape: Generation
    free: list[int]
    alone: bool = False
    acquired: set[int] = field(default_factory=set)
    published: dict[int, set[int]] = field(default_factory=dict)

    @property
    def in_flight(self) -> int:
        return len(self.acquired) + len(self.published)


class RingWriter:
    """The bookkeeping of one ring. Used by one thread.

    `held` maps slots that readers hold from the start (after the writer's restart) to these readers. What a peer can
    get wrong (`returned`) raises ProtocolError, a writer's own mistake ValueError; neither changes anything.
    """

    def __init__(
        self, slot_bytes: int, slots: int, *, generation: int = 0, held: Mapping[int, Iterable[int]] | None = None
    ) -> None:
        self._generations: dict[int, _Drain] = {}
        self._retired: list[int] = []
        self._next = generation
        self._outgrown = 0
        self.alone = 0
        """Payloads in flight that travel alone."""
        self._current = self._begin(slot_bytes, slots)
        for index, readers in (held or {}).items():
            if index not in self._current.free:
                raise ValueError(f"held slot {index} does not exist in a ring of {slots} slots")
            left = set(readers)
            if left:
                self._current.free.remove(index)
                self._current.published[index] = left

    def _begin(self, slot_bytes: int, slots: int, *, alone: bool = False) -> _Drain:
        if slot_bytes <= 0 or slots <= 0:
            raise ValueError(f"a ring needs slots of a positive size, not {slots} slots of {slot_bytes} bytes")
        # The slot freed last is used first: its bytes are the likeliest to be in a cache.
        number = self._next
        self._next += 1
        drain = _Drain(Generation(number, slot_bytes, slots), list(range(slots - 1, -1, -1)), alone)
        self._generations[number] = drain
        return drain

    @property
    def generation(self) -> Generation:
        """The generation that gives out slots."""
        return self._current.shape

    @property
    def free(self) -> int:
        """Slots that `acquire` can still give out."""
        return len(self._current.free)

    @property
    def in_flight(self) -> int:
        """Slots acquired or published, of all generations."""
        return sum(drain.in_flight for drain in self._generations.values())

    def fits(self, nbytes: int) -> bool:
        """Whether a payload of `nbytes` fits a slot of this generation at all."""
        return nbytes <= self._current.shape.slot_bytes

    def outgrows(self, nbytes: int) -> bool:
        """Whether a payload that does not fit should travel alone rather than make every slot as large.

        So it is with one several times the size of a slot, unless it is one of a few in a row.
        """
        if self.fits(nbytes):
            self._outgrown = 0
            return False
        self._outgrown += 1
        large = nbytes > max(ALONE, _OUTGROWN * self._current.shape.slot_bytes)
        return large and self._outgrown < _IN_A_ROW

    def acquire_alone(self, nbytes: int) -> Slot:
        """The only slot of a generation for this payload; its segment is to be made, and to be closed when it retires.

        The generation that gives out slots stays the same.
        """
        drain = self._begin(nbytes, 1, alone=True)
        drain.free.clear()
        drain.acquired.add(0)
        self.alone += 1
        return Slot(drain.shape.id, 0, 0)

    def acquire(self, nbytes: int) -> Slot | None:
        """A slot to write `nbytes` into; None when none is free, or when `fits` says no."""
        current = self._current
        if not current.free or nbytes > current.shape.slot_bytes:
            return None
        index = current.free.pop()
        current.acquired.add(index)
        return Slot(current.shape.id, index, index * current.shape.slot_bytes)

    def publish(self, slot: Slot, readers: Iterable[int]) -> bool:
        """Hands a written slot to `readers`; True when there are none, and it is free again at once."""
        drain = self._acquired(slot)
        left = set(readers)
        drain.acquired.remove(slot.index)
        if left:
            drain.published[slot.index] = left
        else:
            self._freed(drain, slot.index)
        return not left

    def abandon(self, slot: Slot) -> None:
        """Gives back a slot that was acquired and will not be published."""
        drain = self._acquired(slot)
        drain.acquired.remove(slot.index)
        self._freed(drain, slot.index)

    def returned(self, generation: int, index: int, reader: int) -> bool:
        """Notes that `reader` is done with a slot; True when it was the last one and the slot is free."""
        drain = self._generations.get(generation)
        if drain is None:
            raise ProtocolError(f"slot {index} of generation {generation}: the ring has no such generation, or no more")
        left = drain.published.get(index)
        if left is None or reader not in left:
            raise ProtocolError(
                f"slot {index} of generation {generation}: reader {reader} returned it, but does not hold it "
                "(returned twice, never handed to it, or there is no such slot)"
            )
        left.remove(reader)
        if left:
            return False
        del drain.published[index]
        self._freed(drain, index)
        return True

    def drop_reader(self, reader: int) -> list[Slot]:
        """Takes back all that `reader` holds, for it is gone; the slots that became free."""
        freed = []
        for slot in self.held_by(reader):
            if self.returned(slot.generation, slot.index, reader):
                freed.append(slot)
        return freed

    def held_by(self, reader: int) -> list[Slot]:
        """The slots that `reader` has not returned."""
        return [
            Slot(number, index, index * drain.shape.slot_bytes)
            for number, drain in self._generations.items()
            for index, left in drain.published.items()
            if reader in left
        ]

    def regrow(self, slot_bytes: int, slots: int) -> Generation:
        """Starts the next generation, whose slots live in a new segment; the old one only drains from now on."""
        old = self._current
        self._current = self._begin(slot_bytes, slots)
        self._outgrown = 0
        self._retire_if_empty(old)
        return self._current.shape

    def retired(self) -> list[int]:
        """The generations whose last slot has come back since the last call: their segments may be closed."""
        retired, self._retired = self._retired, []
        return retired

    def _acquired(self, slot: Slot) -> _Drain:
        drain = self._generations.get(slot.generation)
        if drain is None or slot.index not in drain.acquired:
            raise ValueError(f"slot {slot.index} of generation {slot.generation} is not acquired")
        return drain

    def _freed(self, drain: _Drain, index: int) -> None:
        drain.free.append(index)
        self._retire_if_empty(drain)

    def _retire_if_empty(self, drain: _Drain) -> None:
        if drain is not self._current and not drain.in_flight:
            del self._generations[drain.shape.id]
            self.alone -= drain.alone
            self._retired.append(drain.shape.id)

    def check_invariants(self) -> None:
        """Every slot is in exactly one place, published ones have a reader, and only draining generations linger."""
        assert self._generations[self._current.shape.id] is self._current
        for number, drain in self._generations.items():
            assert number == drain.shape.id < self._next
            assert drain.alone or number <= self._current.shape.id
            places = [*drain.free, *drain.acquired, *drain.published]
            assert sorted(places) == list(range(drain.shape.slots)), f"generation {number}: {sorted(places)}"
            assert all(drain.published.values()), f"generation {number} has a published slot without a reader"
            assert drain is self._current or drain.in_flight, f"generation {number} should have retired"
        assert self.alone == sum(drain.alone for drain in self._generations.values())
        assert not set(self._retired) & set(self._generations)


class Anchor(np.ndarray[Any, Any]):
    """A mapping as leases are made over it: of a type of its own, so that numpy does not skip them when it collapses
    bases.
    """

    __slots__ = ()


class SlotLease(np.ndarray[Any, Any]):
    """Owns one slot for as long as any array over it lives. Never handed out itself."""

    __slots__ = ()


class _LeaseEnd(weakref.ref[SlotLease]):
    __slots__ = ("key",)
    key: SlotKey


class LeaseKeeper:
    """Makes arrays over slots and learns when the last array over each has died.

    All is for one thread; arrays may die in any. Arrays stay valid when the keeper is gone.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._ended: deque[_LeaseEnd] = deque()
        self.live: defaultdict[int, dict[SlotKey, _LeaseEnd]] = defaultdict(dict)
        """By lane, the leases of which it has not been seen that they ended: `held` looks, and counts."""
        self._returned: list[SlotKey] = []

    def lease(self, array: Bytes, offset: int, nbytes: int, key: SlotKey) -> Bytes:
        """The `nbytes` bytes at `offset` of the mapped `array`, as a plain uint8 array whose lifetime, with that of
        all views of it, is the lease. It can be written where `array` can.
        """
        owner = leased(array.view(Anchor), offset, nbytes)
        self.hold(owner, key)
        return owner.view(np.ndarray)

    def hold(self, owner: SlotLease, key: SlotKey) -> None:
        """The lease has begun: its end will be noted. Who was interrupted in here calls it again, for the same."""
        live = self.live[key[0]]
        if key not in live:
            end = _LeaseEnd(owner, self._ended.append)
            end.key = key
            live[key] = end
        elif live[key]() is not owner:
            self._sweep()
            if key in live:
                raise ProtocolError(f"slot {key}: handed out again while arrays over it live")
            self.hold(owner, key)

    def drain(self) -> list[SlotKey]:
        """The slots to give back: those whose last array has died since the last call. Empty in a forked child."""
        self._sweep()
        returned, self._returned = self._returned, []
        return returned if os.getpid() == self._pid else []

    def held(self, lane: int | None = None) -> int:
        """How many slots, of one lane or of all, still have arrays over them."""
        self._sweep()
        return sum(map(len, self.live.values())) if lane is None else len(self.live[lane])

    def _sweep(self) -> None:
        while self._ended:
            key = self._ended.popleft().key
            del self.live[key[0]][key]
            self._returned.append(key)


def leased(anchor: Anchor, offset: int, nbytes: int) -> SlotLease:
    """An owner of those bytes, uint8 `[nbytes]`; ProtocolError for others than the mapping has."""
    if offset < 0 or nbytes < 0 or offset + nbytes > len(anchor):
        raise ProtocolError(f"{nbytes} bytes at {offset} lie outside a segment of {len(anchor)} bytes")
    return SlotLease(nbytes, _UINT8, anchor, offset)
