"""Who has been at the same thing for too long. No I/O; the clock is passed in.

Whoever is watched has a *position* (a worker: its task, operator and record; an engine: how often it has answered).
While it changes, however slowly, nothing is wrong. One that stays the same for `limit` seconds is a stall: first the
stack is asked for, at the next look it is reported, once. After `end` seconds the order is to end who stalls.

Who has nothing to do has no position, so waiting for a slow trainer is never a stall.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

LIMIT_SECONDS = 20.0
ENDS_AFTER = 10.0
"""In limits."""

LOOKS_A_LIMIT = 5
MOST_SECONDS = 1.0


class Act(enum.Enum):
    """What to do about one that is watched."""

    ASK = "ask for its stack"
    REPORT = "report it"
    END = "end it"
    GOES_ON = "say that it goes on"


@dataclass(frozen=True)
class Patience:
    """Seconds: `limit` until a stall is reported, `end` until it is ended. 0: never."""

    limit: float = LIMIT_SECONDS
    end: float = LIMIT_SECONDS * ENDS_AFTER

    @classmethod
    def of(cls, limit: float | None, end: float | None) -> Patience:
        """From what the user said; without an `end` it is ten limits."""
        limit = LIMIT_SECONDS if limit is None else limit
        return cls(limit, limit * ENDS_AFTER if end is None else end)

    @property
    def look(self) -> float:
        """Seconds between two looks."""
        shortest = min((each for each in (self.limit, self.end) if each > 0), default=MOST_SECONDS * LOOKS_A_LIMIT)
        return min(MOST_SECONDS, shortest / LOOKS_A_LIMIT)


@dataclass
class _Watched:
    position: Hashable
    since: float
    asked: bool = False
    told: bool = False
    ended: bool = False


class Watchdog:
    """Everyone that one process watches, by name."""

    def __init__(self, patience: Patience) -> None:
        self.patience = patience
        self.moves = 0
        """How often somebody was found at another position than before."""
        self._watched: dict[Hashable, _Watched] = {}
        self._stalled: dict[Hashable, float] = {}

    @property
    def stalled(self) -> Mapping[Hashable, float]:
        """Those reported that have not moved since, each with its seconds at the last look."""
        return self._stalled

    def seconds(self, name: Hashable, now: float) -> float:
        """For how long it has been at its position."""
        at = self._watched.get(name)
        return 0.0 if at is None else now - at.since

    def look(self, positions: Mapping[Hashable, Hashable], now: float) -> list[tuple[Hashable, Act, float]]:
        """Take note of everyone's position; None is nothing to do. What is to be done about whom, and after how many
        seconds. Those that are not named are forgotten.
        """
        out: list[tuple[Hashable, Act, float]] = []
        limit, end = self.patience.limit, self.patience.end
        for gone in self._watched.keys() - positions.keys():
            del self._watched[gone]
        for name, position in positions.items():
            at = self._watched.get(name)
            if at is None or at.position != position or position is None:
                if at is not None and at.told and not at.ended:
                    out.append((name, Act.GOES_ON, now - at.since))
                self.moves += at is not None and at.position != position is not None
                self._watched[name] = _Watched(position, now)
                continue
            seconds = now - at.since
            if at.asked and not at.told:
                at.told = True
                out.append((name, Act.REPORT, seconds))
            elif limit and seconds >= limit and not at.asked:
                at.asked = True
                out.append((name, Act.ASK, seconds))
            if end and seconds >= end and not at.ended and (at.told or not limit):
                at.ended = True
                out.append((name, Act.END, seconds))
        self._stalled = {name: now - at.since for name, at in self._watched.items() if at.told}
        return out
