"""Custom operators and random numbers under worker processes and real daemons: the same bytes everywhere."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.corpora import COUNT
from tests.running import Daemon, Ledger, Ranks, plan_of, run_to_the_end, write_recipe
from tests.unit.custom_operators import PIECES
from zephon.errors import RecordError
from zephon.recipe import load_recipe

Digests = dict[tuple[int, int], str]

LISTS = {
    "pipeline": ("odd", "stamp", "children", "noisy", "told"),
    "held": ("noisy_one", "fours", "doubled", "sorted"),
    "states": ("doubled", "pairs", "shuffle", "hoard", "counted"),
    "serial": ("children", "numbered", "stamp", "noisy_one"),
}


def custom_recipe(folder: Path) -> str:
    """Every custom operator of the unit tests, over JSON lines, in a recipe that lies beside their module."""
    COUNT(700, 3, folder / "count")
    (folder / "pieces.py").write_text(Path(__file__).parents[1].joinpath("unit/custom_operators.py").read_text())
    text = """
from pieces import PIECES

def made(*names):
    source = StaticMixtureWorkSource([Dataset.from_path("count", HERE / "count")], None, seed=3, chunk_size=40)
    pipeline = Pipeline(source).map_transform(lambda row: {"id": row["id"], "of": row["text"]})
    for name in names:
        PIECES[name](pipeline)
    return pipeline.batch(5, drop_last=False).options(canonical_replicas=4, flush_every_k_chunks=2)

"""
    return write_recipe(folder, text + "".join(f"{name} = made(*{names!r})\n" for name, names in LISTS.items()))


def here(recipe: str, pipeline: str, **options: object) -> Digests:
    made = load_recipe(recipe).pipeline(pipeline).options(**options)
    try:
        return {(batch.lane, batch.first_record): batch.digest for batch in made}
    finally:
        made.close()


@pytest.mark.soak
def test_custom_operators_deliver_the_same_bytes_in_every_runner_and_under_a_daemon(
    runtime_folder: Path, no_leaks: None
) -> None:
    assert {name for names in LISTS.values() for name in names} == set(PIECES)
    recipe = custom_recipe(runtime_folder)
    expected = {name: here(recipe, name) for name in LISTS}
    assert all(len(batches) > 20 for batches in expected.values())
    for runner, workers in (("threads", 3), ("process", 2)):
        for name, batches in expected.items():
            assert here(recipe, name, runner=runner, max_workers=workers) == batches, (runner, name)
    with Daemon(recipe, workers=2) as daemon:
        for name, batches in expected.items():
            assert run_to_the_end(daemon.socket, 2, name) == batches, name


@pytest.mark.soak
def test_custom_operators_go_on_under_a_daemon_where_they_were_stopped(runtime_folder: Path) -> None:
    recipe = custom_recipe(runtime_folder)
    for name in ("states", "pipeline"):
        ledger = Ledger(load_recipe(recipe).pipeline(name).plan())
        with Daemon(recipe, workers=1) as daemon, Ranks(daemon.socket, 2, pipeline=name, ledger=ledger) as ranks:
            ranks.rounds(7)
            state = ranks.state()
        with Daemon(recipe, workers=2) as daemon, Ranks(
            daemon.socket, 4, state, pipeline=name, ledger=ledger
        ) as ranks:
            ranks.rounds()
        ledger.check()


RANDOM = """
import zephon, numpy as np

def seeded(row):
    return {"id": row["id"], "r": float(zephon.generator().random())}

def bare(row):
    return {"id": row["id"], "r": float(np.random.random())}

def made(fn):
    source = StaticMixtureWorkSource([Dataset.from_path("count", HERE / "count")], None, seed=3, chunk_size=8)
    return Pipeline(source).map_transform(fn).batch(4).options(canonical_replicas=8)

