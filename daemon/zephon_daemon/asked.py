"""Requests of clients: what is refused at once, and what waits for its answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zephon.errors import DaemonUnavailable, SettingError, TopologyError, ZephonError
from zephon.frontiers import MOST_LANES
from zephon.transport.protocol import Attach, Hello, Refused
from zephon_daemon.members import Client, Run, listed

SAME_JOB_SECONDS = 30.0
"""How long a rank that connects again waits for its peers to leave the run before."""

UNWANTED_SECONDS = 600.0
"""How long a rank waits for a run that nobody wants any more to take shape, since it can be ended only then."""

LONGEST_NAME = 1000
"""Characters of a pipeline's or a job's name."""

LONGEST_TEXT = 8000
"""Characters of an error's text."""

MOST_REASONS = 20
"""Reasons to wait that a report names."""


class Wait(NamedTuple):
    """A request cannot be answered yet. After `seconds` it is refused with `error` (None: it waits on).

    `joins`: it is to attach to the current run of its pipeline.
    """

    reason: str
    seconds: float = 0.0
    error: ZephonError | None = None
    joins: bool = False


@dataclass
class Waiting:
    """A request that waits; see `Wait`. `told` is when its client last heard that it is not forgotten."""

    ask: Hashable
    request: Hello | Attach
    since: float
    reason: str
    told: float
    seconds: float
    error: ZephonError | None
    joins: bool


TAKES_SHAPE = Wait("the run takes shape", joins=True)
LOADS = Wait("the engine loads the recipe")


def run_before(client: Client, readers: Sequence[Client]) -> Wait:
    """For those who still read in the run that a client's place is used up in."""
    names, hello = listed(readers), client.hello
    return Wait(
        f"the run before to end: {names}",
        SAME_JOB_SECONDS,
        TopologyError(
            f"group {hello.dp_group_id} has read in this run of pipeline {hello.pipeline!r} and left it, while "
            f"others still read: {names}. Nobody can come back into a run that others go on reading: a new one "
            "starts once all of them have closed, so end them, and start all ranks together from the last "
            "checkpoint."
        ),
    )


def unwanted(run: Run) -> Wait:
    """For a run to take shape and end, all of whose clients have left before it did."""
    return Wait(
        f"the run before to end, which still takes shape: {run.first} wanted it, and has left",
        UNWANTED_SECONDS,
        DaemonUnavailable(
            f"the run of pipeline {run.pipeline!r} that {run.first} wanted, and left, still takes shape after "
            f"{UNWANTED_SECONDS:g} s, and no other one starts before it has. `zephon progress` shows what the engine "
            "works on (a tokenizer that is loaded, setup of operators, functions that are tried on the first records); "
            "or start the daemon again."
        ),
    )


def check_hello(hello: Hello) -> None:
    """Refuses a hello that makes no sense, whoever is here: SettingError or TopologyError."""
    if len(hello.pipeline) > LONGEST_NAME or len(hello.job) > LONGEST_NAME:
        raise SettingError(f"the name of a pipeline or a job has more than {LONGEST_NAME} characters")
    if not (1 <= hello.dp_degree <= MOST_LANES and 1 <= hello.group_readers <= MOST_LANES):
        raise SettingError(
            f"dp_degree={hello.dp_degree}, group_readers={hello.group_readers}: both must be in 1..{MOST_LANES}"
        )
    if not 0 <= hello.dp_group_id < hello.dp_degree:
        raise TopologyError(
            f"dp_group_id={hello.dp_group_id} with dp_degree={hello.dp_degree}: must be in 0..{hello.dp_degree - 1}"
        )


def group_of(hello: Hello) -> tuple[str, int]:
    """The group that a client reads, by pipeline and number."""
    return hello.pipeline, hello.dp_group_id


def is_of(request: Hello | Attach, client: int) -> bool:
    """Whether it is that client's."""
    return isinstance(request, Attach) and request.client == client


def reasons_of(waiting: Iterable[Waiting]) -> list[str]:
    """What is waited for, the first few reasons."""
    counts = Counter(each.reason for each in waiting)
    named = [f"{reason} ({count} requests)" if count > 1 else reason for reason, count in counts.items()]
    return [*named[:MOST_REASONS], *([f"and {len(named) - MOST_REASONS} more"] if named[MOST_REASONS:] else [])]


def refused(error: ZephonError) -> Refused:
    """An error as an answer."""
    return Refused(type(error).__name__, str(error)[:LONGEST_TEXT])
