"""Lanes that *stand in*: produced for nobody, to know which rounds all lanes reach while their ranks do not come.

Where ends are even and are not known beforehand, a round is released once every lane of the run is known to reach it. A
rank that was told of a round right before an engine's death delivers it, and then waits in a collective for the ranks
that were not told. It comes back after that; until then an engine whose ranks are here finds out by itself how far the
lanes of such a group come. It begins at the windows that are known, and keeps no further ahead than its own ranks have
delivered.

Ranks need not wait for each other, and then those that are here could go on through epoch after epoch. What engines
keep of earlier ones does not go back so far (`EPOCHS_STATED`), and who came then could not end its own. So lanes of a
group that lacks ranks go on to the next epoch, and to none behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from zephon.frontiers import Frontier
from zephon.lanes import batch_end, batch_round
from zephon.plan import Plan
from zephon_daemon.gates import ENDLESS, Gates
from zephon_daemon.lane import Lane, Reader
from zephon_daemon.others import Others


class StandIns:
    """Those of one run in one engine. The arguments are the run's own; `groups` those whose lanes stand in now."""

    def __init__(
        self,
        plan: Plan,
        gates: Gates,
        others: Others,
        readers: Mapping[int, Reader],
        starts: Mapping[int, Frontier],
        first_epoch: int,
    ) -> None:
        self.groups: set[int] = set()
        self._last_epochs: dict[int, int] = {}
        self._plan, self._gates, self._others = plan, gates, others
        self._readers, self._starts, self._first_epoch = readers, starts, first_epoch

    def begin(self, group: int) -> None:
        """The group's lanes stand in from now on."""
        self.groups.add(group)
        self.limit(group)

    def limit(self, group: int) -> None:
        """Lanes of the group go on without some of its ranks, or all."""
        self._last_epochs[group] = 1 + max(reader.at_epoch for reader in self._readers.values())

    def holds(self, lane: Lane, missing: int) -> bool:
        """Whether a lane has gone on for as long as it may while so many ranks of its group have not come."""
        return missing > 0 and lane.epoch >= self._last_epochs.get(lane.group, ENDLESS)

    def needed(self, missing: Collection[int], came: Collection[int]) -> list[int]:
        """Of the groups of which nobody is here or in another engine, those that lost theirs, if ends depend on them.

        `came`: those that were in this engine, which has their lanes.
        """
        if not self._readers or not self._plan.settings.even_ends:
            return []
        gate = self._gates.of(max(reader.at_epoch for reader in self._readers.values()), 0)
        if gate.final or gate.rounds == ENDLESS:
            return []
        resumed = any(reader.stated is not None for reader in self._readers.values())
        lost = {group for group in missing if resumed and group not in self._others.came} | set(self._others.lost)
        return sorted(lost.intersection(missing) - set(came) - self.groups)

    def last_known(self, number: int) -> tuple[int, Frontier]:
        """The latest epoch that a reader here is in, and where a window began that the lane was in by then."""
        reader = max(self._readers.values(), key=lambda each: (each.at_epoch, each.rounds))
        epoch, stated = reader.at_epoch, reader.stated
        reached = self._gates.of(epoch, 0).most + reader.rounds * self._plan.microbatch_size
        known = [self._others.window(number, epoch, reached)]
        known += [stated.at.lanes[number]] if stated is not None and stated.at.epoch == epoch else []
        known += [self._starts[number].window] if epoch == self._first_epoch else []
        return epoch, max(known, key=lambda each: each.records)

    def pass_over(self, lane: Lane) -> None:
        """The lane comes as far as all readers that are here have delivered."""
        gate, size, stream = self._gates.of(lane.epoch, lane.group), self._plan.microbatch_size, lane.producer.stream
        delivered = [r.rounds if r.epoch == lane.epoch else ENDLESS for r in self._readers.values()]
        limit = min([gate.rounds, *delivered])
        while True:
            until = batch_end(lane.stands, gate.most, size)
            count = until - lane.written
            if batch_round(until, gate.most, size) > limit or (len(stream) < count and not lane.producer.ended):
                return
            stream.take(min(count, len(stream)))
            lane.stands, lane.written = until, stream.first
