"""What `sessions.Sessions` has the daemon do: answer, start a run, pass a connection on, tell the engine, let go."""

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
    Patience,
    Refused,
    StartRun,
    Welcome,
)


class Answer(NamedTuple):
    """Answer a request."""

    ask: Hashable
    message: Welcome | Attached | Farewell | Patience | Refused


class Start(NamedTuple):
    """Have the engine start a run from a checkpoint (JSON, empty for a new run)."""

    message: StartRun
    checkpoint: str


class HandOver(NamedTuple):
    """Pass a client's data connection to the engine, with its resume statement, if it has one."""

    message: AddReader
    statement: str = ""


class ToEngine(NamedTuple):
    message: DropReader | EndRun | ExpectReaders


class HangUp(NamedTuple):
    """Close a client's data connection, so that it comes back."""

    client: int


class Forget(NamedTuple):
    """A client is gone: its watch and its data connection, if still held, can go."""

    client: int


Instruction = Answer | Start | HandOver | ToEngine | HangUp | Forget
