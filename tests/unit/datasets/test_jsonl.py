"""JSON lines: rows come back as `json` would read them, in any order, and bad ones are named."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.corpora import COUNT, row_of
from zephon.columns import MISSING, Block
from zephon.datasets import Dataset, jsonl
from zephon.datasets.open_files import resources
from zephon.debug import DatasetInspector
from zephon.errors import DatasetError, RecordError
from zephon.ops.base import Faults

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
ROW = st.dictionaries(st.sampled_from(["id", "text", "a b", ""]) | st.text(max_size=3), JSON, max_size=4)


def fetch(dataset: Dataset, rows: Any, fields: frozenset[str] | None = None, faults: Faults | None = None) -> Block:
    return dataset.fetch(0, np.array(rows, np.int64), fields, faults or Faults("raise", [dataset]))


def every(dataset: Dataset, faults: Faults | None = None) -> list[dict[str, Any]]:
    faults = faults or Faults("raise", [dataset])
    blocks = [dataset.fetch(s, np.arange(n), None, faults) for s, n in enumerate(dataset.counts.tolist())]
    return [row for block in blocks for row in block.to_rows()]


@given(st.data())
def test_any_rows_in_any_order_with_blank_lines_anywhere_are_those_that_were_written(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    rows = data.draw(st.lists(ROW, min_size=1, max_size=8))
    ascii_only = data.draw(st.booleans())
    path = tmp_path_factory.getbasetemp() / f"rows-{os.getpid()}.jsonl"
    ends = st.sampled_from(["\n", "\r\n", "\n\n", "\n \t\n", "  \n"])
    starts = st.sampled_from(["", "", "", " ", "\n"])
    lines = [data.draw(starts) + json.dumps(row, ensure_ascii=ascii_only) + data.draw(ends) for row in rows]
    text = "".join(lines)
    if data.draw(st.booleans()):
        text = text.rstrip("\r\n\t ")
    path.write_bytes(text.encode())
    dataset = Dataset.from_path("d", path)
    assert dataset.total == len(rows)
    order = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=12))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(order)), max_size=3)))
    found = [fetch(dataset, order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    same([row for block in found for row in block.to_rows()], [rows[i] for i in order])
    assert [s for block in found for s in block.samples.tolist()] == [[0, 0, i] for i in order]
    fields = frozenset(data.draw(st.sets(st.sampled_from(["id", "text", "a b", "", "absent"]))))
    if order:
        some = fetch(dataset, order, fields)
        assert len(some) == len(order)
        same(some.to_rows(), [{k: v for k, v in rows[i].items() if k in fields} for i in order])


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert found == expected
    assert repr(found) == repr([{k: r[k] for k in f} for f, r in zip(found, expected, strict=True)])  # 1 is not 1.0


@pytest.mark.parametrize("line, value", [
    ('{"a": 1, "a": 2}', 2),
    ('{"a": 123456789012345678901234567890}', 123456789012345678901234567890),
    ('{"a": -9223372036854775809}', -9223372036854775809),
    ('{"a": 1e400}', float("inf")),
    ('{"a": -0.0}', -0.0),
    ('{"a": 1E5}', 1e5),
    ('{"a": "\\ud83d\\ude00"}', "😀"),
    ('{"a": "\\ud800"}', "\ud800"),
    ('{"a": {"b": [1, 2.0, null]}}', {"b": [1, 2.0, None]}),
])  # fmt: skip
def test_a_value_means_what_json_says(tmp_path: Path, line: str, value: Any) -> None:
    (tmp_path / "a.jsonl").write_text(line + "\n")
    dataset = Dataset.from_path("d", tmp_path)
    for fields in (None, frozenset({"a"})):
        row = fetch(dataset, [0], fields).to_rows()[0]
        assert repr(row["a"]) == repr(value) == repr(json.loads(line)["a"])


@pytest.mark.parametrize("line, cause", [
    (b'{"a": NaN}', "NaN is not JSON"),
    (b'{"a": -Infinity}', "-Infinity is not JSON"),
    (b'{"a": "\xff"}', "not valid UTF-8"),
    (b'{"x": "\xff"}', "not valid UTF-8"),
    (b'{"a": 1} {"a": 2}', "Extra data"),
    (b'{"a": 1}}', "Extra data"),
    (b'{"a": 1', "broken JSON"),
    (b"\x0c", "broken JSON"),
    (b"[1]", "not an object but an array"),
    (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    (b'{"a": ' + b"9" * 5000 + b"}", "4300"),
])  # fmt: skip
@pytest.mark.parametrize("fields", [None, frozenset({"a"})])
def test_a_bad_row_is_named_and_the_others_come(
    tmp_path: Path, line: bytes, cause: str, fields: frozenset[str] | None
) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 0}\n\n' + line + b'\n{"a": 2}\n')
    dataset = Dataset.from_path("d", tmp_path)
    faults = Faults("skip", [dataset])
    assert fetch(dataset, [2, 1, 0, 1], fields, faults).to_rows() == [{"a": 2}, {"a": 0}]
    assert faults.skipped == 2
    assert "a.jsonl, row 1: line 3 (byte 10)" in faults.reports[0]
    assert cause in faults.reports[0]
    with pytest.raises(RecordError, match="line 3"):
        fetch(dataset, [0, 1], fields)


def test_values_that_lie_across_lines_never_pass_for_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a":\n1} {"a": 2}\n{"a": {}\n}\n{}{}\n{"a": 3}\n')
    dataset = Dataset.from_path("d", tmp_path)
    faults = Faults("skip", [dataset])
    assert every(dataset, faults) == [{"a": 3}]
    assert faults.skipped == 5


def test_a_field_that_a_row_lacks_is_missing_not_none(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": null}\n{"b": 1}\n')
    dataset = Dataset.from_path("d", tmp_path)
    assert fetch(dataset, [0, 1], frozenset({"a"})).fields["a"].to_list() == [None, MISSING]
    assert every(dataset) == [{"a": None}, {"b": 1}]


def test_case_E1_one_bad_row_is_one_bad_row(tmp_path: Path) -> None:
    rows = [json.dumps({"id": i, "text": "é" * (i % 7)}) for i in range(1000)]
    rows[500] = '{"id": 500, "te'
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    dataset = Dataset.from_path("d", tmp_path)
    faults = Faults("skip", [dataset])
    blocks = [fetch(dataset, range(i, min(i + 64, 1000)), frozenset({"id"}), faults) for i in range(0, 1000, 64)]
    ids = [i for block in blocks for i in block.fields["id"].to_list()]
    assert ids == [i for i in range(1000) if i != 500]
    assert faults.skipped == 1
    byte = len("\n".join(rows[:500])) + 1
    facts = (str(tmp_path / "a.jsonl"), "line 501", f"byte {byte}", "row 500")
    assert all(fact in faults.reports[0] for fact in facts)
    for _ in range(2):  # asking again raises again
        with pytest.raises(RecordError) as raised:
            fetch(dataset, range(490, 510))
        assert all(fact in str(raised.value) for fact in facts)


def test_case_E3_rows_of_other_shapes_pass_untouched(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": 0, "text": "a"}, {"id": 1, "text": "b", "extra": [1, "x", None, {"y": 2.5}]}, {"text": "c"},
        {"id": "3", "text": "d"}, {"id": 4, "text": None},
    ]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    same(every(Dataset.from_path("d", tmp_path)), rows)


E4 = [
    b'\xef\xbb\xbf{"id": 1}', b"\xff\xfe", b"[]", b"42", b"null", b'"x"', b"", b"   ", b'{"id": 9}', b'{"id": 10}',
]  # fmt: skip


def test_case_E4_ten_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(E4))
    dataset = Dataset.from_path("d", tmp_path)
    assert dataset.total == 8
    for fields in (None, frozenset({"id"})):
        faults = Faults("skip", [dataset])
        assert fetch(dataset, range(8), fields, faults).to_rows() == [{"id": 1}, {"id": 9}, {"id": 10}]
        assert faults.skipped == 5
        reasons = ("not valid UTF-8", "an array", "a number", "null", "a string")
        for line, reason, report in zip(range(2, 7), reasons, faults.reports, strict=True):
            assert f"line {line} " in report
            assert reason in report
        with pytest.raises(RecordError, match=r"line 2 "):
            fetch(dataset, range(8), fields)


def test_case_E5_empty_files_change_nothing(tmp_path: Path) -> None:
    for name, text in {"0": "", "1": '{"id": 1}\n', "2": "", "3": "\n \n\n", "4": '{"id": 4}', "5": ""}.items():
        for folder, keep in (("all", True), ("solid", "id" in text)):
            (tmp_path / folder).mkdir(exist_ok=True)
            if keep:
                (tmp_path / folder / f"{name}.jsonl").write_text(text)
    whole, solid = Dataset.from_path("d", tmp_path / "all"), Dataset.from_path("d", tmp_path / "solid")
    assert every(whole) == every(solid) == [{"id": 1}, {"id": 4}]
    assert whole.counts.tolist() == solid.counts.tolist() == [1, 1]
    assert whole.digest == solid.digest
    assert whole.shard_path(1).endswith("4.jsonl")


def test_case_E7_long_lines_among_short_ones_are_whole(tmp_path: Path) -> None:
    sizes = [1000, 2_000_000, 9_000_000, 1000]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"t": "x" * n}) + "\n" for n in sizes))
    dataset = Dataset.from_path("d", tmp_path)
    assert [len(r["t"]) for r in every(dataset)] == sizes
    assert [len(v) for v in fetch(dataset, [3, 2, 0]).fields["t"].to_list()] == [1000, 9_000_000, 1000]


def test_case_E10_no_row_at_all_is_an_error_that_names_the_path(tmp_path: Path) -> None:
    dataset = Dataset.from_path("d", COUNT(0, 1, tmp_path / "none"))
    with pytest.raises(DatasetError, match="none holds no row"):
        dataset.total


def test_case_B11_the_digest_sees_content_and_nothing_else(tmp_path: Path) -> None:
    base = COUNT(20, 2, tmp_path / "data")
    before = Dataset.from_path("d", base).digest
    moved = shutil.move(base, tmp_path / "elsewhere")
    assert Dataset.from_path("other", moved).digest == before
    for name in sorted(os.listdir(moved)):
        os.rename(moved / name, moved / f"x-{name}")
    assert Dataset.from_path("d", moved).digest == before
    (moved / "x-part-00002.jsonl").write_text(json.dumps(row_of(20)) + "\n")
    assert Dataset.from_path("d", moved).digest != before
    os.unlink(moved / "x-part-00002.jsonl")
    first = moved / "x-part-00000.jsonl"
    first.write_text(first.read_text().replace("row 3", "row 4"))
    assert Dataset.from_path("d", moved).digest != before


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst"])
def test_a_compressed_shard_is_the_same_dataset(tmp_path: Path, suffix: str) -> None:
    plain = Dataset.from_path("d", COUNT(50, 3, tmp_path / "plain"))
    packed = Dataset.from_path("d", COUNT(50, 3, tmp_path / "packed", suffix=suffix))
    assert every(packed) == every(plain) == [dict(row_of(i)) for i in range(50)]
    assert packed.digest == plain.digest
    assert packed.raw_bytes != plain.raw_bytes


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("kept", [-1, -9, 40, 3])
def test_a_compressed_shard_that_is_cut_short_is_refused_by_name(tmp_path: Path, suffix: str, kept: int) -> None:
    data = b"".join(json.dumps(row_of(i)).encode() + b"\n" for i in range(500))
    packed = gzip.compress(data) if suffix == ".gz" else zstandard.ZstdCompressor().compress(data)
    (tmp_path / f"a.jsonl{suffix}").write_bytes(packed[:kept])
    with pytest.raises(DatasetError, match=rf"a\.jsonl{suffix} is damaged or cut short"):
        Dataset.from_path("d", tmp_path).total


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_damaged_archive_is_refused_by_name(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"a.jsonl{suffix}").write_bytes(b'{"not": "compressed"}\n')
    with pytest.raises(DatasetError, match=rf"a\.jsonl{suffix} is damaged"):
        Dataset.from_path("d", tmp_path).total


def test_archives_of_several_members_and_of_none_are_read_whole(tmp_path: Path) -> None:
    lines = [json.dumps(row_of(i)).encode() + b"\n" for i in range(4)]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines[0]) + gzip.compress(lines[1]))
    (tmp_path / "b.jsonl.zst").write_bytes(b"".join(zstandard.ZstdCompressor().compress(x) for x in lines[2:]))
    (tmp_path / "c.jsonl.gz").write_bytes(b"")
    (tmp_path / "d.jsonl.zst").write_bytes(b"")
    assert [row["id"] for row in every(Dataset.from_path("d", tmp_path))] == [0, 1, 2, 3]


def test_an_expanded_copy_that_has_gone_is_made_again(tmp_path: Path, runtime_folder: Path) -> None:
    dataset = Dataset.from_path("d", COUNT(10, 1, tmp_path / "c", suffix=".jsonl.gz"))
    assert len(every(dataset)) == 10
    shutil.rmtree(runtime_folder / "cache")
    resources().tables.drop(dataset.source.survey.tables[0])  # type: ignore[attr-defined]
    assert len(every(dataset)) == 10
    assert len(every(Dataset.from_path("d", tmp_path / "c"))) == 10


@pytest.mark.parametrize("change", ["append", "shorten", "touch", "remove"])
def test_a_file_that_changes_while_in_use_is_refused_by_name(tmp_path: Path, change: str) -> None:
    path = COUNT(10, 1, tmp_path / "c") / "part-00000.jsonl"
    dataset = Dataset.from_path("d", path)
    assert len(every(dataset)) == 10
    if change == "append":
        path.write_bytes(path.read_bytes() + b'{"id": 10}\n')
    elif change == "shorten":
        path.write_bytes(path.read_bytes()[:-20])
    elif change == "touch":
        os.utime(path, ns=(1, 1))
    else:
        path.unlink()
    with pytest.raises(DatasetError, match=r"part-00000\.jsonl"):
        fetch(dataset, [0])


def test_a_file_put_in_the_place_of_another_is_read_as_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 1}\n')
    assert every(Dataset.from_path("d", path)) == [{"id": 1}]
    (tmp_path / "b").write_text('{"id": 2}\n')
    os.replace(tmp_path / "b", path)
    assert every(Dataset.from_path("d", path)) == [{"id": 2}]


def test_rows_far_apart_and_close_together_are_read_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Dataset.from_path("d", COUNT(300, 1, tmp_path / "c"))
    order = np.random.default_rng(0).integers(0, 300, 200)
    for gap, together in ((0, 0), (100, 1000), (1 << 20, 1 << 20)):
        monkeypatch.setattr(jsonl, "_GAP", gap)
        monkeypatch.setattr(jsonl, "_TOGETHER", together)
        assert fetch(dataset, order).fields["id"].to_list() == order.tolist()


def test_a_row_read_twice_shares_nothing_with_itself(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": [1]}')
    first, second = fetch(Dataset.from_path("d", tmp_path), [0, 0]).fields["a"].to_list()
    first.append(2)
    assert second == [1]


def test_a_pickled_dataset_reads_the_same_and_carries_no_offsets(tmp_path: Path) -> None:
    dataset = Dataset.from_path("d", COUNT(5000, 2, tmp_path / "c"))
    rows = every(dataset)
    data = pickle.dumps(dataset)
    assert len(data) < 4096
    assert every(pickle.loads(data)) == rows
    assert pickle.loads(pickle.dumps(Dataset.from_path("d", tmp_path / "c"))).total == 5000


def test_a_forked_child_reads_on_its_own(tmp_path: Path) -> None:
    dataset = Dataset.from_path("d", COUNT(100, 1, tmp_path / "c"))
    every(dataset)
    parents = resources()
    pid = os.fork()
    if pid == 0:
        good = resources() is not parents and len(every(dataset)) == 100
        os._exit(0 if good else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert resources() is parents


def test_the_inspector_shows_one_row(tmp_path: Path) -> None:
    dataset = Dataset.from_path("d", COUNT(10, 2, tmp_path / "c"))
    inspector = DatasetInspector(dataset)
    assert inspector.read() == row_of(0)
    assert inspector.read(shard_id=1, sample_index=2) == row_of(7)
    assert inspector.read(dataset.shard_path(1), 4) == row_of(9)
    for shard, row in ((2, 0), (0, 5), (-1, 0), ("nowhere", 0)):
        with pytest.raises(ValueError, match="0 to|no such shard"):
            inspector.read(shard, row)
        with pytest.raises(ValueError, match="0 to|no such shard"):
            inspector.raw(shard, row)


@pytest.mark.parametrize("compression", ["", ".gz"])
def test_the_hint_of_a_broken_line_shows_the_line_as_it_stands(tmp_path: Path, compression: str) -> None:
    lines = [b'{"id": 0}', b'', b'{"id": 1, "text": "half', b'\xff\xfe', b'{"id": 3}']
    path = tmp_path / f"part.jsonl{compression}"
    path.write_bytes(gzip.compress(b"\r\n".join(lines)) if compression else b"\r\n".join(lines))
    dataset = Dataset.from_path("d", path)
    for row, line in ((1, lines[2]), (2, lines[3])):
        with pytest.raises(RecordError) as caught:
            DatasetInspector(dataset).read(0, row)
        assert f".raw(0, {row})" in caught.value.look
        assert "To see the record: " + caught.value.look in str(caught.value)
        code = shlex.split(caught.value.look)[-1]
        shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert shown.stdout == f"{line!r}\n"
    assert DatasetInspector(dataset).raw(0, 3) == lines[4]
