"""The engine, the fork server or the daemon dies, and the ranks go on with the same batches, as after a pause."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.running import SECONDS, Daemon, Ledger, Ranks, counting, launch, mixed, plan_of, python, until, write_recipe
from zephon.errors import CheckpointMismatch, DaemonUnavailable, RunFailed
from zephon_client import connect
from zephon_client.absence import UNSUPERVISED_SECONDS


def kill(daemon: Daemon, name: str, number: int = signal.SIGKILL) -> None:
    """One of the daemon's living processes, once it is there."""

    def killed() -> bool:
        try:
            os.kill(daemon.pids()[name], number)
            return True
        except (KeyError, ProcessLookupError):  # it is being replaced
            return False

    until(killed)


def test_a_killed_engine_or_fork_server_changes_nothing_in_two_epochs(
    runtime_folder: Path, amount: Callable[[int, int], int]
) -> None:
    recipe = mixed(runtime_folder, {"pipeline": "2, prefetch_batches=2"}, (300, 200))
    ledger = Ledger(plan_of(recipe))
    with Daemon(recipe, workers=2) as daemon, Ranks(daemon.socket, 3, ledger=ledger) as ranks:
        for epoch in range(2):
            for _ in range(amount(1, 3)):
                assert set(ranks.rounds(3)) == {3}
                before = ranks.state(1)
                kill(daemon, "engine")
                assert ranks.state(1) == before
                ranks.take([2, 0, 1])  # ranks of one session need not be in step when they come back
                kill(daemon, "forkserver" if epoch else "engine")
                ranks.take([1, 3, 2])
            assert len(set(ranks.rounds())) >= 1
            assert [ranks.state(rank)["epoch"] for rank in range(3)] == [epoch + 1] * 3
            ledger.check(epoch)
        assert daemon.report()["session"] == 1


def test_a_rank_that_sees_an_engines_death_before_the_daemon_is_told_of_it_waits_for_that(runtime_folder: Path) -> None:
    recipe = counting(runtime_folder, 400, 4, lanes=2, batch=4)
    with Daemon(recipe, workers=1) as daemon, Ranks(daemon.socket, 1) as ranks, ThreadPoolExecutor(1) as thread:
        ranks.take([2])
        pids, before = daemon.all_started().pids(), daemon.report()["clients"][0]["client"]
        os.kill(pids["forkserver"], signal.SIGSTOP)  # which reports deaths
        try:
            os.kill(pids["engine"], signal.SIGKILL)
            all_of_it = thread.submit(ranks.rounds)
            until(lambda: any(c["client"] > before and c["attached"] for c in daemon.report()["clients"]))
        finally:
            os.kill(pids["forkserver"], signal.SIGCONT)
        all_of_it.result(SECONDS)
        assert len(set(ranks.ids(0))) == len(ranks.ids(0)) == 400


def test_ranks_go_on_without_one_that_waits_for_them_in_a_collective(runtime_folder: Path) -> None:
    """It got its batches before the engine died and comes back after the others got theirs."""
    some = ".map_transform(lambda row: row if row['id'] % 7 else None)"
    recipe = counting(runtime_folder, 4000, 4, lanes=4, batch=4, more=some, options="flush_every_k_chunks=1")
    ledger = Ledger(plan_of(recipe))
    with Daemon(recipe, workers=1) as daemon, Ranks(daemon.socket, 2, ledger=ledger) as ranks:
        assert ranks.loaders[1].lanes == [2, 3]
        ranks.take([6, 0])
        kill(daemon, "engine")
        ranks.take([0, 6])
        ranks.take([2, 2])
        kill(daemon, "engine")
        assert len(set(ranks.rounds())) == 1
    ledger.check()


def test_ranks_that_share_a_group_restart_at_the_slowest_and_each_gets_every_batch_once(runtime_folder: Path) -> None:
    recipe = counting(runtime_folder, 400, 4, lanes=2, batch=4, more=".shuffle(8)")
    with Daemon(recipe, workers=1) as daemon, Ranks(daemon.socket, 1, readers=2) as ranks:
        ranks.take([5, 2])
        kill(daemon, "engine")
        ranks.take([3, 6])
        kill(daemon, "engine")
        ranks.rounds()
        assert ranks.ids(0) == ranks.ids(1)
        assert len(set(ranks.ids(0))) == len(ranks.ids(0)) == 400


