"""Several users, several jobs, and paths of any length on one machine: nobody is in another's way."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.running import Daemon, Ledger, Program, Ranks, counting, launch, plan_of, python, until
from zephon.transport.endpoints import control_path

NOBODY = 65534
TRAIN = """
import sys
from zephon_client import connect
with connect(output="numpy") as loader:
    digests = []
    for batch in loader:
        digests.append(batch.digest)
        if batch.ends_round and loader.rounds == 100:
            print(loader._path, *digests, flush=True)
            sys.stdin.readline()
print(len(digests), flush=True)
"""


@pytest.fixture
def other_user(runtime_folder: Path) -> dict[str, Any]:
    """How to start a process as user `nobody`, with folders of its own; skips where that is not possible.

    It keeps the right to read everything, since this Python may lie in a folder of root's. Connecting to a socket takes
    more than that.
    """
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root, with setpriv, can start a process of another user")
    runtime_folder.chmod(0o755)
    for name in ("run2", "cache2"):
        (runtime_folder / name).mkdir(mode=0o700)
        os.chown(runtime_folder / name, NOBODY, NOBODY)
    only = "-all,+dac_read_search"
    rights = (f"--inh-caps={only}", "--ambient-caps=+dac_read_search", f"--bounding-set={only}")
    ids = (f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    environment = {
        "XDG_RUNTIME_DIR": str(runtime_folder / "run2"), "ZEPHON_CACHE": str(runtime_folder / "cache2"), "HOME": "/tmp"
    }  # fmt: skip
    how = {"prefix": ["setpriv", *ids, *rights], "environment": environment, "cwd": "/"}
    with python(runtime_folder, "import os, zephon_daemon.cli\nprint(os.getuid())", **how) as probe:
        if probe.end():
            pytest.skip(f"user {NOBODY} cannot run this Python: {probe.errors.splitlines()[-1]}")
        assert probe.output == f"{NOBODY}\n"
    return how


def _train(recipe: str, **more: Any) -> Program:
    return launch(recipe, TRAIN, stdin=subprocess.PIPE, **more)


def _three(recipe: str, jobs: list[Program]) -> None:
    """Each job is at step 100 with the reference's stream; the first is killed, the others go to the end."""
    ledger = Ledger(plan_of(recipe))
    expected = [ledger.digest(0, n % 2, n // 2 * 4, 4) for n in range(200)]
    sockets = []
    for job in jobs:
        said = job.line()
        assert said, job.errors
        socket, *digests = said.split()
        assert digests == expected
        sockets.append(socket)
    assert len(set(sockets)) == len(jobs)
    os.killpg(jobs[0].pid, signal.SIGKILL)
    jobs[0].end()
    until(lambda: not os.path.exists(sockets[0]))
    for job, socket in zip(jobs[1:], sockets[1:]):
        assert os.path.exists(socket)
        assert job.process.stdin is not None
        job.process.stdin.write(b"\n")
        job.process.stdin.flush()
        assert job.line() == "240", job.errors
        assert job.end() == 0, job.errors


def test_case_C2_one_user_starts_the_same_job_twice(runtime_folder: Path) -> None:
    recipe = counting(runtime_folder, 960, 4, lanes=2, batch=4)
    with _train(recipe) as one, _train(recipe) as two:
        _three(recipe, [one, two])


def test_case_C2_two_users_start_the_same_job(runtime_folder: Path, other_user: dict[str, Any]) -> None:
    recipe = counting(runtime_folder, 960, 4, lanes=2, batch=4)
    with _train(recipe) as one, _train(recipe, **other_user) as two:
        _three(recipe, [one, two])


def test_case_C2_nobody_else_can_attach(runtime_folder: Path, other_user: dict[str, Any]) -> None:
    recipe = counting(runtime_folder, 960, 4, lanes=2, batch=4)
    code = "from zephon_client import connect\nimport sys\nnext(connect(sys.argv[1], output='numpy', timeout=3))"
    with Daemon(recipe, workers=1) as daemon:  # its sockets lie in a folder that everybody may look into
        with python(runtime_folder, code, daemon.socket, **other_user) as stranger:
            assert stranger.end() == 1
            assert "DaemonUnavailable" in stranger.errors.splitlines()[-1]
        with Ranks(daemon.socket, 2) as ranks:
            assert set(ranks.rounds()) == {120}


@pytest.mark.soak
def test_case_D12_sockets_work_however_long_the_folder_and_the_name(
    runtime_folder: Path, monkeypatch: pytest.MonkeyPatch, amount: Callable[[int, int], int]
) -> None:
    recipe = counting(runtime_folder, 64, 1, lanes=1, batch=4)
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    for length in (180, 108, 60, 100, 107)[: amount(1, 5)]:
        base = tempfile.mkdtemp(prefix="z", dir="/tmp")
        folder = Path(base, "x" * (length - len(base) - 1))
        folder.mkdir()
        monkeypatch.setenv("TMPDIR", str(folder))
        with launch(recipe, "from zephon_client import connect\nprint(len(list(connect(output='numpy'))))") as job:
            assert job.end() == 0, job.errors
            assert job.output == "16\n"
        names = [str(folder / ("n" * 200 + end)) for end in ("a", "b")]
        assert control_path(names[0]) != control_path(names[1])
        with Daemon(recipe, workers=1, socket=names[0]) as one, Daemon(recipe, workers=1, socket=names[1]) as two:
            for daemon in (one, two):
                with Ranks(daemon.socket, 1) as ranks:
                    assert ranks.rounds() == [16]
                    assert ranks.loaders[0].progress()["daemon"]["pid"] == daemon.pid
        assert not [path for path in folder.rglob("*") if path.is_socket()]
        shutil.rmtree(base)
