"""The daemon as a process: its sockets, its children, its clients, and every way in which one of them may end."""
from __future__ import annotations

import json
import os
import select
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from zephon.frontiers import Checkpoint, Frontier
from zephon.transport import protocol as p
from zephon.transport.channels import Channel, connect
from zephon.transport.endpoints import control_path, data_path, running_daemons
from zephon.transport.messages import decode, encode
from zephon.transport.statement import Statement
from zephon_daemon.bootstrap import command
from zephon_daemon.progress import ask
from zephon_daemon.sessions import ENGINE_DEATHS

SECONDS = 20.0
FOLDER = str(Path(__file__).parent)


class DaemonProcess:
    """A daemon with the fake engine."""

    def __init__(
        self, path: str, recipe: str = "r.py", environment: dict[str, str] | None = None, **settings: Any
    ) -> None:
        self.path = path
        given = json.dumps({"recipe": recipe, "socket": path, "workers": 2, **settings})
        self.process = subprocess.Popen(
            command("fake_engine:main", given), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": FOLDER, **(environment or {})},
        )  # fmt: skip
        self.line = self.process.stdout.readline().strip() if self.process.stdout else ""

    def report(self) -> dict[str, Any]:
        return ask(self.path)

    def heard(self) -> list[str]:
        return list(until(lambda: self.report()["engine"])["heard"])

    def pids(self) -> dict[str, int]:
        return dict(self.report()["processes"])

    def ends(self) -> tuple[int, str]:
        """Waits for the daemon's end: its exit code and what it said on stderr."""
        _, errors = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, errors


class Client:
    """A rank's two connections, by hand."""

    def __init__(
        self, path: str, group: int = 0, degree: int = 1, pipeline: str = "pipeline", job: str = "",
        before: p.Welcome | None = None,
    ) -> None:  # fmt: skip
        self.path = path
        self.context = zmq.Context()
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.LINGER, 0)
        self.dealer.connect(f"ipc://{path}")
        self.number = 0
        was = (before.client, before.token) if before is not None else ()
        self.welcome = self.request(p.Hello(os.getpid(), degree, group, 1, pipeline, job, None, 60.0, *was))
        self.channel: Channel | None = None

    def request(self, message: Any) -> Any:
        self.number += 1
        self.dealer.send_multipart([str(self.number).encode(), encode(message)])
        while True:
            assert self.dealer.poll(SECONDS * 1000), f"no answer to {message}"
            number, data = self.dealer.recv_multipart()
            answer = decode(data)
            if not isinstance(answer, p.Patience) and int(number) == self.number:
                return answer

    def join(self) -> None:
        self.channel = connect(data_path(self.path), 5.0)
        self.channel.send(encode(p.Join(self.welcome.token, self.welcome.client)))

    def attach(self, checkpoint: str = "", statement: str = "") -> Any:
        return self.request(p.Attach(self.welcome.token, self.welcome.client, checkpoint, [], statement))

    def receive(self) -> Any:
        """The next message of the data connection, None at its end."""
        assert self.channel is not None
        assert select.select([self.channel], [], [], SECONDS)[0], "nothing came"
        found = self.channel.receive(limit=1)
        return decode(found[0][0]) if found else None

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
        self.dealer.close()
        self.context.term()


@pytest.fixture
def path(runtime_folder: Path) -> str:
    return control_path("d")


@pytest.fixture
def start(path: str) -> Iterator[Callable[..., DaemonProcess]]:
    started: list[DaemonProcess] = []

    def make(recipe: str = "r.py", **settings: Any) -> DaemonProcess:
        started.append(DaemonProcess(settings.pop("path", path), recipe, **settings))
        return started[-1]

    yield make
    for daemon in started:
        if daemon.process.poll() is None:
            daemon.process.terminate()
            daemon.process.wait(SECONDS)
        assert daemon.process.stdout is not None
        assert daemon.process.stderr is not None
        daemon.process.stdout.close()
        daemon.process.stderr.close()