@pytest.mark.soak
def test_short_and_empty_last_batches_come_out_the_same(runtime_folder: Path) -> None:
    recipe = mixed(runtime_folder, {"pipeline": "2, drop_last=False, lanes=4"}, (60, 40))
    ledger = Ledger(plan_of(recipe))
    with Daemon(recipe, workers=1) as daemon, Ranks(daemon.socket, 2, ledger=ledger) as ranks:
        rounds = 0
        while (done := ranks.rounds(2)) != [0, 0]:
            assert len(set(done)) == 1
            rounds += done[0]
            kill(daemon, "engine")
            if done[0] < 2:
                break
    ledger.check()
    assert rounds > 4


RANK = """
import os, sys
from zephon_client import connect
with connect(output="numpy") as loader:
    for batch in loader:
        if batch.ends_round and loader.rounds % 5 == 0:
            print(loader.rounds, batch.first_record, batch.digest, flush=True)
            if loader.rounds == int(sys.argv[1]):
                break
            sys.stdin.readline()
"""


def test_case_D5_a_daemon_that_is_killed_comes_back_under_launch_and_the_rank_notices_nothing(
    runtime_folder: Path,
) -> None:
    endless = "exhausted_policy='repeat'"
    recipe = counting(runtime_folder, 2000, 4, lanes=2, batch=2, more=".shuffle(16)", source=endless)
    lines: list[list[str]] = []
    for kills in (0, 2):
        with launch(recipe, RANK, "15", stdin=subprocess.PIPE) as job:
            lines.append([])
            for number in range(3):
                lines[-1].append(job.line())
                if number < kills:
                    os.kill(until(lambda job=job: daemon_of(job.pid)), signal.SIGKILL)
                    until(lambda job=job, number=number: job.errors.count("It is started again") > number)
                if number < 2:
                    assert job.process.stdin is not None
                    job.process.stdin.write(b"\n")
                    job.process.stdin.flush()
            assert job.end() == 0, job.errors
            assert job.errors.count("It is started again") == kills
            assert "Traceback" not in job.errors
    assert lines[0] == lines[1]
    assert [line.split()[0] for line in lines[0]] == ["5", "10", "15"]


def daemon_of(launcher: int) -> int | None:
    """The launcher's living daemon, once it has its title."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(launcher).children():
            if " ".join(child.cmdline()).startswith("zephon daemon"):
                return child.pid
    return None


LONELY = """
import sys
from zephon_client import connect
with connect(dp_degree=4, dp_group_id=int(sys.argv[1]), output="numpy") as loader:
    for batch in loader:
        print(loader.rounds, flush=True)
