"""What a rank states when it comes back to a run whose engine or daemon has died: the *resume statement*.

A new engine knows nothing, and the ranks together know everything. So each rank states

- `origin`: the run as it began, which is the checkpoint that a run from the beginning of its data, or from a loaded
  state, starts from: the identity (so seed, lanes, sizes and estimates are the run's own), the first epoch, and where
  every lane stood. From it come M (the most records of any lane then) and so every round's boundary: they are what
  they were, however far the run has come since;
- `at` and `stands`: its epoch and its own lanes: a frontier of each, exactly as `state_dict` composes it, and where the
  lane stands in turn-taking (a lane that has run out stands where the others do, but has fewer records). Of the other
  groups' lanes `at` has the beginnings of the windows that they are in, for an engine that has to produce them before
  their ranks come;
- `rounds`, delivered of that epoch, for the record, and `readers`, how many ranks its group has left;
- `released` and `totals`: what engines have said of the last epochs and cannot find again once lanes have left them:
  which rounds may be delivered, and how many records a lane has in all.

Statements of one run agree about its origin. They arrive at any time and in any order, and each speaks for its own
group's lanes. Those of several readers of a group differ: each lane restarts at the one furthest behind, and a batch is
sent to those only that have not had it. Windows of other groups' lanes need not be stated: an earlier one that a
rank knows will do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zephon.errors import CheckpointError, ProtocolError
from zephon.frontiers import Checkpoint, complete_checkpoint, parse_checkpoint
from zephon.transport.protocol import LaneTotal, Released

EPOCHS_STATED = 4
"""Epochs back to which `released` and `totals` go: groups are never further apart where such words are needed."""


@dataclass(frozen=True)
class Statement:
    """See the module."""

    origin: Checkpoint
    at: Checkpoint
    stands: Mapping[int, int]
    rounds: int
    readers: int
    released: tuple[Released, ...] = ()
    totals: tuple[LaneTotal, ...] = ()

    @property
    def delivered(self) -> tuple[int, int]:
        """Grows with every batch that its rank delivers."""
        return self.at.epoch, sum(self.stands.values())

    def encode(self) -> str:
        """As text."""
        at = self.at.to_json()
        return json.dumps(
            {
                "origin": self.origin.to_json(),
                "epoch": at["epoch"],
                "lanes": at["lanes"],
                "stands": {str(lane): stand for lane, stand in self.stands.items()},
                "rounds": self.rounds,
                "readers": self.readers,
                "released": [[r.epoch, r.rounds, r.final, r.spent] for r in self.released],
                "totals": [[t.lane, t.epoch, t.records, t.skipped] for t in self.totals],
            }
        )


def decode_statement(text: str) -> Statement:
    """Reads a statement. Raises ProtocolError where it is malformed."""
    try:
        given = json.loads(text)
        origin = complete_checkpoint(given["origin"])
        at = parse_checkpoint({**given["origin"], "complete": False, "epoch": given["epoch"], "lanes": given["lanes"]})
        stands = {int(lane): _count(stand) for lane, stand in given["stands"].items()}
        if at.missing or any(stands[lane] < at.lanes[lane].records for lane in stands):
            raise ProtocolError("a resume statement's lanes do not agree with where they stand")
        if at.epoch < origin.epoch:
            raise ProtocolError(f"a resume statement of epoch {at.epoch} for a run that began in epoch {origin.epoch}")
        released = tuple(Released(_count(e), _whole(r), f is True, s is True) for e, r, f, s in given["released"])
        totals = tuple(LaneTotal(*map(_count, total)) for total in given["totals"])
        if any(total.lane >= origin.canonical_replicas for total in totals):
            raise ProtocolError("a resume statement tells totals of lanes that the run does not have")
        return Statement(origin, at, stands, _count(given["rounds"]), _count(given["readers"]), released, totals)
    except (CheckpointError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"malformed resume statement: {type(error).__name__}: {error}") from error


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) > 1 << 62:
        raise ValueError(f"{value!r} is no whole number")
    return value


def _count(value: Any) -> int:
    if _whole(value) < 0:
        raise ValueError(f"{value!r} is below 0")
    return int(value)
