"""How a run is executed never shows in what it delivers: one digest, whatever the workers, the runner, the rings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.running import Daemon, Ledger, Ranks, counting, mixed, plan_of, python, run_to_the_end, zephon
from zephon.recipe import load_recipe

Digests = dict[tuple[int, int], str]


def here(recipe: str, pipeline: str = "pipeline", **options: object) -> Digests:
    """The digest of every batch of an embedded run."""
    made = load_recipe(recipe).pipeline(pipeline).options(**options)
    try:
        return {(batch.lane, batch.first_record): batch.digest for batch in made}
    finally:
        made.close()


def test_the_runner_the_workers_and_the_rings_never_show(
    runtime_folder: Path, no_leaks: None, amount: Callable[[int, int], int]
) -> None:
    options = {
        "inline": "runner='inline'",
        "threads": "runner='threads', max_workers=4",
        "one": "prefetch_batches=1",
        "two": "prefetch_batches=2",
        "sixteen": "prefetch_batches=16",
    }
    pipelines = {"pipeline": "4", **{name: f"4, {how}" for name, how in options.items()}}
    recipe = mixed(runtime_folder, pipelines, (200, 140))
    expected = here(recipe)
    assert len(expected) == 80
    runners = [("threads", 4), ("process", 2), ("threads", 1), ("process", 1), ("process", 4)]
    for runner, workers in runners[: amount(2, 5)]:
        assert here(recipe, runner=runner, max_workers=workers) == expected, (runner, workers)
    for workers in (2, 4, 1)[: amount(2, 3)]:
        with Daemon(recipe, workers=workers) as daemon:
            assert run_to_the_end(daemon.socket, 2) == expected, workers
            for name in options if workers == 2 else ():
                assert run_to_the_end(daemon.socket, 2, name) == expected, name


def test_functions_on_batches_give_the_same_under_the_daemon_empty_batches_included(runtime_folder: Path) -> None:
    recipe = mixed(runtime_folder, {"pipeline": "4, drop_last=False"}, (80, 60))
    with open(recipe, "a") as file:
        file.write(
            "def tail(batch):\n"
            "    if batch.first_record % 3 == 0:\n        return None\n"
            "    return {'last': batch['input_ids'][:, -1], 'text': [str(len(batch))] * len(batch)}\n"
            "pipeline.map_batch(tail)\n"
        )
    expected = here(recipe)
    with Daemon(recipe, workers=2) as daemon, Ranks(daemon.socket, 2) as ranks:
        ranks.rounds()
        found = {(b.lane, b.first_record): b.digest for batches in ranks.batches for b in batches}
        assert {len(b) for batches in ranks.batches for b in batches} >= {0, 4}
    assert found == expected


@pytest.mark.soak
def test_case_A9_the_hash_seed_never_shows(runtime_folder: Path, amount: Callable[[int, int], int]) -> None:
    recipe = mixed(runtime_folder, {"pipeline": "4"})
    found = []
    for seed in ("0", None, "12345", "1")[: amount(2, 4)]:
        environment = {"PYTHONHASHSEED": seed}
        with Daemon(recipe, workers=1, environment=environment) as daemon, Ranks(daemon.socket, 1) as ranks:
            ranks.rounds(25)
            found.append([batch.digest for batch in ranks.batches[0]])
            assert ranks.state()["identity"] == plan_of(recipe).identity
    assert len(found[0]) == 200
    assert all(each == found[0] for each in found)


def test_the_daemon_has_the_same_plan_and_verify_and_explain_agree(runtime_folder: Path) -> None:
    recipe = mixed(runtime_folder, {"pipeline": "4"}, (60, 40))
    for arguments in (["verify", recipe, "--dp", "4,2", "--steps", "4"], ["explain", recipe, "--dp", "4"]):
        with zephon(runtime_folder, *arguments) as program:
            assert program.end() == 0, program.errors
            assert program.output.strip()


@pytest.mark.soak
def test_case_A11_a_run_goes_on_with_any_number_of_workers(
    runtime_folder: Path, amount: Callable[[int, int], int]
) -> None:
    recipe = counting(runtime_folder, 2000, 10, lanes=4, batch=5, more=".shuffle(16)")
    plan = plan_of(recipe)
    ledger = Ledger(plan)
    with Daemon(recipe, workers=2) as daemon, Ranks(daemon.socket, 2, ledger=ledger) as ranks:
        ranks.rounds(30)
        state = ranks.state()
    for workers in (8, 1, 3)[: amount(1, 3)]:
        with Daemon(recipe, workers=workers) as daemon, Ranks(daemon.socket, 2, state, ledger=Ledger(plan)) as ranks:
            assert set(ranks.rounds()) == {70}
    embedded = load_recipe(recipe).pipeline().restore(state)
    for batch in embedded:
        ledger.enter(0, batch)
    ledger.check()


SLEEPY = """
import os, time
def slow(row):
    mark = HERE / f"worker-{{os.getpid()}}"
    if not mark.exists():
        mark.touch()
        if len(list(HERE.glob("worker-*"))) == 1:
            time.sleep({first})
    if row["id"] % 100 == 0:
        time.sleep({each})
    return row
"""


@pytest.mark.parametrize(("rows", "lanes"), [pytest.param(10_000, 4, marks=pytest.mark.soak), (4, 1)])
def test_case_D9_slow_workers_lose_no_row(
    runtime_folder: Path, amount: Callable[[int, int], int], rows: int, lanes: int
) -> None:
    """The first worker starts late, and every hundredth row takes its time."""
    twice = "lambda row: {**row, 'twice': 2 * row['id']}"
    more = f".map_transform(slow).map_transform(lambda row: row).map_transform({twice})"
    recipe = counting(runtime_folder, rows, min(rows, 10), lanes, 1, more, source="chunk_size=1" if rows < 10 else "")
    times = {"first": amount(1, 4) / 2, "each": amount(1, 25) / 500}
    Path(recipe).write_text(Path(recipe).read_text().replace("pipeline =", SLEEPY.format(**times) + "\npipeline =", 1))
    with Daemon(recipe, workers=4) as daemon:
        for _ in range(amount(1, 50)):
            with Ranks(daemon.socket, lanes) as ranks:
                ranks.rounds()
                assert sorted(i for rank in range(lanes) for i in ranks.ids(rank)) == list(range(rows))
                assert all(int(b["twice"][0]) == 2 * int(b["id"][0]) for batches in ranks.batches for b in batches)


def test_a_rank_imports_nothing_heavy(runtime_folder: Path) -> None:
    recipe = counting(runtime_folder, 64, 2, lanes=1, batch=4)
    code = """
import json, sys
from zephon_client import connect
with connect(output="numpy") as loader:
    for batch in loader:
        batch["id"]
    loader.state_dict()
print(json.dumps([name for name in ("pyarrow", "tokenizers", "torch", "cloudpickle", "psutil") if name in sys.modules]))
"""
    with Daemon(recipe, workers=1) as daemon, python(
        runtime_folder, code, environment={"ZEPHON_SOCKET": daemon.socket}
    ) as rank:
        assert rank.end() == 0, rank.errors
        assert json.loads(rank.output) == []
        assert rank.errors == ""
