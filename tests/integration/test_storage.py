"""Storage that stumbles is read again; storage that fails, or data that change, end the run. Nothing is skipped."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.running import SOURCES, Daemon, Ledger, Ranks, counting, plan_of
from zephon.errors import DatasetError
from zephon_client import connect

STUMBLES = """
import errno, os, threading
real, due, failures = os.pread, {every}, iter(range({most}))
seen = {{}}
def pread(fd, size, offset):
    path = os.readlink(f"/proc/self/fd/{{fd}}")
    if path.endswith(".jsonl") and "count" in path:
        seen[fd] = seen.get(fd, 0) + 1
        if seen[fd] % due == 0 and next(failures, None) is not None:
            raise OSError(errno.{code}, os.strerror(errno.{code}))
    return real(fd, size, offset)
os.pread = pread
"""


def stumbling(folder: Path, code: str, every: int, most: int) -> dict[str, str | None]:
    """An environment whose Python processes fail to read shards: every so many times, so often at most."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(STUMBLES.format(code=code, every=every, most=most))
    return {"PYTHONPATH": os.pathsep.join([str(folder / "site"), *SOURCES])}


@pytest.mark.parametrize("code", ["EIO", "ESTALE", "ETIMEDOUT"])
def test_reads_that_fail_for_the_moment_change_nothing_and_are_counted_and_logged(
    runtime_folder: Path, code: str, amount: Callable[[int, int], int]
) -> None:
    recipe = counting(runtime_folder, 2000, 4, lanes=2, batch=8, options='on_error="skip"')
    ledger = Ledger(plan_of(recipe))
    environment = stumbling(runtime_folder, code, 3, amount(6, 60))
    with Daemon(recipe, workers=1, environment=environment) as daemon, Ranks(daemon.socket, 1, ledger=ledger) as ranks:
        ranks.rounds(40)
        lanes = daemon.lanes()
        assert sum(lane["counters"].get("storage retries", 0) for lane in lanes) > 0
        assert sum(lane["skipped"] for lane in lanes) == 0
        ranks.rounds()
        ledger.check()
        assert "it is read again in" in daemon.errors


def test_reads_that_go_on_failing_are_an_error_also_where_bad_records_are_skipped(runtime_folder: Path) -> None:
    recipe = counting(runtime_folder, 2000, 4, lanes=2, batch=8, options='on_error="skip"')
    plan_of(recipe)  # the files are indexed while they can be read
    environment = stumbling(runtime_folder, "EIO", 1, 10**9)
    with Daemon(recipe, workers=1, environment=environment) as daemon, connect(daemon.socket, output="numpy") as loader:
        for _ in range(2):
            with pytest.raises(DatasetError, match=r"part-0000\d\.jsonl cannot be read after 4 tries: Input/output"):
                next(loader)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("change", ["appended", "cut", "rewritten", "gone"])
def test_a_shard_that_changes_while_the_run_reads_it_stops_the_run_by_name(
    runtime_folder: Path, suffix: str, change: str
) -> None:
    recipe = counting(runtime_folder, 40_000, 2, lanes=1, batch=8, options='on_error="skip", prefetch_batches=4')
    if suffix == ".parquet":
        from tests.corpora import COUNT

        for old in (runtime_folder / "count").iterdir():
            old.unlink()
        COUNT(40_000, 2, runtime_folder / "count", suffix=suffix)
    with Daemon(recipe, workers=1) as daemon, connect(daemon.socket, output="numpy") as loader:
        next(loader)
        for shard in sorted((runtime_folder / "count").iterdir()):
            data = shard.read_bytes()
            if change == "gone":
                shard.unlink()
            else:
                shard.write_bytes({"appended": data + b"{}\n", "cut": data[:-500], "rewritten": data}[change])
        said = "No such file" if change == "gone" else "changed while in use"
        with pytest.raises(DatasetError, match=rf"part-0000\d{suffix}.*{said}"):
            for _ in loader:
                pass
