"""What `sessions.Sessions` has the daemon do: answer, start a run, pass a connection on, tell an engine, let go."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from zephon.transport.protocol import (
    AddReader,
    Attached,
    DropReader,
    EndRun,
    ExpectReaders,
    Farewell,
    GroupsElsewhere,
    LanesTold,
    Patience,
    Refused,
    StartRun,
    TellLanes,
    Welcome,
)


class Answer(NamedTuple):
    """Answer a request."""

    ask: Hashable
    message: Welcome | Attached | Farewell | Patience | Refused


class Start(NamedTuple):
    """Have an engine start a run from a checkpoint (JSON, empty for a new run)."""

    message: StartRun
    checkpoint: str
    engine: int = 0


class HandOver(NamedTuple):
    """Pass a client's data connection to its engine, with its resume statement, if it has one."""

    message: AddReader
    statement: str = ""
    engine: int = 0


class ToEngine(NamedTuple):
    message: DropReader | EndRun | ExpectReaders | GroupsElsewhere | LanesTold | TellLanes
    engine: int = 0


class HangUp(NamedTuple):
    """Close a client's data connection, so that it comes back."""

    client: int


class Forget(NamedTuple):
    """A client is gone: its watch and its data connection, if still held, can go."""

    client: int


Instruction = Answer | Start | HandOver | ToEngine | HangUp | Forget
