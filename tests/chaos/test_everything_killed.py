"""Launcher, daemon and ranks are killed in every order: no process, socket or segment is left, and a new job starts."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.running import Daemon, Program, counting, launch, living, until

RANKS = """
import os, subprocess, sys
RANK = '''
import os, sys
from zephon_client import connect
with connect(dp_degree=4, dp_group_id=int(sys.argv[1]), output="numpy") as loader:
    for batch in loader:
        if batch.ends_round and loader.rounds == 5:
            print("step 5", os.getpid(), loader._path, flush=True)
'''
ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(n)]) for n in range(4)]
for rank in ranks:
    rank.wait()
"""
ENDLESS = "exhausted_policy='repeat'"


def at_step_5(job: Program) -> tuple[set[int], str]:
    """All processes of the job, and its socket."""
    lines = [job.line().split() for _ in range(4)]
    return family(job.pid), lines[0][-1]


def family(pid: int) -> set[int]:
    return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}


def send(pids: set[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, *(pytest.param(n, marks=pytest.mark.soak) for n in (signal.SIGINT, signal.SIGTERM))]
)
def test_case_C1_a_new_job_starts_at_once_after_any_signal_to_launcher_and_then_to_all(
    runtime_folder: Path, amount: Callable[[int, int], int], number: int
) -> None:
    recipe = counting(runtime_folder, 2000, 4, lanes=4, batch=2, source=ENDLESS)
    for _ in range(amount(1, 20)):
        with launch(recipe, RANKS) as job:
            pids, _ = at_step_5(job)
            assert len(pids) >= 1 + 1 + 4 + 4, "launcher, command, ranks; daemon, fork server, engine, worker"
            send({job.pid}, number)
            send(pids, number)
            job.end(10)
            until(lambda pids=pids: not living(pids), 10)
    with launch(recipe, "pass") as job:  # a clean one takes away what the killed could not
        assert job.end() == 0, job.errors
    assert not list(runtime_folder.rglob("*.sock*"))


@pytest.mark.soak
def test_case_C5_killed_as_a_group_again_and_again_and_a_live_job_is_untouched(
    runtime_folder: Path, amount: Callable[[int, int], int]
) -> None:
    recipe = counting(runtime_folder, 2000, 4, lanes=4, batch=2, source=ENDLESS)
    with Daemon(recipe, workers=1) as foreign:
        before = foreign.all_started().pids()
        for _ in range(amount(1, 30)):
            with launch(recipe, RANKS) as job:
                pids, socket = at_step_5(job)
                os.killpg(job.pid, signal.SIGKILL)
                job.end(10)
                until(lambda pids=pids: not living(pids), 10)
                assert not os.path.exists(socket), "the daemon, which was not in the group, took its sockets away"
        assert foreign.pids() == before


def test_case_D5_all_ranks_are_killed_and_the_daemon_leaves_with_the_command(runtime_folder: Path) -> None:
    recipe = counting(runtime_folder, 2000, 4, lanes=4, batch=2, source=ENDLESS)
    with launch(recipe, RANKS) as job:
        pids, socket = at_step_5(job)
        ranks = {pid for pid in pids if "zephon_client" in " ".join(psutil.Process(pid).cmdline())} - {job.pid}
        send(ranks, signal.SIGKILL)
        assert job.end(10) in (0, 137)
        until(lambda: not living(pids), 10)
        assert not os.path.exists(socket)


@pytest.mark.parametrize(
    ("whom", "number"),
    [
        pytest.param("launcher", signal.SIGTERM, marks=pytest.mark.soak),
        ("launcher", signal.SIGKILL),
        pytest.param("command", signal.SIGTERM, marks=pytest.mark.soak),
    ],
)
def test_case_D5_whoever_is_ended_nothing_stays(runtime_folder: Path, whom: str, number: int) -> None:
    recipe = counting(runtime_folder, 2000, 4, lanes=4, batch=2, source=ENDLESS)
    with launch(recipe, RANKS) as job:
        pids, socket = at_step_5(job)
        names = {pid: " ".join(psutil.Process(pid).cmdline()) for pid in pids}
        victims = {
            "launcher": {job.pid},
            "command": {pid for pid, name in names.items() if "subprocess" in name and pid != job.pid},
        }[whom]
        assert len(victims) == 1
        send(victims, number)
        job.end(15)
        until(lambda: not living(pids), 10)
        assert not os.path.exists(socket)
