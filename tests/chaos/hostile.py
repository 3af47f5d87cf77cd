"""A process of this user that means no good, or has lost its mind: what it may send to the sockets of a daemon."""

from __future__ import annotations

import json
import os
import random
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import zmq

from zephon.transport import protocol as p
from zephon.transport import worker_protocol as w
from zephon.transport.channels import MAX_DESCRIPTOR, Channel, connect
from zephon.transport.endpoints import data_path
from zephon.transport.messages import MAX_MESSAGE, decode, encode

ANSWERS = (p.Welcome, p.Attached, p.ProgressReport, p.Farewell, p.Patience, p.Refused)
TOKEN = b"t" * 16


def damaged(chance: random.Random, data: bytes) -> bytes:
    """The same bytes with some changed, left out, put in, or cut off; never none at all."""
    out = bytearray(data)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(out) + 1)
        kind = chance.randrange(4)
        if kind == 0 and at < len(out):
            out[at] = chance.randrange(256)
        elif kind == 1:
            del out[at:]
        elif kind == 2:
            del out[at : at + chance.randrange(1, 9)]
        else:
            out[at:at] = chance.randbytes(chance.randrange(1, 9))
    return bytes(out) or b"\0"


class Hostile:
    """Sends `sent[kind]` messages of each kind to the daemon at `path`. `pipeline` is one that it may read itself."""

    def __init__(self, path: str, pipeline: str, seed: int) -> None:
        self.path, self.pipeline = path, pipeline
        self.chance = random.Random(seed)
        self.sent: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self._context = zmq.Context(io_threads=1)
        self._dealer = self._open()

    def storm(self, count: int) -> None:
        """So many messages, of all kinds."""
        kinds = (self.garbage_requests, self.strange_requests, self.raw_bytes, self.unjoined, self.joined)
        while self.sent.total() < count:
            self.chance.choices(kinds, (8, 8, 1, 4, 1))[0]()

    def close(self) -> None:
        self._dealer.close(linger=0)
        self._context.term()

    # The control socket

    def garbage_requests(self) -> None:
        """Frames of anything, in any number."""
        for _ in range(16):
            frames = [self._anything() for _ in range(self.chance.randrange(1, 5))]
            if self.chance.random() < 0.003:
                frames[-1] = bytes(MAX_MESSAGE + self.chance.randrange(-64, 64))
            self._ask(frames, "garbage request")
        self._hear()

    def strange_requests(self) -> None:
        """Well-formed messages out of order, of strangers, or of the other side; and damaged ones."""
        for _ in range(16):
            message = encode(self.chance.choice(self._messages()))
            if self.chance.random() < 0.5:
                message = damaged(self.chance, message)
            self._ask([b"1", message], "strange request")
        self._hear()

    def raw_bytes(self) -> None:
        """Bytes that are no ZeroMQ at all, or only its beginning."""
        greeting = b"\xff\0\0\0\0\0\0\0\1\x7f\3\1NULL" + bytes(16 + 32)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw, suppress(OSError):
            raw.connect(self.path)
            self.sent["raw bytes"] += 1
            raw.sendall(self.chance.choice([b"", greeting, greeting[:11]]) + self.chance.randbytes(300))

    # The data socket

    def unjoined(self) -> None:
        """A connection that never says, rightly, whose it is."""
        channel = self._connect()
        if channel is not None:
            self._say(channel, "before joining", self._anything)

    def joined(self) -> None:
        """A client like any other, at first. Its engine hears something else then."""
        welcome = self._request(p.Hello(os.getpid(), 1, 0, 1, self.pipeline, "", None))
        if not isinstance(welcome, p.Welcome):
            return
        channel = self._connect()
        if channel is None:
            return
        channel.send(encode(p.Join(welcome.token, welcome.client)))
        if self.chance.random() < 0.2:  # who ends its own data connection is forgotten, and gets no answer
            self._say(channel, "joined, not attached", self._anything)
            return
        checkpoint = self._checkpoint() if self.chance.random() < 0.3 else ""
        attached = self._request(p.Attach(welcome.token, welcome.client, checkpoint, []))
        if isinstance(attached, p.Attached):
            channel.send(encode(p.Begin(attached.epoch)))
            self._say(channel, "attached", lambda: encode(self._from_reader(attached.epoch)))
        channel.close()
        self._request(p.Goodbye(welcome.token, welcome.client))

    def clings(self) -> None:
        """A client that has left, but whose connection is kept open by a message in it."""
        welcome = self._request(p.Hello(os.getpid(), 1, 0, 1, self.pipeline, "", None))
        channel = self._connect()
        assert isinstance(welcome, p.Welcome)
        assert channel is not None
        channel.send(encode(p.Join(welcome.token, welcome.client)))
        channel.send(b"anything", (channel.fileno(),))
        channel.close()

    # Inside

    def _open(self) -> zmq.Socket[bytes]:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.SNDTIMEO, 10_000)
        dealer.setsockopt(zmq.RCVTIMEO, 40_000)
        dealer.connect(f"ipc://{self.path}")
        return dealer

    def _ask(self, frames: list[bytes], kind: str) -> None:
        self.sent[kind] += 1
        self._dealer.send_multipart(frames)
        if any(len(frame) > MAX_MESSAGE for frame in frames):  # the daemon has cut this connection
            self._dealer.close(linger=1000)
            self._dealer = self._open()

    def _request(self, message: object) -> object:
        """The answer to a request that is all right."""
        self._dealer.send_multipart([b"right", encode(message)])
        while True:
            number, payload = self._dealer.recv_multipart()
            answer = decode(payload, expect=ANSWERS)
            self.answers[type(answer).__name__] += 1
            if number == b"right" and not isinstance(answer, p.Patience):
                return answer

    def _hear(self) -> None:
        with suppress(zmq.Again):
            while True:
                payload = self._dealer.recv_multipart(zmq.NOBLOCK)[-1]
                self.answers[type(decode(payload, expect=ANSWERS)).__name__] += 1

    def _connect(self) -> Channel | None:
        channel = connect(data_path(self.path), 10.0)
        return None if channel.closed else channel

    def _say(self, channel: Channel, kind: str, what: Callable[[], bytes]) -> None:
        """A few messages, some too large, some with descriptors that nobody asked for, until it is thrown out."""
        raw = socket.socket(fileno=os.dup(channel.fileno()))
        raw.settimeout(10.0)
        try:
            for _ in range(self.chance.randrange(1, 6)):
                data = what()
                if self.chance.random() < 0.1:
                    data = bytes(MAX_DESCRIPTOR + 1)
                elif self.chance.random() < 0.2:
                    data = damaged(self.chance, data)
                self.sent[kind] += 1
                if self.chance.random() < 0.2:
                    socket.send_fds(raw, [data], [raw.fileno()] * self.chance.randrange(1, 4))
                else:
                    raw.send(data)
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            raw.close()
            channel.close()

    def _anything(self) -> bytes:
        if self.chance.random() < 0.5:
            return damaged(self.chance, encode(self.chance.choice(self._messages())))
        return self.chance.randbytes(self.chance.choice([1, 2, 16, 200, 3000]))

    def _number(self) -> int:
        return self.chance.choice([0, 0, 0, 1, 1, 2, 7, -1, 1000, 2**31, 2**62, -(2**63)])

    def _from_reader(self, epoch: int) -> object:
        """What a reader may say, at any time and with any numbers."""
        number = self._number
        slots = [number() for _ in range(3 * (number() % 5))]
        return self.chance.choice(
            [
                p.Begin(epoch), p.Begin(number()), p.Hungry(number(), number(), number()),
                p.Returned.of(slots, epoch, number()),
                p.Returned.of([0, 0, 0, 0, 0, 1, 0, 0, 2], epoch, 1),
            ]
        )  # fmt: skip

    def _checkpoint(self) -> str:
        number = self._number
        lanes = {str(number()): {"chunk": number(), "offset": number(), "records": number()} for _ in range(3)}
        whole = {"format": 1, "identity": {"canonical_replicas": number()}, "epoch": number(), "lanes": lanes}
        return self.chance.choice(
            ["{", "[" * 100_000, "null", "[1]", '{"format": 1}', json.dumps(whole), json.dumps(whole)[:-3], "\x00"]
        )

    def _messages(self) -> list[object]:
        number = self._number
        any_pipeline = self.chance.choice(["spare", "pipeline"])
        return [
            p.Hello(os.getpid(), 1, 0, 1, "no such pipeline", "", None),
            p.Hello(os.getpid(), abs(number() // 2), number(), abs(number() // 2), any_pipeline, "", number()),
            p.Attach(TOKEN, number(), self._checkpoint(), ["mixture"]),
            p.Goodbye(TOKEN, number()),
            p.Join(TOKEN, number()),
            p.Progress(),
            p.Begin(number()),
            p.Returned.of([number(), number(), number()], number(), number()),
            p.Welcome(TOKEN, 1, "recipe"),
            p.Refused("RunFailed", "no"),
            p.StartRun(number(), "pipeline", 1, [], [0]),
            p.EndRun(number()),
            p.DropReader(number()),
            p.EngineReport(number(), {"runs": []}),
            w.TaskDone(number(), 0, 0, 0, 0, [], {}, 0),
        ]
