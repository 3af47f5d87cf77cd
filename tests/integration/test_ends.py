"""A finite run ends on all ranks at the same step, whatever its operators drop, and the next epoch follows."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.corpora import COUNT
from tests.running import MIXED, Daemon, Ledger, Ranks, counting, launch, mixed, plan_of, write_recipe
from zephon.errors import TopologyError
from zephon.plan import Plan
from zephon_client import connect
from zephon_client.waiting import Limits

IMPATIENT = Limits(stalled=1.5)
"""Of a rank that has attached, which may take longer."""


def uneven(path: Path) -> str:
    return mixed(
        path,
        {
            "pipeline": "4",
            "pads": "4, drop_last=False",
            "bins": "4, pack='best_fit'",
            "own_ends": "4, even_ends=False",
        },
        (230, 170),
    )


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """Every pipeline of its recipe has lanes of unequal length."""
    folder = Path(tempfile.mkdtemp(prefix="z", dir="/tmp"))
    recipe = uneven(folder)
    COUNT(203, 3, folder / "count")
    text = Path(recipe).read_text() + """
def filtered(**how):
    source = StaticMixtureWorkSource([Dataset.from_path("count", HERE / "count")], mixture=None, seed=1, chunk_size=4)
    keep = lambda row: row if row["id"] % 3 else None
    return Pipeline(source).map_transform(keep).batch(3, **how).options(canonical_replicas=8)
