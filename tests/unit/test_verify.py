"""`verify` proves a good recipe, and names the first difference of one that is not a function of its data."""

from __future__ import annotations

import random
import time
from itertools import count

import pytest
from hypothesis import given

from tests.unit.small_recipes import examples, recipes, reference
from zephon import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource, verify
from zephon.errors import RecipeError, SettingError
from zephon.lanes import released_rounds
from zephon.verify import main


@pytest.fixture(autouse=True)
def no_wait(monkeypatch, request):
    """Only the test of the clock waits for it."""
    if "with_clock" not in request.node.name:
        monkeypatch.setattr(verify, "COARSE_CLOCK_S", 0.0)


def pipeline_with(fn, *, lanes: int = 4, rows: int = 200) -> Pipeline:
    shard = InMemoryShard([{"id": i} for i in range(rows)])
    source = StaticMixtureWorkSource([Dataset.from_dict("web", {"a": shard})], None, chunk_size=8)
    return Pipeline(source).map_transform(fn).batch(2).options(canonical_replicas=lanes)


def with_random(row):
    return {**row, "r": random.random()}


def with_clock(row):
    return {**row, "seen": int(time.time())}


def with_random_filter(row):
    return row if random.random() < 0.5 else None


def keep(row):
    return row


counter = count()


def with_counter(row):
    return {**row, "n": next(counter)}


@examples(10)
@given(recipes())
def test_any_good_recipe_is_proven(recipe):
    plan = recipe.plan()
    totals = {lane: len(reference(plan, lane, most=12)) for lane in range(plan.lanes)}
    if not released_rounds(totals, totals, 0, plan.microbatch_size, recipe.drop_last)[0]:
        with pytest.raises(SettingError, match="no full step"):
            verify.verify(recipe.pipeline(), steps=6)
        return
    report = verify.verify(recipe.pipeline(), steps=6)
    assert report.ok, str(report)
    assert [leg.groups[0] for leg in report.legs] == [dp for dp in (8, 4, 2, 1) if dp <= recipe.lanes]


def test_each_topology_is_stopped_and_resumed_on_the_next_and_impossible_ones_are_left_out():
    report = verify.verify(pipeline_with(keep, lanes=6), dp=[16, 6, 3, 4])
    assert report.ok
    assert [leg.groups for leg in report.legs] == [(6, 3), (3, 4), (4, 6)]
    assert any("dp 16 left out" in note for note in report.notes)
    assert "every global step is the same" in str(report)


@pytest.mark.parametrize(
    "fn, field", [(with_random, "r"), (with_clock, "seen"), (with_counter, "n"), (with_random_filter, "samples")]
)
def test_a_function_that_is_not_one_of_its_record_is_caught_by_step_lane_and_field(fn, field):
    report = verify.verify(pipeline_with(fn), steps=12)
    assert not report.ok
    assert report.difference is not None
    assert report.difference.step == 1
    assert report.difference.field == field
    assert f"step 1, lane {report.difference.lane}, field '{field}' differs" in str(report)


def test_a_difference_that_begins_late_is_named_where_it_begins():
    def late(row):
        return {**row, "r": random.random() if row["id"] == 150 else 0.0}

    pipeline = pipeline_with(late)
    report = verify.verify(pipeline, steps=100)
    assert report.difference is not None
    place = next(
        (batch.first_record // 2 + 1, batch.lane) for batch in pipeline_with(late) if 150 in batch["id"].tolist()
    )
    assert (report.difference.step, report.difference.lane) == place


@pytest.mark.parametrize("arguments", [{"steps": 0}, {"steps": 1.5}, {"dp": [0]}, {"dp": [2, -1]}, {"dp": [5]}])
def test_senseless_arguments_are_refused(arguments):
    with pytest.raises(SettingError, match=next(iter(arguments))):
        verify.verify(pipeline_with(keep), **arguments)


RECIPE = """
import random
from zephon import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
shard = InMemoryShard([{{"id": i}} for i in range(200)])
source = StaticMixtureWorkSource([Dataset.from_dict("web", {{"a": shard}})], None)
pipeline = Pipeline(source).map_transform(lambda row: {body}).shuffle(20).batch(2).options(canonical_replicas=4)
"""


def test_the_command_says_0_for_a_good_recipe_and_1_with_the_first_difference_for_a_bad_one(tmp_path, capsys):
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(RECIPE.format(body="row"))
    bad.write_text(RECIPE.format(body="{**row, 'r': random.random()}"))
    assert main(str(good)) == 0
    assert "every global step is the same" in capsys.readouterr().out
    assert main(str(bad), [4, 1], 8) == 1
    assert "first difference: step 1, lane 0, field 'r' differs" in capsys.readouterr().out
    with pytest.raises(RecipeError):
        main(str(tmp_path / "none.py"))
