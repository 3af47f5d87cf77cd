"""Workers that die, at any moment and in any way, change nothing in what is delivered, or end the run by name."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.corpora import COUNT
from tests.running import Daemon, Ledger, Ranks, counting, mixed, plan_of, until, write_recipe
from zephon import Dataset, Pipeline, StaticMixtureWorkSource
from zephon.errors import RunFailed
from zephon.recipe import load_recipe
from zephon_daemon.supervision import QUICK_SECONDS


def workers_of(daemon: Daemon) -> list[int]:
    return [pid for name, pid in daemon.pids().items() if name.startswith("worker")]


def grown_up(daemon: Daemon) -> list[int]:
    """All three workers, once each of them is older than one that dies of its start."""
    pids = workers_of(daemon)
    with suppress(psutil.NoSuchProcess):
        ages = [time.time() - psutil.Process(pid).create_time() for pid in pids]
        return pids if len(ages) == 3 and min(ages) > QUICK_SECONDS + 0.1 else []
    return []


def test_case_D3_workers_killed_under_load_change_nothing(
    runtime_folder: Path, amount: Callable[[int, int], int]
) -> None:
    """Ranks read on while workers die, one or two at a time, by different signals."""
    recipe = mixed(runtime_folder, {"pipeline": "2, prefetch_batches=2"}, (600, 400))
    chance = random.Random(5)
    killed: list[int] = []
    with Daemon(recipe, workers=3) as daemon:
        while len(killed) < amount(6, 200):
            ledger = Ledger(plan_of(recipe))
            with Ranks(daemon.socket, 4, ledger=ledger) as ranks:
                wanted = done = 1
                while done == wanted:
                    for pid in until(lambda: grown_up(daemon))[: chance.choice([1, 2])]:
                        os.kill(pid, chance.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS]))
                        killed.append(pid)
                    wanted = chance.randrange(15, 40)
                    done = ranks.rounds(wanted)[0]
            ledger.check()
        assert len(until(lambda: grown_up(daemon))) == 3
        assert daemon.report()["workers_died"] == len(killed) == daemon.errors.count("It is replaced")


def hit(pool: Any) -> bool:
    """Whether a task that a killed worker had is still to be done."""
    scheduler = pool._scheduler
    in_work = [work for worker in list(scheduler.workers.values()) for work in list(worker.tasks.values())]
    return any(work.deaths for work in [*scheduler._suspects, *in_work])


def test_workers_of_an_embedded_run_that_are_killed_change_nothing(
    runtime_folder: Path, amount: Callable[[int, int], int]
) -> None:
    recipe = counting(runtime_folder, 6000, 4, lanes=2, batch=4, more=".shuffle(32)", options="flush_every_k_chunks=2")
    pipeline = load_recipe(recipe).pipeline().options(runner="process", max_workers=2)
    ledger, chance = Ledger(plan_of(recipe)), random.Random(3)
    killed = 0
    try:
        for number, batch in enumerate(pipeline):
            ledger.enter(0, batch)
            if number % 30 == 20 and killed < amount(8, 40):
                pool = pipeline._run.pool  # type: ignore[union-attr]
                until(lambda pool=pool: not hit(pool))  # three deaths on one task would rightly end the run
                for pid in list(pool._ports)[: chance.choice([1, 2])]:  # both at once, too
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        killed += 1
    finally:
        pipeline.close()
    ledger.check()
    assert killed >= amount(8, 40)


DEADLY = """
import gc
import os
source = StaticMixtureWorkSource([Dataset.from_path("count", HERE / "count")], mixture=None, seed=5)
def deadly(row):
    if row["id"] == 333:
        {how}
    return row
pipeline = Pipeline(source).map_transform(deadly).batch(4).options(canonical_replicas=2)
other = Pipeline(source).batch(4).options(canonical_replicas=2)
"""


@pytest.mark.parametrize(
    ("how", "facts"),
    [
        ("os.kill(os.getpid(), 9)", ["SIGKILL", "memory"]),
        ("os._exit(1)", ["exit code 1"]),
        ("os.kill(os.getpid(), 11)", ["SIGSEGV"]),
    ],
)
def test_case_D4_a_record_that_kills_every_worker_is_an_error_that_leads_to_it(
    runtime_folder: Path, how: str, facts: list[str]
) -> None:
    counting(runtime_folder, 1000, 2, lanes=2, batch=4)
    recipe = write_recipe(runtime_folder, DEADLY.format(how=how))
    with Daemon(recipe, workers=2) as daemon:
        with Ranks(daemon.socket, 2) as ranks:
            for error in ranks.each(lambda rank: ranks.refused(rank, RunFailed)):
                said = str(error)
                where = ["3 workers died on the same record", "'count'", "row 333 ", "in operator 'map_transform'"]
                assert all(fact in said for fact in [*facts, *where]), said
        with Ranks(daemon.socket, 2, pipeline="other", ledger=Ledger(plan_of(recipe, "other"))) as ranks:
            assert len(set(ranks.rounds())) == 1, "the daemon goes on"


def test_a_rank_that_dies_does_not_touch_the_others(runtime_folder: Path) -> None:
    """Here its connection ends in the middle; that a killed process ends it too is the kernel's doing."""
    recipe = counting(runtime_folder, 4000, 4, lanes=4, batch=4)
    ledger = Ledger(plan_of(recipe))
    with Daemon(recipe) as daemon, Ranks(daemon.socket, 4, ledger=ledger) as ranks:
        ranks.rounds(3)
        ranks.loaders[2]._connection.feed._channel.close()
        until(lambda: len(daemon.report()["clients"]) == 3)

        def go_on(rank: int) -> int:
            if rank == 2:
                return 0
            return sum(ranks._take(rank) is not None for _ in range(100))

        assert ranks.each(go_on) == [100, 100, 0, 100]


def test_workers_of_an_embedded_run_end_with_the_last_that_refers_to_it(runtime_folder: Path) -> None:
    COUNT(100, 1, runtime_folder / "count")
    before = set(psutil.Process().children(recursive=True))
    source = StaticMixtureWorkSource([Dataset.from_path("count", runtime_folder / "count")], mixture=None)
    execution = {"canonical_replicas": 1, "runner": "process", "max_workers": 2}
    batches = iter(Pipeline(source).batch(4).options(**execution))
    first = next(batches)
    gc.collect()
    assert len(set(psutil.Process().children(recursive=True)) - before) == 3, "the iterator needs them"
    del batches
    gc.collect()
    until(lambda: set(psutil.Process().children(recursive=True)) == before)
    assert len(first["id"]) == 4


def test_a_record_that_kills_every_worker_of_an_embedded_run_is_named_too(runtime_folder: Path) -> None:
    counting(runtime_folder, 1000, 2, lanes=2, batch=4)
    recipe = write_recipe(runtime_folder, DEADLY.format(how="os._exit(3)"))
    pipeline = load_recipe(recipe).pipeline().options(runner="process", max_workers=2)
    try:
        with pytest.raises(RunFailed) as caught:
            for _ in pipeline:
                pass
    finally:
        pipeline.close()
    for fact in ("3 workers died on the same record", "exit code 3", "'count'", "row 333 ", "operator 'map_transform'"):
        assert fact in str(caught.value)
