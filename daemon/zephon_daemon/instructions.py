"""What the state machine of a run has its shell do: tell clients, make and drop rings, write batches."""

from __future__ import annotations

from typing import Any, NamedTuple

from zephon.transport.layout import Layout
from zephon.transport.protocol import BatchReady
from zephon.transport.rings import Slot


class Tell(NamedTuple):
    """Send a message to a client. A droppable one may be left out if the client does not keep up."""

    client: int
    message: Any
    droppable: bool = False


class MakeRing(NamedTuple):
    """Create memory for a generation of a lane's ring and hand it to the clients.

    `alone` names the batch, too large for the ring, that it is for alone; empty for a ring. Of one in `parts` each
    client may hold a part; a single one is for all of them.
    """

    lane: int
    generation: int
    slot_bytes: int
    slots: int
    clients: tuple[int, ...]
    alone: str = ""
    parts: int = 1


class DropRing(NamedTuple):
    """Nobody uses that generation any more."""

    lane: int
    generation: int


class Write(NamedTuple):
    """Write a batch into a slot and tell its readers."""

    slot: Slot
    layout: Layout
    ready: BatchReady
    clients: tuple[int, ...]


Instruction = Tell | MakeRing | DropRing | Write
