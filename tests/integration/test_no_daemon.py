"""Where no daemon is, everybody is told within seconds and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import python, zephon
from zephon.errors import DaemonUnavailable
from zephon.transport.endpoints import running_daemons
from zephon_client import connect


@pytest.mark.parametrize("socket", [None, "/nowhere/s.sock", "ipc:///nowhere/s.sock", "name"])
def test_a_rank_is_told_within_seconds(runtime_folder: Path, socket: str | None) -> None:
    if socket is None and running_daemons():
        pytest.skip("another daemon of this user runs on this machine")
    with pytest.raises(DaemonUnavailable) as raised:
        connect(socket, output="numpy")
    said = str(raised.value)
    assert said.startswith("no daemon")
    assert "\n" not in said
    assert all(hint in said for hint in ("zephon daemon RECIPE", "zephon launch", "ZEPHON_SOCKET"))


def test_case_D10_a_rank_ends_within_seconds(runtime_folder: Path) -> None:
    code = "from zephon_client import connect\nconnect('/nowhere/s.sock', output='numpy')"
    with python(runtime_folder, code) as rank:
        assert rank.end() == 1
        last = rank.errors.splitlines()[-1]
        assert last.startswith("zephon.errors.DaemonUnavailable: no daemon listens on /nowhere/s.sock")


def test_progress_is_one_line_and_status_3(runtime_folder: Path) -> None:
    if running_daemons():
        pytest.skip("another daemon of this user runs on this machine")
    with zephon(runtime_folder, "progress") as program:
        assert program.end() == 3
        assert program.errors.startswith("zephon progress: no daemon")
        assert len(program.errors.splitlines()) == 1
