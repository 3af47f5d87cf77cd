"""Stateless operators behind a stateful one, with `parallelism`, in real workers: the same data, whatever happens."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.corpora import COUNT
from tests.running import Daemon, Ranks, run_to_the_end, write_recipe
from zephon.errors import RecordError, RunFailed
from zephon.recipe import load_recipe

RECIPE = """
import os
import zephon
from zephon import MixtureSpec

def busy(row):
    (HERE / "busy" / str(os.getpid())).touch()
    return {**row, "sum": sum(range(60_000)), "drawn": float(zephon.generator().random())}

def busy_alone(row):
    return busy(row)

def dies_once(records):
    for record in records:
        marker = HERE / f"died-{record.payload['id']}"
        if DIES and record.payload["id"] in (7, 150, 151) and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), 9)
    return records

def deadly(record):
    if record.payload["id"] == 77:
        os._exit(3)
    return [record]

def raises(row):
    return {**row, "half": 1 / (row["id"] - 77)}

def made(add, parallelism, **options):
    source = StaticMixtureWorkSource([Dataset.from_path("count", HERE / "count")], None, seed=3, chunk_size=25)
    pipeline = Pipeline(source).map_transform(dict).shuffle(40)
    return add(pipeline, parallelism).shuffle(5).batch(4).options(canonical_replicas=2, **options)

def in_two_steps(pipeline, parallelism):
    return pipeline.map_transform(busy, parallelism=parallelism).add_op("once", process_many=dies_once, parallelism=3)

DIES = (HERE / "dies").exists()
pipeline = made(in_two_steps, 2)
alone = made(lambda p, n: p.map_transform(busy_alone), None)
killing = made(lambda p, n: p.map_transform(dict, parallelism=n).add_op("deadly", process_one=deadly, parallelism=2), 2)
raising = made(lambda p, n: p.map_transform(raises, parallelism=n), 1)
skipping = made(lambda p, n: p.map_transform(raises, parallelism=n), 1, on_error="skip")
"""


def test_later_stages_run_on_workers_survive_their_deaths_and_name_what_ends_them(runtime_folder: Path) -> None:
    COUNT(300, 3, runtime_folder / "count")
    (runtime_folder / "busy").mkdir()
    recipe = write_recipe(runtime_folder, RECIPE)
    expected = {}
    for name in ("pipeline", "skipping"):
        made = load_recipe(recipe).pipeline(name)
        expected[name] = {(batch.lane, batch.first_record): batch.digest for batch in made}
        made.close()
    (runtime_folder / "dies").touch()
    for marker in (runtime_folder / "busy").iterdir():
        marker.unlink()
    with Daemon(recipe, workers=2) as daemon:
        engine = daemon.pids()["engine"]

        def spent() -> float:
            times = psutil.Process(engine).cpu_times()
            return float(times.user + times.system)

        begun = spent()
        assert run_to_the_end(daemon.socket, 2) == expected["pipeline"]
        on_workers = spent() - begun
        assert len(list(runtime_folder.glob("died-*"))) == daemon.report()["workers_died"] == 3
        assert str(engine) not in {marker.name for marker in (runtime_folder / "busy").iterdir()}
        begun = spent()
        run_to_the_end(daemon.socket, 2, "alone")
        assert str(engine) in {marker.name for marker in (runtime_folder / "busy").iterdir()}
        assert on_workers < 0.7 * (spent() - begun)
        assert run_to_the_end(daemon.socket, 2, "skipping") == expected["skipping"]
        with Ranks(daemon.socket, 1, pipeline="raising") as ranks:
            said = str(ranks.refused(0, RecordError))
            assert all(fact in said for fact in ("'count'", "row 77", "map_transform", "ZeroDivisionError")), said
        with Ranks(daemon.socket, 1, pipeline="killing") as ranks:
            said = str(ranks.refused(0, RunFailed))
            where = ("3 workers died on the same record", "exit code 3", "row 77 ", "in operator \"add_op 'deadly'\"")
            assert all(fact in said for fact in where), said
        assert daemon.pids()["engine"] == engine
        assert run_to_the_end(daemon.socket, 2) == expected["pipeline"]


@pytest.mark.soak
def test_later_stages_are_the_same_in_every_runner_also_when_workers_die(runtime_folder: Path) -> None:
    COUNT(300, 3, runtime_folder / "count")
    (runtime_folder / "busy").mkdir()
    recipe = write_recipe(runtime_folder, RECIPE)
    found = []
    for runner in ("inline", "threads", "process"):
        if runner == "process":
            (runtime_folder / "dies").touch()
        made = load_recipe(recipe).pipeline().options(runner=runner, max_workers=2)
        found.append([batch.digest for batch in made])
        made.close()
    assert found[0] == found[1] == found[2]
