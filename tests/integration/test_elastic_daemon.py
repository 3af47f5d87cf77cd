"""Stopped anywhere and resumed on any number of ranks, by a real daemon: every global step is the reference's.

Two mixed datasets, JSON lines and Parquet, are tokenised, packed, shuffled and batched on 8 lanes. A chain of legs,
each a number of groups and a place to stop, runs to the epoch's end; all that was delivered equals the reference.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.corpora import COUNT, byte_tokenizer
from tests.running import Daemon, Ledger, Ranks, State, counting, mixed, plan_of, until, write_recipe
from zephon.errors import CheckpointError, CheckpointMismatch
from zephon.pipeline import Pipeline
from zephon.recipe import load_recipe


class Leg(NamedTuple):
    """A run of some rounds, and then maybe some batches of each rank, that ends with the state of one rank."""

    dp: int
    rounds: int = 10**9
    more: tuple[int, ...] = ()
    state_of: int = 0
    pipeline: str = "pipeline"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    folder = Path(tempfile.mkdtemp(prefix="z", dir="/tmp"))
    recipe = mixed(
        folder,
        {
            "pipeline": "4",
            "half": "2",
            "double": "8",
            "short": "4, drop_last=False",
            "bins": "4, pack='best_fit'",
            "wide": "4, lanes=64",
            "other_mix": "4, web=0.3",
            "dealt": "4, mapping_strategy='interleaved'",
        },
    )
    with Daemon(recipe) as running:
        yield running.all_started()
    shutil.rmtree(folder)


CHAINS: dict[str, list[Leg]] = {
    "8 to 4": [Leg(8, 7), Leg(4)],
    "4 to 2": [Leg(4, 11), Leg(2)],
    "2 to 8": [Leg(2, 5), Leg(8)],
    "8 to 1": [Leg(8, 9), Leg(1)],
    "1 to 8, after one round": [Leg(1, 1), Leg(8)],
    "8 to 4 to 2": [Leg(8, 6), Leg(4, 5), Leg(2)],
    "2 to 8 to 1": [Leg(2, 13), Leg(8, 2), Leg(1)],
    "from rank 3's state": [Leg(4, 8, state_of=3), Leg(8, 3, state_of=7), Leg(2)],
    "another microbatch size": [Leg(8, 6), Leg(4, 4, pipeline="half"), Leg(2, 3, pipeline="double"), Leg(8)],
    "3 groups, unevenly": [Leg(3, 7), Leg(5, 4), Leg(2)],
    "inside a round": [Leg(4, 5, more=(1, 0, 1, 0)), Leg(2)],
    "inside a round, far apart": [Leg(2, 3, more=(3, 1)), Leg(4, 2, more=(0, 1, 0, 1)), Leg(8)],
    "inside the first round": [Leg(2, 0, more=(2, 0)), Leg(4)],
    "padded ends": [Leg(8, 10, pipeline="short"), Leg(2, 4, more=(1, 3), pipeline="short"), Leg(4, pipeline="short")],
    "bins": [Leg(4, 9, pipeline="bins"), Leg(2, 6, pipeline="bins"), Leg(8, pipeline="bins")],
    "dealt lanes": [Leg(4, 6, pipeline="dealt"), Leg(2, 2, more=(1, 0), pipeline="dealt"), Leg(8)],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:8 lanes do not split evenly", "ignore:this state was taken inside a round")
@pytest.mark.parametrize("chain", CHAINS)
def test_every_step_is_the_references_wherever_it_was_stopped(daemon: Daemon, chain: str) -> None:
    ledger = Ledger(plan_of(daemon.recipe, CHAINS[chain][0].pipeline))
    state: State | None = None
    for leg in CHAINS[chain]:
        with Ranks(daemon.socket, leg.dp, state, pipeline=leg.pipeline, ledger=ledger) as ranks:
            done = ranks.rounds(leg.rounds)
            assert len(set(done)) == 1, "all ranks stop at the same step"
            if leg.more:
                ranks.take(leg.more)
                state = ranks.merged()
            else:
                state = ranks.state(leg.state_of)
                assert state["complete"] is True
    ledger.check()
    assert state is not None
    assert state["epoch"] == 1


def test_the_states_of_all_ranks_lead_to_the_same_steps(daemon: Daemon) -> None:
    with Ranks(daemon.socket, 4) as ranks:
        ranks.rounds(9)
        states = [ranks.state(rank) for rank in range(4)]
    assert len({json.dumps({lane: at["records"] for lane, at in state["lanes"].items()}) for state in states}) == 1
    after = []
    for state in (states[0], states[3]):
        with Ranks(daemon.socket, 2, state) as ranks:
            ranks.rounds(6)
            after.append([[batch.digest for batch in batches] for batches in ranks.batches])
    assert after[0] == after[1]


def test_a_state_needs_no_other_rank(daemon: Daemon) -> None:
    """The others have stopped long before: all that they know is in the rank that is asked."""
    with Ranks(daemon.socket, 4) as ranks:
        ranks.rounds(3)
        one = ranks.state(2)
        assert one["complete"] is True
        assert {at["records"] for at in one["lanes"].values()} == {12}


def test_a_checkpoint_of_the_embedded_pipeline_goes_on_under_the_daemon_and_back(daemon: Daemon) -> None:
    ledger = Ledger(plan_of(daemon.recipe))
    embedded = load_recipe(daemon.recipe).pipeline()
    _rounds_here(embedded, 6, ledger)
    with Ranks(daemon.socket, 4, json.loads(json.dumps(embedded.checkpoint())), ledger=ledger) as ranks:
        ranks.rounds(7)
        state = ranks.state(1)
    embedded.restore(state)
    _rounds_here(embedded, 5, ledger)
    back = embedded.checkpoint()
    embedded.close()
    with Ranks(daemon.socket, 8, back, ledger=ledger) as ranks:
        ranks.rounds()
    ledger.check()


def _rounds_here(pipeline: Pipeline, rounds: int, ledger: Ledger) -> None:
    batches = iter(pipeline)
    while rounds:
        batch = next(batches)
        ledger.enter(0, batch)
        rounds -= batch.ends_round


def test_case_B1_a_save_straight_after_a_load_is_byte_equal(daemon: Daemon) -> None:
    with Ranks(daemon.socket, 4) as ranks:
        ranks.rounds(7)
        state = ranks.state()
    with Ranks(daemon.socket, 2, state) as ranks:
        assert json.dumps(ranks.loaders[1].state_dict()) == json.dumps(state)
        assert next(ranks.loaders[0]).first_record == 28


def test_a_resumed_run_shows_its_rounds_from_its_beginning(daemon: Daemon) -> None:
    with Ranks(daemon.socket, 4) as ranks:
        ranks.rounds(7)
        state = ranks.state()
    with Ranks(daemon.socket, 2, state) as ranks:
        ranks.rounds(3)
        assert [(loader.rounds, loader.step) for loader in ranks.loaders] == [(3, 10)] * 2
        assert until(lambda: [run for run in _runs(ranks) if run["rounds"] == run["steps"] == 10])
        ranks.rounds()
        done = ranks.loaders[0].step
        assert ranks.state()["past"] == 4 * done
        assert [next(loader).first_record for loader in ranks.loaders] == [0, 0]
        assert until(lambda: [run for run in _runs(ranks) if (run["rounds"], run["steps"]) == (0, done)])


def _runs(ranks: Ranks) -> list[dict[str, Any]]:
    """What is reported once every rank has told how far it is."""
    report: dict[str, Any] = [loader.progress() for loader in ranks.loaders][-1]
    return list(report["engine"]["runs"])


def test_a_state_of_64_lanes_is_under_16_KiB_and_does_not_grow(daemon: Daemon) -> None:
    sizes = []
    with Ranks(daemon.socket, 4, pipeline="wide") as ranks:
        for rounds in (1, 3):
            ranks.rounds(rounds)
            sizes.append(len(json.dumps(ranks.state())))
    assert max(sizes) < 16 << 10
    assert sizes[1] - sizes[0] < 200


def test_a_mixture_that_is_changed_knowingly_goes_on_from_each_datasets_own_position(daemon: Daemon) -> None:
    with Ranks(daemon.socket, 4) as ranks:
        ranks.rounds(8)
        state = ranks.state()
        before = [sample for batches in ranks.batches for batch in batches for row in batch.samples for sample in row]
    with Ranks(daemon.socket, 2, state, pipeline="other_mix") as ranks:
        assert "mixture" in str(ranks.refused(0, CheckpointMismatch))
    with Ranks(daemon.socket, 2, state, pipeline="other_mix", allow_changed=["mixture"]) as ranks:
        ranks.rounds(12)
        after = [[batch.digest for batch in batches] for batches in ranks.batches]
        again = ranks.state()
        then = [sample for batches in ranks.batches for batch in batches for row in batch.samples for sample in row]
    code = [sum(sample[0] == "code" for sample in set(part)) / len(set(part)) for part in (before, then)]
    assert code[1] > code[0] + 0.1, "the new proportions are in force"
    embedded = load_recipe(daemon.recipe).pipeline("other_mix").restore(state, allow_changed=["mixture"])
    here = []
    for batch in embedded:
        here.append((batch.lane, batch.first_record, batch.digest))
        if batch.ends_round and batch.first_record == 4 * 19:
            break
    embedded.close()
    assert sorted(digest for batches in after for digest in batches) == sorted(digest for *_, digest in here)
    with Ranks(daemon.socket, 8, again, pipeline="other_mix") as ranks:  # a state of the changed run is one of its own
        assert set(ranks.rounds(2)) == {2}


def test_the_daemon_forgets_a_run_that_was_left(daemon: Daemon) -> None:
    with Ranks(daemon.socket, 8) as ranks:
        ranks.rounds(1)
        assert len(daemon.lanes()) == 8
    until(lambda: not daemon.lanes())
    assert daemon.report()["clients"] == []


@pytest.mark.filterwarnings("ignore:8 lanes do not split evenly")
def test_case_A1_every_id_once_and_every_step_the_same_on_any_number_of_ranks(runtime_folder: Path) -> None:
    recipe = counting(runtime_folder, 1024, 16, lanes=8, batch=4)
    with Daemon(recipe) as daemon:
        for first, then in ((8, 4), (8, 2), (8, 1), (2, 8), (8, 3)):
            ledger = Ledger(plan_of(recipe))
            with Ranks(daemon.socket, first, ledger=ledger) as ranks:
                ranks.rounds(10)
                state = ranks.state(first - 1)
                ids = [i for rank in range(first) for i in ranks.ids(rank)]
            with Ranks(daemon.socket, then, state, ledger=ledger) as ranks:
                assert set(ranks.rounds()) == {22}
                ids += [i for rank in range(then) for i in ranks.ids(rank)]
            ledger.check()
            assert sorted(ids) == list(range(1024))
        del state["lanes"]["5"]
        with pytest.raises(CheckpointError, match=r"lanes \[5\]"):
            Ranks(daemon.socket, 1, state)


A7 = """
def kept(row):
    return None if row["id"] % 5 == 0 else row
