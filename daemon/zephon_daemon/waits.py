"""What lanes wait for, and for how long: every second of every lane is put to the account of a cause. No I/O.

A lane waits from the moment on at which it last moved (another batch in its ring, another outcome taken in) or its
cause changed. Lanes are looked at about once a second, so shorter waits are told apart only in their sums.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

LONGEST_LOOK = 5.0
"""Seconds between two looks for which a lane's cause is taken to have held; of a longer pause nothing is known."""


@dataclass
class _Wait:
    cause: str
    moved: Hashable
    since: float


@dataclass
class Waits:
    """The waits of one run's lanes. `spent` is lane seconds by cause."""

    spent: dict[str, float] = field(default_factory=dict)
    _lanes: dict[int, _Wait] = field(default_factory=dict)
    _looked: float | None = None

    def look(self, lanes: Mapping[int, tuple[str, Hashable]], now: float) -> None:
        """Take note of each lane's cause, and of something that is another thing whenever the lane has moved."""
        passed = 0.0 if self._looked is None else min(now - self._looked, LONGEST_LOOK)
        self._looked = now
        for number, (cause, moved) in lanes.items():
            self.spent[cause] = self.spent.get(cause, 0.0) + passed
            at = self._lanes.get(number)
            if at is None or (at.cause, at.moved) != (cause, moved):
                self._lanes[number] = _Wait(cause, moved, now)

    def seconds(self, lane: int, now: float) -> float:
        """For how long the lane has waited for what it waits for."""
        at = self._lanes.get(lane)
        return 0.0 if at is None else max(0.0, now - at.since)
