"""E12: an epoch of which nothing comes through is an error within its first pass, whether it ends or not."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest

from tests.corpora import COUNT
from zephon import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
from zephon.barren import Barren
from zephon.errors import RunFailed

ENDS = [{}, {"exhausted_policy": "repeat"}, {"exhausted_policy": "stop"}, {"max_repeats": 0}]


def nothing(row):
    return None


def counted(folder, **ends):
    return Pipeline(StaticMixtureWorkSource([Dataset.from_path("count", COUNT(100, 1, folder))], None, **ends))


@pytest.mark.parametrize("lanes", [1, 8])
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("steps", ["filter", "filter, shuffle", "shuffle, filter"])
def test_case_E12_a_filter_that_rejects_all_is_named_within_one_pass(tmp_path, ends, lanes, steps):
    pipeline, seen = counted(tmp_path / "rows", **ends), []

    def rejects(row):
        seen.append(row["id"])

    for step in steps.split(", "):
        pipeline = pipeline.shuffle(4) if step == "shuffle" else pipeline.map_transform(rejects)
    pipeline.batch(4).options(canonical_replicas=lanes, flush_every_k_chunks=2 if "shuffle" in steps else None)
    with pytest.raises(RunFailed, match=r"0 of 100 records passed map_transform, so epoch 0 has no record"):
        next(iter(pipeline))
    assert len(seen) <= 3 * 100 + 512  # a pass, what was looked ahead, and those that tell which operator it was


@pytest.mark.parametrize("ends", ENDS)
def test_case_E12_max_length_1_with_a_dropping_packer_is_named_within_one_pass(ends):
    rows = [{"input_ids": np.arange(2 + i % 5)} for i in range(100)]
    source = StaticMixtureWorkSource([Dataset.from_dict("docs", {"a": InMemoryShard(rows)})], None, **ends)
    pipeline = Pipeline(source).pack_flat(1, drop_oversized=True).batch(2).options(canonical_replicas=4)
    with pytest.raises(RunFailed, match="0 of 100 records passed pack_flat"):
        next(iter(pipeline))


def test_case_E12_bad_records_alone_are_told_with_their_number(tmp_path):
    def fails(row):
        raise ValueError("no")

    pipeline = counted(tmp_path / "rows", exhausted_policy="repeat").map_transform(fails)
    pipeline.batch(4).options(canonical_replicas=1, on_error="skip")
    with pytest.raises(RunFailed, match=r"0 of 100 records passed map_transform.*\d+ bad records? w(as|ere) skipped"):
        next(iter(pipeline))


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("kept", [0, 50, 99])
def test_one_record_of_all_that_passes_is_enough(tmp_path, ends, kept):
    pipeline = counted(tmp_path / "rows", **ends).map_transform(lambda row: row if row["id"] == kept else None)
    pipeline.batch(1, drop_last=False).options(canonical_replicas=8)
    batches = [batch for batch in islice(iter(pipeline), 8) if len(batch)]
    assert {i for batch in batches for i in batch["id"].tolist()} == {kept}


def test_a_run_that_begins_after_barren_windows_still_notices(tmp_path):
    """A frontier that names a later window of an epoch without a record says that nothing came before it."""
    pipeline = counted(tmp_path / "rows").map_transform(nothing).batch(4).options(canonical_replicas=2)
    state = json.loads(json.dumps(pipeline.checkpoint()))
    for lane in state["lanes"].values():
        lane["chunk"] = 30
    with pytest.raises(RunFailed, match="0 of 100 records passed map_transform"):
        next(iter(pipeline.restore(state)))


def test_one_group_of_several_cannot_know_and_ends_with_its_lanes(tmp_path):
    pipeline = counted(tmp_path / "rows").map_transform(nothing)
    pipeline.batch(4).options(canonical_replicas=4, dp_degree=2, dp_group_id=0)
    with pytest.warns(UserWarning, match="this group sees lanes") as caught:
        assert [list(pipeline) for _ in range(3)] == [[], [], []]
    assert len([each for each in caught if "this group sees lanes" in str(each.message)]) == 1


def test_a_users_operator_that_holds_records_may_make_something_of_them_later(tmp_path):
    plan = counted(tmp_path / "rows", exhausted_policy="repeat").batch(4).options(canonical_replicas=1).plan()
    assert Barren(plan, 0)._enough == 100
    later = counted(tmp_path / "other", exhausted_policy="repeat").stateful_transform(
        "rare", init_state=list, push=lambda state, records: (state, [])
    )
    assert Barren(later.batch(4).options(canonical_replicas=1).plan(), 0)._enough is None
