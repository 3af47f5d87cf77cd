"""A lane's ring under load: one writer, readers in processes of their own that stall and hoard at random.

Every message has a number and a checksum in its descriptor. Readers check each one when it comes and again when they
let go of it, so a slot that is written while somebody still looks at it is found, too.
"""

from __future__ import annotations

import random
import select
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.running import Program, python
from zephon.transport import protocol as p
from zephon.transport.channels import pair
from zephon.transport.messages import decode, encode
from zephon.transport.rings import RingWriter, ring_shape
from zephon.transport.segments import Segment

SECONDS = 60_000
POOL = 16 << 20

READER = """
import random, select, sys, zlib
from collections import deque
from zephon.transport import protocol as p
from zephon.transport.channels import Channel
from zephon.transport.messages import decode, encode
from zephon_client.ready import Ready
from zephon_client.slots import Slots


channel, number, hoard = Channel.from_fd(int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
slots, chance = Slots(writable=False), random.Random(number)
poll = select.poll()
poll.register(channel.fileno(), select.POLLIN)
held, due, total, again = deque(), 0, 0, 0

def let_go():
    global again
    array, check = held.popleft()
    assert zlib.crc32(array) == check, f"reader {number}: overwritten while it was held"
    again += 1

def take(ready):
    global due, total
    assert ready.first_record == due, f"reader {number}: {due} is due, {ready.first_record} came"
    slots.came(ready)
    array = slots.lease(ready)
    assert len(array) == ready.nbytes
    assert zlib.crc32(array) == ready.records, f"reader {number}: message {due} is wrong"
    due += 1
    total += ready.nbytes
    held.append((array, ready.records))
    while len(held) > hoard or (held and chance.random() < 0.6):
        if chance.random() < 0.5:
            held.rotate(chance.randrange(len(held)))
        let_go()

while True:
    poll.poll()
    messages = channel.receive()
    if not messages and channel.closed:
        break
    for payload, fds in messages:
        message = decode(payload, expect=(p.NewSegment, p.BatchesReady))
        if isinstance(message, p.NewSegment):
            slots.map(message, fds.pop())
            continue
        for row in message.rows:
            take(Ready(*row))
        if chance.random() < 0.002:
            select.select([], [], [], chance.random() * 0.02)  # a training step that takes its time
    back = slots.to_return()
    if back:
        channel.send(encode(p.Returned.of(back, 0, due)))
    while channel.wants_write and not channel.closed:
        channel.flush()
while held:
    let_go()
assert again == due
print(due, total, flush=True)
"""


class Reader:
    """A reader's process, its connection, and whether it has been killed."""

    def __init__(self, folder: Path, number: int, hoard: int) -> None:
        self.channel, theirs = pair()
        self.number, self.due = number, 0
        arguments = (str(theirs.fileno()), str(number), str(hoard))
        self.program: Program = python(folder, READER, *arguments, pass_fds=(theirs.fileno(),))
        theirs.close()


class Writer:
    """Sends numbered messages of random sizes to all readers, over a ring that grows when one does not fit."""

    def __init__(self, readers: list[Reader], largest: int, seed: int) -> None:
        self.readers, self.largest = {reader.number: reader for reader in readers}, largest
        self.chance = random.Random(seed)
        self.pool = np.frombuffer(np.random.default_rng(seed).bytes(POOL + largest), np.uint8)
        self.ring, self.segments = RingWriter(4096, 8), dict[int, Segment]()
        self.written = self.bytes = 0
        self._make()
        self._poll = select.poll()
        for reader in readers:
            self._poll.register(reader.channel.fileno(), select.POLLIN)

    def send(self, count: int) -> None:
        batch: list[p.BatchReady] = []
        for _ in range(count):
            size = int(self.largest ** self.chance.random())
            if not self.ring.fits(size):
                self._tell(batch)
                self.ring.regrow(*ring_shape(size))
                self._make()
            while (slot := self.ring.acquire(size)) is None:
                self._tell(batch)
                self._hear(wait=True)
            at = self.chance.randrange(POOL)
            data = self.pool[at : at + size]
            self.segments[slot.generation].array[slot.offset : slot.offset + size] = data
            ready = p.BatchReady(0, 0, slot.generation, slot.index, size, self.written, zlib.crc32(data))
            self.ring.publish(slot, self.readers)
            self.written += 1
            self.bytes += size
            batch.append(ready)
            if len(batch) >= 32 or self.chance.random() < 0.3:
                self._tell(batch)
                self._hear(wait=False)
        self._tell(batch)
        self._hear(wait=False)

    def kill(self, number: int) -> None:
        """A reader dies with slots in its hands: they are free at once, the others do not notice."""
        reader = self.readers.pop(number)
        reader.program.process.kill()
        self._poll.unregister(reader.channel.fileno())
        reader.channel.close()
        self.ring.drop_reader(number)
        self.ring.check_invariants()

    def end(self) -> None:
        """What waits is sent, and there is no more."""
        for reader in self.readers.values():
            while reader.channel.wants_write:
                self._hear(wait=True)
            reader.channel.close()

    def _make(self) -> None:
        shape = self.ring.generation
        segment = self.segments[shape.id] = Segment.create("traffic", shape.nbytes)
        payload = encode(p.NewSegment(0, shape.id, shape.slot_bytes, shape.slots))
        for reader in self.readers.values():
            reader.channel.send(payload, (segment.fileno(),))

    def _tell(self, batch: list[p.BatchReady]) -> None:
        if batch:
            payload = encode(p.BatchesReady.of(batch))
            for reader in self.readers.values():
                assert reader.channel.send(payload), f"reader {reader.number} is gone: {reader.program.errors}"
            batch.clear()

    def _hear(self, wait: bool) -> None:
        assert self._poll.poll(SECONDS if wait else 0) or not wait, "no reader gave a slot back"
        for reader in self.readers.values():
            reader.channel.flush()
            for payload, _ in reader.channel.receive():
                message = decode(payload, expect=p.Returned)
                for _, generation, index in message.slots:
                    self.ring.returned(generation, index, reader.number)
            assert not reader.channel.closed, reader.program.errors
        for generation in self.ring.retired():
            self.segments.pop(generation).close()


@pytest.mark.parametrize(
    ("messages", "largest"),
    [((2_500, 1_000_000), 64 << 10), ((100, 10_000), 4 << 20)],
    ids=["many-small", "fewer-large"],
)
def test_no_message_is_wrong_missing_or_there_twice_whatever_readers_do(
    runtime_folder: Path, amount: Callable[[int, int], int], messages: tuple[int, int], largest: int
) -> None:
    count = amount(*messages)
    readers = [Reader(runtime_folder, number, hoard=number + 1) for number in range(4)]
    writer = Writer(readers, largest, seed=count)
    try:
        writer.send(count // 2)
        writer.kill(3)
        writer.send(count - count // 2)
        writer.ring.check_invariants()
        writer.end()
        for reader in readers[:3]:
            assert reader.program.end(SECONDS / 1000) == 0, reader.program.errors
            assert reader.program.output.split() == [str(count), str(writer.bytes)]
    finally:
        for reader in readers:
            with reader.program:
                reader.channel.close()
        for segment in writer.segments.values():
            segment.close()
