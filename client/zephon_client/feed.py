"""The data connection of a client: descriptors of batches in, slots back.

`pump` takes in what has arrived, without waiting: segments are mapped, a failure and the engine's signs of life are
noted, all else is queued in `arrived` for the run. `sleep` waits in the kernel until something arrives; nothing here
polls or spins. After the connection's end what had arrived before is still there.

Where taking in or giving back fails half-way (no memory to map a segment, say), the connection ends: batches or slots
would be missing for good otherwise, and a rank comes back to a connection that has ended by itself.
"""

from __future__ import annotations

import select
from collections import deque
from typing import Any

from zephon.errors import ProtocolError
from zephon.transport import channels
from zephon.transport.messages import decode, encode
from zephon.transport.protocol import (
    Alive,
    Announced,
    BatchesReady,
    BatchReady,
    Begin,
    Failed,
    Hungry,
    Join,
    LaneTotal,
    NewSegment,
    ReadersLeft,
    Released,
    Returned,
)
from zephon_client.ready import Ready
from zephon_client.slots import Slots
from zephon_client.undisturbed import Undisturbed

FROM_ENGINE = (NewSegment, BatchReady, BatchesReady, Announced, LaneTotal, Released, ReadersLeft, Alive, Failed)
_AT_ONCE = 64
_NUMBERS_A_MESSAGE = 3 * 1000


class Feed:
    """Used by one thread, in the process that made it."""

    def __init__(
        self, path: str, join: Join, undisturbed: Undisturbed, *, writable: bool, start_seconds: float
    ) -> None:
        """Connects to the data socket at `path`; DaemonUnavailable when none answers within `start_seconds`."""
        self._channel = channels.connect(path, start_seconds)
        self._undisturbed = undisturbed
        self._poll = select.poll()
        self._poll.register(self._channel.fileno(), select.POLLIN)
        self._watches_write = False
        self._told = (-1, -1)
        self.slots = Slots(writable)
        self.arrived: deque[Any] = deque()
        self.failed: Failed | None = None
        self.heard = 0
        """Messages that came in."""
        self.moved = 0
        """Those of them that show the run going on."""
        self.reason = ""
        """What the engine last said that this client waits for."""
        self.stall = ""
        """What it last said of a worker that does not move."""
        self.waits_for: tuple[int, int, int] | None = None
        """The lane, the epoch and the place that this client waits at, as the engine knows it; None if it does not."""
        self._send(join)

    @property
    def closed(self) -> bool:
        """Whether the other side is gone."""
        return self._channel.closed

    def fileno(self) -> int:
        return self._channel.fileno()

    def pump(self) -> None:
        """Takes in what has arrived and sends what waits, without blocking."""
        with self._undisturbed:
            self.pump_undisturbed()

    def pump_undisturbed(self) -> None:
        """As `pump`, for a caller that has taken care of interrupts."""
        try:
            if self._channel.wants_write:
                self._channel.flush()
            while True:
                messages = self._channel.receive(_AT_ONCE)
                try:
                    for payload, fds in messages:
                        self._take(payload, fds)
                finally:
                    for _, fds in messages:
                        channels.close_all(fds)
                if len(messages) < _AT_ONCE:
                    return
        except BaseException:
            self.leave()
            raise

    def begin(self, epoch: int, past: int = 0) -> None:
        """Asks for an epoch's batches. `past`: records of each lane in the epochs before."""
        self._told = (epoch, 0)
        self._send(Begin(epoch, past))

    def give_back(self, epoch: int, rounds: int) -> None:
        """Returns the slots whose last array has died, and tells how many rounds have been delivered."""
        try:
            numbers = self.slots.to_return()
            begun, told = self._told
            if not numbers and (begun != epoch or told == rounds):
                return
            if begun == epoch:
                self._told = (epoch, rounds)
            for low in range(0, max(1, len(numbers)), _NUMBERS_A_MESSAGE):
                self._send(Returned.of(numbers[low : low + _NUMBERS_A_MESSAGE], epoch, rounds))
        except BaseException:
            self.leave()
            raise

    def hungry(self, lane: int, epoch: int, stands: int) -> None:
        """Asks for signs of life until the lane's batch comes, which begins at `stands` in turn-taking."""
        self._send(Hungry(lane, epoch, stands))
        self.waits_for = lane, epoch, stands

    def sleep(self, seconds: float) -> None:
        """Waits until something arrives, or so long."""
        if self._watches_write != self._channel.wants_write:
            self._watches_write = not self._watches_write
            self._poll.modify(self._channel.fileno(), select.POLLIN | (select.POLLOUT if self._watches_write else 0))
        self._poll.poll(seconds * 1000)

    def interrupt(self) -> None:
        """Ends the connection for a thread that waits in it. The only method that another thread may call."""
        self._channel.interrupt()

    def leave(self) -> None:
        """Ends the connection, of which something was lost on the way. What had arrived before is still there."""
        self._channel.close()

    def close(self) -> None:
        """Ends the connection; arrays stay readable. May be called again."""
        self._channel.close()
        self.slots.close()

    def _send(self, message: object) -> None:
        self.waits_for = None
        self._channel.send(encode(message, limit=channels.MAX_DESCRIPTOR))

    def _take(self, payload: bytes, fds: list[int]) -> None:
        message = decode(payload, expect=FROM_ENGINE)
        self.heard += 1
        self.moved += 1
        if isinstance(message, (BatchesReady, BatchReady)):
            for row in message.rows:
                ready = Ready(*row)
                self.slots.came(ready)
                self.arrived.append(ready)
        elif isinstance(message, NewSegment):
            if len(fds) != 1:
                raise ProtocolError(f"a segment of lane {message.lane} came with {len(fds)} descriptors, not one")
            self.slots.map(message, fds.pop())
        elif isinstance(message, Alive):
            self.reason, self.stall = message.reason, message.stall
            self.moved -= not message.working
        elif isinstance(message, Failed):
            self.failed = message
        else:
            self.arrived.append(message)