data = [Dataset.from_path(name, HERE / name) for name in ("lines", "columns", "packed")]
mixture = MixtureSpec({"lines": 0.5, "columns": 0.3, "packed": 0.2})
pipeline = Pipeline(StaticMixtureWorkSource(data, mixture, seed=7, chunk_size=8)).map_transform(kept)
pipeline.tokenize(tokenizer_id=str(HERE / "tokenizer.json"), field="text", special_tokens="eos")
pipeline.pack_flat(33, algorithm="best_fit").shuffle(64).batch(2)
pipeline.options(canonical_replicas=8, flush_every_k_chunks=4)
"""


def test_case_A7_filtered_tokenised_packed_shuffled_and_mixed_and_still_elastic(runtime_folder: Path) -> None:
    rows, shards = 200, 4
    for name, suffix in (("lines", ".jsonl"), ("columns", ".parquet"), ("packed", ".jsonl.gz")):
        COUNT(rows, shards, runtime_folder / name, suffix=suffix)
    byte_tokenizer(runtime_folder / "tokenizer.json")
    recipe = write_recipe(runtime_folder, A7)
    ledger, state = Ledger(plan_of(recipe)), None
    drawn: Counter[object] = Counter()
    with Daemon(recipe) as daemon:
        for dp, rounds in ((8, 7), (2, 3), (4, 10**9)):
            with Ranks(daemon.socket, dp, state, ledger=ledger) as ranks:
                assert len(set(ranks.rounds(rounds))) == 1
                state = ranks.state(dp - 1)
                for batch in (batch for batches in ranks.batches for batch in batches):
                    drawn.update(sample for record in batch.samples for sample in record)
    ledger.check()
    assert not [row for _, shard, row in drawn if (shard * (rows // shards) + row) % 5 == 0]
    reference: Counter[object] = Counter()
    for batch in load_recipe(recipe).pipeline():
        reference.update(sample for record in batch.samples for sample in record)
    assert drawn == reference
    assert {name for name, _, _ in drawn} == {"lines", "columns", "packed"}
