"""Supervision: what is replaced, when, and when it is given up. The fork server and the clock are the test's."""
from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from zephon.errors import DaemonUnavailable
from zephon.transport.channels import Channel
from zephon.transport.messages import decode
from zephon.transport.protocol import AddWorker, RetireWorker, WorkerEnds, WorkerGone, WorkerServes
from zephon_daemon.supervision import ENGINE_STARTS, QUICK_DEATHS, CannotGoOn, Supervision


class FakeServer:
    """Children are numbers; the test says when they end."""

    def __init__(self, **_: Any) -> None:
        self.alive, self.pid, self.spawned, self.killed = True, 1, 0, list[int]()
        self.ends: list[tuple[int, int]] = []
        self.channels: dict[int, Channel] = {}
        self.titles: dict[int, str] = {}

    def start(self) -> None:
        pass

    def fileno(self) -> int:
        return -1

    def spawn(self, target: str, args: Sequence[Any], channel: Channel, *, title: str) -> int:
        if not self.alive:
            raise DaemonUnavailable("dead")

        self.spawned += 1
        pid = 100 + self.spawned
        self.channels[pid], self.titles[pid] = Channel.from_fd(os.dup(channel.fileno())), title
        return pid

    def kill(self, pid: int, number: int = 9) -> None:
        self.killed.append(pid)

    def exits(self) -> list[tuple[int, int]]:
        found, self.ends = self.ends, []
        return found

    def ended(self, seconds: float = 0.0) -> int | None:
        return None if self.alive else -9

    def close(self, seconds: float = 0.0) -> None:
        for channel in self.channels.values():
            channel.close()


class Scene:
    def __init__(self) -> None:
        self.now = 0.0
        self.servers: list[FakeServer] = []
        self.supervision = Supervision("r.py", {"workers": 2}, clock=lambda: self.now, make_server=self.make)
        self.supervision._start_engine_at = 0.0  # as `start` does, without adopting this test's orphans

    def make(self, **kwargs: Any) -> Any:
        self.servers.append(FakeServer(**kwargs))
        return self.servers[-1]

    @property
    def server(self) -> FakeServer:
        return self.servers[-1]

    def living(self) -> list[str]:
        return [name for name in self.supervision.pids if name != "forkserver"]

    def end(self, name: str, code: int) -> str | None:
        self.server.ends.append((self.supervision.pids[name], code))
        return self.supervision.step()

    def engine_hears(self) -> list[Any]:
        engine = self.server.channels[self.supervision.pids["engine"]]
        found = []
        for data, fds in engine.receive():
            found.append(decode(data))
            for fd in fds:

                os.close(fd)
        return found


@pytest.fixture
def scene(no_leaks: None) -> Iterator[Scene]:
    scene = Scene()
    scene.supervision.step()
    yield scene
    with contextlib.suppress(Exception):
        scene.supervision._drop_engine()
    for server in scene.servers:
        server.close()


@pytest.fixture
def running(scene: Scene) -> Scene:
    scene.supervision.engine_ready(2)
    scene.supervision.step()
    scene.now = 100.0
    return scene


def test_workers_start_once_the_engine_is_ready_and_come_with_their_connection(scene: Scene) -> None:
    assert scene.living() == ["engine"]
    scene.supervision.engine_ready(2)
    scene.supervision.step()
    assert scene.living() == ["engine", "worker 1", "worker 2"]
    assert scene.engine_hears() == [AddWorker(1, 102), AddWorker(2, 103)]


def test_a_dead_worker_is_replaced_at_once_under_a_new_number_and_the_engine_knows_how_it_ended(running: Scene) -> None:
    running.engine_hears()
    running.end("worker 1", -9)
    assert running.living() == ["engine", "worker 2", "worker 3"]
    assert running.engine_hears() == [
        WorkerGone(1, "killed by signal 9 (SIGKILL): maybe out of memory"), AddWorker(3, 104)]  # fmt: skip


def test_workers_that_die_at_their_start_are_replaced_ever_more_slowly_and_then_given_up(running: Scene) -> None:
    pauses: list[float] = []
    running.end("worker 1", 3)
    with pytest.raises(CannotGoOn, match="exit code 3"):
        for _ in range(1000):
            running.end(running.living()[-1], 3)
            wake = running.supervision.wake_at
            if wake is not None:
                pauses.append(wake - running.now)
                running.now = wake
                running.supervision.step()
    assert len(pauses) <= QUICK_DEATHS * 2
    assert pauses == sorted(pauses)
    assert max(pauses) <= 5.0


