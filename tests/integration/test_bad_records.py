"""A record that is bad is counted or is an error with all facts; it never looks like the end of the data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.corpora import COUNT
from tests.running import Daemon, Ranks, write_recipe
from zephon.errors import RecordError
from zephon.recipe import load_recipe
from zephon_daemon.progress import text

RECIPE = """
def rows(**options):
    source = StaticMixtureWorkSource([Dataset.from_path("d", HERE / "data")], mixture=None, chunk_size=16)
    return Pipeline(source).batch(3, drop_last=False).options(canonical_replicas=2, **options)
pipeline = rows()
skips = rows(on_error="skip")
def divide(row):
    return {**row, "x": 1 // (row["id"] - 777)}
good = StaticMixtureWorkSource([Dataset.from_path("good", HERE / "good")], mixture=None)
divides = Pipeline(good).map_transform(divide).batch(3).options(canonical_replicas=2)
asks = Pipeline(good).map_transform(lambda row: {"x": row["idd"]}).batch(3).options(canonical_replicas=2)
"""


def make(folder: Path) -> str:
    lines = [json.dumps({"id": i, "text": "é" * (i % 7)}) for i in range(1000)]
    lines[500] = '{"id": 500, "te'
    (folder / "data").mkdir()
    (folder / "data" / "a.jsonl").write_text("\n".join(lines) + "\n")
    COUNT(1000, 4, folder / "good")
    return write_recipe(folder, RECIPE)


def test_case_E1_a_broken_line_is_an_error_with_all_facts_again_and_again(runtime_folder: Path) -> None:
    recipe = make(runtime_folder)
    byte = len("\n".join((runtime_folder / "data" / "a.jsonl").read_text().split("\n")[:500])) + 1
    facts = ["a.jsonl", "line 501", f"byte {byte}", "dataset 'd'", "row 500", 'on_error="skip"']
    with Daemon(recipe) as daemon, Ranks(daemon.socket, 2) as ranks:

        def act(rank: int) -> list[str]:
            said = []
            for _ in range(3):
                said.append(str(ranks.refused(rank, RecordError)))
            return said

        for said in ranks.each(act):
            assert len(set(said)) == 1, "asking again says the same"
            assert all(fact in said[0] for fact in facts), said[0]
            assert "\n" not in said[0]
        seen = [i for rank in range(2) for i in ranks.ids(rank)]
        assert 500 not in seen
        assert len(seen) == len(set(seen))
        state = ranks.state()
        assert state["epoch"] == 0
    with pytest.raises(RecordError) as raised:
        for _ in load_recipe(recipe).pipeline():
            pass
    assert str(raised.value) == said[0], "embedded says the same"
    assert daemon.errors == "", "the daemon tells it to the rank, once"


def test_case_E1_a_broken_line_is_skipped_and_counted_also_over_a_stop(runtime_folder: Path) -> None:
    recipe = make(runtime_folder)
    with Daemon(recipe) as daemon:
        with Ranks(daemon.socket, 2, pipeline="skips") as ranks:
            ranks.rounds()
            expected = [[b.digest for b in batches] for batches in ranks.batches]
            assert sorted(i for rank in range(2) for i in ranks.ids(rank)) == [i for i in range(1000) if i != 500]
            report = daemon.report()["engine"]
            assert sum(lane["skipped"] for run in report["runs"] for lane in run["lanes"]) == 1
            assert [run["skips"] for run in report["runs"]] == [{"d": {"read": 1}}]
            assert "bad records left out: d: 1 in read" in text(daemon.report())
            assert sum("line 501" in text for text in report["errors"]) == 1
        with Ranks(daemon.socket, 2, pipeline="skips") as ranks:
            ranks.rounds(120)
            state = ranks.state()
            first = [[b.digest for b in batches] for batches in ranks.batches]
        assert sum(at["skipped"] for at in state["lanes"].values()) == 1
        with Ranks(daemon.socket, 1, state, pipeline="skips") as ranks:
            ranks.rounds(2)
            again = ranks.state()
            assert sum(at["skipped"] for at in again["lanes"].values()) == 1
        with Ranks(daemon.socket, 2, again, pipeline="skips") as ranks:
            ranks.rounds()
            last = [[b.digest for b in batches] for batches in ranks.batches]
    assert first == [e[:120] for e in expected]
    assert last == [e[122:] for e in expected]


def test_case_J4_an_operator_that_raises_is_named_with_its_record(runtime_folder: Path) -> None:
    with Daemon(make(runtime_folder)) as daemon:
        with Ranks(daemon.socket, 1, pipeline="divides") as ranks:
            error = ranks.refused(0, RecordError)
        with Ranks(daemon.socket, 1, pipeline="asks") as ranks:
            asked = ranks.refused(0, RecordError)
    assert "the record has no field 'idd' (it has: id, text; did you mean 'id'?)" in str(asked)
    assert "Fix the function, or the record" in str(asked)
    assert isinstance(error, RecordError)
    assert (error.dataset, error.row, error.operator) == ("good", 27, "map_transform")
    assert error.shard.endswith("part-00003.jsonl")
    assert "ZeroDivisionError" in error.cause
    assert "text" not in str(error), "no content of the record"
    source = (runtime_folder / "recipe.py").read_text().splitlines()
    line = next(number for number, text in enumerate(source, 1) if "777" in text)
    there = str(error.__cause__)
    assert f'File "{runtime_folder / "recipe.py"}", line {line}, in divide\n    {source[line - 1].strip()}' in there
