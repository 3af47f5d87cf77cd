"""Parquet: rows in any order, columns without objects, large row groups step by step, damage named."""

from __future__ import annotations

import datetime
import decimal
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.corpora import COUNT, row_of
from zephon.columns import Block, Bytes, Fixed, Objects, Ragged, Text
from zephon.datasets import Dataset, parquet
from zephon.datasets.arrow_columns import column_from_arrow
from zephon.datasets.open_files import resources
from zephon.debug import DatasetInspector
from zephon.errors import DatasetError, RecordError
from zephon.ops.base import Faults


def fetch(dataset: Dataset, rows: Any, fields: frozenset[str] | None = None, faults: Faults | None = None) -> Block:
    return dataset.fetch(0, np.array(rows, np.int64), fields, faults or Faults("raise", [dataset]))


def written(path: Path, columns: dict[str, Any], **options: Any) -> Dataset:
    pq.write_table(pa.table(columns), path, **options)
    return Dataset.from_path("d", path)


VALUES = st.one_of(
    st.lists(st.none() | st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=30).map(
        lambda v: pa.array(v, pa.int64())
    ),
    st.lists(st.integers(0, 65535), min_size=1, max_size=30).map(lambda v: pa.array(v, pa.uint16())),
    st.lists(st.none() | st.text(max_size=4), min_size=1, max_size=30).map(lambda v: pa.array(v, pa.string())),
    st.lists(st.text(max_size=4), min_size=1, max_size=30).map(lambda v: pa.array(v).dictionary_encode()),
    st.lists(st.none() | st.binary(max_size=4), min_size=1, max_size=30).map(lambda v: pa.array(v, pa.binary())),
    st.lists(st.none() | st.booleans(), min_size=1, max_size=30).map(lambda v: pa.array(v, pa.bool_())),
    st.lists(st.none() | st.lists(st.none() | st.integers(0, 9), max_size=4), min_size=1, max_size=30).map(
        lambda v: pa.array(v, pa.list_(pa.uint16()))
    ),
    st.lists(st.lists(st.text(max_size=2), max_size=3), min_size=1, max_size=30).map(
        lambda v: pa.array(v, pa.list_(pa.string()))
    ),
    st.lists(st.fixed_dictionaries({"a": st.none() | st.integers(0, 5)}), min_size=1, max_size=30).map(
        lambda v: pa.array(v, pa.struct({"a": pa.int32()}))
    ),
)  # fmt: skip


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


@given(st.data(), VALUES)
def test_any_column_in_any_order_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, values: pa.Array
) -> None:
    path = tmp_path_factory.getbasetemp() / f"rows-{os.getpid()}.parquet"
    dataset = written(path, {"v": values, "n": np.arange(len(values))}, row_group_size=data.draw(st.integers(1, 30)))
    order = data.draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=20))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "_WHOLE", data.draw(st.sampled_from([0, 1 << 20])))
        patch.setattr(parquet, "_SEGMENT", data.draw(st.integers(1, 300)))
        block = fetch(dataset, order)
        cut = data.draw(st.integers(0, len(order)))
        halves = [fetch(dataset, part, frozenset({"v", "absent"})) for part in (order[:cut], order[cut:])]
    assert block.fields["n"].to_list() == order
    expected = [values[i].as_py() for i in order]
    assert [plain(v) for v in block.fields["v"].to_list()] == expected
    again = [v for half in halves if len(half) for v in half.fields["v"].to_list()]
    assert [plain(v) for v in again] == expected
    assert [type(v) for v in again] == [type(v) for v in block.fields["v"].to_list()]


@given(VALUES)
def test_a_value_has_the_same_type_whatever_lies_beside_it(values: pa.Array) -> None:
    alone = [column_from_arrow(values.slice(i, 1))[0].to_list()[0] for i in range(len(values))]
    together = column_from_arrow(values)[0].to_list()
    assert [type(v) for v in alone] == [type(v) for v in together]


