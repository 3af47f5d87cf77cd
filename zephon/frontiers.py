"""Frontiers: how far each lane has been delivered, and the checkpoints made of them.

A frontier names a window of its lane by the window's first chunk, how many of the lane's records were delivered since
that window began (`offset`) and how many in all (`records`). Any window that begins at or before the last delivered
record will do: a stale frontier costs replay, never data. Where a user's own work source holds state, its state at
that window's beginning belongs to the frontier (`source`, as JSON text: `zephon.source_state`).

A lane that has run out keeps its turns where short and empty batches are delivered (`drop_last=False`), so there a
frontier also names the place in turn-taking that the lane has come to (`stands`): else nobody could say, inside a
round, whether the empty batch of such a lane was delivered or is still due.

Rounds of a run are counted by the records that each lane has had its turn for. Those of earlier epochs are `past`, in
checkpoints of later ones only; those of the epoch its frontiers tell (`steps_done`).

A checkpoint is plain JSON: the run's identity and one frontier a lane. A partial one holds the lanes of some groups
only and says so; `merge_checkpoints` joins the parts.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from zephon.errors import CheckpointError
from zephon.source_state import STATE_LIMIT, as_text, parse_state
from zephon.words import many

FORMAT = 1

MOST_LANES = 1 << 16
"""Lanes of the largest run: a checkpoint of more is malformed, and would take for ever to check."""

MOST_EMPTY = 1 << 16
"""Batches that a lane may stand beyond the records of all; a state with more is malformed.

At the end of a round it is one. It is more where groups are out of step, or batches were larger before the restore.
"""

_LARGEST = (1 << 62) - 1


class Announcement(NamedTuple):
    """A window of a lane begins at this record: what an engine announces when the window before is complete."""

    chunk: int
    records: int
    skipped: int
    source: str = ""


@dataclass(frozen=True)
class Frontier:
    """How far one lane has been delivered."""

    chunk: int = 0
    offset: int = 0
    records: int = 0
    skipped: int = 0
    source: str = ""
    stands: int | None = None
    """Where it stands in turn-taking; None if that is not said: with `drop_last`, or by a version before this."""

    @property
    def place(self) -> int:
        """Where it stands in turn-taking: at its records, unless it has run out."""
        return self.records if self.stands is None else self.stands

    @property
    def announcement(self) -> Announcement:
        """The beginning of the window that it names."""
        return Announcement(self.chunk, self.records - self.offset, self.skipped, self.source)

    @property
    def window(self) -> Frontier:
        """The beginning of that window."""
        return Frontier(self.chunk, 0, self.records - self.offset, self.skipped, self.source)

    def to_json(self) -> dict[str, Any]:
        out = {"chunk": self.chunk, "offset": self.offset, "records": self.records, "skipped": self.skipped}
        if self.stands is not None:
            out["stands"] = self.stands
        return {**out, "source": json.loads(self.source)} if self.source else out


def beginnings(lanes: int, drop_last: bool) -> dict[int, Frontier]:
    """The frontiers of an epoch's beginning."""
    return {lane: Frontier(stands=None if drop_last else 0) for lane in range(lanes)}


def furthest(frontiers: Iterable[Frontier]) -> int:
    """Where the lane stands that has come furthest: what rounds are counted from (M)."""
    return max(frontier.place for frontier in frontiers)


def steps_done(past: int, most: int, rounds: int, microbatch_size: int) -> int:
    """Global steps of one round each since the run's beginning, `rounds` after a place that lanes at `most` began from,
    `past` records of each lane after the run's beginning. Had batches another size before, steps are of this one.
    """
    return (past + most) // microbatch_size + rounds


def frontier_at(announcements: Sequence[Announcement], records: int, stands: int | None = None) -> Frontier:
    """The frontier of a lane that has delivered `records`, from its announcements in ascending order."""
    at = bisect_right(announcements, records, key=lambda a: a.records) - 1
    if at < 0:
        raise CheckpointError(f"no known window begins at or before record {records}")
    chunk, begins, skipped, source = announcements[at]
    return Frontier(chunk, records - begins, records, skipped, source, stands)


