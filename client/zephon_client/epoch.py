"""One epoch of a run as its rank knows it: whose turn it is, what may be delivered, and the state at any point.

Pure bookkeeping on messages, without I/O. `due` says which batch is next, `deliver` notes that it was handed
over, `frontiers` where every lane stands. All ranks come to the same state at the same round, because at the end of
round j every lane of the run has delivered M + j * microbatch_size records, or all that it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from zephon.errors import ProtocolError
from zephon.frontiers import Announcement, Frontier, frontier_at, furthest
from zephon.lanes import RoundRobin, epoch_end_report
from zephon.transport.protocol import Announced, LaneTotal, Released
from zephon_client.ready import Ready


class Epoch:
    """Used by one rank. `starts` has a frontier for every lane of the run, `owned` are this rank's lanes."""

    def __init__(
        self, number: int, starts: Mapping[int, Frontier], owned: Sequence[int], microbatch_size: int, drop_last: bool
    ) -> None:
        self.number = number
        self.starts = dict(starts)
        self.turns = RoundRobin(
            {lane: starts[lane].records for lane in owned},
            furthest(starts.values()),
            microbatch_size,
            {lane: starts[lane].stands for lane in owned},
        )
        self.rounds, self.final, self.spent = 0, False, False
        self.released: Released | None = None
        """The furthest that was said of which rounds may be delivered."""
        self.touched = False
        """Whether anything was delivered."""
        self._drop_last = drop_last
        self._windows: dict[int, list[Announcement]] = {lane: [f.announcement] for lane, f in starts.items()}
        self._totals: dict[int, int] = {}
        self._skipped: dict[int, int] = {}
        self._ready: dict[int, deque[Ready]] = {lane: deque() for lane in owned}

    # What the engine says

    def take(self, message: Ready | Announced | LaneTotal | Released) -> None:
        """Notes a batch or a message of this epoch."""
        if isinstance(message, Ready):
            if message.lane not in self._ready:
                raise ProtocolError(f"a batch of lane {message.lane} came in, which this rank does not own")
            self._ready[message.lane].append(message)
        elif isinstance(message, Announced):
            windows = self._windows[message.lane]
            # An engine that was started again may announce what is known.
            if message.chunk > windows[-1].chunk and message.records >= windows[-1].records:
                windows.append(Announcement(message.chunk, message.records, message.skipped, message.source))
                reached = min(self._delivered(message.lane, self.reached), self.reached)
                while len(windows) > 1 and windows[1].records <= reached:  # no state from now on will name the first
                    del windows[0]
        elif isinstance(message, LaneTotal):
            self._totals[message.lane] = message.records
            self._skipped[message.lane] = message.skipped
        elif self.released is None or message.rounds > self.rounds or message.final:
            self.released = message
            self.rounds, self.final, self.spent = message.rounds, message.final, message.spent

    # Turns

    @property
    def place(self) -> tuple[int, int]:
        """The lane whose turn it is, and where that stands."""
        return self.turns.turn()[:2]

    @property
    def over(self) -> bool:
        """Whether the epoch has no further round than those delivered."""
        return self.final and self.turns.turn()[3] > self.rounds

    def due(self) -> Ready | None:
        """The batch whose turn it is, if it is here and its round is released."""
        turns = self.turns
        lane, stands, until, round_, ends = turns.turn()
        queue = self._ready[lane]
        if not queue or round_ > self.rounds:
            return None
        ready = queue[0]
        first, size = turns.records[lane], until - stands
        fits = ready.records <= size if not self._drop_last else ready.records == size
        if ready.first_record != first or not fits:
            raise ProtocolError(
                f"lane {lane}: {ready.records} records from record {ready.first_record} came in where {size} from "
                f"{first} are due. Use the same version of zephon on both sides."
            )
        ready.until, ready.taken, ready.ends_round = until, turns.taken + 1, ends
        return ready

    def after(self, ready: Ready) -> Ready | None:
        """The batch that is due once `ready` has been handed over, if it is here."""
        lane = self.turns.lane_after()
        queue, place = self._ready[lane], int(lane == ready.lane)
        return queue[place] if len(queue) > place else None

    def deliver(self, ready: Ready) -> None:
        """Notes that the batch, which was due, was handed over. Whoever was interrupted in here calls it again."""
        self.touched = True
        self.turns.note(ready.lane, ready.until, ready.first_record + ready.records, ready.taken)
        try:
            self._ready[ready.lane].remove(ready)  # the first; in one go, since another thread may close the loader
        except ValueError:
            return

    def is_void(self, ready: Ready) -> bool:
        """Whether the lane had run out before the state was taken: its empty batch only lets it catch up."""
        return self.turns.is_void(ready.lane, ready.records)

    def pass_over(self, ready: Ready) -> Ready:
        """Notes a void batch, which is not handed over."""
        self.turns.deliver(0)
        return self._ready[ready.lane].popleft()

    def undelivered(self) -> list[Ready]:
        """What came in and was not handed over, and never will be: the slots that nobody gives back otherwise."""
        left = [ready for queue in self._ready.values() for ready in queue if not ready.leased]
        for queue in self._ready.values():
            queue.clear()
        return left

    # State

    @property
    def reached(self) -> int:
        """The record of each lane that the rounds delivered so far have come to."""
        return self.turns.most + self.turns.rounds * self.turns.microbatch_size

    @property
    def at_end(self) -> bool:
        """Whether all rounds of the epoch are known to be delivered."""
        return self.touched and self.final and self.turns.at_round_end and self.turns.rounds == self.rounds

    def frontiers(self) -> dict[int, Frontier]:
        """Where the lanes stand: all of the run's at the end of a round, inside one only this rank's own."""
        turns = self.turns
        if not self.touched:
            return dict(self.starts)
        # Within the first round others may still catch up, so that M alone says nothing of their lanes.
        if not turns.rounds or not turns.at_round_end:
            return self.own_frontiers()
        stands = self.reached
        said = None if self._drop_last else stands
        return {lane: frontier_at(all_, self._delivered(lane, stands), said) for lane, all_ in self._windows.items()}

    def own_frontiers(self) -> dict[int, Frontier]:
        """Where this rank's own lanes stand."""
        turns = self.turns
        said = {} if self._drop_last else turns.stands
        return {lane: frontier_at(self._windows[lane], count, said.get(lane)) for lane, count in turns.records.items()}

    def windows(self) -> dict[int, Frontier]:
        """Where the windows begin that all of the run's lanes are in, going by this rank's rounds."""
        stands = self.reached
        return {lane: frontier_at(windows, stands).window for lane, windows in self._windows.items()}

    def totals(self) -> list[LaneTotal]:
        """The lanes' totals that are known."""
        return [LaneTotal(n, self.number, records, self._skipped[n]) for n, records in self._totals.items()]

    def end_report(self) -> str | None:
        """What to tell the user of an epoch that is over."""
        size, skipped = self.turns.microbatch_size, sum(self._skipped.values())
        return epoch_end_report(self.number, self._totals, self.reached, size, len(self.starts), skipped)

    def _delivered(self, lane: int, stands: int) -> int:
        """What a lane has delivered: its own count, or what one of another group has by that place."""
        return self.turns.records.get(lane, min(stands, self._totals.get(lane, stands)))
