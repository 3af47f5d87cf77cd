"""Where no daemon is, everybody is told within seconds and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import python
from zephon.errors import DaemonUnavailable
from zephon.transport import endpoints
from zephon_client import connect

PROGRESS = """
import sys
from pathlib import Path
from zephon.transport import endpoints
from zephon_daemon.cli import main
endpoints._folders = lambda: [Path(sys.argv[1])]
sys.exit(main(["progress"]))
"""


@pytest.fixture
def nobodys_folder(runtime_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which daemons are looked for: other daemons of this user, if there are any, are not seen."""
    folder = runtime_folder / "run" / "zephon"
    monkeypatch.setattr(endpoints, "_folders", lambda: [folder])
    return folder


@pytest.mark.parametrize("socket", [None, "/nowhere/s.sock", "ipc:///nowhere/s.sock", "name"])
def test_a_rank_is_told_within_seconds(nobodys_folder: Path, socket: str | None) -> None:
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


def test_progress_is_one_line_and_status_3(runtime_folder: Path, nobodys_folder: Path) -> None:
    with python(runtime_folder, PROGRESS, str(nobodys_folder)) as program:
        assert program.end() == 3
        assert program.errors.startswith("zephon progress: no daemon")
        assert len(program.errors.splitlines()) == 1