drops = filtered()
filters = filtered(drop_last=False)
"""
    Path(recipe).write_text(text)
    with Daemon(recipe) as running:
        yield running.all_started()
    shutil.rmtree(folder)


@pytest.mark.parametrize("dp", [1, 8])
@pytest.mark.parametrize("pipeline", ["pipeline", "pads", "bins", "drops", "filters"])
def test_all_ranks_end_at_the_same_step_and_the_next_epoch_is_another(daemon: Daemon, pipeline: str, dp: int) -> None:
    plan = plan_of(daemon.recipe, pipeline)
    ledger = Ledger(plan)
    totals = [{lane: ledger.total(epoch, lane) for lane in range(8)} for epoch in (0, 1)]
    assert len(set(totals[0].values())) > 1, "the lanes are uneven, or else this shows nothing"
    with Ranks(daemon.socket, dp, pipeline=pipeline, ledger=ledger) as ranks:
        for epoch in (0, 1):
            assert set(ranks.rounds()) == {_rounds(plan, totals[epoch])}
            assert {loader.epoch for loader in ranks.loaders} == {epoch + 1}
            ledger.check(epoch)
        assert ranks.state(dp - 1)["epoch"] == 2
        counts = {len(batches) for batches in ranks.batches}
    assert counts == {8 // dp * sum(_rounds(plan, of) for of in totals)}, "every rank had as many batches"


def _rounds(plan: Plan, totals: dict[int, int]) -> int:
    size = plan.microbatch_size
    if plan.settings.drop_last:
        return min(totals.values()) // size
    return -(-max(totals.values()) // size)


def test_without_even_ends_each_rank_goes_to_the_end_of_its_own_lanes(daemon: Daemon) -> None:
    ledger = Ledger(plan_of(daemon.recipe, "own_ends"))
    with Ranks(daemon.socket, 8, pipeline="own_ends", ledger=ledger) as ranks:
        done = ranks.rounds()
    assert done == [ledger.total(0, lane) // 4 for lane in range(8)]
    assert len(set(done)) > 1


@pytest.mark.parametrize("pipeline", ["pipeline", "pads", "filters"])
def test_a_rank_alone_is_told_whom_a_finite_run_waits_for(daemon: Daemon, pipeline: str) -> None:
    with connect(daemon.socket, dp_degree=2, dp_group_id=0, output="numpy", pipeline=pipeline) as loader:
        loader._limits = IMPATIENT
        with pytest.raises(TopologyError, match=r"groups? \[?1.*even_ends=False"):
            for _ in loader:
                pass
        assert loader.state_dict()["lanes"], "what it has had can still be saved"


def test_when_the_ranks_of_a_group_have_left_the_others_are_told_that_they_cannot_come_back(daemon: Daemon) -> None:
    how: Any = {"dp_degree": 2, "output": "numpy", "pipeline": "filters"}
    with connect(daemon.socket, dp_group_id=0, **how) as stays:
        with connect(daemon.socket, dp_group_id=1, **how) as leaves:
            began = threading.Thread(target=next, args=(leaves,))
            began.start()
            next(stays)
            began.join()
        stays._limits = IMPATIENT
        with pytest.raises(TopologyError, match=r"groups \[1\], whose ranks have left .* start them together from"):
            for _ in stays:
                pass


def test_readers_of_one_group_get_the_same_batches(daemon: Daemon) -> None:
    ledger = Ledger(plan_of(daemon.recipe))
    with Ranks(daemon.socket, 2, readers=2) as ranks:
        until_end = ranks.rounds()
        got = [[(batch.lane, batch.first_record, batch.digest) for batch in batches] for batches in ranks.batches]
        states = [ranks.state(rank) for rank in range(4)]
    assert got[0] == got[1]
    assert got[2] == got[3]
    assert set(got[0]).isdisjoint(got[2])
    assert len(set(until_end)) == 1
    assert all(state["epoch"] == 1 for state in states)
    for batch in [*ranks.batches[0], *ranks.batches[2]]:
        ledger.enter(0, batch)
    ledger.check()


def test_no_reader_of_a_shared_group_can_change_its_peers_tokens(daemon: Daemon) -> None:
    with Ranks(daemon.socket, 1, readers=2) as ranks:
        first = ranks.each(lambda rank: next(ranks.loaders[rank]))
        assert first[0].digest == first[1].digest
        with pytest.raises(ValueError, match="read-only"):
            first[0]["input_ids"][0, 0] = 7
        del first


def test_case_A3_peers_of_a_group_change_nothing(runtime_folder: Path) -> None:
    recipe = counting(runtime_folder, 1024, 8, lanes=4, batch=4)
    found = []
    with Daemon(recipe) as daemon:
        for readers in (1, 2, 4):
            with Ranks(daemon.socket, 4, readers=readers) as ranks:
                ranks.rounds(10)
                ids = [ranks.ids(rank) for rank in range(4 * readers)]
                assert all(ids[rank] == ids[rank - rank % readers] for rank in range(4 * readers))
                lanes = ranks.state(4 * readers - 1)["lanes"]
                found.append((ids[::readers], sum(at["records"] for at in lanes.values())))
    assert found[0] == found[1] == found[2]
    assert found[0][1] == 10 * 16


def test_eval_runs_beside_the_pipeline_and_again_and_again(runtime_folder: Path) -> None:
    mixed(runtime_folder, {"pipeline": "4"}, (200, 100))
    COUNT(50, 2, runtime_folder / "held_out")
    recipe = write_recipe(
        runtime_folder,
        MIXED + "pipeline = mixed(4)\n"
        "eval = (Pipeline(StaticMixtureWorkSource([Dataset.from_path('held_out', HERE / 'held_out')], mixture=None))"
        ".batch(4, drop_last=False).options(canonical_replicas=4))\n",
    )
    train, held_out = Ledger(plan_of(recipe)), Ledger(plan_of(recipe, "eval"))
    with Daemon(recipe) as daemon, Ranks(daemon.socket, 2, ledger=train) as ranks:
        with Ranks(daemon.socket, 2, pipeline="eval", ledger=held_out) as checks:
            for epoch in range(3):
                ranks.rounds(2)
                assert len(set(checks.rounds())) == 1
                held_out.check(epoch)
            assert sorted(i for rank in range(2) for i in checks.ids(rank)) == sorted([*range(50)] * 3)
        with Ranks(daemon.socket, 2, pipeline="eval") as checks:  # a run of its own: it begins with epoch 0
            checks.rounds()
            assert {loader.epoch for loader in checks.loaders} == {1}
        state = ranks.state()
        assert {at["records"] for at in state["lanes"].values()} == {24}
        ranks.rounds()
        train.check()


def test_case_B3_a_state_at_an_epochs_end_starts_the_next_one(runtime_folder: Path) -> None:
    recipe = counting(runtime_folder, 96, 4, lanes=8, batch=4)
    with Daemon(recipe, workers=1) as daemon:
        for state_at in ("after batch 3", "after the end", "in epoch 1"):
            ledger = Ledger(plan_of(recipe))
            with Ranks(daemon.socket, 4, ledger=ledger) as ranks:
                assert set(ranks.rounds(3)) == {3}
                if state_at != "after batch 3":
                    assert set(ranks.rounds(1)) == {0}
                if state_at == "in epoch 1":
                    assert set(ranks.rounds(1)) == {1}
                state = ranks.state(1)
            steps = []
            with Ranks(daemon.socket, 2, state, ledger=ledger) as ranks:
                while (epoch := ranks.loaders[0].epoch) < 4:
                    steps.append((epoch, *set(ranks.rounds())))
            assert steps == [(1, 2 if state_at == "in epoch 1" else 3), (2, 3), (3, 3)], state_at
            for epoch in range(4):
                ledger.check(epoch, dict.fromkeys(range(8), 12))


def test_after_a_stop_inside_the_last_round_its_empty_batches_come_and_all_ranks_end_the_epoch_together(
    runtime_folder: Path,
) -> None:
    recipe = counting(runtime_folder, 3, 1, lanes=8, batch=4)
    Path(recipe).write_text(Path(recipe).read_text().replace(".batch(4)", ".batch(4, drop_last=False)"))
    with Daemon(recipe, workers=1) as daemon:
        with Ranks(daemon.socket, 1) as ranks:
            ranks.take([1])
            state = ranks.state()
        silent = json.loads(json.dumps(state))  # as of a version that did not say where lanes stand
        for lane in silent["lanes"].values():
            del lane["stands"]
        # Lanes 1 and 2 have a record left, the others an empty batch.
        for given, left in ((state, [3, 4]), (silent, [2, 0])):
            with Ranks(daemon.socket, 2, given) as ranks:
                ranks.rounds()
                assert [loader.epoch for loader in ranks.loaders] == [1, 1]
                assert [len(batches) for batches in ranks.batches] == left
                assert ranks.rounds() == [1, 1]


def test_case_K2_fewer_records_than_lanes_end_evenly_too(runtime_folder: Path) -> None:
    recipe = Path(counting(runtime_folder, 1, 1, lanes=4, batch=1))
    text = recipe.read_text()
    kept = text[text.index("pipeline =") :].replace("pipeline =", "kept =")
    recipe.write_text(text + kept.replace(".batch(1)", ".batch(1, drop_last=False)"))
    with Daemon(str(recipe), workers=1) as daemon:
        for pipeline, steps in (("pipeline", 0), ("kept", 1)):
            with (
                Ranks(daemon.socket, 4, pipeline=pipeline) as ranks,
                warnings.catch_warnings(record=True) as said,
            ):
                warnings.simplefilter("always")
                assert ranks.rounds() == [steps] * 4
                assert [sum(map(len, batches)) for batches in ranks.batches].count(1) == steps
            for told in ("no rank gets a batch: a round takes 1 record of each lane", "no full round"):
                assert any(told in str(each.message) for each in said) == (steps == 0)


TRAIN = """
import json, os, sys
import torch, torch.distributed as dist
from zephon_client import connect
dist.init_process_group("gloo")
steps, digests = 0, []
with connect() as loader:
    for batch in loader:
        made = batch.to_training(return_labels=True)
        assert made["input_ids"].dtype == torch.int64 and made["labels"].shape == made["input_ids"].shape == (4, 32)
        digests.append((batch.lane, batch.first_record, batch.digest))
        steps += batch.ends_round
    dist.barrier()
    state = loader.state_dict()