@pytest.fixture
def client(path: str) -> Iterator[Callable[..., Client]]:
    made: list[Client] = []

    def make(*args: Any, **kwargs: Any) -> Client:
        made.append(Client(path, *args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[DaemonProcess]:
    """A daemon for all tests that leave it as it was."""
    with tempfile.TemporaryDirectory(prefix="z", dir="/tmp") as folder:
        daemon = DaemonProcess(f"{folder}/d.sock", memory=1 << 30)
        until(lambda: len(daemon.pids()) == 4)
        yield daemon
        daemon.process.terminate()
        assert daemon.ends() == (0, "")


@pytest.fixture
def rank(shared: DaemonProcess) -> Iterator[Client]:
    """A client of the shared daemon, alone there."""
    until(lambda: shared.report()["clients"] == [])
    made = Client(shared.path)
    yield made
    if shared.report()["clients"]:
        made.request(p.Goodbye(made.welcome.token, made.welcome.client))
    made.close()
    until(lambda: shared.report()["clients"] == [])


def until(condition: Callable[[], Any]) -> Any:
    """Waits for a condition of another process."""
    end = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < end, "it did not come to that"
        select.select([], [], [], 0.02)
    return found


def gone(pids: Any) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def test_it_says_when_it_is_ready_to_people_and_to_systemd(start: Any, path: str, runtime_folder: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(runtime_folder / "notify"))
        systemd.settimeout(SECONDS)
        daemon = start(environment={"NOTIFY_SOCKET": str(runtime_folder / "notify")})
        assert daemon.line == f"zephon daemon ready: {path}"
        assert systemd.recv(100) == b"READY=1"
        assert path in [each.control_path for each in running_daemons()]
        daemon.process.terminate()
        assert systemd.recv(100) == b"STOPPING=1"
        assert daemon.ends() == (0, "")
    assert path not in [each.control_path for each in running_daemons()]
    (runtime_folder / "notify").unlink()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 0)])
def test_a_signal_ends_it_with_all_its_processes_quietly(start: Any, path: str, number: int, code: int) -> None:
    daemon = start()
    pids = daemon.pids()
    assert sorted(pids) == ["engine", "forkserver", "worker 1", "worker 2"]
    daemon.process.send_signal(number)
    assert daemon.ends() == (code, "")
    assert gone(pids.values())
    assert not os.path.exists(path)
    assert not os.path.exists(data_path(path))


def test_case_C2_both_sockets_are_its_users_alone(shared: DaemonProcess) -> None:
    for each in (shared.path, data_path(shared.path)):
        assert stat.S_IMODE(os.stat(each).st_mode) == 0o600


def test_a_second_daemon_on_the_socket_is_refused_and_the_first_one_goes_on(shared: DaemonProcess, start: Any) -> None:
    code, errors = start(path=shared.path).ends()
    assert code == 3
    assert f"process {shared.process.pid}" in errors
    assert len(errors.splitlines()) == 1
    assert shared.report()["daemon"]["pid"] == shared.process.pid


def test_a_file_that_is_no_socket_is_left_alone(start: Any, path: str) -> None:
    Path(path).write_text("precious")
    code, errors = start().ends()
    assert code == 3
    assert "no socket" in errors
    assert Path(path).read_text() == "precious"


@pytest.mark.parametrize(("recipe", "reason"), [("refused.py", "refused.py:7: NameError"), ("crash.py", "SIGSEGV")])
def test_a_recipe_that_cannot_be_loaded_is_one_line_and_exit_code_3(start: Any, recipe: str, reason: str) -> None:
    code, errors = start(recipe).ends()
    assert code == 3
    assert reason in errors.splitlines()[-1]


def test_the_engine_gets_its_settings(shared: DaemonProcess) -> None:
    settings = until(lambda: shared.report()["engine"])["settings"]
    assert (settings["workers"], settings["memory"]) == (2, 1 << 30)


