"""Blocks on their way to another process: a ring of this one's, handed over once, with a slot for each block in flight.

The ring is as large as the blocks turn out to be: it grows by generations, and a block several times as large as the
others, or too large for a ring within the limit, travels in a segment of its own. The other side gives each slot back.
A worker sends outcomes so, and whoever gives tasks of later stages to it their records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zephon.budget import SETTING
from zephon.errors import MemoryLimit, ProtocolError
from zephon.transport.layout import Layout
from zephon.transport.protocol import NewSegment
from zephon.transport.rings import LARGE_RING, RingWriter, Slot
from zephon.transport.segments import MemoryHeadroom, Segment

HEADROOM = MemoryHeadroom(setting=f"{SETTING} or --workers")
SMALLEST_SLOT = 256 << 10


Bytes = npt.NDArray[np.uint8]


class BlockRing:
    """`slots` blocks at once. `hand_over(message, fd)` tells the other side of a new segment.

    `limit`: bytes that its segments may take together; None: as many as are free.
    """

    def __init__(self, name: str, slots: int, hand_over: Callable[[NewSegment, int], None]) -> None:
        self._name, self._slots, self._hand_over = name, slots, hand_over
        self._ring: RingWriter | None = None
        self._segments: dict[int, Segment] = {}
        self.limit: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its segments."""
        return sum(segment.size for segment in self._segments.values())

    def has_room(self, nbytes: int) -> bool:
        """Whether a block may be written now, or will not fit any better when the other side has given some back."""
        if self._ring is None or self.limit is None or self._ring.fits(nbytes):
            return True
        wanted = nbytes if self._too_large(nbytes) else _slot_bytes(nbytes) * self._slots
        return not self._ring.in_flight or self.nbytes + wanted <= self.limit

    def write(self, layout: Layout) -> Slot:
        """Put a block into a free slot, of which there must be one. Raises MemoryLimit."""
        slot = self._slot_for(layout.nbytes)
        assert self._ring is not None
        layout.write(self._segments[slot.generation].array[slot.offset : slot.offset + layout.nbytes])
        self._ring.publish(slot, (0,))
        return slot

    def free(self, generation: int, index: int) -> None:
        """The other side is done with a slot."""
        assert self._ring is not None
        self._ring.returned(generation, index, 0)
        self._close_retired()

    def close(self) -> None:
        """The other side is gone."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()

    def _slot_for(self, nbytes: int) -> Slot:
        """Room for a block. One too large for the ring, or for the limit, gets a segment of its own."""
        if self._ring is None or self._ring.generation.id not in self._segments:  # the last try may have failed
            self._grow(nbytes if nbytes <= LARGE_RING and not self._too_large(nbytes) else 0)
        assert self._ring is not None
        if self._ring.outgrows(nbytes) or (not self._ring.fits(nbytes) and self._too_large(nbytes)):
            if self.limit is not None and self.nbytes + nbytes > self.limit and not self._ring.in_flight:
                self._grow(0)
            slot = self._ring.acquire_alone(nbytes)
            try:
                self._make(slot.generation, nbytes, 1, alone=True)
            except BaseException:
                self._ring.abandon(slot)
                self._close_retired()
                raise
            return slot
        if not self._ring.fits(nbytes):
            self._grow(nbytes)
        room = self._ring.acquire(nbytes)
        assert room is not None, "more blocks at once than the ring has slots"
        return room

    def _too_large(self, nbytes: int) -> bool:
        """Whether a ring for such blocks could not grow once more with the old one still in use."""
        return self.limit is not None and 2 * _slot_bytes(nbytes) * self._slots > self.limit

    def _grow(self, nbytes: int) -> None:
        size = _slot_bytes(nbytes)
        if self._ring is None:
            self._ring = RingWriter(size, self._slots)
        else:
            self._ring.regrow(size, self._slots)
            self._close_retired()
        self._make(self._ring.generation.id, size, self._slots)

    def _close_retired(self) -> None:
        assert self._ring is not None
        for generation in self._ring.retired():
            if generation in self._segments:
                self._segments.pop(generation).close()

    def _make(self, generation: int, slot_bytes: int, slots: int, alone: bool = False) -> None:
        size = slot_bytes * slots
        if alone and self.limit is not None and self.nbytes + size > self.limit:
            raise MemoryLimit(
                f"a block of {size} bytes needs a segment of its own, but only {max(0, self.limit - self.nbytes)} "
                f"bytes are left for this worker in the memory budget. Raise {SETTING}, or lower --workers."
            )
        segment = Segment.create(self._name, size, limit=HEADROOM)
        self._segments[generation] = segment
        self._hand_over(NewSegment(-1, generation, slot_bytes, slots, alone), segment.fileno())


@dataclass(frozen=True)
class _Mapped:
    """One segment of another process: `slots` slots of `slot_bytes` bytes."""

    segment: Segment
    slot_bytes: int
    slots: int
    alone: bool


class OtherRing:
    """The other side's view of a `BlockRing`, which it may not trust."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._segments: dict[int, _Mapped] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of its segments."""
        return sum(mapped.segment.size for mapped in self._segments.values())

    def take(self, message: NewSegment, fds: list[int]) -> None:
        """Another ring, in place of the one before, or the memory of a block that travels alone.

        Whoever still has a block of the one before keeps its memory. `fds` is emptied of what is kept.
        """
        if not fds:
            raise ProtocolError("a segment came without its descriptor")
        segment = Segment.attach(fds.pop(), writable=False, name=self._name)
        if message.slots < 1 or message.slot_bytes < 1 or message.slots * message.slot_bytes > segment.size:
            raise ProtocolError(f"{message.slots} slots of {message.slot_bytes} bytes do not fit {segment.size}")
        if not message.alone:
            for generation in [number for number, old in self._segments.items() if not old.alone]:
                self._segments.pop(generation).segment.close()
        self._segments[message.generation] = _Mapped(segment, message.slot_bytes, message.slots, message.alone)

    def slot(self, generation: int, index: int, nbytes: int) -> Bytes:
        """The bytes of a block. Of one that travels alone, they can be had once."""
        ring = self._segments.get(generation)
        if ring is None or not 0 <= index < ring.slots or not 0 <= nbytes <= ring.slot_bytes:
            raise ProtocolError(
                f"a block of {nbytes} bytes in slot {index} of generation {generation}, which is not there"
            )
        offset = index * ring.slot_bytes
        found = ring.segment.array[offset : offset + nbytes]
        if ring.alone:
            self._segments.pop(generation).segment.close()
        return found

    def close(self) -> None:
        """No more of it is needed."""
        for mapped in self._segments.values():
            mapped.segment.close()
        self._segments.clear()


def _slot_bytes(nbytes: int) -> int:
    size = max(SMALLEST_SLOT, 1 << (nbytes * 5 // 4 - 1).bit_length() if 0 < nbytes < 1 << 20 else nbytes * 5 // 4)
    return -(-size // 4096) * 4096
