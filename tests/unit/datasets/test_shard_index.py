"""The cache of what is known of shards: used again, made again where it must be, and shown while it is made."""

from __future__ import annotations

import io
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.corpora import COUNT
from zephon.datasets import Dataset, jsonl, line_index, progress, shard_index
from zephon.datasets.cache_folder import cache_folder
from zephon.datasets.progress import Progress, Tally
from zephon.errors import DatasetError
from zephon.ops.base import Faults
from zephon_daemon import cli


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch, runtime_folder: Path) -> list[str]:
    """The files that were scanned, in a cache of this test alone."""
    seen: list[str] = []
    inner = jsonl.scan_stretch

    def noted(path: str, low: int, high: int, tally: Tally) -> object:
        seen.append(os.path.basename(path))
        return inner(path, low, high, tally)

    monkeypatch.setattr(jsonl, "scan_stretch", noted)
    return seen


def tables(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "index").rglob("*.lines"))


def test_a_second_start_scans_nothing(tmp_path: Path, scans: list[str]) -> None:
    path = COUNT(100, 5, tmp_path / "c")
    first = Dataset.from_path("d", path)
    assert first.total == 100
    assert len(scans) == 5
    again = Dataset.from_path("again", f"{tmp_path}/c/*.jsonl")
    assert again.digest == first.digest
    assert len(scans) == 5


def test_a_link_to_the_same_files_uses_the_same_index(tmp_path: Path, scans: list[str]) -> None:
    path = COUNT(100, 5, tmp_path / "c")
    (tmp_path / "link").symlink_to(path)
    assert Dataset.from_path("d", path).digest == Dataset.from_path("d", tmp_path / "link").digest
    assert len(scans) == 5


def test_a_changed_file_is_scanned_again_and_its_old_table_goes(
    tmp_path: Path, scans: list[str], runtime_folder: Path
) -> None:
    path = COUNT(10, 1, tmp_path / "c") / "part-00000.jsonl"
    before = Dataset.from_path("d", path).digest
    old = tables(runtime_folder)
    path.write_text(path.read_text() + '{"id": 10}\n')
    dataset = Dataset.from_path("d", path)
    assert dataset.total == 11
    assert dataset.digest != before
    assert len(scans) == 2
    assert len(tables(runtime_folder)) == 1
    assert tables(runtime_folder) != old


@pytest.mark.parametrize("damage", ["empty", "cut", "garbage", "one bit", "foreign", "other type", "folder"])
def test_a_damaged_or_foreign_table_is_made_again(
    tmp_path: Path, scans: list[str], runtime_folder: Path, damage: str
) -> None:
    path = COUNT(100, 1, tmp_path / "c")
    before = Dataset.from_path("d", path).digest
    (table,) = tables(runtime_folder)
    data = table.read_bytes()
    if damage == "folder":
        table.unlink()
    elif damage in ("foreign", "other type"):
        values = np.arange(50) if damage == "foreign" else np.arange(50.0)
        with open(table, "wb") as file:
            np.save(file, values)
    else:
        flipped = bytearray(data)
        flipped[-17] ^= 4
        table.write_bytes({
            "empty": b"", "cut": data[:-8], "garbage": os.urandom(len(data)), "one bit": bytes(flipped),
        }[damage])  # fmt: skip
    dataset = Dataset.from_path("d", path)
    assert dataset.digest == before
    assert dataset.fetch(0, np.arange(100), None, Faults()).fields["id"].to_list() == list(range(100))
    assert len(scans) == 2
    assert Dataset.from_path("d", path).total == 100
    assert len(scans) == 2


def test_large_files_are_cut_among_threads_and_small_ones_share_tables(
    tmp_path: Path, scans: list[str], runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_index, "CHUNK", 512)
    monkeypatch.setattr(jsonl, "STRETCH", 1024)
    path = COUNT(200, 4, tmp_path / "c")
    expected = Dataset.from_path("d", path).digest
    assert len(tables(runtime_folder)) == 1
    rows = [
        row for i in range(4) for row in Dataset.from_path("d", path).fetch(i, np.arange(50), None, Faults()).to_rows()
    ]
    monkeypatch.setattr(shard_index, "_SMALL", 0)
    scans.clear()
    large = Dataset.from_path("d", path)
    assert large.digest == expected
    assert len(tables(runtime_folder)) == 5
    assert len(scans) > 8
    assert [row for i in range(4) for row in large.fetch(i, np.arange(50), None, Faults()).to_rows()] == rows
    monkeypatch.setattr(shard_index, "_SMALL", 1 << 20)
    monkeypatch.setattr(shard_index, "_GROUP_FILES", 3)
    assert Dataset.from_path("d", path).digest == expected
    assert len(tables(runtime_folder)) == 6  # three files together; the fourth has its own already


def test_a_table_lost_while_in_use_is_made_again(tmp_path: Path, scans: list[str], runtime_folder: Path) -> None:
    dataset = Dataset.from_path("d", COUNT(10, 2, tmp_path / "c"))
    assert dataset.total == 10
    for table in tables(runtime_folder):
        table.unlink()
    assert dataset.fetch(1, np.array([4]), None, Faults()).fields["id"].to_list() == [9]
    assert len(tables(runtime_folder)) == 1


