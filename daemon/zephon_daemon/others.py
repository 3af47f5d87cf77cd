"""What the engines of one run tell each other of their lanes, through the daemon.

Each group's lanes are in one engine; where ends are even every engine must know how far all lanes have come, and every
rank the windows of all of them for its states. So an engine tells the others, once there are any:

- windows and totals, which its own ranks are told too;
- the records that a lane has come to, whenever they reach a round more, or begin one: what gates depend on, no more;
- the samples of lanes that have given no record at all (`zephon.barren`);
- rounds that an engine before it had released, and the latest epoch that a reader has begun;
- once a second, with or without any of that, that it moves: a task of slow records may take minutes, and ranks of other
  engines wait for its lanes as its own do.

Each word wakes the daemon and every other engine, so what lanes have come to is told after `TELL_SECONDS`, or once the
one that is furthest behind has come further than was told by half of its ring: no round waits for the lanes before it,
readers elsewhere never wait for a word while the ring has room, and where lanes are slow a fraction of a second more is
nothing.

All of it only grows and may be told again, in any order: so an engine that joins late, or again after its death, is
told everything once more by all (`Run.tell_lanes`), and nobody in between keeps anything. An engine that has a run for
itself tells nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from zephon.barren import barren
from zephon.frontiers import Frontier
from zephon.plan import Plan
from zephon.transport.protocol import Announced, LanesTold, LaneTotal, Released
from zephon.transport.statement import EPOCHS_STATED

TELL_SECONDS = 0.05
MOVES_SECONDS = 1.0
ANNOUNCEMENTS_KEPT = 64
"""Windows of a lane that are told to readers who come later."""


class Others:
    """One engine's side. `telling` once the run has other engines.

    `groups` are those that read from them now, `came` those that ever did, `lost` those whose engine has died.
    """

    def __init__(self, plan: Plan) -> None:
        self.telling = False
        self.groups: list[int] = []
        self.lost: list[int] = []
        self.came: set[int] = set()
        self.words = 0
        """How often another engine has told something, if only that it moves."""
        self._plan = plan
        self._totals: dict[tuple[int, int], LaneTotal] = {}
        self._windows: dict[int, deque[Announced]] = {}
        self._rounds: dict[tuple[int, int], tuple[int, int]] = {}
        self._come: dict[tuple[int, int], int] = {}
        self._said: dict[tuple[int, int], int] = {}
        self._tried: dict[tuple[int, int], tuple[int, bool]] = {}
        self._begun = self._told_begun = -1
        self._urgent = False
        self._since: float | None = None
        self._moves, self._moves_told = 0, -math.inf
        self._announced: list[Announced] = []
        self._new_totals: list[LaneTotal] = []
        self._released: list[Released] = []
        self._reached: dict[tuple[int, int], int] = {}
        self._barren: dict[tuple[int, int], tuple[int, int, int]] = {}

    def read_there(self, groups: Sequence[int], lost: Sequence[int] = ()) -> None:
        """These groups read from the other engines now, and these did from one that has died."""
        self.groups, self.lost = list(groups), list(lost)
        self.came.update(groups)

    def due(self, now: float) -> float:
        """Seconds until something is to be told; not above 0: now; for ever where there is nothing."""
        if not (self._urgent or self._announced or self._reached or self._barren):
            return math.inf
        if self._since is None:
            self._since = now
        return 0.0 if self._urgent else self._since + TELL_SECONDS - now

    def take(self, run: int) -> LanesTold | None:
        """What is to be told since it was last asked; None if there is nothing."""
        if not (self._urgent or self._announced or self._reached or self._barren):
            return None
        told = LanesTold(
            run,
            self._announced,
            self._new_totals,
            self._released,
            [[epoch, lane, records] for (epoch, lane), records in self._reached.items()],
            [[epoch, lane, *fact] for (epoch, lane), fact in self._barren.items()],
            self._begun,
        )
        self._told_begun = self._begun
        self._said.update(self._reached)
        self._urgent, self._since = False, None
        self._announced, self._new_totals, self._released, self._reached, self._barren = [], [], [], {}, {}
        return told

    # Of this engine's lanes

    def announce(self, message: Announced) -> None:
        """A window begins."""
        if self.telling:
            self._announced.append(message)

    def total(self, total: LaneTotal, *, ours: bool) -> bool:
        """A lane's total; whether it is new."""
        if (total.epoch, total.lane) in self._totals:
            return False
        self._totals[total.epoch, total.lane] = total
        if ours and self.telling:
            self._new_totals.append(total)
            self._urgent = True
        for kept in (self._totals, self._rounds, self._come, self._said, self._tried):
            for old in [key for key in kept if key[0] <= total.epoch - EPOCHS_STATED]:
                del kept[old]
        return True

    def reach(self, epoch: int, lane: int, records: int, most: int, microbatch_size: int, enough: int) -> None:
        """A lane has come to that many records. Once all have come `enough` rounds further than was told, that does not
        wait.
        """
        if not self.telling:
            return
        beyond = records - most
        rounds = beyond // microbatch_size, -(-beyond // microbatch_size)
        if self._rounds.get((epoch, lane)) != rounds:
            self._rounds[epoch, lane] = rounds
            self._come[epoch, lane] = self._reached[epoch, lane] = records
            going_on = [key for key in self._come if key[0] == epoch and key not in self._totals]
            if going_on:
                told = min(self._said.get(key, 0) for key in going_on)
                self._urgent |= min(map(self._come.__getitem__, going_on)) - told >= enough * microbatch_size

    def search(self, epoch: int, lane: int, skipped: int) -> None:
        """A lane has no record yet."""
        if self.telling:
            fact = barren(self._plan, epoch).of(lane)
            if fact[0] and self._tried.get((epoch, lane)) != fact:
                self._tried[epoch, lane] = fact
                self._barren[epoch, lane] = fact[0], int(fact[1]), skipped

    def release(self, released: Released) -> None:
        """Rounds that are known to be released without what lanes have come to."""
        if self.telling:
            self._released.append(released)
            self._urgent = True

    def begin(self, epoch: int) -> None:
        """A reader has begun an epoch."""
        if self.telling:
            self._begun = max(self._begun, epoch)
            self._urgent |= self._begun > self._told_begun

    def move(self, moves: int, now: float) -> None:
        """This engine has moved so often by now. What it heard from others is no move: else they moved each other."""
        if moves != self._moves and now >= self._moves_told + MOVES_SECONDS:
            self._moves, self._moves_told, self._urgent = moves, now, True

    def tell_again(self) -> None:
        """From now on there are others, who may know nothing yet."""
        self.telling = True
        self._told_begun = -1
        for known in (self._rounds, self._come, self._said, self._tried):
            known.clear()
        self._urgent = True
        self._new_totals = list(self._totals.values())

    # Of the others' lanes

    def heard(self, told: LanesTold) -> None:
        """Keep what readers who come later must be told, and note barren lanes. RunFailed if no record can come."""
        self.words += 1
        for message in told.announced:
            self._windows.setdefault(message.lane, deque(maxlen=ANNOUNCEMENTS_KEPT)).append(message)
        for epoch, _, records in told.reached:
            if records:
                barren(self._plan, epoch).fruitful = True
        for epoch, lane, samples, ended, skipped in told.barren:
            barren(self._plan, epoch).note(lane, samples, bool(ended), skipped)

    def window(self, lane: int, epoch: int, records: int) -> Frontier:
        """The beginning of the last window of another engine's lane that is known to begin at or before that record."""
        for at in reversed(self._windows.get(lane, ())):
            if at.epoch == epoch and at.records <= records:
                return Frontier(at.chunk, 0, at.records, at.skipped, at.source)
        return Frontier()

    def history(self) -> Iterator[Announced | LaneTotal]:
        """What readers who come now must be told: the others' windows, and all totals."""
        for windows in self._windows.values():
            yield from windows
        yield from self._totals.values()


def unsaid(runs: Mapping[int, Others], now: float, moves: int = 0) -> tuple[list[LanesTold], float]:
    """What an engine has to tell of all its runs now, and the seconds until it may have more. `moves`: how often it has
    moved.
    """
    told: list[LanesTold] = []
    soonest = math.inf
    for number, others in runs.items():
        if not others.telling:
            continue
        others.move(moves, now)
        seconds = others.due(now)
        words = others.take(number) if seconds <= 0 else None
        told += [words] if words is not None else []
        soonest = min(soonest, seconds if words is None else math.inf)
    return told, soonest
