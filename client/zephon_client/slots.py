"""Slots of lane rings, seen from the rank: mapped memory, leases on slots, and what is to be given back.

A segment is mapped once per lane and generation: writable where this rank is the only reader, so that its tensors are
ordinary ones, else read-only. A generation is unmapped when the lane has moved on to a later one and the last of its
slots is back; arrays that are still alive keep their memory all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from zephon.errors import ProtocolError, ZephonError
from zephon.transport.protocol import NewSegment
from zephon.transport.rings import ALONE_AT_ONCE, Anchor, LeaseKeeper, SlotKey, SlotLease, leased, may_hold
from zephon.transport.segments import Segment
from zephon_client.ready import Ready

_UNTOLD = 32


@dataclass(eq=False)
class Mapped:
    """One generation of a lane's ring. `out` counts the slots that came and were not given back.

    One that is `alone` holds one batch too large for the ring, which goes on beside it. `most` of the slots may be held
    here, so that one always stays free, unless other readers hold different ones; where they did before, the slots are
    in `parts`, one for each reader.
    """

    segment: Segment
    anchor: Anchor | None
    slot_bytes: int
    slots: int
    alone: bool
    parts: int
    most: int
    out: int = 0

    def close(self) -> None:
        """Unmaps it once no array keeps it alive."""
        self.anchor = None
        self.segment.close()


class Slots:
    """All rings of one client. `writable`: this rank is their only reader."""

    def __init__(self, writable: bool) -> None:
        self._writable = writable
        self._keeper = LeaseKeeper()
        self._mapped: dict[tuple[int, int], Mapped] = {}
        self._current: dict[int, int] = {}
        self._unused: list[SlotKey] = []
        self.when_unmapped: Callable[[tuple[int, int]], None] = lambda _: None
        """Is told of each segment, as (lane, generation), right before it is unmapped."""
        self.spare = 0
        """How many slots may be free here without the engine being told: a quarter of the rings, within reason."""

    def map(self, message: NewSegment, fd: int) -> None:
        """Maps a new segment; `fd` is used up."""
        segment = Segment.attach(fd, self._writable, name=f"lane {message.lane} generation {message.generation}")
        fits = message.slots * message.slot_bytes <= segment.size
        if min(message.slots, message.slot_bytes, message.parts) < 1 or not fits:
            segment.close()
            raise ProtocolError(f"{segment.name}: {message.slots} slots of {message.slot_bytes} bytes do not fit")
        key = message.lane, message.generation
        if key in self._mapped:
            segment.close()
            raise ProtocolError(f"{segment.name}: came twice")
        slots, alone, parts = message.slots, message.alone, message.parts
        most = 0 if alone else may_hold(slots, parts)
        self._mapped[key] = Mapped(segment, segment.array.view(Anchor), message.slot_bytes, slots, alone, parts, most)
        newest = {lane: at.slots for (lane, _), at in sorted(self._mapped.items()) if not at.alone}
        self.spare = min(sum(newest.values()) // 4, _UNTOLD)

    def came(self, ready: Ready) -> None:
        """Notes that a slot holds a batch for this client."""
        mapped = self._mapped.get((ready.lane, ready.generation))
        if mapped is None or not 0 <= ready.index < mapped.slots or not 0 <= ready.nbytes <= mapped.slot_bytes:
            raise ProtocolError(
                f"lane {ready.lane}: a batch of {ready.nbytes} bytes in slot {ready.index} of generation "
                f"{ready.generation}, which is not mapped here"
            )
        mapped.out += 1
        ready.ring = mapped
        if not mapped.alone and self._current.get(ready.lane, -1) < ready.generation:
            self._current[ready.lane] = ready.generation
            self._unmap_drained(ready.lane)

    def lease(self, ready: Ready) -> SlotLease:
        """The bytes of a batch; the slot is to be given back once no array over them lives.

        Who was interrupted in here calls it again.
        """
        source: SlotLease | None = ready.source
        if source is None:
            anchor = ready.ring.anchor
            if anchor is None:  # another thread has closed the loader just now
                raise ZephonError("this Loader was closed while a batch was asked for. Its state_dict() still works.")
            source = ready.source = leased(anchor, ready.index * ready.ring.slot_bytes, ready.nbytes)
        self._keeper.hold(source, (ready.lane, ready.generation, ready.index))
        return source

    @property
    def read_only(self) -> bool:
        """Whether the rings are mapped so."""
        return not self._writable

    def memory(self, segment: tuple[int, int]) -> npt.NDArray[np.uint8] | None:
        """All of a ring's segment, by (lane, generation); None for that of a batch which travels alone."""
        mapped = self._mapped[segment]
        return None if mapped.alone else mapped.segment.array

    def at_hand(self, ready: Ready) -> bool:
        """Whether that ring is surely not `short`. Takes next to no time."""
        return len(self._keeper.live[ready.lane]) < ready.ring.most

    def short(self, ready: Ready) -> bool:
        """Whether holding one more slot of that ring would leave the engine too few to write ahead into.

        Of batches that travel alone each reader of several would hold another one.
        """
        self._keeper.held(ready.lane)
        held, ring = self._keeper.live[ready.lane], ready.ring
        if ring.alone:
            return not self._writable or sum(self._mapped[key[:2]].alone for key in held) >= ALONE_AT_ONCE - 1
        return sum(key[1] == ready.generation for key in held) >= ring.most

    def held(self, lane: int | None = None) -> int:
        """Slots of a lane, or of all, over which arrays live."""
        return self._keeper.held(lane)

    def unused(self, ready: Ready) -> None:
        """The batch will not be delivered: its slot goes back."""
        self._unused.append((ready.lane, ready.generation, ready.index))

    def to_return(self) -> list[int]:
        """The slots to give back since the last call: lane, generation and index of each, end to end."""
        keys = self._keeper.drain()
        if self._unused:
            keys, self._unused = [*keys, *self._unused], []
        for lane, generation, _ in keys:
            mapped = self._mapped.get((lane, generation))
            if mapped is None:  # closed meanwhile
                continue
            mapped.out -= 1
            if mapped.alone:
                del self._mapped[lane, generation]
                mapped.close()
            elif generation != self._current.get(lane):
                self._unmap_drained(lane)
        return [number for key in keys for number in key]

    def close(self) -> None:
        """Unmaps everything that no array keeps alive."""
        for key, mapped in self._mapped.items():
            self.when_unmapped(key)
            mapped.close()
        self._mapped = {}

    def mapped(self) -> list[tuple[int, int]]:
        """(lane, generation) of what is mapped now."""
        return sorted(self._mapped)

    def _unmap_drained(self, lane: int) -> None:
        current: Any = self._current[lane]
        for key, mapped in list(self._mapped.items()):
            if key[0] == lane and key[1] < current and not mapped.out and not mapped.alone:
                del self._mapped[key]
                self.when_unmapped(key)
                mapped.close()