@dataclass(frozen=True)
class Checkpoint:
    """A checked checkpoint. `identity` is as `zephon.plan` made it; `lanes` has an entry for each lane that it
    knows.
    """

    identity: dict[str, Any]
    epoch: int
    lanes: dict[int, Frontier]
    past: int = 0
    """Records that each lane had its turn for in earlier epochs."""

    @property
    def canonical_replicas(self) -> int:
        return int(self.identity["canonical_replicas"])

    @property
    def most(self) -> int:
        """Where the lane stands that has come furthest."""
        return furthest(self.lanes.values())

    def check_stands(self, microbatch_size: int) -> None:
        """Refuse lanes that stand where no run of this microbatch size can have come to: all others would follow."""
        furthest_record = max(frontier.records for frontier in self.lanes.values())
        for lane, frontier in self.lanes.items():
            if frontier.place - furthest_record > MOST_EMPTY * microbatch_size:
                raise CheckpointError(
                    f"malformed checkpoint: lane {lane} stands at record {frontier.place} with {frontier.records} "
                    f"records delivered, and no lane has delivered more than {furthest_record}"
                )

    def without_stands(self) -> Checkpoint:
        """The same, each lane standing at its records: of data with which one that had run out may go on."""
        return replace(self, lanes={lane: replace(frontier, stands=None) for lane, frontier in self.lanes.items()})

    @property
    def missing(self) -> list[int]:
        """The lanes that it lacks, ascending."""
        return [lane for lane in range(self.canonical_replicas) if lane not in self.lanes]

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "identity": self.identity,
            "epoch": self.epoch,
            **({"past": self.past} if self.past else {}),
            "complete": not self.missing,
            "lanes": {str(lane): self.lanes[lane].to_json() for lane in sorted(self.lanes)},
        }


def parse_checkpoint(state: Mapping[str, Any]) -> Checkpoint:
    """Check a checkpoint's form. `CheckpointError` names what is wrong with it."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"a checkpoint is a mapping, not {_instead(state)}")
    if "format" not in state:
        raise CheckpointError(
            f"no checkpoint of Zephon's: a mapping with {', '.join(map(repr, list(state)[:5])) or 'nothing'}"
        )
    if state["format"] != FORMAT:
        raise CheckpointError(f"checkpoint format {_shown(state['format'])}: this version reads format {FORMAT}")
    identity, lanes = state.get("identity"), state.get("lanes")
    if not isinstance(identity, Mapping) or not isinstance(lanes, Mapping) or not lanes:
        raise CheckpointError("malformed checkpoint: it needs 'identity' and 'lanes'")
    replicas = identity.get("canonical_replicas")
    if type(replicas) is not int or not 1 <= replicas <= MOST_LANES:
        raise CheckpointError(
            f"malformed checkpoint: identity.canonical_replicas is {_shown(replicas)}, and must be in 1..{MOST_LANES}"
        )
    epoch = _count(state.get("epoch"), "epoch")
    frontiers = {}
    for key, entry in lanes.items():
        lane = _lane_number(key)
        if not 0 <= lane < replicas or lane in frontiers or not isinstance(entry, Mapping):
            raise CheckpointError(f"malformed checkpoint: lane {_shown(key)} of {many(replicas, 'lane')}")
        names = ("chunk", "offset", "records", "skipped")
        numbers = {n: _count(entry.get(n, 0 if n == "skipped" else None), f"lane {lane}: {n}") for n in names}
        stands = _count(entry["stands"], f"lane {lane}: stands") if "stands" in entry else None
        frontiers[lane] = Frontier(**numbers, source=_source(entry, lane), stands=stands)
        if frontiers[lane].offset > frontiers[lane].records:
            raise CheckpointError(f"malformed checkpoint: lane {lane}: offset exceeds records")
        if frontiers[lane].place < frontiers[lane].records:
            raise CheckpointError(f"malformed checkpoint: lane {lane}: it stands before its records")
    checkpoint = Checkpoint(dict(identity), epoch, frontiers, _count(state.get("past", 0), "past"))
    if state.get("complete") and checkpoint.missing:
        raise CheckpointError(f"the checkpoint says it is complete but has no entry for lanes {checkpoint.missing}")
    return checkpoint


def checkpoint_from_text(text: str | bytes) -> Checkpoint:
    """The complete checkpoint in JSON text. `CheckpointError` for anything else, however malformed."""
    try:
        state = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint is not JSON: {error}") from error
    return complete_checkpoint(state)


def complete_checkpoint(state: Mapping[str, Any]) -> Checkpoint:
    """A checkpoint to restore from: all lanes must be there."""
    checkpoint = parse_checkpoint(state)
    if checkpoint.missing:
        raise CheckpointError(
            f"the checkpoint has no entry for lanes {checkpoint.missing}: it is partial, taken inside a round. "
            "Merge the parts of all groups with zephon.merge_checkpoints([...]) and load the result."
        )
    return checkpoint


def merge_checkpoints(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join checkpoints of one run, taken by its groups at one moment.

    A partial one speaks for its own group's lanes, wherever it stands inside a round. A complete one (a group that has
    just ended a round, or not begun one) speaks for the lanes that no partial one holds. Parts of one kind must agree.
    """
    if not states:
        raise CheckpointError("merge_checkpoints needs at least one checkpoint")
    parts = [parse_checkpoint(state) for state in states]
    first = parts[0]
    for number, part in enumerate(parts):
        if part.identity != first.identity:
            raise CheckpointError(f"part {number} belongs to another run than part 0: their identities differ")
        if part.epoch != first.epoch:
            raise CheckpointError(
                f"part {number} is of epoch {part.epoch}, part 0 of epoch {first.epoch}: take the states of all groups "
                "at the same step, and at its end where it is an epoch's last: a group that is through with that one "
                "states the beginning of the next epoch"
            )
    lanes = _agreed((number, part) for number, part in enumerate(parts) if not part.missing)
    lanes.update(_agreed((number, part) for number, part in enumerate(parts) if part.missing))
    return Checkpoint(first.identity, first.epoch, lanes, max(part.past for part in parts)).to_json()