@pytest.mark.parametrize("array, kind, dtype", [
    (pa.array([1, 2], pa.int32()), Fixed, np.int32),
    (pa.array([1.0, 2.0], pa.float16()), Fixed, np.float16),
    (pa.array([True, False]), Fixed, np.bool_),
    (pa.array(["a", "bc"]), Text, np.uint8),
    (pa.array(["a", "bc"], pa.large_string()), Text, np.uint8),
    (pa.array(["a", "a"]).dictionary_encode(), Text, np.uint8),
    (pa.array([b"a", b""]), Bytes, np.uint8),
    (pa.array([b"ab"], pa.binary(2)), Bytes, np.uint8),
    (pa.array([[1], [2, 3], []], pa.list_(pa.uint16())), Ragged, np.uint16),
    (pa.array([[1.5], []], pa.large_list(pa.float32())), Ragged, np.float32),
    (pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2)), Fixed, np.int64),
])  # fmt: skip
def test_flat_types_become_arrays(array: pa.Array, kind: type, dtype: type) -> None:
    for part in (array, array.slice(1), array.slice(0, 1)):
        column = column_from_arrow(part)[0]
        assert type(column) is kind or not len(part)
        assert len(column) == len(part)
        if len(part):
            assert column.values.dtype == dtype  # type: ignore[attr-defined]
            assert [plain(v) for v in column.to_list()] == part.to_pylist()


@pytest.mark.parametrize("array", [
    pa.array([1, None]), pa.array([{"a": 1}]), pa.array([[[1]]]), pa.array([datetime.date(2020, 1, 1)]),
    pa.array([decimal.Decimal("1.5")]), pa.array([["x"]]), pa.array([None]), pa.array([[True]]),
    pa.array([[1, None], [2]]), pa.array([[1, None], [2, 3]], pa.list_(pa.int8(), 2)),
])  # fmt: skip
def test_all_else_becomes_python_objects(array: pa.Array) -> None:
    column = column_from_arrow(array)[0]
    assert type(column) is Objects
    assert [plain(v) for v in column.to_list()] == array.to_pylist()


def test_nanoseconds_become_microseconds_with_or_without_pandas() -> None:
    column = column_from_arrow(pa.array([1_001], pa.timestamp("ns")))[0]
    assert column.to_list() == [datetime.datetime(1970, 1, 1, 0, 0, 0, 1)]
    assert type(column.to_list()[0]) is datetime.datetime


def test_consecutive_rows_are_views_of_one_decoded_segment(tmp_path: Path) -> None:
    tokens = pa.array([np.arange(i % 9, dtype=np.uint16) for i in range(1000)])
    dataset = written(tmp_path / "a.parquet", {"t": tokens, "s": [f"row {i}" for i in range(1000)]})
    first, second = fetch(dataset, range(500)), fetch(dataset, range(400, 900))
    for name in ("t", "s"):
        a, b = first.fields[name], second.fields[name]
        assert isinstance(a, (Ragged, Text))
        assert np.shares_memory(a.values, b.values)  # type: ignore[attr-defined]
    assert second.fields["s"].to_list() == [f"row {i}" for i in range(400, 900)]


def test_a_segment_is_kept_until_all_its_rows_were_read_and_decoded_again_where_one_is_wanted_once_more(
    tmp_path: Path,
) -> None:
    dataset = written(tmp_path / "a.parquet", {"n": list(range(1000))})
    kept = []
    for rows in (range(900, 1000), range(400), range(400, 900), range(400, 900)):
        assert fetch(dataset, rows).fields["n"].to_list() == list(rows)
        kept.append(resources().row_groups.weight)
    assert kept[0] == kept[1] > kept[2] < kept[3]


def test_only_needed_columns_are_read_and_absent_ones_are_absent(tmp_path: Path) -> None:
    dataset = written(tmp_path / "a.parquet", {"a.b": [1, 2], "a": [{"b": 3}, {"b": 4}], "c": ["x", "y"]})
    assert fetch(dataset, [1, 0], frozenset({"a.b", "nothing"})).to_rows() == [{"a.b": 2}, {"a.b": 1}]
    assert fetch(dataset, [1], frozenset({"a"})).to_rows() == [{"a": {"b": 4}}]
    assert set(fetch(dataset, [0]).fields) == {"a.b", "a", "c"}
    none = fetch(dataset, [0, 1], frozenset())
    assert len(none) == 2
    assert none.to_rows() == [{}, {}]


