"""The memory of lanes' rings: refused with both numbers where the budget or the machine does not have it."""

from __future__ import annotations

from zephon.budget import SETTING, Budget
from zephon.errors import MemoryLimit
from zephon.explain import packed_batch_bytes
from zephon.transport.segments import MemoryHeadroom, Segment
from zephon.words import many
from zephon_daemon.instructions import MakeRing
from zephon_daemon.run import Run

HEADROOM = MemoryHeadroom(setting=f"options(prefetch_batches=...), microbatch_size or {SETTING}")


def check_rings(run: Run, budget: Budget) -> None:
    """Refuses a run at its start whose rings cannot be had, where the size of its batches is known."""
    nbytes = packed_batch_bytes(run.plan)
    if nbytes is None:
        return
    slot_bytes, slots = run.rings.shape_of(nbytes)
    needed = slot_bytes * slots * len(run.lanes)
    what = f"the rings of {many(len(run.lanes), 'lane')} ({many(slots, 'slot')} of {slot_bytes} bytes each)"
    if needed > budget.lane_rings:
        raise MemoryLimit(budget.refusal(what, needed, budget.lane_rings, "lane rings"))
    HEADROOM.check(needed, what)


def make_ring(order: MakeRing, used: int, budget: Budget) -> Segment:
    """A ring's memory, or that of a batch that travels alone. `used` is what the rings have already, in bytes."""
    size = order.slot_bytes * order.slots
    if used + size > budget.lane_rings:
        what = order.alone or f"the ring of lane {order.lane} ({many(order.slots, 'slot')} of {order.slot_bytes} bytes)"
        raise MemoryLimit(budget.refusal(what, size, budget.lane_rings - used, "lane rings"))
    return Segment.create(f"zephon-lane-{order.lane}", size, limit=HEADROOM)
