"""A lane at work in an engine, and the readers that it is for."""

from __future__ import annotations

from dataclasses import dataclass, field

from zephon.producer import LaneProducer
from zephon.transport.rings import RingWriter
from zephon.transport.statement import Statement

Place = tuple[int, int]
"""Where a lane stands: its epoch, and the record at which its next batch begins in turn-taking."""


@dataclass
class Reader:
    """One client of a group. `places` is how far each lane was given to it, `came` what that was when it came, and
    `stated` its own word for it.

    `rounds` are those of its epoch since the run's origin, `past` the records of each lane in all epochs before it.
    """

    client: int
    group: int
    epoch: int = -1
    rounds: int = 0
    past: int = 0
    places: dict[int, Place] = field(default_factory=dict)
    came: dict[int, Place] = field(default_factory=dict)
    stated: Statement | None = None
    waits: tuple[int, Place] | None = None
    """The lane that it last said it waits for, and where that stands for it."""

    def come(self, places: dict[int, Place]) -> None:
        """It begins there."""
        self.places, self.came = places, dict(places)

    @property
    def at_epoch(self) -> int:
        """The epoch that it is in, or was in when it came."""
        return max(self.epoch, -1 if self.stated is None else self.stated.at.epoch)


@dataclass
class Lane:
    """A lane's production and ring. `stands` is where its next batch begins in turn-taking, `written` its records."""

    number: int
    group: int
    producer: LaneProducer
    stands: int
    written: int
    ring: RingWriter | None = None
    renew: bool = False
    """Whether readers have come that do not know its ring, so that it needs a new one."""
    divided: bool = False
    """Whether its readers were found to hold all slots of a ring, so that each has a part of those from then on."""
    announced: int = 1
    total_told: bool = False
    first_task: int = 0
    """The number of its producer's first task: those of earlier producers are lower."""
    handed_out: int = 0

    @property
    def epoch(self) -> int:
        return self.producer.epoch

    @property
    def place(self) -> Place:
        return self.epoch, self.stands

    def restart(self, producer: LaneProducer, stands: int) -> None:
        """Go on with another producer. Outcomes of tasks of the one before are strangers to it."""
        self.first_task += self.handed_out
        self.handed_out = 0
        self.producer, self.stands, self.written = producer, stands, producer.stream.first
        self.announced, self.total_told = 1, False

    @property
    def runs_dry(self) -> bool:
        """Whether its ring is half empty or more."""
        return self.ring is None or 2 * self.ring.in_flight <= self.ring.generation.slots
