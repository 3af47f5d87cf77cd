"""Lanes that *stand in*: produced for nobody, to know which rounds all lanes reach while their ranks do not come.

Where ends are even and are not known beforehand, a round is released once every lane of the run is known to reach it. A
rank that was told of a round right before an engine's death delivers it, and then waits in a collective for the ranks
that were not told. It comes back after that; until then the next engine finds out by itself how far its lanes come. It
begins at the windows that other ranks know, and keeps no further ahead than these have delivered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zephon.lanes import batch_end, batch_round
from zephon.plan import Plan
from zephon.producer import LaneProducer
from zephon_daemon.gates import ENDLESS, Gate
from zephon_daemon.lane import Lane, Reader


def stand_ins(
    plan: Plan, group: int, numbers: Sequence[int], readers: Iterable[Reader], task_samples: int
) -> list[Lane]:
    """The lanes of a group of which nobody came, from what the reader knows of them that has come furthest."""
    stated = [reader.stated for reader in readers if reader.stated is not None]
    furthest = max(stated, key=lambda each: (each.at.epoch, each.rounds))
    made = []
    for number in numbers:
        start = furthest.at.lanes[number]
        producer = LaneProducer(plan, furthest.at.epoch, number, start, task_samples)
        made.append(Lane(number, group, producer, start.place, start.records, announced=0))
    return made


def pass_over(lane: Lane, gate: Gate, readers: Iterable[Reader], microbatch_size: int) -> None:
    """A lane that stands in comes as far as all readers that are here have delivered."""
    delivered = [reader.rounds if reader.epoch == lane.epoch else ENDLESS for reader in readers]
    limit, stream = min([gate.rounds, *delivered]), lane.producer.stream
    while True:
        until = batch_end(lane.stands, gate.most, microbatch_size)
        count = until - lane.written
        if batch_round(until, gate.most, microbatch_size) > limit or (len(stream) < count and not lane.producer.ended):
            return
        stream.take(min(count, len(stream)))
        lane.stands, lane.written = until, stream.first
