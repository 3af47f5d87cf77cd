"""Messages that may be larger than a connection takes: as memory then, which a small message announces.

Between the daemon and its engine, which trust each other's lengths no more than the kernel does: what is read is what
the descriptor holds, and it must be a whole message.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zephon.errors import ProtocolError
from zephon.transport.channels import MAX_DESCRIPTOR, Channel
from zephon.transport.messages import MAX_MESSAGE, decode, encode, message


@message("in_memory")
@dataclass(frozen=True, slots=True)
class InMemory:
    """A message of `nbytes`; its memory comes with this one."""

    nbytes: int


def send_large(channel: Channel, value: object, fds: Sequence[int] = ()) -> None:
    """Sends a message of any size up to `MAX_MESSAGE`; one that comes with descriptors of its own must be small."""
    payload = encode(value)
    if len(payload) <= MAX_DESCRIPTOR or fds:
        channel.send(payload, fds)
        return
    fd = os.memfd_create("zephon:message", os.MFD_CLOEXEC)
    try:
        left = memoryview(payload)
        while left:
            left = left[os.write(fd, left) :]
        channel.send(encode(InMemory(len(payload))), (fd,))
    finally:
        os.close(fd)


def decode_large(payload: bytes, fds: list[int], expect: tuple[type, ...]) -> Any:
    """The message in `payload`, or in the memory that it announces. `fds` stay the caller's to close.

    Raises ProtocolError as `decode` does.
    """
    found = decode(payload, expect=(*expect, InMemory))
    if not isinstance(found, InMemory):
        return found
    if not fds or not 0 < found.nbytes <= MAX_MESSAGE:
        raise ProtocolError(f"a message of {found.nbytes} bytes was announced: it came without memory, or is too large")
    return decode(os.pread(fds[0], found.nbytes, 0), expect=expect)
