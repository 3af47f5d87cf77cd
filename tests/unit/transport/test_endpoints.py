"""Sockets have short paths in a private folder, and only daemons that really live are listed."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.errors import SettingError
from zephon.transport import endpoints
from zephon.transport.channels import connect, listen
from zephon.transport.endpoints import (
    MAX_CONTROL_PATH,
    announce,
    control_path,
    data_path,
    process_start,
    running_daemons,
    withdraw,
)

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def only_this_test(runtime_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No note of a daemon outside this test is seen, and none is left in /tmp."""
    monkeypatch.setattr(endpoints, "_last_resort", lambda: runtime_folder / "last")


def folder_of_length(parent: Path, length: int) -> Path:
    """A folder whose path has exactly `length` bytes."""
    path = str(parent) + "/"
    path += "d" * (length - len(path))
    os.makedirs(path)
    assert len(os.fsencode(path)) == length
    return Path(path)


def daemon_process(control: str, then: str = "sys.stdin.read()") -> subprocess.Popen[bytes]:
    code = (
        f"import sys, socket; sys.path.insert(0, {str(ROOT)!r})\n"
        "from zephon.transport.endpoints import *\n"
        "from zephon.transport.channels import listen\n"
        f"control = {control!r}\n"
        "data = listen(data_path(control))\n"
        "server = socket.socket(socket.AF_UNIX); server.bind(control); server.listen()\n"
        "announce(control, 'recipe.py')\n"
        "print('ready', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code + then], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_case_C2_the_folder_is_private_and_made_on_first_use(runtime_folder: Path) -> None:
    before = os.umask(0)
    try:
        folder = endpoints.runtime_folder()
    finally:
        os.umask(before)
    assert folder == runtime_folder / "run" / "zephon"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert endpoints.runtime_folder() == folder


def test_a_folder_of_ours_that_others_may_read_is_closed_to_them() -> None:
    folder = endpoints.runtime_folder()
    folder.chmod(0o755)
    endpoints.runtime_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_case_C2_a_folder_that_others_may_write_is_refused() -> None:
    folder = endpoints.runtime_folder()
    folder.chmod(0o770)
    with pytest.raises(SettingError, match="written by others"):
        endpoints.runtime_folder()


def test_case_C2_a_folder_of_another_user_or_a_link_is_refused(
    runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = os.geteuid()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("TMPDIR", str(runtime_folder))
    planted = runtime_folder / f"zephon-{me + 1}"
    planted.mkdir(mode=0o700)
    with monkeypatch.context() as other_user:
        other_user.setattr(os, "geteuid", lambda: me + 1)
        with pytest.raises(SettingError, match=f"belongs to user {me}"):
            endpoints.runtime_folder()
    (runtime_folder / f"zephon-{me}").symlink_to(planted)
    with pytest.raises(SettingError, match="link"):
        endpoints.runtime_folder()


def test_an_unusable_runtime_folder_of_the_session_gives_way_to_tmpdir_and_that_to_tmp(
    runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = runtime_folder / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("TMPDIR", str(runtime_folder))
    for unusable in ("", "relative", str(runtime_folder / "missing"), str(shared)):
        monkeypatch.setenv("XDG_RUNTIME_DIR", unusable)
        assert endpoints.runtime_folder() == runtime_folder / f"zephon-{os.geteuid()}"
    monkeypatch.setenv("TMPDIR", str(runtime_folder / "missing"))
    assert endpoints.runtime_folder() == runtime_folder / "last"


def test_names_paths_and_endpoints_lead_to_the_same_socket(
    runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert control_path("run-7") == str(runtime_folder / "run" / "zephon" / "run-7.sock")
    path = str(runtime_folder / "my.sock")
    monkeypatch.chdir(runtime_folder)
    for spelling in (path, f"ipc://{path}", "./my.sock", "ipc://my.sock", f"{runtime_folder}/x/../my.sock"):
        assert control_path(spelling) == path
    assert control_path(control_path("run-7")) == control_path("run-7")


@pytest.mark.parametrize("wrong", ["", "tcp://host:1", "@abstract", "ipc://@abstract", "ipc://", "a\0b"])
def test_what_is_no_local_socket_is_refused(wrong: str) -> None:
    with pytest.raises(SettingError, match="socket"):
        control_path(wrong)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=300))
def test_case_D12_any_name_leads_to_a_path_short_enough_and_always_the_same(text: str) -> None:
    try:
        path = control_path(text)
    except SettingError:
        return
    assert os.path.isabs(path)
    assert len(os.fsencode(path)) <= MAX_CONTROL_PATH
    assert len(os.fsencode(data_path(path))) <= 107
    assert control_path(text) == path == control_path(path)


@pytest.mark.parametrize("length", [60, 100, 107, 108, 180])
@pytest.mark.parametrize("name", ["run", "r" * 200, "a run's name: ü/?"])
def test_case_D12_sockets_work_below_a_long_tmpdir(
    length: int, name: str, runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("TMPDIR", str(folder_of_length(runtime_folder, length)))
    for given_name in (name.replace("/", "-"), str(folder_of_length(runtime_folder, length + 1) / name[:50])):
        path = control_path(given_name)
        if "/" in given_name and path == os.path.abspath(given_name):
            os.makedirs(os.path.dirname(path), exist_ok=True)
        with socket.socket(socket.AF_UNIX) as control:
            control.bind(path)
        listener = listen(data_path(control_path(given_name)))
        client = connect(data_path(control_path(given_name)), 1)
        server = listener.accept()
        assert server is not None
        for each in (client, server, listener):
            each.close()
        os.unlink(path)


@pytest.mark.parametrize("prefix", ["n" * 100, "/tmp/" + "p" * 95])
def test_case_D12_two_long_names_that_begin_alike_never_meet(prefix: str) -> None:
    first, second = control_path(prefix + "-first"), control_path(prefix + "-second")
    assert first != second
    assert os.path.dirname(first) == os.path.dirname(second) == str(endpoints.runtime_folder())


def test_a_daemon_is_listed_from_announce_to_withdraw() -> None:
    control = control_path("run")
    assert running_daemons() == []
    note = announce(control, "recipes/web.py")
    assert stat.S_IMODE(note.stat().st_mode) == 0o600
    (daemon,) = running_daemons()
    assert (daemon.control_path, daemon.recipe, daemon.pid) == (control, "recipes/web.py", os.getpid())
    withdraw(control)
    assert running_daemons() == []
    assert not note.exists()


def test_daemons_with_sockets_of_the_same_name_in_different_folders_are_both_listed() -> None:
    for path in ("/a/run.sock", "/b/run.sock"):
        announce(path, "recipe.py")
    assert [daemon.control_path for daemon in running_daemons()] == ["/a/run.sock", "/b/run.sock"]


@pytest.mark.parametrize("change", [{"started": 1}, {"boot": "an earlier one"}, {"pid_namespace": "pid:[1]"}])
def test_case_C5_a_reused_process_id_is_not_taken_for_the_daemon(change: dict[str, object]) -> None:
    note = announce(control_path("run"), "recipe.py")
    note.write_text(json.dumps({**json.loads(note.read_text()), **change}))
    assert running_daemons() == []


def test_case_C5_what_a_killed_daemon_left_goes_at_the_next_start_and_a_live_ones_stays(no_leaks: None) -> None:
    dead, live = control_path("dead"), control_path("live")
    killed, other = daemon_process(dead), daemon_process(live)
    assert [daemon.pid for daemon in running_daemons()] == [killed.pid, other.pid]
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert [daemon.pid for daemon in running_daemons()] == [other.pid]
    mine = control_path("mine")
    announce(mine, "recipe.py")
    left = sorted(os.listdir(endpoints.runtime_folder()))
    assert [name.partition("-")[0] for name in left] == ["live", "live.sock", "live.sock.data", "mine"]
    connect(data_path(live), 1).close()
    other.communicate()
    withdraw(mine)
    announce(mine, "recipe.py")
    withdraw(mine)
    assert os.listdir(endpoints.runtime_folder()) == []


def test_a_socket_that_a_new_server_took_over_survives_the_clearing_of_the_old_ones_note() -> None:
    control = control_path("run")
    note = announce(control, "recipe.py")
    note.write_text(json.dumps({**json.loads(note.read_text()), "started": 1}))
    listener = listen(data_path(control))
    announce(control_path("other"), "recipe.py")
    assert not note.exists()
    connect(data_path(control), 1).close()
    listener.close()


def test_a_note_that_is_damaged_is_passed_over() -> None:
    folder = endpoints.runtime_folder()
    (folder / "a.json").write_text("{")
    (folder / "b.json").write_text('{"pid": 1}')
    (folder / "c.json").write_text("[]")
    assert running_daemons() == []


def test_withdraw_leaves_the_note_of_a_successor() -> None:
    control = control_path("run")
    note = announce(control, "recipe.py")
    note.write_text(json.dumps({**json.loads(note.read_text()), "pid": 1}))
    withdraw(control)
    assert note.exists()


def test_the_start_of_a_process_is_known_while_it_lives() -> None:
    assert process_start(os.getpid()) == process_start(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    started = process_start(child.pid)
    assert started is not None
    assert started >= (process_start(os.getpid()) or 0)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_start(child.pid) is None  # A zombie serves nobody.
    child.communicate()
    assert process_start(child.pid) is None
