"""The rings of one run's lanes: how large they are, and what keeps readers that share one from stopping it.

A reader knows how many slots it holds itself, and leaves the engine some to write into. Readers of one group mostly
hold the same slots, so each may hold as many as one alone (`rings.may_hold`), and none of them copies. Where they keep
*different* batches all slots may be theirs. Then every one of them waits for the lane's next batch, at the very place
where the lane stands, and says so: the lane goes on in a new ring that is *divided* among them. Each may hold its part
of that one and gets copies beyond it, so that a slot always comes free: this happens once in a lane's life.

Rejected: parts from the beginning. Eight readers of eight slots could hold none then, and would copy every batch.
"""

from __future__ import annotations

from collections.abc import Sized

from zephon.transport.rings import ALONE, RingWriter, ring_shape
from zephon_daemon.instructions import MakeRing
from zephon_daemon.lane import Lane, Reader


class LaneRings:
    """`slots`: how many each has, None to choose; `most_bytes`: what all should take together at most, None for any."""

    def __init__(self, slots: int | None, most_bytes: int | None, lanes: Sized) -> None:
        self._slots, self._most_bytes, self._lanes = slots, most_bytes, lanes

    def shape_of(self, nbytes: int) -> tuple[int, int]:
        """`(slot_bytes, slots)` of a lane's ring for batches of about `nbytes`."""
        return ring_shape(nbytes, self._slots, self._share)

    def begin(self, lane: Lane, nbytes: int, clients: tuple[int, ...]) -> MakeRing:
        """A first ring, or a further one: with room to spare, since the next batch may be a little larger still."""
        slot_bytes, slots = self.shape_of(nbytes)
        lane.renew = False
        if lane.ring is None:
            lane.ring = RingWriter(slot_bytes, slots)
            shape = lane.ring.generation
        else:
            shape = lane.ring.regrow(slot_bytes, slots)
        # Whoever comes later gets a ring anew.
        return MakeRing(lane.number, shape.id, slot_bytes, slots, clients, parts=len(clients) if lane.divided else 1)

    def too_large(self, nbytes: int, lane: Lane) -> bool:
        """Whether a ring for such batches would be more than the lane's share, so that they had better travel alone."""
        if lane.ring is None or lane.ring.fits(nbytes) or self._share is None or nbytes < ALONE:
            return False
        slot_bytes, slots = self.shape_of(nbytes)
        return slot_bytes * slots > self._share

    def divide(self, lane: Lane, readers: list[Reader]) -> bool:
        """Whether the lane goes on in a divided ring from now on, since its `readers` wait for what they hold."""
        if lane.ring is None or lane.ring.free or lane.renew or lane.divided or not readers:
            return False
        if any(reader.waits != (lane.number, lane.place) for reader in readers):
            return False
        lane.renew = lane.divided = True
        return True

    @property
    def _share(self) -> int | None:
        """Bytes that a lane's ring may take, so that all of them may grow once more with the old ones still in use."""
        return None if self._most_bytes is None else self._most_bytes // (2 * max(1, len(self._lanes)))
