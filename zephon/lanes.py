"""Lanes: who owns which, whose turn it is, and where a lane's windows lie. Pure arithmetic.

A run has `canonical_replicas` lanes for its whole life. Each data-parallel group owns some of them and delivers one
batch of each in turn; one batch from every lane a group owns is a round. Because the lanes never change, a run
resumed on another number of groups delivers the same records in the same rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from zephon.errors import CheckpointError, SettingError, TopologyError
from zephon.words import many

CONTIGUOUS, INTERLEAVED = "contiguous", "interleaved"


def owned_lanes(lanes: int, groups: int, group: int, strategy: str = CONTIGUOUS) -> list[int]:
    """The lanes of one group, ascending. `contiguous` gives each group a block, `interleaved` deals them."""
    if strategy == INTERLEAVED:
        return list(range(group, lanes, groups))
    quotient, larger = divmod(lanes, groups)
    first = group * quotient + min(group, larger)
    return list(range(first, first + quotient + (group < larger)))


def check_topology(lanes: int, groups: int, group: int, strategy: str = CONTIGUOUS) -> str | None:
    """Refuse groups that the lanes cannot serve. Returns a warning where the split is uneven, else None."""
    if strategy not in (CONTIGUOUS, INTERLEAVED):
        raise SettingError(f'mapping_strategy={strategy!r}: must be "contiguous" or "interleaved"')
    if groups < 1:
        raise SettingError(f"dp_degree={groups}: must be at least 1")
    if not 0 <= group < groups:
        raise TopologyError(f"dp_group_id={group} with dp_degree={groups}: must be in 0..{groups - 1}")
    if groups > lanes:
        raise TopologyError(
            f"dp_degree={groups} groups cannot share {many(lanes, 'lane')} (canonical_replicas={lanes}): a group needs "
            f"at least one lane. Use at most {many(lanes, 'group')}, or start a new run with more canonical_replicas."
        )
    if lanes % groups == 0:
        return None
    sizes = [len(owned_lanes(lanes, groups, g, strategy)) for g in range(groups)]
    larger = [g for g, size in enumerate(sizes) if size == max(sizes)]
    return (
        f"{lanes} lanes do not split evenly over {groups} groups: groups {larger} own {many(max(sizes), 'lane')}, the "
        f"others {min(sizes)}, so they do unequal work in each step. Choose a dp_degree that divides {lanes}."
    )


def window_start(lane: int, lanes: int, chunks_per_window: int, window: int) -> int:
    """The lane-local number of a window's first chunk. A lane's first window is shorter, so that lanes flush in
    turn.
    """
    if window == 0:
        return 0
    return -(-chunks_per_window * (lane + 1) // lanes) + (window - 1) * chunks_per_window


def window_containing(lane: int, lanes: int, chunks_per_window: int, chunk: int) -> int:
    """The number of the window that lane-local chunk `chunk` belongs to."""
    first = window_start(lane, lanes, chunks_per_window, 1)
    return 0 if chunk < first else 1 + (chunk - first) // chunks_per_window


def window_at(lane: int, lanes: int, chunks_per_window: int, chunk: int) -> int:
    """The number of the window that begins at lane-local chunk `chunk`; `CheckpointError` if none begins there."""
    window = window_containing(lane, lanes, chunks_per_window, chunk)
    if window_start(lane, lanes, chunks_per_window, window) != chunk:
        raise CheckpointError(
            f"lane {lane}: chunk {chunk} is not the first of a window (flush_every_k_chunks={chunks_per_window})"
        )
    return window


class RoundRobin:
    """Whose turn it is among the lanes of one group, and where rounds end.

    The next batch comes from the lane that stands lowest, ties to the lowest number. With `most` the most records of
    any lane of the whole loaded state, round j ends when every lane stands at `most + j * microbatch_size`. After a
    stop inside a round, lanes behind `most` first catch up: those batches end no round, and belong to round 0 or lower,
    so that they are delivered even where the data has no full round beyond. From then on lanes take turns in their
    order. A lane that has run out of records keeps its turns (short or empty batches), so it stands where the others do
    while `records` says what it delivered.

    `stands` says where the lanes stand at the beginning. A lane of which it does not (None, or no entry) stands at its
    records, and has no empty batch to catch up with.
    """

    def __init__(
        self,
        records: Mapping[int, int],
        most: int,
        microbatch_size: int,
        stands: Mapping[int, int | None] | None = None,
    ) -> None:
        known = {lane: place for lane, place in (stands or {}).items() if place is not None}
        self.records = dict(records)
        self.most, self.microbatch_size = most, microbatch_size
        self.taken = 0
        """Turns since all lanes stood at `most`."""
        self._lanes = sorted(records)
        begins = {lane: known.get(lane, records[lane]) for lane in self._lanes}
        self._behind = {lane: stand for lane, stand in begins.items() if stand < most}
        """Where those lanes stand that have to catch up."""
        self._unsaid = records.keys() - known.keys()

    def turn(self) -> tuple[int, int, int, int, bool]:
        """Of the next batch: its lane, where that stands, where it stands after a whole batch, the round that it
        belongs to (from 1, at most 0 while the lane catches up), and whether it is the last of its round.
        """
        size = self.microbatch_size
        if self._behind:
            lane = min(self._behind, key=self._behind.__getitem__)  # of equals the first, and so the lowest
            stands = self._behind[lane]
            until = batch_end(stands, self.most, size)
            return lane, stands, until, batch_round(until, self.most, size), False
        rounds, place = divmod(self.taken, len(self._lanes))
        stands = self.most + rounds * size
        return self._lanes[place], stands, stands + size, rounds + 1, place + 1 == len(self._lanes)

    def lane_after(self) -> int:
        """The lane whose turn it will be once the next batch has been delivered."""
        if not self._behind:
            return self._lanes[(self.taken + 1) % len(self._lanes)]
        lane, _, until, _, _ = self.turn()
        behind = {**self._behind, lane: until}
        lowest = min(behind, key=behind.__getitem__)
        return lowest if behind[lowest] < self.most else self._lanes[0]

    def is_void(self, lane: int, count: int) -> bool:
        """Whether the lane's next batch, of `count` records, is not to be handed over.

        So it is with a lane that had run out before the state was taken, where the state does not say that its empty
        batches are still due.
        """
        return not count and lane in self._unsaid and lane in self._behind

    def deliver(self, count: int) -> bool:
        """Note that the next batch, of `count` records, was handed over. True if that ends a round."""
        lane, _, until, _, ends = self.turn()
        self.note(lane, until, self.records[lane] + count, self.taken + 1)
        return ends

    def note(self, lane: int, until: int, records: int, taken: int) -> None:
        """The lane stands at `until` and has delivered so many `records`; `taken` turns were taken, if none is behind.

        Whoever was interrupted in here calls it again.
        """
        self.records[lane] = records
        if until > self.most:
            self.taken = taken
        elif until < self.most:
            self._behind[lane] = until
        else:
            self._behind.pop(lane, None)

    @property
    def rounds(self) -> int:
        """Rounds that were delivered whole."""
        return self.taken // len(self._lanes)

    @property
    def stands(self) -> dict[int, int]:
        """Where each lane stands."""
        rounds, place = divmod(self.taken, len(self._lanes))
        low = self.most + rounds * self.microbatch_size
        high = low + self.microbatch_size
        return {lane: self._behind.get(lane, high if n < place else low) for n, lane in enumerate(self._lanes)}

    @property
    def at_round_end(self) -> bool:
        """Whether every owned lane stands at the end of the same round (or nothing was delivered yet)."""
        return not self._behind and not self.taken % len(self._lanes)


def batch_end(stands: int, most: int, microbatch_size: int) -> int:
    """Where the batch that begins at record `stands` of a lane ends: one shorter batch may bring a lane to `most`."""
    return min(stands + microbatch_size, most) if stands < most else stands + microbatch_size


def batch_round(until: int, most: int, microbatch_size: int) -> int:
    """The round of the batch that ends at record `until` of its lane: from 1, or at most 0 if it catches up."""
    return -(-(until - most) // microbatch_size)


def is_spent(
    starts: Mapping[int, int],
    totals: Mapping[int, int],
    most: int,
    rounds: int,
    microbatch_size: int,
    stands: Mapping[int, int | None],
) -> bool:
    """Whether a state was the end of its epoch: no lane has a record left in the `rounds` that may be delivered, nor
    an empty batch due. `starts` are the records delivered before, `stands` as in `RoundRobin`.

    To be asked of all lanes that end together, so that their groups agree on when the next epoch begins.
    """
    for lane, start in starts.items():
        stand = stands[lane]
        due = start < totals[lane] or (stand is not None and stand < most)
        end = batch_end(start if stand is None else stand, most, microbatch_size)
        if due and batch_round(end, most, microbatch_size) <= rounds:
            return False
    return True


def epoch_end_report(
    epoch: int, known: Mapping[int, int], reached: int, microbatch_size: int, lanes: int, skipped: int
) -> str | None:
    """What to tell the user when an epoch ends; None if there is nothing worth a warning.

    `known` are the records that lanes are known to have, `reached` the record at which all were stopped. An incomplete
    last round is left out as a matter of course; more than that is said, as are an epoch without any round, and bad
    records.
    """
    bad = f" {many(skipped, 'bad record was', 'bad records were')} skipped." if skipped else ""
    if not reached:
        return (
            f"epoch {epoch} has no full round: {many(sum(known.values()), 'record')} on {many(len(known), 'lane')}, "
            f"and a round takes {microbatch_size} from each of the run's {many(lanes, 'lane')}.{bad} Use fewer lanes, "
            "a smaller microbatch_size, or batch(..., drop_last=False)."
        )
    left_out = sum(max(0, records - reached) for records in known.values())
    if left_out >= microbatch_size * lanes:
        return (
            f"epoch {epoch} ended with at least {many(left_out, 'record')} left out, more than its incomplete last "
            f"round: all lanes end with the shortest, at {many(reached, 'record')}, and the longest has "
            f"{max(known.values())}.{bad} Use fewer lanes or more data, or batch(..., drop_last=False) to deliver them "
            "in short batches."
        )
    return f"epoch {epoch} ended:{bad}" if bad else None


def check_step(batches_per_step: int | None, lanes: Iterable[int]) -> None:
    """Refuse a step that is not a whole number of rounds."""
    owned = len(list(lanes))
    if batches_per_step is not None and (batches_per_step < 1 or batches_per_step % owned):
        raise TopologyError(
            f"batches_per_step={batches_per_step}: this group owns {many(owned, 'lane')}, so a step must be a positive "
            f"multiple of {many(owned, 'batch', 'batches')} to be whole rounds"
        )


def rounds_of_step(batches_per_step: int | None, lanes: Sequence[int]) -> int:
    """Rounds of one training step of a group that owns these lanes: 1 where nothing is said."""
    return 1 if batches_per_step is None else batches_per_step // len(lanes)


def released_rounds(
    produced: Mapping[int, int], ended: Iterable[int], most: int, microbatch_size: int, drop_last: bool
) -> tuple[int, bool]:
    """How many rounds may be delivered, and whether that is all there will ever be.

    `produced` are the records that each lane is known to have, `ended` the lanes for which that is the total. With
    `drop_last` a round needs a full batch of every lane; without it a round exists as soon as one lane has a record in
    it, and lanes that have ended deliver a short or an empty batch. So all ranks stop at the same round. Below 0 where
    not even the records to catch up with are known (`RoundRobin`).
    """
    done = set(ended)
    if drop_last:
        full = {lane: (count - most) // microbatch_size for lane, count in produced.items()}
        rounds = min(full.values())
        return rounds, any(full[lane] == rounds for lane in done)
    rounds = max(0, *(-(-(count - most) // microbatch_size) for count in produced.values()))
    return rounds, len(done) == len(produced)