def _agreed(parts: Iterable[tuple[int, Checkpoint]]) -> dict[int, Frontier]:
    """The lanes of all parts. One found in several must stand at the same record in each."""
    lanes: dict[int, tuple[int, Frontier]] = {}
    for number, part in parts:
        for lane, frontier in part.lanes.items():
            other, known = lanes.setdefault(lane, (number, frontier))
            if (known.records, known.place) != (frontier.records, frontier.place):
                raise CheckpointError(
                    f"lane {lane} stands at record {known.place} in part {other} and at {frontier.place} in part "
                    f"{number}: take the states of all groups at the same step"
                )
    return {lane: frontier for lane, (_, frontier) in lanes.items()}


def _source(entry: Mapping[str, Any], lane: int) -> str:
    """The state of the work source, as text; empty where there is none."""
    if "source" not in entry:
        return ""
    try:
        text = as_text(entry["source"])
        parse_state(text)
        if len(text) > STATE_LIMIT + 256:
            raise ValueError(f"it has {len(text)} bytes, more than the {STATE_LIMIT} of the largest state")
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"malformed checkpoint: lane {lane}: the work source's state: {error}") from error
    return text


def _count(value: object, what: str) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise CheckpointError(
            f"malformed checkpoint: {what} must be a whole number from 0 to {_LARGEST}, found {_shown(value)}"
        )
    return value


def _lane_number(key: object) -> int:
    """The lane that a key of `lanes` names, written as this module writes it; -1 for anything else."""
    if type(key) is int:
        return key
    if not isinstance(key, str) or not key.isascii() or not key.isdecimal() or len(key) > len(str(MOST_LANES)):
        return -1
    return int(key) if str(int(key)) == key else -1


def _instead(state: object) -> str:
    """What was given where a checkpoint is wanted, and how one is made of it."""
    if isinstance(state, str) and state.lstrip().startswith("{"):
        return "text: if it is JSON, load what json.loads makes of it"
    if isinstance(state, (str, os.PathLike)):
        path = os.fspath(state)
        return f"a path: load what zephon.load_checkpoint({_shown(path)}) returns"
    if isinstance(state, (list, tuple)):
        return f"a {type(state).__name__}: load what zephon.merge_checkpoints makes of the parts of all groups"
    return f"{type(state).__name__}: load what state_dict() or checkpoint() returned"


def _shown(value: object) -> str:
    """A value for an error message, no longer than a line."""
    text = f"a number of {value.bit_length()} bits" if type(value) is int and abs(value) > _LARGEST else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
