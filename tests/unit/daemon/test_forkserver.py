"""The fork server: children without an inheritance, ends reported, nothing left however anybody ends."""
from __future__ import annotations

import ast
import os
import select
import signal
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from zephon.transport.channels import Channel, pair
from zephon_daemon.bootstrap import command
from zephon_daemon.forkserver import ForkServer
from zephon_daemon.lifelines import describe_end

HERE = str(Path(__file__).parent)
SECONDS = 20.0

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def server(no_leaks: None) -> Iterator[ForkServer]:
    server = ForkServer(path=[HERE])
    server.start()
    yield server
    server.close()


def message(channel: Channel) -> bytes:
    assert select.select([channel], [], [], SECONDS)[0], "no message came"
    return channel.receive(limit=1)[0][0]


def ends(server: ForkServer, count: int) -> dict[int, int]:
    """Waits for the ends of so many children."""
    found: dict[int, int] = {}
    while len(found) < count:
        assert select.select([server], [], [], SECONDS)[0], f"only {found} ended"
        found.update(server.exits())
    return found


def gone(pid: int) -> bool:
    try:
        psutil.Process(pid).wait(SECONDS)
    except (psutil.NoSuchProcess, psutil.TimeoutExpired):
        return not psutil.pid_exists(pid)
    return True


def told(server: ForkServer, *values: object) -> dict[str, object]:
    mine, its = pair()
    server.spawn("children:tell", values, its)
    its.close()
    found: dict[str, object] = ast.literal_eval(message(mine).decode())
    mine.close()
    return found


def test_a_child_gets_its_arguments_its_channel_and_nothing_else(server: ForkServer) -> None:
    spare = os.open("/dev/null", os.O_RDONLY)
    found = told(server, 1, "two", [3, {"four": 4.0}], None, b"five")
    os.close(spare)
    assert found["values"] == [1, "two", [3, {"four": 4.0}], None, b"five"]
    assert len(found["fds"]) == 4, "0, 1, 2 and the channel"
    assert (found["session"], found["sigint"], found["stdout_is_stderr"]) == (True, True, True)
    assert found["main"] is None


def test_children_do_not_share_random_numbers(server: ForkServer) -> None:
    first, second = told(server)["random"], told(server)["random"]
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert not set(first) & set(second)


def test_each_end_is_reported_as_what_it_was(server: ForkServer) -> None:
    expected = {
        server.spawn("children:leave", [0]): 0,
        server.spawn("children:leave", [3]): 3,
        server.spawn("children:fail"): 1,
        server.spawn("children:no_such_function"): 1,
        server.spawn("no_such_module:main"): 1,
        server.spawn("children:exit_by", [int(signal.SIGSEGV)]): -signal.SIGSEGV,
        server.spawn("children:exit_by", [int(signal.SIGKILL)]): -signal.SIGKILL,
    }
    assert ends(server, len(expected)) == expected
    assert not server.children


def test_case_J3_ends_are_described_with_signal_code_and_hint() -> None:
    assert describe_end(3) == "exit code 3"
    assert describe_end(-9) == "killed by signal 9 (SIGKILL): maybe out of memory"
    assert "shared memory" in describe_end(-7)
    assert describe_end(-11) == "killed by signal 11 (SIGSEGV)"
    assert describe_end(-77) == "killed by signal 77"


def test_a_child_is_killed_by_its_number_and_a_stranger_is_not(server: ForkServer) -> None:
    pid = server.spawn("children:stay")
    server.kill(os.getppid())
    server.kill(pid)
    assert ends(server, 1) == {pid: -signal.SIGKILL}


def test_close_ends_children_that_ignore_the_request_too(no_leaks: None) -> None:
    server = ForkServer(path=[HERE])
    server.start()
    mine, its = pair()
    pids = [server.spawn("children:stay", [True], its), server.spawn("children:stay")]
    its.close()
    message(mine)
    pids.append(server.pid)
    server.close(0.2)
    mine.close()
    assert all(gone(pid) for pid in pids)


def test_what_a_child_has_started_ends_with_it(server: ForkServer) -> None:
    mine, its = pair()
    child = server.spawn("children:leave_a_process", [], its)
    its.close()
    left = int(message(mine))
    mine.close()
    assert ends(server, 1) == {child: 0}
    assert gone(left)


def test_children_die_with_a_server_that_is_killed_and_the_owner_learns_of_all(no_leaks: None) -> None:
    server = ForkServer(path=[HERE])
    server.start()
    pids = {server.spawn("children:stay", [True]) for _ in range(3)}
    os.kill(server.pid, signal.SIGKILL)
    assert ends(server, 3) == dict.fromkeys(pids, -signal.SIGKILL)
    assert not server.alive
    assert server.ended(SECONDS) == -signal.SIGKILL
    server.close()
    assert all(gone(pid) for pid in pids)


OWNER = """
    import os, signal, sys
    sys.path.append({here!r})
    from zephon_daemon.forkserver import ForkServer
    def main():
        server = ForkServer(path=[{here!r}])
        server.start()
        pids = [server.pid] + [server.spawn("children:stay", [True]) for _ in range(2)]
        if sys.argv[1] == "fork" and os.fork() == 0:
            os.write(1, b"%d\\n" % os.getpid())
            signal.pause()
        os.write(1, b"%d %d %d\\n" % tuple(pids))
        signal.pause()
"""


@pytest.mark.parametrize("how", ["kill", "fork"])
def test_server_and_children_end_with_an_owner_that_is_killed(
    how: str, tmp_path: Path, no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a process that the owner has forked still holds the connection open."""
    (tmp_path / "owner_of_test.py").write_text(textwrap.dedent(OWNER.format(here=HERE)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    owner = subprocess.Popen(command("owner_of_test:main", how), stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    lines = [owner.stdout.readline() for _ in range(2 if how == "fork" else 1)]
    pids = [int(pid) for line in lines for pid in line.split()]
    forked = [int(line) for line in lines if len(line.split()) == 1]
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert all(gone(pid) for pid in pids if pid not in forked)
    for pid in forked:
        os.kill(pid, signal.SIGKILL)
        assert gone(pid)


def test_the_caller_s_main_and_folder_are_never_imported(
    tmp_path: Path, no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's `numpy.py` beside them does not shadow the real one, and their script runs once."""
    (tmp_path / "numpy.py").write_text("raise SystemExit('the wrong numpy')")
    monkeypatch.chdir(tmp_path)
    server = ForkServer(path=[HERE])
    server.start()
    try:
        assert told(server, 1)["values"] == [1]
    finally:
        server.close()


def test_nothing_is_spawned_by_a_dead_server_and_the_error_says_so(no_leaks: None) -> None:
    from zephon.errors import DaemonUnavailable

    server = ForkServer()
    server.start()
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(DaemonUnavailable, match="has died"):
        server.spawn("children:stay")
    server.close()