def test_an_attached_clients_connection_goes_to_the_engine(shared: DaemonProcess, rank: Client) -> None:
    before = len(shared.heard())
    rank.join()
    found = rank.attach()
    assert (found.owned, found.lanes) == ([0, 1, 2, 3], 4)
    assert rank.receive() == p.Released(0, 5, True)
    rank.channel.send(encode(p.Begin(0)))
    until(lambda: "Begin" in shared.heard()[before:])
    assert isinstance(rank.request(p.Goodbye(rank.welcome.token, rank.welcome.client)), p.Farewell)
    until(lambda: any(line.startswith("EndRun(") for line in shared.heard()[before:]))
    assert shared.report()["clients"] == []


def test_a_client_may_attach_before_it_joins_and_send_before_it_is_handed_over(
    shared: DaemonProcess, rank: Client
) -> None:
    before = len(shared.heard())
    rank.attach()
    rank.join()
    rank.channel.send(encode(p.Begin(0)))
    assert rank.receive() == p.Released(0, 5, True)
    until(lambda: "Begin" in shared.heard()[before:])


def test_a_checkpoint_larger_than_any_message_reaches_the_engine(start: Any, client: Any) -> None:
    lanes = {str(n): {"chunk": 0, "offset": 0, "records": 1, "skipped": 0} for n in range(4)}
    state = {"format": 1, "identity": {"canonical_replicas": 4, "x": "y" * 300_000}, "epoch": 0, "lanes": lanes}
    daemon = start()
    rank = client()
    assert isinstance(rank.attach(json.dumps(state)), p.Attached)
    # The report that would say so is itself larger than a message; that the run started means that it was read.
    assert daemon.process.poll() is None


@pytest.mark.parametrize("attached", [True, False])
def test_a_client_whose_connection_ends_is_dropped(shared: DaemonProcess, rank: Client, attached: bool) -> None:
    rank.join()
    if attached:
        rank.attach()
        rank.receive()
    assert [each["client"] for each in shared.report()["clients"]] == [rank.welcome.client]
    rank.channel.close()
    until(lambda: shared.report()["clients"] == [])


RANK = """
import os, sys, signal
sys.path[:0] = {paths!r}
from test_daemon_process import Client
rank = Client({path!r})
rank.join()
rank.attach()
print(rank.receive(), flush=True)
if os.fork() == 0:
    print(os.getpid(), flush=True)
signal.pause()
"""


def test_a_rank_that_is_killed_is_dropped_even_if_a_child_of_it_holds_its_connection(shared: DaemonProcess) -> None:
    import sys

    until(lambda: shared.report()["clients"] == [])
    code = RANK.format(paths=[*sys.path, FOLDER], path=shared.path)
    rank = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    lines = [rank.stdout.readline() for _ in range(2)]
    forked = int(next(line for line in lines if line.strip().isdecimal()))
    (own,) = shared.report()["clients"]
    assert own["pid"] == rank.pid
    rank.kill()
    rank.wait()
    until(lambda: shared.report()["clients"] == [])
    until(lambda: str(p.DropReader(own["client"])) in shared.heard())
    os.kill(forked, signal.SIGKILL)
    rank.stdout.close()


def test_a_stranger_on_the_data_socket_is_sent_away(shared: DaemonProcess) -> None:
    channel = connect(data_path(shared.path), 5.0)
    channel.send(encode(p.Join(b"guess", 1)))
    assert select.select([channel], [], [], SECONDS)[0]
    found = channel.receive()
    assert decode(found[0][0], expect=p.Failed).kind == "DaemonUnavailable"
    channel.close()


def test_garbage_on_the_control_socket_is_answered_and_harms_nobody(shared: DaemonProcess, rank: Client) -> None:
    rank.dealer.send_multipart([b"7", b"\x00garbage"])
    assert rank.dealer.poll(SECONDS * 1000)
    assert decode(rank.dealer.recv_multipart()[1], expect=p.Refused).kind == "ProtocolError"
    rank.dealer.send_multipart([b"lonely frame"])
    assert shared.report()["daemon"]["pid"] == shared.process.pid


