"""The run that a rank is attached to, over its epochs: messages find their epoch, states become checkpoints.

The run outlives its connections: when the engine or the daemon dies, what was not delivered is forgotten, and
`statement` says to the next engine where to go on.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

from zephon.errors import CheckpointMismatch, ProtocolError
from zephon.frontiers import Checkpoint, Frontier, beginnings, steps_done
from zephon.transport.protocol import Announced, Attached, LaneTotal, ReadersLeft, Released
from zephon.transport.statement import EPOCHS_STATED, Statement
from zephon_client.epoch import Epoch
from zephon_client.ready import Ready


class Run:
    """Bookkeeping of one attached client, without I/O."""

    def __init__(self, plan: Attached, readers: int = 1, past: int = 0) -> None:
        """`past`: the records of each lane in the epochs before the plan's."""
        if len(plan.starts) != plan.lanes or any(len(start) != 4 for start in plan.starts):
            raise ProtocolError(f"the daemon gave {len(plan.starts)} frontiers for {plan.lanes} lanes")
        self.plan = plan
        self.lanes = list(plan.owned)
        self.dataset_names = tuple(plan.dataset_names)
        self.rounds_before = 0
        """Rounds delivered in earlier epochs of this run."""
        self.past = past
        """Records that each lane had its turn for in all epochs before this one, before a resume too."""
        self.begun = False
        """Whether the current epoch's batches were asked for."""
        self._identity: dict[str, Any] = json.loads(plan.identity)
        self._first = True
        starts = plan.frontiers()
        self._origin = Checkpoint(self._identity, plan.epoch, starts, past)
        self._readers = readers
        self.epoch = self._made(plan.epoch, starts)
        self._past: deque[Epoch] = deque(maxlen=EPOCHS_STATED - 1)
        self._later: dict[int, Epoch] = {}

    @property
    def resumed_at_end(self) -> bool:
        """Whether the loaded state turns out to be the end of its epoch; ask when the epoch is over.

        The engine says so, of all lanes: this rank may have nothing left where others have, and then all end it.
        """
        return self._first and self.epoch.spent and self.epoch.turns.most > 0

    @property
    def rounds(self) -> int:
        """Rounds delivered in this run, over its epochs."""
        return self.rounds_before + self.epoch.turns.rounds

    @property
    def steps(self) -> int:
        """Rounds delivered since the run's beginning, before a resume too."""
        return steps_done(self.past, self.epoch.turns.most, self.epoch.turns.rounds, self.plan.microbatch_size)

    def take(self, arrived: deque[Any]) -> list[Ready]:
        """Notes batches and messages, and empties the queue. Returns batches of an epoch that is over."""
        stale = []
        while arrived:
            message: Ready | Announced | LaneTotal | Released | ReadersLeft = arrived[0]
            if isinstance(message, ReadersLeft):
                self._readers = message.readers
            elif message.epoch == self.epoch.number:
                self.epoch.take(message)
            elif message.epoch > self.epoch.number:
                self._epoch(message.epoch).take(message)
            elif isinstance(message, Ready):
                stale.append(message)
            arrived.popleft()
        return stale

    def advance(self) -> list[Ready]:
        """Goes on to the next epoch. Returns the batches that will not be delivered any more."""
        left = self.epoch.undelivered()
        self.rounds_before += self.epoch.turns.rounds
        self.past += self.epoch.reached
        self._past.append(self.epoch)
        number = self.epoch.number + 1
        self.epoch = self._epoch(number)
        del self._later[number]
        self._first = self.begun = False
        return left

    def checkpoint(self) -> Checkpoint:
        """The state as it is now; at an epoch's end the start of the next."""
        if self.epoch.at_end:
            return Checkpoint(self._identity, self.epoch.number + 1, self._zeros(), self.past + self.epoch.reached)
        return Checkpoint(self._identity, self.epoch.number, self.epoch.frontiers(), self.past)

    def forget_undelivered(self) -> None:
        """The connection has ended: what came over it and was not delivered comes again over the next."""
        for epoch in (self.epoch, *self._later.values()):
            epoch.undelivered()

    def check_same(self, plan: Attached) -> None:
        """Refuses a plan that is not this run's: the recipe may have changed under it."""
        mine, its = self.plan, plan
        shape = ("lanes", "owned", "microbatch_size", "drop_last", "even_ends", "packed", "dataset_names", "epoch")
        differ = [name for name in shape if getattr(mine, name) != getattr(its, name)]
        differ += ["identity"] if json.loads(its.identity) != self._identity else []
        if differ:
            raise CheckpointMismatch(
                f"the daemon came back with another run: {', '.join(differ)} differ. Was the recipe changed, or its "
                "data, under the run? Start the job again from its last checkpoint."
            )

    def statement(self) -> Statement:
        """What the next engine must know."""
        known = (*self._past, self.epoch, *self._later.values())
        return Statement(
            origin=self._origin,
            at=Checkpoint(self._identity, self.epoch.number, {**self.epoch.windows(), **self.epoch.own_frontiers()}),
            stands=dict(self.epoch.turns.stands),
            rounds=self.epoch.turns.rounds,
            readers=self._readers,
            released=tuple(epoch.released for epoch in known if epoch.released is not None),
            totals=tuple(total for epoch in known for total in epoch.totals()),
        )

    def _zeros(self) -> dict[int, Frontier]:
        return beginnings(self.plan.lanes, self.plan.drop_last)

    def _epoch(self, number: int) -> Epoch:
        if number not in self._later:
            self._later[number] = self._made(number, self._zeros())
        return self._later[number]

    def _made(self, number: int, starts: dict[int, Frontier]) -> Epoch:
        return Epoch(number, starts, self.lanes, self.plan.microbatch_size, self.plan.drop_last)
