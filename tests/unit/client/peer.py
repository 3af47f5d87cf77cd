"""The other side of a client, for tests: a daemon and an engine in one thread, over real sockets and real segments.

It speaks `zephon.transport.protocol` and produces made-up lanes: record `i` of lane `l` in epoch `e` has the id
`(e * 100 + l) * 100_000 + i`, and a window begins every `window` records. What a test wants otherwise it sets:
`hold` lanes, `release` rounds by hand, `answers` to requests.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from zephon.columns import Block, Bytes, Fixed, Text, canonical, joined
from zephon.frontiers import Frontier, complete_checkpoint, furthest
from zephon.lanes import batch_end, is_spent, owned_lanes, released_rounds
from zephon.transport import protocol as p
from zephon.transport.channels import Channel, listen
from zephon.transport.endpoints import data_path
from zephon.transport.layout import measure
from zephon.transport.messages import decode, encode
from zephon.transport.rings import RingWriter
from zephon.transport.segments import PAGE, Segment
from zephon.transport.statement import decode_statement

ENDLESS = 2**62
SECONDS = 40.0
"""The limit of every wait."""


def ids(lane: int, low: int, high: int, epoch: int = 0) -> list[int]:
    """The ids of records `low` to `high` of a lane."""
    return list(range((epoch * 100 + lane) * 100_000 + low, (epoch * 100 + lane) * 100_000 + high))


@dataclass
class Shape:
    """What the made-up run looks like. `totals`: records of each lane, None for an endless run."""

    lanes: int = 4
    microbatch: int = 2
    totals: list[int] | None = None
    drop_last: bool = True
    slots: int = 4
    window: int = 5
    width: int = 3
    strategy: str = "contiguous"
    by_hand: bool = False
    warnings: list[str] = field(default_factory=list)
    announce: Callable[[int, int], bool] = lambda lane, window: True

    @property
    def identity(self) -> dict[str, Any]:
        return {"seed": 7, "canonical_replicas": self.lanes, "operators": "none"}


@dataclass
class Guest:
    """One client."""

    hello: p.Hello
    channel: Channel | None = None
    attached: bool = False
    epoch: int = -1


@dataclass
class Ring:
    """A lane's ring, its memory, and where its production stands."""

    writer: RingWriter
    segments: dict[int, Segment]
    told: set[int]
    epoch: int = -1
    stands: int = 0
    written: int = 0
    announced: int = 0


