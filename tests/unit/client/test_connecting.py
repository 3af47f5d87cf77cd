"""Finding the daemon, saying hello, and refusing what makes no sense before anything is opened."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.client.peer import Peer
from zephon.errors import DaemonUnavailable, RecipeError, SettingError, TopologyError
from zephon.transport import protocol as p
from zephon.transport.endpoints import RunningDaemon, announce, running_daemons, withdraw
from zephon_client import connect, connecting
from zephon_client.control import Control

Make = Callable[..., Peer]
Join = Callable[..., Any]
ROOT = Path(__file__).parents[3]


def running_in(folder: Path) -> list[RunningDaemon]:
    """The running daemons of this test alone: others of this user may run on the machine."""
    return [daemon for daemon in running_daemons() if str(folder) in daemon.control_path]


def test_importing_the_client_loads_nothing_that_a_rank_does_not_need() -> None:
    heavy = "torch", "pyarrow", "tokenizers", "fastokens", "psutil", "zephon.datasets", "zephon.pipeline"
    code = (
        "import sys, zephon_client.loader, zephon_client\n"
        f"print(*[name for name in {heavy!r} if name in sys.modules], sep=',')"
    )
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == ""


@pytest.mark.parametrize(
    "arguments, error, names",
    [
        ({"dp_degree": 0}, SettingError, "dp_degree=0"),
        ({"dp_degree": 2, "dp_group_id": 2}, TopologyError, "dp_group_id=2"),
        ({"dp_degree": 2, "dp_group_id": -1}, TopologyError, "dp_group_id=-1"),
        ({"dp_degree": 2.5}, SettingError, "dp_degree=2.5"),
        ({"dp_degree": True}, SettingError, "dp_degree=True"),
        ({"group_readers": 0}, SettingError, "group_readers=0"),
        ({"batches_per_step": 0}, SettingError, "batches_per_step=0"),
        ({"output": "jax"}, SettingError, "output='jax'"),
        ({"pipeline": ""}, SettingError, "pipeline=''"),
        ({"timeout": 0}, SettingError, "timeout=0"),
        ({"timeout": float("nan")}, SettingError, "timeout=nan"),
        ({"device": "cpu", "output": "numpy"}, SettingError, "device='cpu'"),
        ({"socket": "tcp://host:1"}, SettingError, "tcp://host:1"),
    ],
)
def test_senseless_arguments_are_refused_by_name(
    runtime_folder: Path, arguments: dict[str, Any], error: type[Exception], names: str
) -> None:
    with pytest.raises(error, match=names.replace("(", "\\(")):
        connect(**arguments)


def test_a_mistyped_argument_of_connect_is_told_with_the_nearest_name() -> None:
    arguments: dict[str, Any] = {"dp_degre": 2}
    with pytest.raises(TypeError, match=r"connect\(\) has no argument 'dp_degre'; did you mean 'dp_degree'\?"):
        connect(**arguments)


def test_world_size_and_rank_are_the_defaults_and_named_when_they_are_wrong(
    make_peer: Make, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = make_peer(lanes=4)
    assert join(peer).lanes == [0, 1, 2, 3]
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert join(peer).lanes == [3]
    assert join(peer, dp_degree=2, dp_group_id=0).lanes == [0, 1]
    with pytest.raises(TopologyError, match=r"dp_group_id \(from RANK\)=3"):
        connect(peer.path, dp_degree=2)
    monkeypatch.setenv("RANK", "three")
    with pytest.raises(SettingError, match="RANK='three'"):
        connect(peer.path)


def test_the_hello_says_who_comes_for_which_job(
    make_peer: Make, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = make_peer()
    join(peer, dp_degree=8, dp_group_id=5, group_readers=2, pipeline="eval", batches_per_step=4)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "abc")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    join(peer)
    first, second = peer.heard(p.Hello)
    assert first == p.Hello(os.getpid(), 8, 5, 2, "eval", "", 4, timeout=40.0, nonce=first.nonce)
    assert second.job == "abc:2"
    assert len({first.nonce, second.nonce, b""}) == 3, "two readers, though of one process"


def test_the_socket_is_the_named_one_else_the_environments_else_that_of_the_only_daemon(
    make_peer: Make, runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, in_environment, only = make_peer(), make_peer(), make_peer()
    monkeypatch.setattr(connecting, "running_daemons", lambda: running_in(runtime_folder))
    for socket in (named.path, f"ipc://{named.path}", Path(named.path)):
        connect(socket).close()
    announce(only.path, "recipe.py")
    connect().close()
    monkeypatch.setenv("ZEPHON_SOCKET", in_environment.path)
    connect().close()
    assert [len(peer.heard(p.Hello)) for peer in (named, in_environment, only)] == [3, 1, 1]
    monkeypatch.delenv("ZEPHON_SOCKET")
    announce(named.path, "other.py")
    with pytest.raises(SettingError, match="2 daemons") as caught:
        connect()
    assert all(part in str(caught.value) for part in (named.path, only.path, "recipe.py", "other.py"))
    withdraw(named.path)
    announce(only.path, "recipe.py", launched=True)
    with pytest.raises(DaemonUnavailable, match="besides those of running launches") as alone:
        connect(timeout=0.2)
    assert only.path in str(alone.value), "it is for its command, which knows its socket"
    withdraw(only.path)


def test_case_D10_without_a_daemon_connect_fails_within_its_limit_and_says_how_to_start_one(
    runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "running_daemons", lambda: running_in(runtime_folder))
    began = time.monotonic()
    with pytest.raises(DaemonUnavailable, match="zephon launch"):
        connect(timeout=0.2)
    missing = str(runtime_folder / "gone.sock")
    with pytest.raises(DaemonUnavailable) as caught:
        connect(missing, timeout=0.2)
    assert missing in str(caught.value)
    assert "zephon daemon" in str(caught.value)
    assert time.monotonic() - began < 30  # it is a minute otherwise


def test_a_daemon_that_is_just_starting_is_waited_for(runtime_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zephon_client import control

    peers: list[Peer] = []
    answers = control.answers

    def starts_at_the_second_look(path: str, kind: int) -> bool:
        if not peers:
            peers.append(Peer(runtime_folder))
            return False
        return answers(path, kind)

    monkeypatch.setattr(control, "answers", starts_at_the_second_look)
    try:
        connect(str(runtime_folder / "d.sock")).close()
    finally:
        peers[0].close()


def test_a_daemon_that_does_not_answer_is_unavailable_but_patience_prolongs_the_wait(make_peer: Make) -> None:
    peer = make_peer()
    peer.answers[p.Hello] = lambda message: [p.Patience("its recipe to load")]
    with pytest.raises(DaemonUnavailable, match="its recipe to load"):
        connect(peer.path, timeout=1.0)
    peer.answers[p.Hello] = lambda message: [p.Patience("a"), p.Patience("b"), peer._answer(message)]
    connect(peer.path, timeout=30).close()


def test_a_rank_that_waits_for_other_processes_to_end_says_so_once(
    make_peer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zephon_client.control._TOLD_SECONDS", 0.0)
    peer = make_peer()
    waits = [p.Patience("its recipe to load"), *[p.Patience("the run before to end: process 7 (group 1)", True)] * 3]
    peer.answers[p.Hello] = lambda message: [*waits, peer._answer(message)]
    with pytest.warns(UserWarning, match="this rank waits") as caught:
        connect(peer.path, timeout=30).close()
    (said,) = caught
    assert str(said.message) == "this rank waits for the run before to end: process 7 (group 1)"
    assert said.filename == __file__


def test_a_refused_hello_is_raised_as_the_error_it_names(make_peer: Make) -> None:
    peer = make_peer()
    peer.answers[p.Hello] = lambda message: [p.Refused("RecipeError", f"no pipeline {message.pipeline!r}")]
    with pytest.raises(RecipeError, match="no pipeline 'eval'"):
        connect(peer.path, pipeline="eval")


def test_a_request_that_was_interrupted_is_not_sent_twice(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=2)
    loader = join(peer, timeout=5.0)
    kept: list[Any] = []

    def interrupted(*_: Any) -> Any:
        kept.append(loader._connection.control._awaited)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader._connection.control, "_awaited", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loader.lanes
    assert loader.lanes == [0, 1]
    assert len(peer.heard(p.Attach)) == 1


def test_progress_is_what_the_daemon_reports(make_peer: Make, join: Join) -> None:
    loader = join(make_peer())
    assert loader.progress() == {"clients": 1}
    next(loader)
    assert loader.progress() == {"clients": 1}


def test_after_an_interrupted_connect_the_next_one_is_the_same_reader_and_the_one_after_it_another(
    make_peer: Make, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = make_peer()

    def interrupted(*_: object) -> None:
        peer.until(lambda: peer.heard(p.Hello))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Control, "_awaited", interrupted)
        with pytest.raises(KeyboardInterrupt):
            join(peer, dp_degree=2)
    for group in (1, 0, 0):
        join(peer, dp_degree=2, dp_group_id=group).close()
    first, other_group, again, another = [hello.nonce for hello in peer.heard(p.Hello)]
    assert again == first
    assert len({first, other_group, another}) == 3