def test_case_D3_a_killed_worker_is_replaced_and_the_engine_is_told_how_it_ended(start: Any) -> None:
    daemon = start()
    os.kill(daemon.pids()["worker 2"], signal.SIGKILL)
    until(lambda: "worker 3" in daemon.pids())
    until(lambda: any("WorkerGone(worker=2" in line and "SIGKILL" in line for line in daemon.heard()))


@pytest.mark.parametrize("victim", ["engine", "forkserver"])
def test_when_the_engine_is_lost_its_clients_come_back_into_their_places(
    start: Any, client: Any, victim: str
) -> None:
    daemon = start()
    rank = client()
    rank.join()
    rank.attach()
    rank.receive()
    before = daemon.pids()
    os.kill(before[victim], signal.SIGKILL)
    assert rank.receive() is None
    until(lambda: daemon.pids().keys() >= {"engine", "worker 3", "worker 4"})
    until(lambda: gone(before.values()) or victim == "engine")
    again = client(before=rank.welcome)
    again.join()
    lanes = {lane: Frontier(0, 6, 6) for lane in range(4)}
    origin = Checkpoint({"canonical_replicas": 4}, 0, dict.fromkeys(range(4), Frontier()))
    stated = Statement(origin, Checkpoint(origin.identity, 0, lanes), dict.fromkeys(range(4), 6), 3, 1).encode()
    assert again.attach(statement=stated).owned == [0, 1, 2, 3]
    assert again.receive() == p.Released(0, 5, True)
    heard = daemon.heard()
    assert "checkpoint " + json.dumps(origin.to_json()) in heard
    assert "statement " + stated in heard
    assert daemon.report()["session"] == 1


def test_a_run_that_kills_the_engine_again_and_again_is_refused_with_how_it_died(start: Any, client: Any) -> None:
    start()
    refused = client(pipeline="deadly").attach()
    assert refused.kind == "RunFailed"
    assert refused.text.count("SIGKILL") == ENGINE_DEATHS
    assert isinstance(client().attach(), p.Attached)


def test_case_D5_everything_ends_with_a_daemon_that_is_killed_and_the_next_one_starts_at_once(start: Any) -> None:
    daemon = start()
    pids = daemon.pids()
    daemon.process.kill()
    daemon.process.wait()
    again = start()
    assert again.line.startswith("zephon daemon ready")
    until(lambda: gone(pids.values()))


def test_case_D5_a_daemon_leaves_with_its_parent_and_ends_the_ranks_of_the_job(start: Any, path: str) -> None:
    import sys

    parent = subprocess.Popen(["sleep", "600"])
    daemon = start(parent=parent.pid)
    code = RANK.format(paths=[*sys.path, FOLDER], path=path).replace("os.fork()", "1")
    rank = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    rank.stdout.readline()
    parent.kill()
    parent.wait()
    assert daemon.ends()[0] == 0
    assert rank.wait(SECONDS) == -signal.SIGTERM
    rank.stdout.close()


def test_case_C5_killing_the_whole_group_again_and_again_leaves_nothing(
    start: Any, amount: Callable[[int, int], int]
) -> None:
    for _ in range(amount(1, 30)):
        daemon = start()
        pids = [daemon.process.pid, *daemon.pids().values()]
        for pid in pids:
            with suppress(ProcessLookupError):  # some end with those that were killed first
                os.kill(pid, signal.SIGKILL)
        daemon.process.wait()
        until(partial(gone, pids))
    assert start().line.startswith("zephon daemon ready")


def test_progress_names_sockets_clients_and_memory_of_every_process(start: Any, client: Any, path: str) -> None:
    from zephon_daemon.progress import text

    daemon = start()
    client(group=1, degree=2).join()
    report = daemon.report()
    assert report["daemon"]["socket"] == path
    assert report["clients"][0] == {
        "client": 1, "pid": os.getpid(), "group": 1, "dp_degree": 2, "pipeline": "pipeline", "attached": False,
        "stopped": False, "engine": 0,
    }  # fmt: skip
    assert set(report["memory"]) == {"daemon", "engine", "forkserver", "worker 1", "worker 2"}
    assert all(size > 0 for size in report["memory"].values())
    assert f"process {os.getpid()}" in text(report)