def test_a_file_that_changes_while_it_is_indexed_is_refused(
    tmp_path: Path, runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = COUNT(10, 1, tmp_path / "c") / "part-00000.jsonl"
    inner = jsonl.scan_stretch

    def meddled(name: str, low: int, high: int, tally: Tally) -> object:
        found = inner(name, low, high, tally)
        os.utime(path, ns=(5, 5))
        return found

    monkeypatch.setattr(jsonl, "scan_stretch", meddled)
    with pytest.raises(DatasetError, match=r"part-00000\.jsonl changed"):
        Dataset.from_path("d", path).total
    assert not tables(runtime_folder)


def test_an_error_in_one_file_of_many_ends_the_indexing_and_names_it(tmp_path: Path, runtime_folder: Path) -> None:
    path = COUNT(100, 10, tmp_path / "c", suffix=".jsonl.gz")
    (path / "part-00007.jsonl.gz").write_bytes(b"nothing")
    with pytest.raises(DatasetError, match=r"part-00007\.jsonl\.gz is damaged"):
        Dataset.from_path("d", path).total
    assert not list((runtime_folder / "cache").rglob(".making-*"))


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEPHON_CACHE", str(tmp_path / "asked"))
    assert cache_folder() == str(tmp_path / "asked")
    monkeypatch.setenv("ZEPHON_CACHE", "/proc/nowhere")
    with pytest.raises(DatasetError, match="ZEPHON_CACHE=/proc/nowhere"):
        cache_folder()
    monkeypatch.delenv("ZEPHON_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == str(tmp_path / "xdg" / "zephon")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == str(tmp_path / "home" / ".cache" / "zephon")


def test_without_a_home_that_can_be_written_a_private_temporary_folder_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ZEPHON_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = cache_folder()
    assert os.path.dirname(folder) == str(tmp_path)
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert cache_folder() == folder


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_silent_at_first_then_a_line_at_least_every_five_seconds() -> None:
    clock, tally, out = Clock(), Tally(), io.StringIO()
    progress = Progress("indexing 'd'", 1000, 4_000_000_000, tally, out, clock)
    for tenth in range(9):
        clock.now = 100 + tenth / 10
        progress.show()
    assert out.getvalue() == ""
    written = []
    for _ in range(199):
        clock.now += 0.2
        tally.add(1, 10_000_000)
        before = len(out.getvalue())
        progress.show()
        if len(out.getvalue()) > before:
            written.append(clock.now)
    assert max(b - a for a, b in zip([100, *written], [*written, clock.now], strict=True)) <= 5
    last = out.getvalue().splitlines()[-1]
    assert "/1,000 files" in last
    assert "of 4.0 GB" in last
    assert "left" in last
    progress.finish()
    assert "done in" in out.getvalue()


def test_progress_that_never_spoke_has_no_last_word() -> None:
    out = io.StringIO()
    Progress("x", 1, 1, Tally(), out, Clock()).finish()
    assert out.getvalue() == ""


def test_a_terminal_gets_a_bar_in_place() -> None:
    clock, tally, out = Clock(), Tally(), Terminal()
    progress = Progress("x", 2, 100, tally, out, clock)
    for _ in range(10):
        clock.now += 1
        tally.add(size=10)
        progress.show()
    progress.finish()
    assert out.getvalue().count("\r") == 11
    assert out.getvalue().count("\n") == 1
    assert "[########################]" in out.getvalue()


def test_the_scan_has_a_chunk_that_divides_its_stretch() -> None:
    assert line_index.STRETCH % line_index.CHUNK == 0


def test_case_I3_many_files_are_counted_with_a_word_on_the_way_and_only_once(
    tmp_path: Path,
    runtime_folder: Path,
    scans: list[str],
    amount: Callable[[int, int], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Here a line is due at once and each time that one may be."""
    monkeypatch.setattr(progress, "_SILENT_S", 0.0)
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.0)
    files = amount(500, 100_000)
    COUNT(10 * files, files, tmp_path / "c")
    first = Dataset.from_path("d", tmp_path / "c")
    assert (first.total, len(scans)) == (10 * files, files)
    lines = capsys.readouterr().err.splitlines()
    assert all(re.search(rf"[\d,]+/{files:,} files, .* (left|time left|done in \d+ s)$", line) for line in lines), lines
    assert f"{files:,}/{files:,} files" in lines[-1]
    assert Dataset.from_path("again", tmp_path / "c").digest == first.digest
    assert len(scans) == files, "from the index"
    monkeypatch.setenv("ZEPHON_CACHE", str(runtime_folder / "offline"))
    assert cli.main(["index", str(tmp_path / "c")]) == 0
    assert len(scans) == 2 * files
    assert Dataset.from_path("d", tmp_path / "c").digest == first.digest
    assert len(scans) == 2 * files, "from the index of the command"


@pytest.mark.soak
def test_case_I3_a_sparse_file_of_20_gb_is_counted(tmp_path: Path, runtime_folder: Path) -> None:
    (tmp_path / "c.jsonl").write_bytes(b'{"id": 0}\n')
    with open(tmp_path / "c.jsonl", "r+b") as file:
        for number in range(1, 21):
            file.seek(number * 10**9)
            file.write(b'\n{"id": %d}\n' % number)
    found = Dataset.from_path("d", tmp_path / "c.jsonl")
    assert found.total == 21 + 20, "a line of each, and those of the holes"
    assert Dataset.from_path("d", tmp_path / "c.jsonl").digest == found.digest