def test_a_large_row_group_is_decoded_step_by_step_within_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_WHOLE", 1 << 10)
    monkeypatch.setattr(parquet, "_SEGMENT", 4 << 10)
    dataset = written(tmp_path / "a.parquet", {"t": [f"{i:0100d}" for i in range(2000)]}, use_dictionary=False)
    advanced = []
    inner = parquet._Cursor.advance
    monkeypatch.setattr(parquet._Cursor, "advance", lambda self: (advanced.append(self.next), inner(self))[1])
    for low in range(0, 2000, 100):  # two lanes side by side
        for offset in (0, 50):
            rows = range(low + offset, low + offset + 50)
            assert [int(v) for v in fetch(dataset, rows).fields["t"].to_list()] == list(rows)
    assert len(advanced) > 20
    assert advanced == sorted(set(advanced))
    assert [int(v) for v in fetch(dataset, [3, 1999, 0]).fields["t"].to_list()] == [3, 1999, 0]


def test_large_row_groups_of_different_widths_are_read_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_WHOLE", 1 << 10)
    monkeypatch.setattr(parquet, "_SEGMENT", 4 << 10)
    rows = [f"{i:0100d}" for i in range(300)] + [f"{i:0170d}" for i in range(300, 600)]
    pq.write_table(pa.table({"t": rows}), tmp_path / "a.parquet", row_group_size=300, use_dictionary=False)
    dataset = Dataset.from_path("d", tmp_path / "a.parquet")
    for low in range(0, 300, 25):
        for first in (low, 300 + low):
            block = fetch(dataset, range(first, first + 25))
            assert [int(text) for text in block.fields["t"].to_list()] == list(range(first, first + 25))


def test_decoded_segments_and_open_files_are_bounded(tmp_path: Path) -> None:
    for i in range(40):
        pq.write_table(pa.table({"a": [i]}), tmp_path / f"{i}.parquet")
    dataset = Dataset.from_path("d", tmp_path)
    for i in range(40):
        block = dataset.fetch(i, np.array([0]), None, Faults())
        assert block.fields["a"].to_list() == [i]
    assert len(resources().parquet) <= 32


def test_objects_are_new_each_time_so_nobody_changes_anothers(tmp_path: Path) -> None:
    dataset = written(tmp_path / "a.parquet", {"m": [[{"role": "user"}]]})
    fetch(dataset, [0]).fields["m"].to_list()[0].append("changed")
    assert fetch(dataset, [0]).fields["m"].to_list() == [[{"role": "user"}]]


def test_text_that_is_not_utf8_is_a_bad_row(tmp_path: Path) -> None:
    raw = pa.array([b"good", b"\xff\xfe", None, b"fine"])
    text = pa.Array.from_buffers(pa.string(), 4, raw.buffers(), raw.null_count)
    dataset = written(tmp_path / "a.parquet", {"t": text, "n": [0, 1, 2, 3]})
    faults = Faults("skip", [dataset])
    block = fetch(dataset, [3, 1, 2, 0], None, faults)
    assert block.to_rows() == [{"t": "fine", "n": 3}, {"t": None, "n": 2}, {"t": "good", "n": 0}]
    assert block.samples[:, 2].tolist() == [3, 2, 0]
    assert "row 1" in faults.reports[0]
    assert "field 't'" in faults.reports[0]
    with pytest.raises(RecordError, match=r"not valid UTF-8.*To see the record: .*\.raw\(0, 1\)"):
        fetch(dataset, [0, 1])
    assert DatasetInspector(dataset).raw(0, 1) == {"t": b"\xff\xfe", "n": 1}
    assert len(fetch(dataset, [0, 1], frozenset({"n"}))) == 2


def test_case_E5_a_parquet_file_without_rows_changes_nothing(tmp_path: Path) -> None:
    for i, rows in enumerate([[], [1, 2], [], [3]]):
        pq.write_table(pa.table({"id": pa.array(rows, pa.int64())}), tmp_path / f"{i}.parquet")
    (tmp_path / "9.parquet").write_bytes(b"")
    dataset = Dataset.from_path("d", tmp_path)
    assert dataset.counts.tolist() == [2, 1]
    assert dataset.fetch(1, np.array([0]), None, Faults()).to_rows() == [{"id": 3}]


