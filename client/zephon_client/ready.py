"""A batch that has come in: where it lies, whose turn it is, and what has been made of it so far.

It lives from its descriptor's coming until it has been noted as delivered. What is made of it is kept at each step, so
that a call which fails or is interrupted half-way leaves nothing to be undone: the next one goes on from there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zephon_client.slots import Mapped


class Ready:
    """Made of the numbers of a `BatchReady`; compares by identity."""

    __slots__ = (
        "batch",
        "ends_round",
        "epoch",
        "first_record",
        "generation",
        "index",
        "lane",
        "nbytes",
        "records",
        "ring",
        "source",
        "taken",
        "until",
    )

    def __init__(
        self, lane: int, epoch: int, generation: int, index: int, nbytes: int, first_record: int, records: int
    ) -> None:
        self.lane, self.epoch = lane, epoch
        self.generation, self.index, self.nbytes = generation, index, nbytes
        self.first_record, self.records = first_record, records
        self.source: Any = None
        """Its slot, leased, while the batch is made."""
        self.batch: Any = None
        self.ends_round = False
        """Whether it is the last of its round; known once it is due."""

    ring: Mapped
    """The ring's generation that it lies in; known once its coming was noted."""
    until: int
    """Where its lane stands after it, and how many turns were taken then (`RoundRobin.note`); known once it is due."""
    taken: int

    def __repr__(self) -> str:
        slot = f"slot {self.index} of generation {self.generation}"
        return f"Ready(lane {self.lane}, epoch {self.epoch}, {slot}, records from {self.first_record})"

    @property
    def leased(self) -> bool:
        """Whether its slot goes back by itself, with the last array over it."""
        return self.batch is not None or self.source is not None
