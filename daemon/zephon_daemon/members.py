"""The clients and runs of a session, and what ranks of one run must agree on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from zephon.errors import CheckpointError, CheckpointMismatch, TopologyError
from zephon.frontiers import Checkpoint, checkpoint_from_text
from zephon.transport.protocol import Attached, Hello
from zephon.transport.statement import Statement
from zephon_daemon.black_box import STARTING

MOST_NAMED = 8
"""Clients that an error names."""


class Shape(NamedTuple):
    """What all clients of a run must agree on."""

    dp_degree: int
    group_readers: int
    checkpoint: str
    allow_changed: tuple[str, ...]


@dataclass
class Client:
    """One connection of one rank."""

    number: int
    token: bytes
    hello: Hello
    since: float
    pid: int
    engine: int = 0
    """The engine that has its group's lanes."""
    joined: bool = False
    handed_over: bool = False
    run: int | None = None
    """Its run, once it has been attached to one."""
    attached: bool = False
    """Whether it is attached in this engine's life."""
    lost: bool = False
    """Whether the engine that it was attached to has died: its data connection is dead, and it must come back."""
    back: bool = False
    """Whether it has said, since an engine died, how far it is."""
    statement: str = ""
    delivered: tuple[int, int] = (0, 0)
    """What it had delivered when it last said so."""

    def __str__(self) -> str:
        return f"process {self.pid} (group {self.hello.dp_group_id})"


@dataclass
class Run:
    """A pipeline's run. `started` are the engines that were told of it, `has` those of them that have resolved it.

    `plan` is None while none has. `origin` is the state that it begins from (JSON, empty for none), `resumed` whether
    it was running before.
    """

    number: int
    pipeline: str
    shape: Shape
    first: Client
    origin: str
    resumed: bool = False
    started: set[int] = field(default_factory=set)
    has: set[int] = field(default_factory=set)
    plan: Attached | None = None
    strategy: str = ""
    places: dict[int, int] = field(default_factory=dict)
    """How many readers of each group have ever attached."""
    gone: dict[int, int] = field(default_factory=dict)
    """How many of them have left."""
    died: dict[int, int] = field(default_factory=dict)
    """How many of them did so without a word."""
    deaths: dict[int, list[str]] = field(default_factory=dict)
    """How each engine died under it since a batch was delivered from it."""
    elsewhere: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)
    """The groups that each engine was told of, whose readers have other engines, and those that have lost theirs."""
    failed: str = ""
    """Why it cannot go on."""

    def expected(self, group: int) -> int:
        """Readers of a group that are here or will be."""
        return max(1, self.shape.group_readers - self.gone.get(group, 0))

    @property
    def died_out(self) -> list[int]:
        """The groups of which nobody is left who might wait for what others get after an engine's death."""
        return sorted(group for group, died in self.died.items() if died >= self.shape.group_readers)

    def hopeless(self, deaths: Sequence[str]) -> str:
        """Why it cannot go on once an engine has died so often under it, and what to do."""
        advice = "Look for a record that makes an operator crash or take too much memory."
        if all(STARTING in how for how in deaths):
            advice = (
                "It died before any record was on its way, where the run takes shape: look at what the recipe does "
                "there (a tokenizer that is loaded, setup of operators, functions that are tried on the first "
                "records), and at the machine's memory. Iterating the pipeline in a script of your own does the same "
                "without a daemon."
            )
        return (
            f"the engine died {len(deaths)} times under pipeline {self.pipeline!r}, and no batch was delivered "
            f"between: {'; '.join(deaths)}. {advice}"
        )


def check_shape(client: Client, shape: Shape, run: Run) -> None:
    """Refuse who brings another shape than the run has, both named."""
    first = run.first
    if shape.checkpoint != run.shape.checkpoint or shape.allow_changed != run.shape.allow_changed:
        raise CheckpointMismatch(
            f"{client} and {first} of one run bring different checkpoints: {_brought(shape)} and {_brought(run.shape)}."
            " Load the same checkpoint on every rank, with the same allow_changed."
        )
    for name, here, there in (
        ("dp_degree", shape.dp_degree, run.shape.dp_degree),
        ("group_readers", shape.group_readers, run.shape.group_readers),
    ):
        if here != there:
            raise TopologyError(
                f"{client} and {first} of one run contradict each other: {name}={here} and {name}={there}. "
                "All ranks must say the same."
            )


def check_origin(client: Client, statement: Statement, run: Run) -> None:
    """Ranks that go on together must have been in one run."""
    known = origin_of(run.plan) if run.plan is not None else checkpoint_from_text(run.origin) if run.resumed else None
    if known is None or _key(known) == _key(statement.origin):
        return
    differ = [name for name, value in statement.origin.identity.items() if known.identity.get(name) != value]
    what = f"their identities differ in {', '.join(differ)}" if differ else "they began at different places"
    raise CheckpointMismatch(
        f"{client} comes back to the run of {run.first}, but it was in another one: {what}. Was the recipe or its data "
        "changed under the run? Start the job again from its last checkpoint."
    )


def origin_of(plan: Attached) -> Checkpoint:
    """The state that a run began from."""
    return Checkpoint(json.loads(plan.identity), plan.epoch, plan.frontiers())


def _brought(shape: Shape) -> str:
    text = shape.checkpoint[:12] or "none"
    return text + (f" with allow_changed={list(shape.allow_changed)}" if shape.allow_changed else "")


def digest_of(text: str) -> str:
    """A checkpoint's digest, empty for none. States of one round that name different windows resume to the same."""
    if not text:
        return ""
    return _key(checkpoint_from_text(text))


def _key(checkpoint: Checkpoint) -> str:
    places = {lane: (frontier.records, frontier.place) for lane, frontier in checkpoint.lanes.items()}
    try:
        canonical = json.dumps([checkpoint.identity, checkpoint.epoch, sorted(places.items())], sort_keys=True)
    except RecursionError as error:
        raise CheckpointError("malformed checkpoint: its identity is nested too deeply") from error
    return hashlib.sha256(canonical.encode()).hexdigest()


def listed(clients: Sequence[Client]) -> str:
    """Clients by name, the first few, for an error."""
    more = len(clients) - MOST_NAMED
    return ", ".join(str(client) for client in clients[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
