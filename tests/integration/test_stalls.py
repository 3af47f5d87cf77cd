"""What hangs is found and named: an operator, storage, an engine in a user's function. A slow trainer does not hang."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.running import Daemon, Ledger, Ranks, counting, plan_of, until, write_recipe
from zephon.datasets.open_files import _of_process
from zephon.errors import RunFailed, ZephonError
from zephon_client import connect
from zephon_daemon.progress import text

STALL = ["--stall-seconds", "0.5", "--stall-end-seconds"]

SLEEPS = """
import os, time

source = StaticMixtureWorkSource([Dataset.from_path("count", HERE / "count")], mixture=None, seed=5)
def sleeps(row):
    if row["id"] == 333 and (HERE / "asleep").exists():
        time.sleep(3600)
    return row
pipeline = Pipeline(source).map_transform(sleeps).batch(4).options(canonical_replicas=2)
late = Pipeline(source).shuffle(4).map_transform(sleeps).batch(4).options(canonical_replicas=2)
"""


@pytest.fixture
def sleeping(runtime_folder: Path) -> str:
    counting(runtime_folder, 1000, 2, lanes=2, batch=4)
    (runtime_folder / "asleep").touch()
    return write_recipe(runtime_folder, SLEEPS)


def refused(socket: str, timeout: float, pipeline: str = "pipeline") -> tuple[ZephonError, list[str]]:
    """The error of a rank that reads until it gets one, and what it was warned of before."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with connect(socket, output="numpy", timeout=timeout, pipeline=pipeline) as loader:
            try:
                for _ in loader:
                    pass
            except ZephonError as error:
                return error, [str(w.message) for w in caught]
    raise AssertionError("it came to the end")


def told(daemon: Daemon, what: str) -> tuple[dict[str, Any], str] | None:
    """A report with a stall in it and what progress shows of it, once it has this in it, too."""
    report = daemon.report()
    shown = text(report)
    return (report, shown) if report["engine"] and report["engine"]["stalls"] and what in shown else None


def stalls(daemon: Daemon) -> list[dict[str, Any]]:
    return daemon.engine()["stalls"]


def test_case_J1_an_operator_that_sleeps_for_ever_is_named_with_its_record_and_stack_to_all_who_wait(
    sleeping: str,
) -> None:
    with Daemon(sleeping, more=[*STALL, "0"]) as daemon:
        with ThreadPoolExecutor(1) as threads:
            rank = threads.submit(refused, daemon.socket, 6.0)
            report, shown = until(lambda: told(daemon, "for operator 'map_transform', lane "))
            (stall,) = report["engine"]["stalls"]
            error, warned = rank.result()
        assert stall["operator"] == "operator 'map_transform'"
        assert stall["record"].startswith("dataset 'count'")
        assert stall["record"].endswith("row 333")
        assert "part-00000.jsonl" in stall["samples"]
        assert stall["pid"] in report["processes"].values()
        assert stall["seconds"] >= 0.5
        assert stall["seconds_without_output"] > 0
        assert "in sleeps" in stall["stack"]
        facts = ["operator 'map_transform'", "row 333", f"process {stall['pid']}", "stands in sleeps (", "output was"]
        for said in (str(error), shown, daemon.errors, *[each for each in warned if "is stalled" in each][:1]):
            assert all(fact in said for fact in facts), said
        assert any("is stalled" in each for each in warned)
        assert isinstance(error, RunFailed)
        until(lambda: daemon.report()["workers_died"])
        assert "work for a run that has ended" in daemon.errors


def test_slow_records_are_no_stall_however_long_a_task_of_them_takes_nor_for_ranks_of_another_engine(
    runtime_folder: Path,
) -> None:
    counting(runtime_folder, 64, 1, lanes=1, batch=4)
    recipe = write_recipe(
        runtime_folder,
        """
import time

source = StaticMixtureWorkSource([Dataset.from_path("count", HERE / "count")], mixture=None, chunk_size=32)
def slow(row):
    time.sleep(0.25 if row["id"] < 32 else 0)
    return row
pipeline = Pipeline(source).map_transform(slow).batch(4).options(canonical_replicas=2)
""",
    )

    def ids(group: int) -> list[int]:
        with connect(daemon.socket, dp_degree=2, dp_group_id=group, output="numpy", timeout=5.0) as loader:
            return [id for batch in loader for id in batch["id"].tolist()]

    with Daemon(recipe, workers=2, more=["--engines", "2"]) as daemon, ThreadPoolExecutor(2) as threads:
        assert sorted(id for each in threads.map(ids, range(2)) for id in each) == list(range(64))


@pytest.mark.soak
def test_documents_that_a_tokenizer_takes_long_for_are_no_stall_either(runtime_folder: Path) -> None:
    recipe = write_recipe(
        runtime_folder,
        """
import time
from zephon import InMemoryShard

class Slow:
    name_or_path = "slow"
    def encode(self, text):
        time.sleep(0.025)
        return [1, 2, 3]
rows = [{"text": f"document {n}"} for n in range(400)]
source = StaticMixtureWorkSource([Dataset.from_dict("rows", {"s": InMemoryShard(rows)})], mixture=None, chunk_size=400)
pipeline = Pipeline(source).tokenize(Slow(), field="text", special_tokens="none").batch(4).options(canonical_replicas=1)
""",
    )
    with (
        Daemon(recipe, workers=1) as daemon,
        connect(daemon.socket, dp_degree=1, output="numpy", timeout=5.0) as loader,
    ):
        assert sum(map(len, loader)) == 400


