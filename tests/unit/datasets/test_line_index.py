"""Lines are found wherever files are cut, and rows keep their physical line numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.datasets import line_index
from zephon.datasets.line_index import join_chunks, line_number, scan_stretch
from zephon.datasets.progress import Tally

LINES = st.lists(st.sampled_from([b"", b" ", b"\t \r", b"\r", b"x", b"  x", b"{}\r", b"\x00", b"\x0b", b"longer line"]))


@given(LINES, st.booleans(), st.booleans(), st.integers(1, 9))
def test_every_line_that_is_not_blank_is_a_row_however_the_file_is_cut(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], mark: bool, ends: bool, chunk: int
) -> None:
    data = b"\n".join(lines) + (b"\n" if ends else b"")
    begin = 3 if mark else 0
    path = tmp_path_factory.getbasetemp() / "lines"
    path.write_bytes(b"\xef\xbb\xbf" * mark + data)
    expected, at = [], begin
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip(b" \t\r"):
            expected.append((at, number))
        at += len(line) + 1
    found = scanned(path, max(chunk, 3))
    assert list(zip(found.offsets.tolist(), numbers(found), strict=True)) == expected
    assert found.size == path.stat().st_size


def numbers(found: line_index.Lines) -> list[int]:
    return [line_number(row, found.blanks) for row in range(len(found.offsets))]


def scanned(path: Path, chunk: int) -> line_index.Lines:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_index, "CHUNK", chunk)
        size = path.stat().st_size
        parts: list[Any] = []
        for low in range(0, size, 2 * chunk):
            parts += scan_stretch(str(path), low, min(low + 2 * chunk, size), Tally())
    return join_chunks(parts)


def test_the_content_hash_sees_every_byte_and_no_path(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b'{"a": 1}\n' * 1000)
    (tmp_path / "b").write_bytes(b'{"a": 1}\n' * 1000)
    (tmp_path / "c").write_bytes(b'{"a": 1}\n' * 999 + b'{"a": 2}\n')
    a, b, c = (scanned(tmp_path / name, 64).digest for name in "abc")
    assert a == b != c


def test_the_scan_counts_its_bytes_and_leaves_when_told(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x\n" * 50)
    tally = Tally()
    scan_stretch(str(tmp_path / "a"), 0, 100, tally)
    assert tally.bytes == 100
    tally.stopped = True
    assert scan_stretch(str(tmp_path / "a"), 0, 100, tally) == []


def test_a_file_without_a_byte_has_no_line() -> None:
    empty = join_chunks([])
    assert empty.size == len(empty.offsets) == len(empty.blanks) == 0
    assert empty.offsets.dtype == np.int64
