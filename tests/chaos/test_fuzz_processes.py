"""What flows between our own processes is not believed either: a peer gone wild costs itself, and nobody else."""

from __future__ import annotations

import os
import random
import select
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.hostile import damaged
from tests.running import counting, until
from tests.unit.client.peer import Peer, Shape
from zephon.errors import ZephonError
from zephon.transport import protocol as p
from zephon.transport import worker_protocol as w
from zephon.transport.channels import MAX_DESCRIPTOR, Channel, pair
from zephon.transport.messages import decode, encode
from zephon.transport.segments import Segment
from zephon_client import connect
from zephon_daemon.forkserver import ForkServer

SECONDS = 20.0


@pytest.fixture
def server(runtime_folder: Path) -> Iterator[ForkServer]:
    server = ForkServer()
    server.start()
    yield server
    server.close()


def say(channel: Channel, data: bytes, fds: int = 0) -> bool:
    """Sends bytes of any kind and size past what a channel checks; whether they could be sent."""
    raw = socket.socket(fileno=os.dup(channel.fileno()))
    try:
        raw.settimeout(SECONDS)
        socket.send_fds(raw, [data], [raw.fileno()] * fds)
    except (BrokenPipeError, ConnectionResetError):
        return False
    finally:
        raw.close()
    return True


def heard(channel: Channel, kind: type) -> Any:
    """The next message of that kind; None at the connection's end."""
    while True:
        assert select.select([channel], [], [], SECONDS)[0], f"no {kind.__name__} came"
        for payload, fds in channel.receive(limit=1):
            for fd in fds:
                os.close(fd)
            message = decode(payload)
            if isinstance(message, kind):
                return message
        if channel.closed:
            return None


def noise(chance: random.Random, messages: list[Any]) -> bytes:
    kind = chance.randrange(4)
    if kind == 0:
        return chance.randbytes(chance.choice([1, 30, 3000]))
    if kind == 1 and chance.random() < 0.2:
        return bytes(MAX_DESCRIPTOR + 1)
    data = encode(chance.choice(messages))
    return damaged(chance, data) if kind < 3 else data


def test_a_fork_server_goes_on_after_malformed_requests(server: ForkServer, amount: Callable[[int, int], int]) -> None:
    channel, chance = server._channel, random.Random(1)
    assert channel is not None
    strange = [p.Progress(), p.Begin(1), w.DoTask(1, 1, 1, 1, 1, 1)]
    for _ in range(amount(300, 20_000)):
        data = noise(chance, strange)
        if len(data) <= MAX_DESCRIPTOR:
            assert say(channel, data, fds=chance.randrange(3))
    pid = server.spawn("os:close")
    assert pid in server.children
    assert len(os.listdir(f"/proc/{server.pid}/fd")) < 20


def test_a_fork_server_gone_wild_counts_as_dead_to_its_owner(server: ForkServer) -> None:
    ours, theirs = pair()
    real, server._channel = server._channel, ours
    server.children.add(1 << 21)
    theirs.send(b"\x93 no message")
    assert server.exits() == [(1 << 21, -9)]
    assert not server.alive
    theirs.close()
    server._channel = real


class Engine:
    """A real engine, whose daemon and workers are the test."""

    def __init__(self, server: ForkServer, recipe: str) -> None:
        self.server = server
        self.channel, its = pair()
        self.pid = server.spawn("zephon_daemon.engine:main", (recipe, {"workers": 1}), its)
        its.close()
        assert heard(self.channel, p.EngineReady)
        self.numbers = 0

    def send(self, message: object, fds: tuple[int, ...] = ()) -> None:
        """Until it is sent."""
        self.channel.send(encode(message), fds)
        while self.channel.wants_write:
            assert select.select([], [self.channel], [], SECONDS)[1], "the engine does not listen"
            self.channel.flush()

    def worker(self) -> Channel:
        """Another worker of its: the test."""
        mine, its = pair()
        self.numbers += 1
        self.send(p.AddWorker(self.numbers, os.getpid()), (its.fileno(),))
        its.close()
        return mine

    def lives(self) -> list[str]:
        """It answers; its last errors."""
        self.numbers += 1
        self.channel.send(encode(p.Report(self.numbers)))
        while True:
            report = heard(self.channel, p.EngineReport)
            assert report is not None, "the engine has died"
            if report.request == self.numbers:
                return list(report.report["errors"])

    def close(self) -> None:
        self.channel.close()


@pytest.fixture
def engine(server: ForkServer, runtime_folder: Path) -> Iterator[Engine]:
    engine = Engine(server, counting(runtime_folder, 400, 2, lanes=2, batch=4))
    yield engine
    engine.close()


FROM_WORKER = [
    w.WorkerReady(1),
    p.NewSegment(-1, 0, 4096, 3),
    w.TaskDone(1, 0, 0, 100, 0, [], {}, 5),
    w.TaskDone(1, 7, -1, 1 << 40, 0, [], {}, 5),
    w.TaskFailed(1, "RunFailed", "no", [], "trace"),
    p.Begin(0),
]


