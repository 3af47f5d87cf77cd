"""F3: the same data under two names is noticed, and each name has an order of its own."""

from __future__ import annotations

import json
import os
import warnings

import pytest

from tests.corpora import COUNT
from zephon import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource


def both(one, other):
    datasets = [Dataset.from_path(name, path) for name, path in (("one", one), ("other", other))]
    source = StaticMixtureWorkSource(datasets, {"one": 0.5, "other": 0.5}, shuffle_block_size="global")
    return Pipeline(source).batch(10).options(canonical_replicas=1)


@pytest.mark.parametrize("way", ["same", "slash", "link", "glob", "copy", "link to a file"])
def test_case_F3_the_same_data_twice_warns_with_both_names_and_comes_in_two_orders(tmp_path, way):
    folder = COUNT(100, 4, tmp_path / "rows")
    other = {"same": folder, "slash": f"{folder}/", "glob": f"{folder}/*.jsonl"}.get(way, tmp_path / "again")
    if way == "link":
        os.symlink(folder, other)
    elif way == "copy":
        COUNT(100, 4, other)
    elif way == "link to a file":
        other.mkdir()
        os.symlink(sorted(folder.iterdir())[1], other / "linked.jsonl")
    pipeline = both(folder, other)
    with pytest.warns(UserWarning, match=r"datasets 'one' and 'other' .* under both names"):
        batches = list(pipeline)
    first = [(name, i) for batch in batches[:4] for (name, _, _), i in zip(batch.samples, batch["id"].tolist())]
    orders = [[i for name, i in first if name == which] for which in ("one", "other")]
    assert orders[0][:20] != orders[1][:20]


def test_data_that_differ_are_not_warned_of(tmp_path):
    one = COUNT(100, 4, tmp_path / "one")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "part.jsonl").write_text("".join(json.dumps({"id": i}) + "\n" for i in range(100)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both(one, tmp_path / "other").plan()


def test_rows_in_memory_are_compared_by_what_they_hold():
    shards = [{"s": InMemoryShard([{"id": i} for i in range(rows)])} for rows in (5, 5, 6)]
    datasets = [Dataset.from_dict(f"d{number}", shard) for number, shard in enumerate(shards)]
    pipeline = Pipeline(StaticMixtureWorkSource(datasets, None)).batch(1).options(canonical_replicas=1)
    with pytest.warns(UserWarning, match="datasets 'd0' and 'd1' hold the same data") as caught:
        pipeline.plan()
    assert len(caught) == 1