pipeline, unseeded = made(seeded), made(bare)
"""


def numbers(ranks: Ranks) -> list[tuple[int, float]]:
    return [
        (int(i), float(r)) for batches in ranks.batches for batch in batches if len(batch)
        for i, r in zip(batch["id"], batch["r"])
    ]  # fmt: skip


@pytest.mark.soak
def test_case_A12_random_numbers_of_a_function_depend_on_seed_epoch_and_record_alone(
    runtime_folder: Path, amount: Callable[[int, int], int]
) -> None:
    COUNT(256, 4, runtime_folder / "count")
    recipe = write_recipe(runtime_folder, RANDOM)
    found: list[list[dict[int, float]]] = []
    for workers in (1, 4, 8):
        with Daemon(recipe, workers=workers) as daemon, Ranks(daemon.socket, 2) as ranks:
            ranks.rounds()
            first = numbers(ranks)
            ranks.rounds()
            found.append([dict(first), dict(set(numbers(ranks)) - set(first))])
    assert found[0] == found[1] == found[2]
    first, second = found[0]
    assert len(first) == len(second) == 256
    assert len({*first.values(), *second.values()}) == 512

    with Daemon(recipe, workers=4) as daemon, Ranks(daemon.socket, 4) as ranks:
        ranks.rounds(3)
        state, begun = ranks.state(), numbers(ranks)
    with Daemon(recipe, workers=1) as daemon, Ranks(daemon.socket, 1, state) as ranks:
        ranks.rounds()
        assert dict(begun + numbers(ranks)) == first
        assert len(begun) + len(numbers(ranks)) == 256
    resumed = load_recipe(recipe).pipeline().restore(state)
    for batch in resumed:
        for i, r in zip(batch["id"].tolist(), batch["r"].tolist()):
            assert first[i] == r
    resumed.close()


def test_case_A12_bare_random_numbers_are_warned_of_and_are_no_copies_from_worker_to_worker(
    runtime_folder: Path,
) -> None:
    COUNT(256, 4, runtime_folder / "count")
    recipe = write_recipe(runtime_folder, RANDOM)
    with Daemon(recipe, workers=4).all_started() as daemon:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with Ranks(daemon.socket, 1, pipeline="unseeded") as ranks:
                ranks.rounds()
                values = [r for _, r in numbers(ranks)]
        assert len(set(values)) == len(values) == 256
    texts = [str(warning.message) for warning in caught]
    assert any("map_transform: draws from numpy.random, which no seed of the run decides" in text for text in texts)


CRASHING = """
import os, sys, signal, threading

def die(row):
    if row["id"] == 0 and not os.path.exists(HERE / "died"):
        (HERE / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return row

def leave(row):
    sys.exit("no more") if row["id"] == 777 else None
    return row

def unsendable(row):
    return {**row, "lock": threading.Lock()} if row["id"] == 777 else row

def made(*fns, **how):
    source = StaticMixtureWorkSource([Dataset.from_path("count", HERE / "count")], None, seed=3, chunk_size=40)
    pipeline = Pipeline(source).shuffle(8) if how else Pipeline(source)
    for fn in fns:
        pipeline.map_transform(fn, **how)
    return pipeline.batch(4).options(canonical_replicas=2)

LOCK = threading.Lock()
pipeline, leaving, holding = made(die), made(leave), made(unsendable)
held_behind, held_in_a_stage = made(unsendable, parallelism=None), made(unsendable, parallelism=2)
closing = made(lambda row: (LOCK, row)[1])
"""


def test_a_function_that_kills_its_process_on_the_first_records_does_not_kill_the_engine(runtime_folder: Path) -> None:
    COUNT(900, 4, runtime_folder / "count")
    recipe = write_recipe(runtime_folder, CRASHING)
    with Daemon(recipe, workers=1) as daemon:
        before = daemon.pids()["engine"]
        assert run_to_the_end(daemon.socket)
        assert daemon.pids()["engine"] == before
    assert (runtime_folder / "died").exists()


@pytest.mark.parametrize("runner", ["inline", "process", "daemon"])
def test_case_J4_an_error_of_a_function_names_path_row_operator_lane_and_how_to_see_the_record(
    runtime_folder: Path, runner: str
) -> None:
    COUNT(900, 4, runtime_folder / "count")
    recipe = write_recipe(runtime_folder, CRASHING)
    held = "field 'lock' holds a lock that cannot be sent to another process"
    causes = {"leaving": "SystemExit: no more", "holding": held, "held_behind": held, "held_in_a_stage": held}
    errors: dict[str, RecordError] = {}
    with Daemon(recipe, workers=1) if runner == "daemon" else nullcontext() as daemon:
        for name in causes:
            if daemon is not None:
                with Ranks(daemon.socket, 1, pipeline=name) as ranks:
                    errors[name] = ranks.refused(0, RecordError)
            else:
                with pytest.raises(RecordError) as caught:
                    here(recipe, name, runner=runner, max_workers=1)
                errors[name] = caught.value
    for name, error in errors.items():
        assert (error.dataset, error.row, error.operator) == ("count", 102, "map_transform")
        assert error.shard == str(runtime_folder / "count" / "part-00003.jsonl")
        assert causes[name] in error.cause
        assert error.lane in (0, 1)
        assert f"lane {error.lane}" in str(error)
        assert "w1" not in str(error).replace(str(runtime_folder), "")
        assert error.look.startswith("python -c ")
        assert error.look in str(error)
    arguments = [sys.executable, *shlex.split(error.look)[1:]]
    shown = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "'id': 777" in shown


def test_what_cannot_reach_the_workers_is_named_when_the_run_starts(runtime_folder: Path) -> None:
    COUNT(60, 2, runtime_folder / "count")
    recipe = write_recipe(runtime_folder, CRASHING)
    with Daemon(recipe, workers=1) as daemon, Ranks(daemon.socket, 1, pipeline="closing") as ranks:
        error = ranks.refused(0, Exception)  # type: ignore[type-var]
        assert "map_transform: fn reads the global 'LOCK', a _thread.lock, which cannot be sent" in str(error)
        assert json.dumps(plan_of(recipe).identity)
