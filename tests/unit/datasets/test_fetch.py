"""Pointers of several datasets are read in their own order, whatever lies where."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.corpora import COUNT, row_of
from zephon.columns import Block, IntArray, canonical
from zephon.datasets import Dataset, InMemoryShard
from zephon.datasets.fetch import read
from zephon.errors import RecordError
from zephon.ops.base import Faults


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> list[Dataset]:
    folder = tmp_path_factory.mktemp("data")
    return [
        Dataset.from_path("lines", COUNT(30, 2, folder / "lines")),
        Dataset.from_path("parquet", COUNT(30, 3, folder / "parquet", suffix=".parquet")),
        Dataset.from_dict("memory", {"a": InMemoryShard([dict(row_of(i)) for i in range(30)])}),
        Dataset.from_path("packed", COUNT(30, 2, folder / "packed", suffix=".jsonl.zst")),
    ]


POINTERS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 29)), max_size=40)


def pointers(datasets: list[Dataset], samples: list[tuple[int, int]]) -> IntArray:
    found = []
    for dataset, row in samples:
        ends = np.cumsum(datasets[dataset].counts)
        shard = int(np.searchsorted(ends, row, side="right"))
        found.append((dataset, shard, row - int(ends[shard] - datasets[dataset].counts[shard])))
    return np.array(found, np.int64).reshape(-1, 3)


@given(POINTERS, st.sampled_from([None, frozenset({"id"}), frozenset({"id", "text", "absent"})]), st.data())
def test_records_come_in_pointer_order_however_they_are_cut(
    datasets: list[Dataset], samples: list[tuple[int, int]], fields: frozenset[str] | None, data: st.DataObject
) -> None:
    asked = pointers(datasets, samples)
    cut = data.draw(st.integers(0, len(samples)))
    blocks = [read(datasets, part, fields, Faults("raise", datasets)) for part in (asked[:cut], asked[cut:])]
    rows = [row for block in blocks for row in block.to_rows()]
    assert rows == [{k: v for k, v in row_of(row).items() if fields is None or k in fields} for _, row in samples]
    assert np.concatenate([block.samples for block in blocks]).tolist() == asked.tolist()
    whole = canonical(read(datasets, asked, fields, Faults("raise", datasets)))
    parts = canonical(Block.concat(blocks))
    assert {n: type(c) for n, c in whole.fields.items()} == {n: type(c) for n, c in parts.fields.items()}


@given(POINTERS, st.sets(st.integers(0, 29)))
def test_bad_rows_are_left_out_and_reported_in_pointer_order(
    tmp_path_factory: pytest.TempPathFactory, samples: list[tuple[int, int]], bad: set[int]
) -> None:
    folder = tmp_path_factory.mktemp("bad")
    sources = []
    for d in range(4):
        (folder / f"{d}.jsonl").write_text("".join("broken\n" if i in bad else f'{{"id": {i}}}\n' for i in range(30)))
        sources.append(Dataset.from_path(str(d), folder / f"{d}.jsonl"))
    asked = pointers(sources, samples)
    faults = Faults("skip", sources)
    block = read(sources, asked, None, faults)
    good = [(d, 0, i) for d, i in samples if i not in bad]
    assert [tuple(s) for s in block.samples.tolist()] == good
    if good:
        assert block.fields["id"].to_list() == [i for _, _, i in good]
    lost = [(d, i) for d, i in samples if i in bad]
    assert faults.skipped == len(lost)
    assert all(f"{d}.jsonl, row {i}:" in report for (d, i), report in zip(lost, faults.reports, strict=True))
    if lost:
        with pytest.raises(RecordError) as raised:
            read(sources, asked, None, Faults("raise", sources))
        assert (raised.value.dataset, raised.value.row) == (str(lost[0][0]), lost[0][1])


def test_no_pointer_is_no_record(datasets: list[Dataset]) -> None:
    assert len(read(datasets, np.empty((0, 3), np.int64), None, Faults())) == 0


@pytest.mark.parametrize("pointer", [(0, 2, 0), (0, 0, 15), (0, 0, -1), (1, -1, 0)])
def test_a_pointer_to_nothing_is_refused(datasets: list[Dataset], pointer: tuple[int, int, int]) -> None:
    with pytest.raises(IndexError, match="no such sample"):
        read(datasets, np.array([pointer]), None, Faults())


def test_fetch_names_the_dataset_as_its_caller_does(datasets: list[Dataset]) -> None:
    block = datasets[0].fetch(1, np.array([2, 0]), None, Faults(), dataset_index=7)
    assert block.samples.tolist() == [[7, 1, 2], [7, 1, 0]]
    assert block.fields["id"].to_list() == [17, 15]
    assert Path(datasets[0].shard_path(1)).name == "part-00001.jsonl"