def test_workers_that_have_served_are_replaced_at_once_however_soon_they_die(running: Scene) -> None:
    for _ in range(QUICK_DEATHS * 4):
        newest = running.living()[-1]
        running.supervision.told(WorkerServes(int(newest.split()[1])))
        running.end(newest, -9)
        assert len(running.living()) == 3


def test_workers_that_live_for_a_while_are_replaced_for_ever(running: Scene) -> None:
    for _ in range(QUICK_DEATHS * 4):
        running.now += 2.0
        running.end("worker 2" if "worker 2" in running.living() else running.living()[-1], 1)
        assert len(running.living()) == 3


def test_an_engine_that_dies_takes_its_workers_along_and_a_new_one_follows(running: Scene) -> None:
    workers = [running.supervision.pids[name] for name in ("worker 1", "worker 2")]
    how = running.end("engine", -11)
    assert how is not None
    assert "SIGSEGV" in how
    running.supervision.lose_engine(how)
    assert running.server.killed == workers
    assert running.living() == []
    assert running.supervision.wake_at is not None
    running.now = running.supervision.wake_at
    assert running.supervision.step() is None
    assert running.living() == ["engine"]
    for pid in workers:
        running.server.ends.append((pid, -9))
    running.supervision.step()
    assert running.engine_hears() == [], "the ends of the workers before do not concern the new engine"


def test_an_engine_that_dies_before_it_was_ever_ready_is_given_up_at_once(scene: Scene) -> None:
    how = scene.end("engine", 1)
    assert how is not None
    with pytest.raises(CannotGoOn, match="exit code 1"):
        scene.supervision.lose_engine(how)


def test_an_engine_that_was_ready_once_gets_several_tries(running: Scene) -> None:
    tries = 0
    with pytest.raises(CannotGoOn):
        while tries < 10:
            how = running.end("engine", 1)
            assert how is not None
            running.supervision.lose_engine(how)
            assert running.supervision.wake_at is not None
            running.now = running.supervision.wake_at
            running.supervision.step()
            tries += 1
    assert tries == ENGINE_STARTS


def test_a_dead_fork_server_means_a_dead_engine_and_both_come_again(running: Scene) -> None:
    running.server.alive = False
    how = running.supervision.step()
    assert how is not None
    assert "fork server" in how
    running.supervision.lose_engine(how)
    assert running.supervision.wake_at is not None
    running.now = running.supervision.wake_at
    running.supervision.step()
    assert len(running.servers) == 2
    assert running.living() == ["engine"]


def test_fewer_workers_are_wanted_so_the_last_ones_are_let_go_without_being_replaced_or_counted(running: Scene) -> None:
    running.engine_hears()
    running.supervision.want(1)
    assert running.engine_hears() == [RetireWorker(2)]
    assert running.living() == ["engine", "worker 1", "worker 2"], "it may have work in hand"
    running.end("worker 2", 0)
    assert running.living() == ["engine", "worker 1"]
    assert running.engine_hears() == [WorkerGone(2, "")]
    assert running.supervision.died == 0
    running.supervision.want(3)
    running.supervision.step()
    assert running.living() == ["engine", "worker 1", "worker 3", "worker 4"]


def test_a_worker_that_dies_while_it_is_let_go_is_told_of_as_a_death_and_not_replaced(running: Scene) -> None:
    running.engine_hears()
    running.supervision.want(0)
    running.end("worker 1", -9)
    running.end("worker 2", 0)
    assert running.living() == ["engine"]
    ends = [m for m in running.engine_hears() if isinstance(m, WorkerGone)]
    assert ends == [WorkerGone(1, "killed by signal 9 (SIGKILL): maybe out of memory"), WorkerGone(2, "")]
    assert running.supervision.died == 1


def test_workers_that_have_not_started_yet_are_simply_not_started(scene: Scene) -> None:
    scene.supervision.engine_ready(4)
    scene.supervision.want(2)
    scene.supervision.step()
    assert scene.living() == ["engine", "worker 1", "worker 2"]
    assert not any(isinstance(m, RetireWorker) for m in scene.engine_hears())


def test_of_a_worker_that_the_engine_has_ended_it_is_said_why_and_no_cause_is_guessed(
    running: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    why = "ended by the watchdog after 200 s with no sign of progress, in operator 'map_transform'"
    running.supervision.hear = lambda: running.supervision.told(WorkerEnds(1, why))  # read when its end is noticed
    running.end("worker 1", -9)
    assert [record.getMessage() for record in caplog.records] == [f"worker 1 ended: {why}. It is replaced"]
    running.end("worker 2", -9)
    assert "maybe out of memory" in caplog.records[-1].getMessage()
