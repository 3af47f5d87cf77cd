"""Which files a dataset takes, and what it says where there is nothing to take."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.datasets.shards import find_shards, format_of, natural
from zephon.errors import DatasetError, SettingError


def tree(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"id": 0}\n')
    return folder


def found(path: Path | str, base: Path, fmt: str | None = None) -> list[str]:
    return [os.path.relpath(file, base) for file in find_shards("d", path, fmt).files]


def test_shards_come_in_natural_order_folder_by_folder(tmp_path: Path) -> None:
    tree(tmp_path, "b/part-10.jsonl", "b/part-2.jsonl", "a10/x.jsonl", "a2/x.jsonl", "b-0/x.jsonl", "part-1.jsonl")
    assert found(tmp_path, tmp_path) == [
        "a2/x.jsonl", "a10/x.jsonl", "b/part-2.jsonl", "b/part-10.jsonl", "b-0/x.jsonl", "part-1.jsonl",
    ]  # fmt: skip


@given(st.lists(st.text("ab019/-", min_size=1), unique=True))
def test_natural_order_is_total_whatever_the_names(names: list[str]) -> None:
    keys = [natural(name) for name in names]
    keys.sort()
    assert all(a < b for a, b in pairwise(keys))


def test_hidden_temporary_and_side_files_are_left_out(tmp_path: Path) -> None:
    tree(
        tmp_path, "a.jsonl", "b/c.jsonl", ".hidden.jsonl", ".git/x.jsonl", "_temporary/0/x.jsonl", "_SUCCESS",
        ".a.jsonl.crc", "a.jsonl.tmp", "d.tmp.jsonl", "e.jsonl~", "f.jsonl.partial", "dataset_info.json", "index.json",
        "README.md", "a.jsonl.idx", "empty/notes.txt",
    )  # fmt: skip
    assert found(tmp_path, tmp_path) == ["a.jsonl", "b/c.jsonl"]


def test_every_known_suffix_in_any_case_names_its_format() -> None:
    for suffix in (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".ndjson.zst", ".JSONL", ".Json.GZ"):
        assert format_of("x" + suffix) == "jsonl"
    assert format_of("x.parquet") == "parquet"
    assert format_of("x.csv") is format_of("x.gz") is format_of("x.parquet.gz") is None


def test_a_glob_takes_its_matches_and_folders_among_them(tmp_path: Path) -> None:
    tree(tmp_path, "x1/a.jsonl", "x2/a.jsonl", "y/a.jsonl", "x.jsonl")
    assert found(f"{tmp_path}/x*", tmp_path) == ["x1/a.jsonl", "x2/a.jsonl", "x.jsonl"]
    assert found(f"{tmp_path}/**/a.jsonl", tmp_path) == ["x1/a.jsonl", "x2/a.jsonl", "y/a.jsonl"]


def test_a_folder_whose_name_looks_like_a_glob_is_a_folder(tmp_path: Path) -> None:
    tree(tmp_path, "run[1]/a.jsonl", "run1/b.jsonl")
    assert found(tmp_path / "run[1]", tmp_path) == ["run[1]/a.jsonl"]


def test_links_are_followed_and_a_circle_of_them_ends(tmp_path: Path) -> None:
    tree(tmp_path, "real/a.jsonl", "data/b.jsonl")
    (tmp_path / "data/link").symlink_to(tmp_path / "real")
    (tmp_path / "data/up").symlink_to(tmp_path / "data")
    assert found(tmp_path / "data", tmp_path / "data") == ["b.jsonl", "link/a.jsonl"]


def test_a_file_uri_is_a_local_path(tmp_path: Path) -> None:
    tree(tmp_path, "with space.jsonl")
    assert found(f"file://{tmp_path}/with%20space.jsonl", tmp_path) == ["with space.jsonl"]


@pytest.mark.parametrize(
    "uri", ["s3://bucket/code", "gs://b/x.jsonl", "https://example.com/a.jsonl", "hf://datasets/x"]
)
def test_another_uri_is_refused_by_its_scheme(uri: str) -> None:
    with pytest.raises(DatasetError, match=r"only local files are supported so far"):
        find_shards("d", uri)


@pytest.mark.parametrize("names, path, words", [
    ([], "absent", "absent does not exist"),
    ([], "", "holds no shard"),
    (["a.csv", ".x.jsonl"], "", "only files with .csv"),
    ([], "*.jsonl", "holds no shard"),
    (["a.jsonl", "b.parquet"], "", "two formats, jsonl .*a.jsonl.*, parquet .*b.parquet"),
    (["a.jsonl.bz2", "b.jsonl"], "", "jsonl compressed as .bz2 cannot be read"),
    (["a.parquet.gz"], "a.parquet.gz", "Parquet compresses its own pages"),
    (["a.txt"], "a.txt", "names no known format"),
])  # fmt: skip
def test_what_cannot_be_a_dataset_is_refused_with_its_path(
    tmp_path: Path, names: list[str], path: str, words: str
) -> None:
    tree(tmp_path, *names)
    with pytest.raises(DatasetError, match=words) as raised:
        find_shards("d", f"{tmp_path}/{path}" if path else tmp_path)
    assert str(tmp_path) in str(raised.value)
    assert "'d'" in str(raised.value)


def test_fmt_names_the_format_where_suffixes_do_not(tmp_path: Path) -> None:
    tree(tmp_path, "mixed/a.jsonl", "mixed/b.parquet", "odd/a.txt", "odd/b.txt")
    assert found(tmp_path / "mixed", tmp_path, "parquet") == ["mixed/b.parquet"]
    assert found(tmp_path / "odd", tmp_path, "jsonl") == ["odd/a.txt", "odd/b.txt"]
    assert find_shards("d", tmp_path / "odd/a.txt", "jsonl").format == "jsonl"
    with pytest.raises(SettingError, match="csv"):
        find_shards("d", tmp_path, "csv")


def test_one_named_file_is_taken_whatever_it_is_called(tmp_path: Path) -> None:
    tree(tmp_path, "_tmp.jsonl")
    assert found(tmp_path / "_tmp.jsonl", tmp_path) == ["_tmp.jsonl"]