with open(f"{sys.argv[1]}/rank-{dist.get_rank()}", "w") as file:
    json.dump([steps, digests, state["epoch"]], file)
dist.destroy_process_group()
"""


@pytest.mark.soak
def test_torchrun_ranks_end_together_and_none_waits_in_a_collective(runtime_folder: Path) -> None:
    recipe = uneven(runtime_folder)
    (runtime_folder / "train.py").write_text(TRAIN)
    run = "import runpy, sys; sys.argv[0] = 'torchrun'; runpy.run_module('torch.distributed.run', run_name='__main__')"
    arguments = ("--standalone", "--nproc-per-node", "4", str(runtime_folder / "train.py"), str(runtime_folder))
    environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with launch(recipe, run, *arguments, environment=environment) as job:
        assert job.end(100) == 0, job.errors
    found = [json.loads((runtime_folder / f"rank-{rank}").read_text()) for rank in range(4)]
    ledger = Ledger(plan_of(recipe))
    rounds = min(ledger.total(0, lane) for lane in range(8)) // 4
    assert [(steps, epoch) for steps, _, epoch in found] == [(rounds, 1)] * 4
    got = {(lane, first): digest for _, digests, _ in found for lane, first, digest in digests}
    assert len(got) == rounds * 8
    assert all(digest == ledger.digest(0, lane, first, 4) for (lane, first), digest in got.items())
