"""Which rounds of an epoch may be delivered: a gate for all lanes, or one a group where ends need not be even.

A round is released when every lane that takes part is known to reach it (`zephon.lanes.released_rounds`); where
arithmetic gives the totals beforehand, all are at once, and in an endless run. What an engine before this one released
stays so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zephon.frontiers import Frontier, furthest
from zephon.lanes import is_spent, released_rounds
from zephon.plan import Plan
from zephon.transport.protocol import Released
from zephon.transport.statement import EPOCHS_STATED

ENDLESS = 2**62


@dataclass
class Gate:
    """Which rounds of an epoch have been released to a set of lanes. `stated`: by an engine before this one."""

    most: int
    rounds: int = -ENDLESS
    final: bool = False
    stated: Released | None = None
    produced: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)


class Gates:
    """The gates of one run. `starts` and `first_epoch` are its origin's, `owned` the lanes of each group."""

    def __init__(
        self, plan: Plan, starts: Mapping[int, Frontier], first_epoch: int, owned: Sequence[Sequence[int]]
    ) -> None:
        self._plan, self._starts, self._first_epoch, self._owned = plan, starts, first_epoch, owned
        self._gates: dict[tuple[int, int], Gate] = {}

    def of(self, epoch: int, group: int) -> Gate:
        """The gate of an epoch: of all lanes, or of the group's own where ends need not be even."""
        key = (epoch, -1 if self._plan.settings.even_ends else group)
        gate = self._gates.get(key)
        if gate is None:
            numbers = range(self._plan.lanes) if key[1] < 0 else self._owned[group]
            first = epoch == self._first_epoch
            begins = {n: self._starts[n].records if first else 0 for n in numbers}
            gate = Gate(furthest(self._starts.values()) if first else 0, produced=begins)
            totals = self._plan.lane_totals(epoch)
            if totals is not None:
                gate.produced = {n: totals[n] for n in numbers}
                gate.ended = set(numbers)
            self._gates[key] = gate
            for old in [k for k in self._gates if k[0] <= epoch - EPOCHS_STATED]:
                del self._gates[old]
        return gate

    def final(self) -> list[Released]:
        """Of the epochs whose last round is known, what readers are told. For runs whose ends are even."""
        return [self.released(epoch, gate) for (epoch, _), gate in self._gates.items() if gate.final]

    def left_out(self) -> dict[int, int]:
        """By epoch, of those whose end is known: the records that no round holds. Bad records are not among them."""
        found: dict[int, int] = {}
        for (epoch, _), gate in self._gates.items():
            if self._plan.settings.drop_last and gate.final and len(gate.ended) == len(gate.produced):
                reached = gate.most + max(0, gate.rounds) * self._plan.microbatch_size
                left = sum(max(0, records - reached) for records in gate.produced.values())
                found[epoch] = found.get(epoch, 0) + left
        return found

    def open(self, gate: Gate, epoch: int) -> None:
        """Release what is known to be reached."""
        if self._plan.ends(epoch) is False:
            gate.rounds = ENDLESS
            return
        if not any(gate.produced.values()) and len(gate.ended) < len(gate.produced):
            return  # while no lane has a record, an end would hide that none comes through
        rounds, final = released_rounds(
            gate.produced, gate.ended, gate.most, self._plan.microbatch_size, self._plan.settings.drop_last
        )
        gate.rounds, gate.final = max(gate.rounds, rounds), gate.final or final

    def released(self, epoch: int, gate: Gate) -> Released:
        """What the gate's readers are told."""
        if gate.stated is not None:  # of lanes that have not been produced anew nothing is known but what was said
            return Released(epoch, gate.rounds, gate.final, gate.stated.spent)
        starts = {lane: self._starts[lane].records for lane in gate.produced}
        stands = {lane: self._starts[lane].stands for lane in gate.produced}
        spent = (
            gate.final
            and epoch == self._first_epoch
            and is_spent(starts, gate.produced, gate.most, gate.rounds, self._plan.microbatch_size, stands)
        )
        return Released(epoch, gate.rounds, gate.final, spent)