@pytest.mark.soak
def test_case_J1_a_worker_that_hangs_is_ended_in_time_and_if_that_helps_nobody_sees_it(sleeping: str) -> None:
    ledger, asleep = Ledger(plan_of(sleeping)), Path(sleeping).parent / "asleep"
    asleep.unlink()
    ledger.ends()  # what is to come, worked out while nothing sleeps
    asleep.touch()
    with Daemon(sleeping, more=[*STALL, "1"]) as daemon, Ranks(daemon.socket, 2, ledger=ledger) as ranks:
        ends = [ranks._threads.submit(count, ranks, rank) for rank in range(2)]
        until(lambda: stalls(daemon))
        asleep.unlink()
        assert all(end.result() for end in ends)
        ledger.check()
        assert daemon.report()["workers_died"] == 1
        assert "is ended: it has been in operator 'map_transform', at dataset 'count'" in daemon.errors
        assert "ended: ended by the watchdog after" in daemon.errors
        assert "out of memory" not in daemon.errors, "the cause is known"


@pytest.mark.soak
def test_case_J1_and_D4_a_record_at_which_every_worker_hangs_ends_the_run_by_name(sleeping: str) -> None:
    with Daemon(sleeping, workers=1, more=[*STALL, "0.8"]) as daemon:
        error, _ = refused(daemon.socket, timeout=40.0)
        assert daemon.report()["workers_died"] == 3
    for fact in ("3 workers", "ended by the watchdog", "operator 'map_transform'", "row 333", "no sign of progress"):
        assert fact in str(error), error


@contextmanager
def server_that_does_not_answer(path: Path) -> Iterator[None]:
    """Whoever opens the file waits until this is left: its lease is held here and not given up."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    held = os.open(path, os.O_RDWR)
    try:
        try:
            fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            pytest.skip(f"this file system has no leases: {error}")
        yield
    finally:
        os.close(held)
        signal.signal(signal.SIGIO, before)


@pytest.mark.soak
def test_case_J1_storage_that_stops_answering_is_named_with_its_file_and_the_run_goes_on_when_it_answers(
    runtime_folder: Path,
) -> None:
    recipe = counting(runtime_folder, 4000, 8, lanes=2, batch=4)
    ledger = Ledger(plan_of(recipe))
    ledger.ends()  # what is to come, worked out while all files can be read; none stays open here
    _of_process.cache_clear()
    gc.collect()
    blocked = runtime_folder / "count" / "part-00005.jsonl"
    with Daemon(recipe, more=[*STALL, "0"]) as daemon, Ranks(daemon.socket, 2, ledger=ledger) as ranks:
        with server_that_does_not_answer(blocked):
            ends = [ranks._threads.submit(count, ranks, rank) for rank in range(2)]
            stall = until(lambda: stalls(daemon))[0]
            assert stall["operator"] == "reading"
            assert str(blocked) in stall["samples"]
            assert "open" in stall["stack"] or "_fd" in stall["stack"]
            until(lambda: told(daemon, "for reading, lane "))
        assert all(end.result() for end in ends)
        ledger.check()
        assert "goes on after" in " ".join(daemon.engine()["errors"])
        assert daemon.report()["workers_died"] == 0


def count(ranks: Ranks, rank: int) -> int:
    """Batches of a rank to the end."""
    done = 0
    while ranks._take(rank) is not None:
        done += 1
    return done


def test_case_J1_a_trainer_that_sleeps_is_no_stall_and_the_status_says_so(runtime_folder: Path) -> None:
    recipe = counting(runtime_folder, 4000, 4, lanes=2, batch=4)
    with Daemon(recipe, more=["--stall-seconds", "0.5"]) as daemon, Ranks(daemon.socket, 2) as ranks:
        ranks.rounds(3)

        def waited() -> dict[str, Any] | None:
            (run,) = daemon.engine()["runs"]
            return run if run["waited"].get("the trainer", 0) > 2 * 4 * 0.5 else None

        run = until(waited)
        assert {lane["waits_for"] for lane in run["lanes"]} == {"the trainer"}
        assert "limit: training: 2 of 2 lanes" in text(daemon.report())
        assert not stalls(daemon)
        assert "stalled" not in daemon.errors
        ranks.rounds(3)


@pytest.mark.soak
def test_case_J1_an_engine_in_a_users_function_that_does_not_return_is_shown_with_its_stack(sleeping: str) -> None:
    with Daemon(sleeping, more=[*STALL, "0"]) as daemon:
        error, _ = refused(daemon.socket, timeout=6.0, pipeline="late")
        facts = ["has not answered for", "at work on lane", "map_transform", "it stands in sleeps ("]
        for said in (str(error), text(daemon.report()), daemon.errors):
            assert all(fact in said for fact in facts), said


@pytest.mark.soak
def test_an_engine_that_hangs_is_ended_and_three_of_them_end_the_run_with_where_they_hung(sleeping: str) -> None:
    with Daemon(sleeping, workers=1, more=[*STALL, "1"]) as daemon:
        error, _ = refused(daemon.socket, timeout=40.0, pipeline="late")
    for fact in ("died 3 times", "ended by the watchdog", "shuffle, map_transform", "stands in sleeps ("):
        assert fact in str(error), error


def test_a_recipe_that_hangs_while_it_is_loaded_is_named_in_progress_and_ended_with_where_it_stood(
    runtime_folder: Path,
) -> None:
    recipe = write_recipe(runtime_folder, "def waits():\n    while True:\n        pass\n\nwaits()\n")
    with Daemon(recipe, ready=False, more=[*STALL, "4"]) as daemon:
        facts = ["has not answered for", "at work on loading the recipe", "it stands in waits (recipe.py:"]
        until(lambda: os.path.exists(daemon.socket))
        until(lambda: all(fact in text(daemon.report()) for fact in facts))
        assert daemon.end() == 3
        assert all(fact in daemon.errors.splitlines()[-1] for fact in ["ended by the watchdog", *facts])
