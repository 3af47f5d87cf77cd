"""Batches on their way to a device: copied from the ring itself, on a side stream, one batch ahead of the trainer.

    ring slot --(driver, side stream)--> device        the slot is leased until the copy's event has fired
        \\----(this process)-----------> host copy      what `samples`, `digest`, text and `to_training` are made of

A lane's segment is registered with the driver when the first batch is sent from it, once for each generation, and
unregistered before it is unmapped, when the copies from it are done. Where the driver does not take a segment (a limit
on locked memory, say) batches go through pinned copies, and where there is no pinned memory either they are copied
while the trainer waits; that is said once. A batch that travels alone goes through pinned memory, too: to register
memory for one copy costs more than the copy.

The trainer gets no array over the ring, so it cannot start a copy from memory that is about to be written again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from zephon.columns import AnyArray, Fixed
from zephon.training import TORCH_DTYPES
from zephon.transport import layout
from zephon_client.copies import Copies
from zephon_client.device import Bytes, Device, Event, NotRegistered
from zephon_client.ready import Ready
from zephon_client.slots import Slots

Segment = tuple[int, int]
"""(lane, generation)"""


@dataclass(frozen=True)
class Sent:
    """A batch on its way: `tensor` (uint8, all of its bytes) is whole when `event` has fired."""

    device: Device
    tensor: Any
    event: Event
    offsets: dict[str, int]
    """Where fields of numbers begin in it."""

    def arrive(self) -> None:
        """It is about to be used on the trainer's current stream."""
        self.device.arrive(self.event, self.tensor)

    def field(self, name: str, values: AnyArray) -> Any:
        """A field there, given what it looks like here; None for one that torch has no type for."""
        if name not in self.offsets:
            return None
        import torch

        low = self.offsets[name]
        dtype = getattr(torch, "bool" if values.dtype == np.bool_ else values.dtype.name)
        return self.tensor[low : low + values.nbytes].view(dtype).view(values.shape)


class Ahead:
    """Starts copies to one device and keeps their sources. Used by the Loader's thread."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.unsaid = ""
        """What the user is to be warned of."""
        self._pending: deque[tuple[Event, Bytes, Segment | None]] = deque()
        self._registered: dict[Segment, Bytes] = {}
        self._refused: set[Segment] = set()
        self._why = ""
        """Why the driver did not take a segment."""
        self._pins = True
        self._warned = False

    def send(self, slots: Slots, at: Ready, source: Bytes, copies: Copies) -> tuple[Bytes, Sent | None]:
        """The batch's host side, in memory of its own, and its copy to the device; `source` is its leased slot.

        That is None where the driver takes neither kind of memory. The caller has made room for the host side.
        """
        segment: Segment | None = (at.lane, at.generation)
        if self._takes(slots, (at.lane, at.generation)):
            host = copies.copy(source)
        else:
            segment = None
            source = host = self._pinned(source, copies)
        if segment is None and not self._pins:
            return host, None
        tensor = self.device.send(source)
        event = self.device.mark()
        self._pending.append((event, source, segment))
        return host, Sent(self.device, tensor, event, _offsets(host))

    def reap(self, wait: bool = False) -> None:
        """Lets go of the sources whose copies are done; `wait` waits for those under way, which takes microseconds."""
        while self._pending and (wait or self._pending[0][0].query()):
            if wait:
                self._pending[0][0].synchronize()
            self._pending.popleft()

    def forget(self, segment: Segment) -> None:
        """The segment is about to be unmapped: waits for copies from it, which are under way for microseconds."""
        if segment in self._registered:
            for event, _, other in self._pending:
                if other == segment:
                    event.synchronize()
            self.device.unregister(self._registered.pop(segment))
        self._refused.discard(segment)
        self.reap()

    def _takes(self, slots: Slots, segment: Segment) -> bool:
        """Whether the driver knows the segment, which it is told of now if it has not been."""
        memory = slots.memory(segment)
        if segment in self._registered:
            return True
        if memory is None or segment in self._refused:
            return False
        try:
            self.device.register(memory, slots.read_only)
        except NotRegistered as error:
            self._refused.add(segment)
            self._why = f"its memory cannot be registered with the driver ({error})"
            return False
        self._registered[segment] = memory
        slots.when_unmapped = self.forget
        return True

    def _pinned(self, source: Bytes, copies: Copies) -> Bytes:
        if self._pins:
            try:
                copy = copies.copy(source, self.device.pinned)
            except NotRegistered as error:
                self._pins, self._warned = False, False
                self._why = "; ".join(filter(None, (self._why, str(error))))
            else:
                self._warn("through pinned memory, which costs one more copy")
                return copy
        self._warn("while the trainer waits")
        return copies.copy(source)

    def _warn(self, how: str) -> None:
        if self._why and not self._warned:
            self._warned = True
            self.unsaid = (
                f"device: batches are not copied from their ring, but {how}: {self._why}. `ulimit -l` (LimitMEMLOCK of "
                "systemd) bounds what a process may lock."
            )


def _offsets(data: Bytes) -> dict[str, int]:
    begin = data.ctypes.data
    return {
        name: column.values.ctypes.data - begin
        for name, column in layout.read(data).fields.items()
        if type(column) is Fixed and column.values.dtype in TORCH_DTYPES and column.values.size
    }