"""


def test_a_rank_that_is_killed_alone_leaves_the_others_alone_and_a_new_job_starts_at_once(
    runtime_folder: Path,
) -> None:
    recipe = counting(runtime_folder, 4000, 4, lanes=4, batch=4, source="exhausted_policy='repeat'")
    with Daemon(recipe, workers=1) as daemon:
        environment = {"ZEPHON_SOCKET": daemon.socket}
        ranks = [python(runtime_folder, LONELY, str(group), environment=environment) for group in range(4)]
        with ranks[0], ranks[1], ranks[2], ranks[3]:
            for rank in ranks:
                rank.line()
            ranks[2].stop(signal.SIGKILL)
            until(lambda: len(daemon.report()["clients"]) == 3)
            for rank in (ranks[0], ranks[1], ranks[3]):
                for _ in range(100):
                    assert rank.line()
            again = [
                python(runtime_folder, LONELY, str(group), environment={**environment, "TORCHELASTIC_RUN_ID": "again"})
                for group in range(4)
            ]
            with again[0], again[1], again[2], again[3]:
                for rank in (ranks[0], ranks[1], ranks[3]):
                    rank.stop(signal.SIGKILL)
                for rank in again:
                    assert rank.line()
                    rank.stop(signal.SIGKILL)


@pytest.mark.soak
def test_case_D10_a_daemon_that_nobody_starts_again_is_an_error_in_seconds_and_the_next_daemon_is_found(
    runtime_folder: Path,
) -> None:
    recipe = counting(runtime_folder, 4000, 4, lanes=2, batch=2, options="prefetch_batches=2")
    ledger = Ledger(plan_of(recipe))
    with Daemon(recipe, workers=1) as daemon, Ranks(daemon.socket, 1, ledger=ledger) as ranks:
        ranks.rounds(3)
        state = ranks.state()
        os.kill(daemon.pid, signal.SIGKILL)
        daemon.end()
        error = ranks.refused(0, DaemonUnavailable)
        assert daemon.socket in str(error)
        assert f"within {UNSUPERVISED_SECONDS:g} s" in str(error)
        assert ranks.state()["lanes"]["0"]["records"] >= state["lanes"]["0"]["records"]
        with Daemon(recipe, workers=1, socket=daemon.socket):
            ranks.rounds(10)


@pytest.mark.soak
def test_a_recipe_that_changed_while_the_daemon_was_away_is_refused(runtime_folder: Path) -> None:
    recipe = counting(runtime_folder, 4000, 4, lanes=2, batch=2, options="prefetch_batches=2")
    with Daemon(recipe, workers=1) as daemon, Ranks(daemon.socket, 1) as ranks:
        ranks.rounds(3)
        os.kill(daemon.pid, signal.SIGKILL)
        daemon.end()
        for batch, more, what in ((3, "", "microbatch_size"), (2, ".shuffle(8)", "steps")):
            counting(runtime_folder, 4000, 4, lanes=2, batch=batch, more=more, options="prefetch_batches=2")
            with Daemon(recipe, workers=1, socket=daemon.socket):
                if what == "microbatch_size":
                    assert what in str(ranks.refused(0, CheckpointMismatch))
                    ranks.loaders[0]._refused = None  # it stays refused; here another try is wanted
                else:
                    assert what in str(ranks.refused(0, CheckpointMismatch))


DEADLY = """
import os
source = StaticMixtureWorkSource([Dataset.from_path("count", HERE / "count")], mixture=None, seed=5, chunk_size=50)
def deadly(row):
    if row["id"] == 333:
        os.kill(os.getpid(), 11)
    return row
pipeline = Pipeline(source).shuffle(8).map_transform(deadly).batch(4).options(canonical_replicas=2)
other = Pipeline(source).batch(4).options(canonical_replicas=2)
"""


def test_a_record_that_kills_every_engine_is_an_error_that_leads_to_it(runtime_folder: Path) -> None:
    counting(runtime_folder, 1000, 2, lanes=2, batch=4)
    recipe = write_recipe(runtime_folder, DEADLY)
    with Daemon(recipe, workers=1) as daemon:
        with Ranks(daemon.socket, 2) as ranks:
            for error in ranks.each(lambda rank: ranks.refused(rank, RunFailed)):
                facts = ["died 3 times", "SIGSEGV", "at work on lane", "shuffle, map_transform", "'count', shard"]
                assert all(fact in str(error) for fact in facts), error
            with pytest.raises(RunFailed, match="died 3 times"):
                next(ranks.loaders[0])
        with Ranks(daemon.socket, 2, pipeline="other", ledger=Ledger(plan_of(recipe, "other"))) as ranks:
            assert len(set(ranks.rounds())) == 1, "the daemon goes on"


def test_a_function_that_calls_exit_ends_the_run_and_kills_nobody(runtime_folder: Path) -> None:
    counting(runtime_folder, 1000, 2, lanes=2, batch=4)
    recipe = write_recipe(
        runtime_folder, DEADLY.replace("os.kill(os.getpid(), 11)", "raise SystemExit(3)")
        + "early = Pipeline(source).map_transform(deadly).batch(4).options(canonical_replicas=2)\n",
    )  # fmt: skip
    with Daemon(recipe, workers=1) as daemon:
        for name in ("pipeline", "early"):
            with connect(daemon.socket, output="numpy", pipeline=name) as loader, pytest.raises(
                RunFailed, match="SystemExit"
            ):
                for _ in loader:
                    pass
        assert daemon.report()["workers_died"] == 0
        assert "died" not in daemon.errors
