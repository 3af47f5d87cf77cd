"""Several engines in one daemon: real processes, the reference's bytes, and one engine's death, which is its own."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.running import Daemon, Ledger, Ranks, State, mixed, plan_of, until
from zephon.errors import RecordError, RunFailed
from zephon_daemon.progress import text

OF_LANES = """
COUNTED = Dataset.from_path("count", HERE / "web")

def counted(operator, name="count", **options):
    pipeline = Pipeline(StaticMixtureWorkSource([COUNTED], mixture=None, seed=5, chunk_size=8))
    return pipeline.map_transform(operator).batch(2).options(canonical_replicas=8, **options)

def breaks(record):
    return record if record["id"] != 77 else 1 // 0

bad = counted(breaks)
barren = counted(lambda record: None)
some = counted(lambda record: record if record["id"] % 3 else None)
"""


@pytest.fixture
def recipe(runtime_folder: Path) -> str:
    path = Path(mixed(runtime_folder, {"pipeline": "2", "short": "3, drop_last=False"}))
    path.write_text(path.read_text() + OF_LANES)
    return str(path)


def clients_of(daemon: Daemon, engine: int) -> list[int]:
    """The numbers of an engine's clients; one that comes back gets another."""
    return sorted(each["client"] for each in daemon.report()["clients"] if each["engine"] == engine)


def test_runs_on_two_engines_are_the_reference_end_evenly_fail_together_and_go_on_with_one(recipe: str) -> None:
    ledger = Ledger(plan_of(recipe))
    with Daemon(recipe, workers=2, more=["--engines", "2"]) as daemon:
        two_runs_end_evenly(daemon)
        all_ranks_fail_together(daemon)
        workers_go_where_ranks_are(daemon)
        state = one_engine_is_killed(daemon, ledger)
    with Daemon(recipe, workers=1) as daemon, Ranks(daemon.socket, 3, state, ledger=ledger) as ranks:
        assert len(set(ranks.rounds())) == 1
    ledger.check()


def two_runs_end_evenly(daemon: Daemon) -> None:
    """One of them in short batches, for two epochs, the other at a step that nobody knows beforehand."""
    short, some = Ledger(plan_of(daemon.recipe, "short")), Ledger(plan_of(daemon.recipe, "some"))
    with (
        Ranks(daemon.socket, 2, pipeline="short", ledger=short) as first,
        Ranks(daemon.socket, 2, pipeline="some", ledger=some) as second,
    ):
        assert len(set(second.rounds(5))) == 1
        for epoch in range(2):
            assert len(set(first.rounds())) == 1
            short.check(epoch)
        assert len(set(second.rounds())) == 1
        some.check()
        assert second.state()["epoch"] == 1


def all_ranks_fail_together(daemon: Daemon) -> None:
    """Of a bad record in a lane of one engine, and of data of which no record passes."""
    with Ranks(daemon.socket, 2, pipeline="bad") as ranks:
        errors = ranks.each(lambda rank: ranks.refused(rank, RecordError))
        assert all("map_transform" in str(error) for error in errors)
    with Ranks(daemon.socket, 2, pipeline="barren") as ranks:
        failures = ranks.each(lambda rank: ranks.refused(rank, RunFailed))
        assert all("0 of" in str(error) for error in failures)
    until(lambda: not daemon.engine()["runs"])


def workers_go_where_ranks_are(daemon: Daemon) -> None:
    """One rank alone has all workers in the end, in the middle of its run."""
    ledger = Ledger(plan_of(daemon.recipe))
    with Ranks(daemon.socket, 1, ledger=ledger) as ranks:
        ranks.rounds(2)
        (own,) = [each["engine"] for each in daemon.report()["clients"]]
        until(lambda: workers_of(daemon) == {own: 2})
        assert daemon.report()["workers_died"] == 0
        ranks.rounds()
        ledger.check()


def workers_of(daemon: Daemon) -> dict[int, int]:
    """How many worker processes each engine has."""
    names = [name.removeprefix("worker ").partition(".")[0] for name in daemon.pids() if name.startswith("worker ")]
    return dict(Counter(map(int, names)))


def one_engine_is_killed(daemon: Daemon, ledger: Ledger) -> State:
    """In the middle of a run of four ranks; its state after that, at the end of a round."""
    with Ranks(daemon.socket, 4, ledger=ledger) as ranks:
        ranks.rounds(3)
        others = clients_of(daemon, 1)
        assert len(others) == 2
        assert {lane["engine"] for lane in daemon.lanes()} == {0, 1}
        shown = text(daemon.report())
        assert "engine 1: running" in shown
        assert "8 lanes" in shown
        before = daemon.report()["processes"]
        os.kill(before["engine 0"], signal.SIGKILL)
        ranks.rounds(20)  # more than the rings had
        after = daemon.report()["processes"]
        assert (after["engine 0"] != before["engine 0"], after["engine 1"]) == (True, before["engine 1"])
        assert clients_of(daemon, 1) == others, "the ranks of the other engine noticed nothing"
        states = [ranks.state(rank) for rank in range(4)]
        assert all(state == states[0] for state in states[1:])
        assert states[0]["complete"]
        return states[0]


@pytest.mark.soak
def test_four_engines_that_die_one_after_the_other_give_the_reference(recipe: str) -> None:
    ledger = Ledger(plan_of(recipe))
    with Daemon(recipe, workers=4, more=["--engines", "4"]) as daemon, Ranks(daemon.socket, 4, ledger=ledger) as ranks:
        ranks.rounds(2)
        for engine in (0, 3, 1):
            os.kill(daemon.pids()[f"engine {engine}"], signal.SIGKILL)
            ranks.rounds(2)
        ranks.rounds()
        ledger.check()


@pytest.mark.parametrize(("given", "status", "said"), [
    ("3", 3, "engines=3: must be in 1..2"), ("x", 2, "a whole number from 1 is expected, or auto"),
])  # fmt: skip
def test_numbers_of_engines_that_make_no_sense_are_refused(recipe: str, given: str, status: int, said: str) -> None:
    with Daemon(recipe, workers=2, more=["--engines", given], ready=False) as daemon:
        assert daemon.end() == status
        assert said in daemon.errors
