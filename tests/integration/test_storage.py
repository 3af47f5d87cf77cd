"""Storage that stumbles is read again; storage that fails, or data that change, end the run. Nothing is skipped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.corpora import COUNT
from tests.running import SOURCES, Daemon, Ledger, Ranks, counting, plan_of, write_recipe
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


CHANGES: dict[str, Callable[[bytes], bytes | None]] = {
    "appended": lambda data: data + b"{}\n",
    "cut": lambda data: data[:-500],
    "rewritten": lambda data: data,
    "gone": lambda data: None,
}
CHANGING = """
def reading(name):
    source = StaticMixtureWorkSource([Dataset.from_path(name, HERE / name)], mixture=None, seed=5)
    return Pipeline(source).batch(8).options(canonical_replicas=1, on_error="skip", prefetch_batches=4)
"""


def test_a_shard_that_changes_while_the_run_reads_it_stops_the_run_by_name(runtime_folder: Path) -> None:
    names = [f"{change}_{suffix}" for change in CHANGES for suffix in ("jsonl", "parquet")]
    for name in names:
        change, _, suffix = name.partition("_")
        if change == "appended":
            COUNT(40_000, 2, runtime_folder / name, suffix=f".{suffix}")
        else:
            shutil.copytree(runtime_folder / f"appended_{suffix}", runtime_folder / name)
    made = [f"{name} = reading({name!r})\n" for name in names]
    recipe = write_recipe(runtime_folder, CHANGING + "".join(made) + f"pipeline = {names[0]}\n")
    with Daemon(recipe, workers=1) as daemon:
        for name in names:
            change, _, suffix = name.partition("_")
            with connect(daemon.socket, pipeline=name, output="numpy") as loader:
                next(loader)
                for shard in sorted((runtime_folder / name).iterdir()):
                    changed = CHANGES[change](shard.read_bytes())
                    if changed is None:
                        shard.unlink()
                    else:
                        shard.write_bytes(changed)
                said = "No such file" if change == "gone" else "(changed|was cut short) while in use"  # as it is met
                with pytest.raises(DatasetError, match=rf"{name}/part-0000\d\.{suffix}.*{said}"):
                    for _ in loader:
                        pass
