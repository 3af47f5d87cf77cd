"""The run that a rank is attached to, over its epochs: messages find their epoch, and states become checkpoints."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

from zephon.errors import ProtocolError
from zephon.frontiers import Checkpoint, Frontier
from zephon.transport.protocol import Announced, Attached, BatchReady, LaneTotal, Released
from zephon_client.epoch import Epoch


class Run:
    """Bookkeeping of one attached client, without I/O."""

    def __init__(self, plan: Attached) -> None:
        if len(plan.starts) != plan.lanes or any(len(start) != 4 for start in plan.starts):
            raise ProtocolError(f"the daemon gave {len(plan.starts)} frontiers for {plan.lanes} lanes")
        self.plan = plan
        self.lanes = list(plan.owned)
        self.dataset_names = tuple(plan.dataset_names)
        self.rounds_before = 0
        """Rounds delivered in earlier epochs of this run."""
        self.begun = False
        """Whether the current epoch's batches were asked for."""
        self._identity: dict[str, Any] = json.loads(plan.identity)
        self._first = True
        self.epoch = self._made(plan.epoch, plan.frontiers())
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

    def take(self, arrived: deque[Any]) -> list[BatchReady]:
        """Notes the messages, and empties the queue. Returns batches of an epoch that is over."""
        stale = []
        while arrived:
            message: BatchReady | Announced | LaneTotal | Released = arrived[0]
            if message.epoch == self.epoch.number:
                self.epoch.take(message)
            elif message.epoch > self.epoch.number:
                self._epoch(message.epoch).take(message)
            elif isinstance(message, BatchReady):
                stale.append(message)
            arrived.popleft()
        return stale

    def advance(self) -> list[BatchReady]:
        """Goes on to the next epoch. Returns the batches that will not be delivered any more."""
        left = self.epoch.undelivered()
        self.rounds_before += self.epoch.turns.rounds
        number = self.epoch.number + 1
        self.epoch = self._epoch(number)
        del self._later[number]
        self._first = self.begun = False
        return left

    def checkpoint(self) -> Checkpoint:
        """The state as it is now; at an epoch's end the start of the next."""
        if self.epoch.at_end:
            return Checkpoint(self._identity, self.epoch.number + 1, self._zeros())
        return Checkpoint(self._identity, self.epoch.number, self.epoch.frontiers())

    def _zeros(self) -> dict[int, Frontier]:
        return {lane: Frontier() for lane in range(self.plan.lanes)}

    def _epoch(self, number: int) -> Epoch:
        if number not in self._later:
            self._later[number] = self._made(number, self._zeros())
        return self._later[number]

    def _made(self, number: int, starts: dict[int, Frontier]) -> Epoch:
        return Epoch(number, starts, self.lanes, self.plan.microbatch_size, self.plan.drop_last)
