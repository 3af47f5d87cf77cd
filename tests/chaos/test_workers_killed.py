"""Workers that die, at any moment and in any way, change nothing in what is delivered, or end the run with their name."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.running import Daemon, Ledger, Ranks, counting, mixed, plan_of, until, write_recipe
from zephon.errors import RunFailed
from zephon.recipe import load_recipe


def workers_of(daemon: Daemon) -> list[int]:
    return [pid for name, pid in daemon.pids().items() if name.startswith("worker")]


def test_case_D3_workers_killed_under_load_change_nothing(
    runtime_folder: Path, amount: Callable[[int, int], int]
) -> None:
    """Kills at random moments: after each one some rounds go by, enough that no task is in hand at three of them."""
    recipe = mixed(runtime_folder, {"pipeline": "2, prefetch_batches=2"}, (1500, 900))
    chance = random.Random(5)
    killed = 0
    with Daemon(recipe, workers=3) as daemon:
        while killed < amount(8, 200):
            ledger = Ledger(plan_of(recipe))
            with Ranks(daemon.socket, 4, ledger=ledger) as ranks:
                rounds = 1
                while rounds:
                    for pid in workers_of(daemon)[: chance.choice([1, 1, 2])]:
                        with suppress(ProcessLookupError):
                            os.kill(pid, chance.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS]))
                            killed += 1
                    rounds = ranks.rounds(chance.randrange(15, 40))[0]
            ledger.check()
        until(lambda: len(workers_of(daemon)) == 3)
        died = daemon.report()["workers_died"]
        assert killed / 2 < died <= killed, "one may be killed twice before it is seen to be dead"
        assert daemon.errors.count("It is replaced") == died


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
                for pid in list(pool._ports)[: chance.choice([1, 2])]:  # both at once, too
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        killed += 1
    finally:
        pipeline.close()
    ledger.check()
    assert killed >= amount(8, 40)


DEADLY = """
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
            for raised in ranks.each(lambda rank: pytest.raises(RunFailed, lambda: [b for b in ranks.loaders[rank]])):
                said = str(raised.value)
                assert all(fact in said for fact in [*facts, "workers died on the same samples", "'count'"]), said
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
