"""Whatever lies in a shard or in the index cache, it is read, or refused with an error that names it."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.corpora import COUNT, row_of, write
from zephon import Dataset
from zephon.datasets import parquet
from zephon.datasets.fetch import read
from zephon.errors import DatasetError, RecordError, ZephonError
from zephon.ops.base import Faults

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
ENDED = 1282
"""The damage to a Parquet file over which pyarrow ended the process."""


def outcome(path: Path) -> tuple[int, int] | ZephonError:
    """Rows read and skipped of everything in a file, or why it cannot be."""
    try:
        dataset = Dataset.from_path("hostile", path)
        places = [(0, shard, row) for shard, rows in enumerate(dataset.counts) for row in range(rows)]
        pointers = np.array(places, np.int64).reshape(-1, 3)
        faults = Faults("skip", (dataset,))
        return len(read([dataset], pointers, None, faults)), faults.skipped
    except ZephonError as error:
        return error


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_random_bytes_as_a_shard_are_bad_rows_or_a_damaged_file(
    folder: Path, suffix: str, amount: Callable[[int, int], int]
) -> None:
    chance = random.Random(3)
    for number in range(amount(20, 2000)):
        path = folder / f"random-{number}{suffix}"
        path.write_bytes(chance.randbytes(chance.choice([1, 5, 12, 300, 9000])))
        found = outcome(path)
        assert isinstance(found, DatasetError) or found[0] == 0, found  # type: ignore[index]
        path.unlink()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_shard_with_damaged_bytes_is_read_as_it_is_or_refused(
    folder: Path, suffix: str, amount: Callable[[int, int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(4)
    rows = [row_of(i) for i in range(60)]
    whole = write(folder / f"whole{suffix}", rows).read_bytes()
    for number in range(max(ENDED, amount(30, 3000)) + 1):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if chance.random() < 0.3:
            del data[chance.randrange(len(data)) :]
        if number >= amount(30, 3000) and number != ENDED:
            continue
        monkeypatch.setattr(parquet, "_WHOLE", number % 2 * (4 << 20))  # half of the row groups are large ones
        path = folder / f"damaged-{number}{suffix}"
        path.write_bytes(data)
        found = outcome(path)
        if not isinstance(found, ZephonError) and suffix == ".jsonl":
            assert sum(found) <= len(rows) + 6  # a changed byte may be a new line
        elif not isinstance(found, ZephonError) and suffix == ".jsonl.gz":
            assert found == (len(rows), 0)  # gzip has checksums: only its header's spare fields may differ
        path.unlink()


@pytest.mark.parametrize(("suffix", "pack"), [(".jsonl.gz", gzip.compress), (".jsonl.zst", zstandard.compress)])
def test_archives_of_anything_are_judged_line_by_line(
    folder: Path, suffix: str, pack: Callable[[bytes], bytes], amount: Callable[[int, int], int]
) -> None:
    chance = random.Random(5)
    for number in range(amount(20, 2000)):
        inside = b"\n".join(chance.choice([b'{"id": 1}', b"[]", b"", b"\xff\xfe", b"{"]) for _ in range(9))
        path = folder / f"archive-{number}{suffix}"
        path.write_bytes(pack(inside))
        found = outcome(path)
        lines = [line for line in inside.split(b"\n") if line]
        assert found == (lines.count(b'{"id": 1}'), len(lines) - lines.count(b'{"id": 1}')) or not lines
        path.unlink()


def test_an_index_that_was_damaged_in_any_place_is_made_again_or_refused_never_believed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, amount: Callable[[int, int], int]
) -> None:
    cache = folder / "cache"
    monkeypatch.setenv("ZEPHON_CACHE", str(cache))
    data = COUNT(40, 2, folder / "count")
    expected = outcome(data / "part-00000.jsonl"), Dataset.from_path("a", data).digest
    chance = random.Random(6)
    for _ in range(amount(40, 4000)):
        tables = [path for path in cache.rglob("*") if path.is_file()]
        assert tables
        for table in tables:
            raw = bytearray(table.read_bytes())
            for _ in range(chance.randrange(1, 5)):
                raw[chance.randrange(len(raw))] = chance.randrange(256)
            if chance.random() < 0.3:
                del raw[chance.randrange(len(raw)) :]
            table.unlink()  # who has the old one mapped keeps it
            table.write_bytes(raw)
        assert (outcome(data / "part-00000.jsonl"), Dataset.from_path("a", data).digest) == expected


lines = st.lists(
    st.one_of(
        st.binary(max_size=30).map(lambda raw: raw.replace(b"\n", b"")),
        st.sampled_from([b'{"a": 1}', b'{"a": NaN}', b'{"a": 1e999}', b'{"a": "\\ud800"}', b"[" * 3000]),
        st.just(b'{"a":' * 3000),
    ),
    max_size=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines)
def test_any_lines_are_rows_or_bad_rows_each_with_its_number(folder: Path, content: list[bytes]) -> None:
    path = folder / "drawn.jsonl"
    path.unlink(missing_ok=True)
    path.write_bytes(b"\n".join(content))
    solid = [line for line in content if line.strip(b" \t\r\n")]
    found = outcome(path)
    if not isinstance(found, ZephonError):
        assert sum(found) == len(solid) or content[0].startswith(b"\xef\xbb\xbf")
    else:
        assert not solid or content[0].startswith(b"\xef\xbb\xbf")


def test_a_bad_row_that_stops_the_run_is_named(folder: Path) -> None:
    path = folder / "named.jsonl"
    path.write_bytes(b'{"a": 1}\n\x00\x01\n')
    with pytest.raises(RecordError, match=r"named\.jsonl, row 1: line 2"):
        read([dataset := Dataset.from_path("x", path)], np.array([[0, 0, 1]]), None, Faults("raise", (dataset,)))