def test_an_engine_throws_out_a_worker_that_talks_nonsense_and_goes_on(
    engine: Engine, amount: Callable[[int, int], int]
) -> None:
    chance = random.Random(2)
    for _ in range(amount(40, 3000)):
        worker = engine.worker()
        for _ in range(chance.randrange(1, 6)):
            if not say(worker, noise(chance, FROM_WORKER), fds=chance.randrange(2)):
                break
        worker.close()
        engine.send(p.WorkerGone(engine.numbers, "thrown out"))
    assert engine.lives()
    until(lambda: len(os.listdir(f"/proc/{engine.pid}/fd")) < 20)


def test_what_a_worker_wrote_into_its_memory_is_checked_and_the_task_is_done_again_in_halves_by_another(
    engine: Engine,
) -> None:
    checkpoint = os.memfd_create("checkpoint")
    engine.channel.send(encode(p.StartRun(1, "pipeline", 1, [], [0])), (checkpoint,))
    os.close(checkpoint)
    assert heard(engine.channel, p.RunStarted)
    wild = engine.worker()
    wild.send(encode(w.WorkerReady(1)))
    task = heard(wild, w.DoTask)
    with Segment.create("wild", 3 * 4096) as memory:
        memory.array[:] = 0xFF
        wild.send(encode(p.NewSegment(-1, 0, 4096, 3)), (memory.fileno(),))
        wild.send(encode(w.TaskDone(task.task, 0, 0, 4096, 0, [], {}, 5)))
        assert heard(wild, w.SlotFree) is None
    assert any("no block begins here" in error for error in engine.lives())
    engine.channel.send(encode(p.WorkerGone(1, "thrown out")))
    tame = engine.worker()
    tame.send(encode(w.WorkerReady(1)))
    again = heard(tame, w.DoTask)
    assert (again.epoch, again.lane, again.low) == (task.epoch, task.lane, task.low)
    assert again.high == (task.low + task.high) // 2
    for channel in (wild, tame):
        channel.close()


@pytest.mark.soak
def test_an_engine_goes_on_after_malformed_words_of_the_daemon(
    engine: Engine, amount: Callable[[int, int], int]
) -> None:
    chance = random.Random(3)
    words = [p.AddWorker(1, 1), p.AddReader(1, 1, 0, 1), p.StartRun(1, "pipeline", 1, [], []), p.Hungry(1, 1, 0)]
    for _ in range(amount(200, 10_000)):
        data = noise(chance, words)
        if len(data) <= MAX_DESCRIPTOR:
            assert say(engine.channel, data)
    assert engine.lives()


def test_a_worker_that_hears_nonsense_ends_with_an_error(server: ForkServer) -> None:
    for data in (b"\xc1", encode(p.Begin(0)), bytes(MAX_DESCRIPTOR + 1), encode(w.DoTask(1, 9, 0, 0, 0, 1))[:-2]):
        mine, its = pair()
        pid = server.spawn("zephon_daemon.worker:main", (1,), its)
        its.close()
        assert heard(mine, w.WorkerReady)
        say(mine, data)
        ended: dict[int, int] = {}
        while pid not in ended:
            assert select.select([server], [], [], SECONDS)[0], "it did not end"
            ended.update(server.exits())
        assert ended[pid] == 1
        mine.close()


FROM_ENGINE = [
    p.NewSegment(0, 9, 4096, 2),
    p.BatchReady(0, 0, 0, 99, 10, 0, 2),
    p.BatchReady(0, 0, 5, 0, 10, 0, 2),
    p.BatchReady(0, 0, 0, 0, -1, 0, 2),
    p.BatchReady(77, 0, 0, 0, 10, 0, 2),
    p.BatchesReady(b"\xff" * 56),
    p.Welcome(b"", 1, ""),
]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2, 3))])
def test_a_rank_refuses_nonsense_from_an_engine_and_keeps_what_it_has(
    runtime_folder: Path, seed: int, amount: Callable[[int, int], int]
) -> None:
    chance = random.Random(seed)
    for number in range(amount(5, 300)):
        peer = Peer(runtime_folder, Shape(lanes=1, microbatch=2), name=f"{number}.sock")
        loader = connect(peer.path, output="numpy", timeout=5.0)
        batch = next(loader)
        ids = batch["id"].tolist()
        guest = next(iter(peer.guests.values()))
        data = noise(chance, FROM_ENGINE)
        peer.do(lambda: say(guest.channel, data, fds=chance.randrange(2)))  # noqa: B023  it runs at once
        try:
            for _ in range(30):
                next(loader)
        except ZephonError as error:
            assert "\n" not in str(error)  # noqa: PT017  a damaged message may also be a good one
        assert batch["id"].tolist() == ids
        loader.close()
        peer.close()
