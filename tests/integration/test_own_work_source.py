"""A work source of the user's own under real daemons: the example of the guide, and sources that go wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.corpora import COUNT, byte_tokenizer
from tests.running import Daemon, Ledger, Ranks, plan_of, run_to_the_end
from zephon.errors import RunFailed
from zephon.recipe import load_recipe
from zephon.transport.channels import MAX_DESCRIPTOR
from zephon.verify import verify

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "own_source.py"

MORE = '''

def ramp(kind=Ramp):
    return kind([Dataset.from_path("web", DATA / "web"), Dataset.from_path("code", DATA / "code")], seed=7)


class Large(Ramp):
    """Its state is large."""

    def clone_for_lane(self, lane_id, canonical_replicas):
        clone = super().clone_for_lane(lane_id, canonical_replicas)
        clone.__class__ = type(self)
        return clone

    def state_dict(self):
        return {"taken": dict(self.taken), "more": "x" * 9000}


class Fails(Large):
    """At its ninth chunk."""

    def next_chunk(self):
        self.asked = getattr(self, "asked", 0) + 1
        if self.asked == 9:
            raise KeyError("lost")
        return super().next_chunk()


class Endless(Large):
    """Begins again."""

    endless = True

    def next_chunk(self):
        if not any(len(rows) - self.taken[name] for name, rows in self.rows.items()):
            self.taken = dict.fromkeys(self.rows, 0)
        return super().next_chunk()


def most(row):
    return row if row["id"] % 5 else None


filtered = Pipeline(ramp()).map_transform(most).shuffle(8).batch(2, drop_last=False)
filtered.options(canonical_replicas=6, flush_every_k_chunks=2)
threads = Pipeline(ramp()).batch(2).options(canonical_replicas=6, flush_every_k_chunks=1, runner="threads")
large = Pipeline(ramp(Large)).batch(2).options(canonical_replicas=16, flush_every_k_chunks=1)
fails = Pipeline(ramp(Fails)).batch(2).options(canonical_replicas=4, flush_every_k_chunks=1)
endless = Pipeline(ramp(Endless)).batch(2).options(canonical_replicas=4, flush_every_k_chunks=2)
'''


def recipe_in(folder: Path) -> str:
    COUNT(900, 3, folder / "data" / "web")
    COUNT(700, 2, folder / "data" / "code", suffix=".parquet")
    byte_tokenizer(folder / "data" / "tokenizer.json")
    (folder / "recipe.py").write_text(EXAMPLE.read_text() + MORE)
    return str(folder / "recipe.py")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    folder = Path(tempfile.mkdtemp(prefix="z", dir="/tmp"))
    with Daemon(recipe_in(folder)) as running:
        yield running.all_started()
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "pipeline", ["large", *(pytest.param(name, marks=pytest.mark.soak) for name in ("pipeline", "filtered", "threads"))]
)
def test_stopped_and_resumed_on_other_numbers_of_ranks_every_batch_is_the_references(
    daemon: Daemon, pipeline: str
) -> None:
    ledger = Ledger(plan_of(daemon.recipe, pipeline))
    state = None
    for dp, rounds, merged in ((4, 5, False), (2, 7, True), (3, 4, False), (1, 10**9, False)):
        with Ranks(daemon.socket, dp, state, pipeline=pipeline, ledger=ledger) as ranks:
            loaded, before = state, ranks.state()
            assert loaded is None or before == loaded, "saved straight after a load"
            ranks.rounds(rounds)
            if merged:  # inside a round
                ranks.take([1] * dp)
            state = ranks.merged() if merged else ranks.state(dp - 1)
        lanes = state["lanes"].values()
        assert all(("source" in lane) == (lane["chunk"] > 0) for lane in lanes)
        if dp == 3:
            assert any(lane["chunk"] for lane in lanes)
    ledger.check()


@pytest.mark.soak
def test_states_too_large_for_one_message_together_are_resumed_from(daemon: Daemon) -> None:
    ledger = Ledger(plan_of(daemon.recipe, "large"))
    with Ranks(daemon.socket, 2, pipeline="large", ledger=ledger) as ranks:
        ranks.rounds(30)
        state = ranks.state()
    assert len(json.dumps(state)) > 2 * MAX_DESCRIPTOR
    with Ranks(daemon.socket, 4, state, pipeline="large", ledger=ledger) as ranks:
        assert ranks.state(3) == state
        ranks.rounds()
    ledger.check()


@pytest.mark.soak
def test_a_second_epoch_asks_fresh_sources(daemon: Daemon) -> None:
    ledger = Ledger(plan_of(daemon.recipe, "filtered"))
    with Ranks(daemon.socket, 2, pipeline="filtered", ledger=ledger) as ranks:
        ranks.rounds()
        ranks.rounds(3)
        state = ranks.state()
    assert state["epoch"] == 1
    with Ranks(daemon.socket, 3, state, pipeline="filtered", ledger=ledger) as ranks:
        ranks.rounds()
    ledger.check(0)
    ledger.check(1)


@pytest.mark.soak
def test_the_daemon_an_embedded_run_and_every_runner_deliver_the_same(daemon: Daemon) -> None:
    """What is more, checkpoints of one are resumed by the other."""
    found = run_to_the_end(daemon.socket, 2, "filtered")
    for runner in ("inline", "threads", "process"):
        pipeline = load_recipe(daemon.recipe).pipeline("filtered").options(runner=runner, max_workers=2)
        embedded = {(batch.lane, batch.first_record): batch.digest for batch in pipeline}
        pipeline.close()
        assert embedded == found, runner
    pipeline = load_recipe(daemon.recipe).pipeline("filtered")
    batches = iter(pipeline)
    first = {(b.lane, b.first_record): b.digest for b in (next(batches) for _ in range(60))}
    with Ranks(daemon.socket, 3, pipeline.checkpoint(), pipeline="filtered") as ranks:
        ranks.rounds()
        rest = {(b.lane, b.first_record): b.digest for part in ranks.batches for b in part}
    assert {**first, **rest} == found
    assert not first.keys() & rest.keys()


def test_an_exception_of_the_users_source_reaches_every_rank_with_lane_and_chunk(daemon: Daemon) -> None:
    with Ranks(daemon.socket, 2, pipeline="fails") as ranks:
        for error in ranks.each(lambda rank: ranks.refused(rank, RunFailed)):
            assert "Fails: lane" in str(error)
            assert "chunk 8 of epoch 0: next_chunk raised KeyError: 'lost'" in str(error)
            assert "recipe.py:" in str(error)
    assert run_to_the_end(daemon.socket, 1, "threads"), "the daemon goes on"


@pytest.mark.soak
def test_ranks_of_an_endless_source_wait_for_nobody(daemon: Daemon) -> None:
    with Ranks(daemon.socket, 2, pipeline="endless") as ranks:
        assert ranks.rounds(400) == [400, 400]
        report = ranks.loaders[0].progress()
    (run,) = report["engine"]["runs"]
    assert run["pipeline"] == "endless"
    assert run["rounds_of_epoch"] is None


@pytest.mark.soak
def test_verify_proves_the_example(daemon: Daemon) -> None:
    assert verify(daemon.recipe, dp=[4, 2, 1], steps=12).ok


@pytest.mark.soak
def test_after_an_engines_death_the_sources_go_on_with_the_states_that_the_ranks_bring(runtime_folder: Path) -> None:
    recipe = recipe_in(runtime_folder)
    ledger = Ledger(plan_of(recipe, "large"))
    with Daemon(recipe) as daemon, Ranks(daemon.socket, 2, pipeline="large", ledger=ledger) as ranks:
        ranks.rounds(20)
        ranks.take([3, 7])
        os.kill(daemon.pids()["engine"], signal.SIGKILL)
        ranks.rounds(20)
        state = ranks.merged()
        assert all(lane["source"]["state"]["more"] for lane in state["lanes"].values())
        ranks.rounds()
    ledger.check()