def test_case_B11_a_rewritten_shard_with_as_many_rows_is_another_digest(tmp_path: Path) -> None:
    path = COUNT(50, 1, tmp_path / "c", suffix=".parquet") / "part-00000.parquet"
    before = Dataset.from_path("d", path).digest
    assert Dataset.from_path("x", path).digest == before
    pq.write_table(pa.Table.from_pylist([dict(row_of(49 - i)) for i in range(50)]), path, row_group_size=100)
    assert Dataset.from_path("d", path).digest != before


@pytest.mark.parametrize("damage", ["garbage", "no magic at the end", "cut", "footer length", "tiny"])
def test_a_file_that_is_not_whole_is_refused_by_name_when_counted(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": list(range(100))}), path)
    data = path.read_bytes()
    path.write_bytes({
        "garbage": os.urandom(500), "no magic at the end": data[:-4] + b"XXXX", "cut": data[: len(data) // 2],
        "footer length": data[:-8] + b"\xff\xff\xff\x7f" + b"PAR1", "tiny": b"PAR1",
    }[damage])  # fmt: skip
    with pytest.raises(DatasetError, match=r"a\.parquet is not a whole Parquet file"):
        Dataset.from_path("d", path).total


@pytest.mark.parametrize("compression", ["snappy", "zstd", "none"])
def test_a_broken_page_is_refused_by_name_when_read(tmp_path: Path, compression: str) -> None:
    path = tmp_path / "a.parquet"
    text = [f"row {i} " + "x" * (i % 50) for i in range(3000)]
    pq.write_table(pa.table({"a": text}), path, compression=compression, write_page_checksum=True, use_dictionary=False)
    data = bytearray(path.read_bytes())
    for i in range(2000, len(data) - 2000, 7):
        data[i] ^= 0x5A
    path.write_bytes(bytes(data))
    dataset = Dataset.from_path("d", path)
    for _ in range(2):
        with pytest.raises(DatasetError, match=r"a\.parquet is not a whole Parquet file"):
            fetch(dataset, range(3000))


def test_a_file_that_changed_after_it_was_counted_is_refused_by_name(tmp_path: Path) -> None:
    dataset = written(tmp_path / "a.parquet", {"a": [1, 2, 3]})
    assert dataset.total == 3
    pq.write_table(pa.table({"a": [1, 2, 4]}), tmp_path / "a.parquet")
    with pytest.raises(DatasetError, match=r"a\.parquet changed while in use"):
        fetch(dataset, [0])


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"]), tmp_path / "a.parquet")
    with pytest.raises(DatasetError, match="two columns named 'a'"):
        fetch(Dataset.from_path("d", tmp_path), [0])


def test_a_pickled_dataset_reads_the_same(tmp_path: Path) -> None:
    dataset = Dataset.from_path("d", COUNT(500, 2, tmp_path / "c", suffix=".parquet"))
    assert fetch(dataset, [249, 3]).to_rows() == [row_of(249), row_of(3)]
    assert fetch(pickle.loads(pickle.dumps(dataset)), [249, 3]).to_rows() == [row_of(249), row_of(3)]
    assert len(pickle.dumps(dataset)) < 4096


NO_COMPUTE = """
import sys
import pyarrow as pa
from zephon.datasets.arrow_columns import column_from_arrow
columns = [(["a", "bc", ""], pa.string()), ([b"a", b"", b"bc"], pa.binary()), ([[1], [], [2, 3]], pa.list_(pa.int32()))]
for values, kind in columns:
    array = pa.array(values, kind)
    whole, part = (column_from_arrow(each)[0] for each in (array, array.slice(1, 2)))
    assert [list(value) for value in whole.to_list()] == [list(value) for value in values]
    assert [list(value) for value in part.to_list()] == [list(value) for value in values[1:]]
    assert whole.values.ctypes.data == array.buffers()[-1].address
assert "pyarrow.compute" not in sys.modules
"""


def test_text_and_lists_with_offsets_of_32_bits_are_views_and_load_no_compute_functions() -> None:
    """In a process of its own, as a worker is: `pyarrow.compute` would take 4 MiB and 50 ms of each."""
    subprocess.run([sys.executable, "-c", NO_COMPUTE], check=True)