class Peer:
    """Serves `path` until `close`."""

    def __init__(self, folder: Path, shape: Shape | None = None, name: str = "d.sock") -> None:
        self.path = str(folder / name)
        self.shape = shape or Shape()
        self.said: list[Any] = []
        self.hold: set[int] = set()
        self.answers: dict[type, Callable[[Any], list[Any]]] = {}
        self.guests: dict[int, Guest] = {}
        self.starts: list[Frontier] | None = None
        self.first_epoch = 0
        self.rings: dict[int, Ring] = {}
        self.alive = [p.Alive(False, "workers")]
        self.supervisor = ""
        self._stated: dict[tuple[int, int], tuple[int, int]] = {}
        self._numbers = 0
        self._changed = threading.Condition()
        self._orders: list[tuple[Callable[[], Any], list[Any], threading.Event]] = []
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context = zmq.Context(io_threads=1)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(f"ipc://{self.path}")
        self._listener = listen(data_path(self.path))
        self._unnamed: list[Channel] = []
        self._open = True
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    # For tests

    def do(self, order: Callable[[], Any]) -> Any:
        """Runs `order` in the peer's thread and returns its result."""
        result: list[Any] = []
        done = threading.Event()
        self._orders.append((order, result, done))
        os.eventfd_write(self._wake, 1)
        assert done.wait(SECONDS), "the peer does not answer"
        if result and isinstance(result[0], BaseException):
            raise result[0]
        return result[0]

    def until(self, holds: Callable[[], Any]) -> None:
        """Waits until something is so, after whatever the peer takes in."""
        with self._changed:
            assert self._changed.wait_for(holds, timeout=SECONDS), f"it never came to that; the peer heard {self.said}"

    def heard(self, kind: type) -> list[Any]:
        """The messages of a class so far."""
        return [message for message in list(self.said) if isinstance(message, kind)]

    def send(self, message: Any, client: int = 0) -> None:
        """Sends a message on a client's data connection."""
        self.do(lambda: self._tell(client, message))

    def release(self, rounds: int, final: bool = False, epoch: int = 0) -> None:
        """Releases rounds to all clients."""
        for client in list(self.guests):
            self.send(p.Released(epoch, rounds, final), client)

    def let_go(self, *lanes: int) -> None:
        """Goes on with lanes that were held back."""

        def go() -> None:
            self.hold -= set(lanes)
            self._produce()

        self.do(go)

    def announce_all(self) -> None:
        """Announces the windows of all lanes up to what was written."""
        self.do(self._announce)

    def regrow(self, lane: int, slots: int) -> None:
        """Goes on in a new, larger generation of the lane's ring."""

        def grow() -> None:
            ring = self.rings[lane]
            ring.writer.regrow(ring.writer.generation.slot_bytes + PAGE, slots)
            ring.told.clear()
            self._produce()

        self.do(grow)

    def cut(self, client: int = 0) -> None:
        """Ends a client's data connection, as the engine's death would."""

        self.do(lambda: self.cut_now(client))

    def until_joined(self, client: int) -> None:
        """Within an answer: takes in connections until that client's is here."""
        while self.guests[client].channel is None:
            for key, _ in self._selector.select(1.0):
                key.data()

    def cut_now(self, client: int) -> None:
        """The same, within an answer."""
        channel = self.guests[client].channel
        if channel is not None:
            self._selector.unregister(channel)
            channel.close()
            self.guests[client].channel = None

    def close(self) -> None:
        """Ends everything, as the daemon's death would."""
        if self._open:
            self._open = False
            os.eventfd_write(self._wake, 1)
            self._thread.join(SECONDS)
            assert not self._thread.is_alive()
            os.close(self._wake)

    # The thread

    def _serve(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ, lambda: None)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._router.fileno(), selectors.EVENT_READ, lambda: None)
        while self._open:
            for key, _ in self._selector.select(0.5):
                key.data()
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            self._requests()
            while self._orders:
                order, result, done = self._orders.pop(0)
                try:
                    result.append(order())
                except BaseException as error:
                    result.append(error)
                done.set()
            with self._changed:
                self._changed.notify_all()
        for guest in self.guests.values():
            if guest.channel is not None:
                guest.channel.close()
        for channel in self._unnamed:
            channel.close()
        self._reset()
        self._listener.close()
        self._router.close()
        self._context.term()
        Path(self.path).unlink(missing_ok=True)
        self._selector.close()

    def _requests(self) -> None:
        while self._router.poll(0):
            identity, number, payload = self._router.recv_multipart()
            message = decode(payload)
            self.said.append(message)
            custom = self.answers.get(type(message))
            for answer in custom(message) if custom is not None else [self._answer(message)]:
                if answer is not None:
                    self._router.send_multipart([identity, number, encode(answer)])

    def _answer(self, message: Any) -> Any:
        if isinstance(message, p.Hello):
            for number, guest in list(self.guests.items()):
                if number == message.client or guest.hello.nonce == message.nonce:
                    self._leave(number)
            self.guests[self._numbers] = Guest(message)
            self._numbers += 1
            return p.Welcome(b"token", self._numbers - 1, "recipe.py", self.supervisor)
        if isinstance(message, p.Attach):
            return self._attach(message)
        if isinstance(message, p.Progress):
            return p.ProgressReport({"clients": len(self.guests)})
        self._leave(message.client)
        return p.Farewell()

    def _attach(self, message: p.Attach) -> p.Attached | p.Refused:
        guest = self.guests.get(message.client)
        if guest is None:  # its data connection has ended before this came
            return p.Refused("DaemonUnavailable", "this client has gone")
        if self.starts is None:
            self.starts, self.first_epoch = [Frontier()] * self.shape.lanes, 0
            if message.checkpoint:
                loaded = complete_checkpoint(json.loads(message.checkpoint))
                self.starts, self.first_epoch = [loaded.lanes[lane] for lane in range(self.shape.lanes)], loaded.epoch
        if message.statement:
            stated = decode_statement(message.statement)
            for lane, frontier in stated.at.lanes.items():
                self._stated[lane, stated.at.epoch] = stated.stands[lane], frontier.records
        guest.attached = True
        return p.Attached(
            identity=json.dumps(self.shape.identity),
            lanes=self.shape.lanes,
            owned=self._owned(guest),
            microbatch_size=self.shape.microbatch,
            drop_last=self.shape.drop_last,
            even_ends=True,
            packed=False,
            dataset_names=["web", "code"],
            epoch=self.first_epoch,
            starts=[[f.chunk, f.offset, f.records, f.skipped] for f in self.starts],
            stands={lane: f.stands for lane, f in enumerate(self.starts) if f.stands is not None},
            warnings=self.shape.warnings,
        )

    def _owned(self, guest: Guest) -> list[int]:
        hello = guest.hello
        return owned_lanes(self.shape.lanes, hello.dp_degree, hello.dp_group_id, self.shape.strategy)

    def _accept(self) -> None:
        while (channel := self._listener.accept()) is not None:
            self._unnamed.append(channel)
            self._selector.register(channel, selectors.EVENT_READ, lambda c=channel: self._data(c))

    def _data(self, channel: Channel) -> None:
        channel.flush()
        for payload, _ in channel.receive():
            message = decode(payload, expect=(p.Join, p.Begin, p.Returned, p.Hungry))
            self.said.append(message)
            if isinstance(message, p.Join):
                self._unnamed.remove(channel)
                if message.client in self.guests:
                    self.guests[message.client].channel = channel
                    continue
                self._selector.unregister(channel)  # said goodbye before this connection was looked at
                channel.close()
                return
            client = next(number for number, guest in self.guests.items() if guest.channel is channel)
            if isinstance(message, p.Begin):
                self._begin(client, message.epoch)
            elif isinstance(message, p.Hungry):
                for alive in self.alive:
                    self._tell(client, alive)
            else:
                for lane, generation, index in message.slots:
                    self.rings[lane].writer.returned(generation, index, client)
                self._produce()
        if channel.closed:
            self._selector.unregister(channel)
            channel.close()
            for number, guest in list(self.guests.items()):
                if guest.channel is channel:
                    guest.channel = None
                    self._leave(number)

    def _leave(self, client: int) -> None:
        guest = self.guests.pop(client, None)
        if guest is None:
            return
        if guest.channel is not None:
            self._selector.unregister(guest.channel)
            guest.channel.close()
        for ring in self.rings.values():
            ring.writer.drop_reader(client)
        if not self.guests:
            self._reset()
        else:
            self._produce()

    def _reset(self) -> None:
        for ring in self.rings.values():
            for segment in ring.segments.values():
                segment.close()
        self.rings, self.starts = {}, None

    def _tell(self, client: int, message: Any, fds: tuple[int, ...] = ()) -> None:
        channel = self.guests[client].channel
        if channel is not None:
            channel.send(encode(message), fds)

    # Production

    def _begin(self, client: int, epoch: int) -> None:
        self.guests[client].epoch = epoch
        if not self.shape.by_hand:
            rounds, final = self._rounds(epoch)
            self._tell(client, p.Released(epoch, rounds, final, final and self._spent(epoch, rounds)))
        for lane, total in enumerate(self.shape.totals or []):
            self._tell(client, p.LaneTotal(lane, epoch, total, 0))
        self._produce()

    def _most(self, epoch: int) -> int:
        assert self.starts is not None
        return furthest(self.starts) if epoch == self.first_epoch else 0

    def _rounds(self, epoch: int) -> tuple[int, bool]:
        totals = self.shape.totals
        if totals is None:
            return ENDLESS, False
        known = dict(enumerate(totals))
        return released_rounds(known, known, self._most(epoch), self.shape.microbatch, self.shape.drop_last)

    def _spent(self, epoch: int, rounds: int) -> bool:
        assert self.starts is not None
        assert self.shape.totals is not None
        starts, totals = {lane: f.records for lane, f in enumerate(self.starts)}, dict(enumerate(self.shape.totals))
        stands = {lane: f.stands for lane, f in enumerate(self.starts)}
        most, size = self._most(epoch), self.shape.microbatch
        return epoch == self.first_epoch and is_spent(starts, totals, most, rounds, size, stands)

    def _produce(self) -> None:
        for number, guest in list(self.guests.items()):
            readers = [
                n
                for n, g in self.guests.items()
                if g.hello.dp_group_id == guest.hello.dp_group_id and g.epoch == guest.epoch and g.channel is not None
            ]
            if guest.epoch < 0 or len(readers) < guest.hello.group_readers or number != readers[0]:
                continue
            for lane in self._owned(guest):
                if lane not in self.hold:
                    self._write(lane, guest.epoch, readers)
        self._announce()

    def _write(self, lane: int, epoch: int, readers: list[int]) -> None:
        shape = self.shape
        assert self.starts is not None
        ring = self.rings.get(lane)
        if ring is None:
            nbytes = PAGE * -(-measure(self._block(lane, 0, 0, shape.microbatch)).nbytes // PAGE)
            ring = self.rings[lane] = Ring(RingWriter(nbytes, shape.slots), {}, set())
        if ring.epoch != epoch:
            start = self.starts[lane] if epoch == self.first_epoch else Frontier()
            stands, written = self._stated.get((lane, epoch), (start.place, start.records))
            ring.epoch, ring.stands, ring.written, ring.announced = epoch, stands, written, written // shape.window
        generation = ring.writer.generation
        if generation.id not in ring.segments:
            ring.segments[generation.id] = Segment.create("peer", generation.nbytes)
        for reader in readers:
            if reader not in ring.told:
                ring.told.add(reader)
                message = p.NewSegment(lane, generation.id, generation.slot_bytes, generation.slots)
                self._tell(reader, message, (ring.segments[generation.id].fileno(),))
        most, total = self._most(epoch), shape.totals[lane] if shape.totals is not None else ENDLESS
        written: list[p.BatchReady] = []
        while ring.writer.free:
            until = batch_end(ring.stands, most, shape.microbatch)
            high = max(ring.written, min(until, total))
            if shape.totals is not None:
                last = most + self._rounds(epoch)[0] * shape.microbatch
                if until > last or (shape.drop_last and high < until):
                    break
            layout = measure(self._block(epoch, lane, ring.written, high))
            slot = ring.writer.acquire(layout.nbytes)
            assert slot is not None
            layout.write(ring.segments[slot.generation].array[slot.offset : slot.offset + layout.nbytes])
            ring.writer.publish(slot, readers)
            ready = p.BatchReady(
                lane, epoch, slot.generation, slot.index, layout.nbytes, ring.written, high - ring.written
            )
            written.append(ready)
            ring.stands, ring.written = until, high
        for reader in readers if written else ():
            self._tell(reader, written[0] if len(written) == 1 else p.BatchesReady.of(written))

    def _announce(self) -> None:
        for lane, ring in self.rings.items():
            while (ring.announced + 1) * self.shape.window <= ring.written:
                ring.announced += 1
                if self.shape.announce(lane, ring.announced):
                    told = p.Announced(lane, ring.epoch, ring.announced, ring.announced * self.shape.window, 0)
                    for client in self.guests:
                        self._tell(client, told)

    def _block(self, epoch: int, lane: int, low: int, high: int) -> Block:
        numbers = np.array(ids(lane, low, high, epoch), np.int64)
        rows = np.stack([numbers % 2, np.full(len(numbers), lane), numbers % 100_000], axis=1).astype(np.int64)
        fields = {
            "id": Fixed(numbers),
            "input_ids": Fixed(np.repeat(numbers, self.shape.width).reshape(len(numbers), self.shape.width)),
            "text": Text(*joined([f"record {number}".encode() for number in numbers.tolist()])),
            "raw": Bytes(*joined([b"x" * (number % 3) for number in numbers.tolist()])),
        }
        return canonical(Block(fields, rows.reshape(-1, 3)))
