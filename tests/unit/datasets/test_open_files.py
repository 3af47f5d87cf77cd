"""Storage that stumbles is tried again; what a process keeps is bounded."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from zephon.datasets.open_files import OpenFile, Recent, patiently
from zephon.errors import DatasetError


def test_a_passing_failure_is_tried_again_with_growing_waits() -> None:
    failures = [errno.EIO, errno.ESTALE]
    waits: list[float] = []
    retries: list[int] = []

    def action() -> str:
        if failures:
            raise OSError(failures.pop(0), "stumbled")
        return "read"

    assert patiently(action, "f", lambda: retries.append(1), waits.append) == "read"
    assert waits == sorted(waits)
    assert len(waits) == len(retries) == 2


def test_a_failure_that_stays_is_an_error_that_names_the_file() -> None:
    waits: list[float] = []

    def action() -> None:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(DatasetError, match=r"some/file cannot be read after 4 tries: Input/output error"):
        patiently(action, "some/file", wait=waits.append)
    assert len(waits) == 3


def test_a_file_that_is_not_there_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="absent cannot be read: No such file"):
        patiently(lambda: OpenFile(str(tmp_path / "absent")), str(tmp_path / "absent"), wait=pytest.fail)


def test_recent_keeps_the_newest_within_its_limit_and_always_one() -> None:
    recent = Recent(10)
    for key in range(5):
        recent.put(key, f"value {key}", 4)
    assert [recent.find(key) for key in range(5)] == [None, None, None, "value 3", "value 4"]
    assert recent.weight == 8
    assert recent.put("large", "x", 100) == "x"
    assert len(recent) == 1
    recent.put("large", "y", 1)
    assert recent.weight == 1
    recent.drop("large")
    recent.drop("large")
    assert recent.weight == len(recent) == 0


def test_a_file_in_use_stays_open_when_it_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abcdef")
    file = OpenFile(str(tmp_path / "f"))
    descriptor = file._fd
    recent = Recent(1)
    recent.put("f", file)
    recent.put("g", None)
    assert file.read(2, 4) == b"cd"
    del file
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


def test_a_file_shorter_than_expected_is_named(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    with pytest.raises(DatasetError, match="f ends at byte 3, not 9"):
        OpenFile(str(tmp_path / "f")).read(0, 9)


def test_recent_keeps_what_is_in_use_beyond_its_limit_and_never_more_than_the_most() -> None:
    """Lanes side by side, each of which comes back to its value after all the others have had a turn."""

    def decoded(lanes: int, most: int) -> int:
        recent = Recent(4)
        recent.limit_to(4, most)
        recent.in_use(2 * lanes)
        made = 0
        for turn in range(40 * lanes):
            key = turn % lanes, turn // lanes // 4  # four turns with each value
            if recent.find(key) is None:
                recent.put(key, "value")
                made += 1
            assert recent.weight <= most
        assert recent.weight <= max(4, 2 * lanes)  # what is not looked for any more goes
        return made

    assert decoded(lanes=16, most=100) == 160
    assert decoded(lanes=3, most=4) == 30
    assert decoded(lanes=16, most=8) == 640
