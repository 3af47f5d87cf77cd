"""How a worker ended is said as it was: by signal, by exit code, or with the exception's own traceback."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import pytest

from tests.running import Daemon, counting, until, write_recipe
from zephon.errors import RecordError, RunFailed, ZephonError
from zephon_client import connect

ENDS = """
import os
source = StaticMixtureWorkSource([Dataset.from_path("count", HERE / "count")], mixture=None, seed=5, chunk_size=64)
def ends(how):
    def at_333(row):
        if row["id"] == 333:
            how()
        return row
    return at_333
def of(how):
    return Pipeline(source).map_transform(ends(how)).batch(4).options(canonical_replicas=2)
pipeline = killed = of(lambda: os.kill(os.getpid(), 9))
segfault = of(lambda: os.kill(os.getpid(), 11))
bus = of(lambda: os.kill(os.getpid(), 7))
exits = of(lambda: os._exit(3))
raises = of(lambda: {}["such"])
"""


def refused(socket: str, pipeline: str) -> ZephonError:
    with connect(socket, output="numpy", timeout=30.0, pipeline=pipeline) as loader:
        try:
            for _ in loader:
                pass
        except ZephonError as error:
            return error.with_traceback(None)
    raise AssertionError("it came to the end")


def test_case_J3_five_ways_to_end_are_five_messages_with_cause_and_hint(runtime_folder: Path) -> None:
    counting(runtime_folder, 1000, 2, lanes=2, batch=4)
    expected = {
        "killed": ["killed by signal 9 (SIGKILL)", "maybe out of memory"],
        "segfault": ["killed by signal 11 (SIGSEGV)"],
        "bus": ["killed by signal 7 (SIGBUS)", "shared memory"],
        "exits": ["exit code 3"],
        "raises": ["KeyError", "such"],
    }
    said: dict[str, str] = {}
    with Daemon(write_recipe(runtime_folder, ENDS), workers=1) as daemon:
        for name, facts in expected.items():
            error = refused(daemon.socket, name)
            said[name] = "".join(traceback.format_exception(error))
            assert isinstance(error, RecordError if name == "raises" else RunFailed)
            for fact in [*facts, "map_transform", "'count'", "part-00000.jsonl", "row 333", "lane "]:
                assert fact in str(error), error
            if name != "raises":
                assert "3 workers died on the same record" in str(error)
                assert f"{facts[0]}" in daemon.errors
    assert len({text.splitlines()[-1] for text in said.values()}) == 5
    where = said["raises"].index("in at_333"), said["raises"].index("zephon.errors.RecordError")
    assert where[0] < where[1], "the exception's own traceback comes first"


HUNGRY = """
import resource

source = StaticMixtureWorkSource([Dataset.from_path("count", HERE / "count")], mixture=None, seed=5)
def hungry(row):
    if row["id"] == 333:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))  # what a memory limit of the system does
        bytearray(2 << 30)
    return row
pipeline = Pipeline(source).map_transform(hungry).batch(4).options(canonical_replicas=2)
"""


@pytest.mark.soak
def test_case_D4_a_record_that_needs_more_memory_than_there_is_is_named(runtime_folder: Path) -> None:
    """Where a limit refuses memory, the operator raises; `test_case_J3…` has the case of a killer."""
    counting(runtime_folder, 1000, 2, lanes=2, batch=4)
    with Daemon(write_recipe(runtime_folder, HUNGRY), workers=1) as daemon:
        error = refused(daemon.socket, "pipeline")
    for fact in ("MemoryError", "map_transform", "'count'", "row 333"):
        assert fact in str(error)


def memory_group(name: str, limit: int) -> Path | None:
    """A memory cgroup with this limit, of version 1 or 2; None where none can be made."""
    for root, file in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root) / name
        try:
            group.mkdir()
            (group / file).write_text(str(limit))
        except OSError:
            if group.is_dir():
                group.rmdir()
            continue
        return group
    return None


LARGE = """
source = StaticMixtureWorkSource([Dataset.from_path("count", HERE / "count")], mixture=None, seed=5)
def large(row):
    if row["id"] == 333:
        (HERE / "cgroup.procs").write_text(str(__import__("os").getpid()))
        held = bytearray(400 << 20)
        held[::4096] = bytes(len(held[::4096])).replace(b"\\0", b"x")
    return row
pipeline = Pipeline(source).map_transform(large).batch(4).options(canonical_replicas=2)
"""


@pytest.mark.soak
def test_case_D4_the_out_of_memory_killer_is_guessed_and_the_record_named(runtime_folder: Path) -> None:
    group = memory_group(f"zephon-test-{os.getpid()}", 300 << 20)
    if group is None:
        pytest.skip("no memory cgroup can be made here")
    counting(runtime_folder, 1000, 2, lanes=2, batch=4)
    (runtime_folder / "cgroup.procs").symlink_to(group / "cgroup.procs")
    try:
        with Daemon(write_recipe(runtime_folder, LARGE), workers=1) as daemon:
            error = refused(daemon.socket, "pipeline")
        for fact in ("3 workers died on the same record", "maybe out of memory", "map_transform", "row 333"):
            assert fact in str(error)
    finally:
        until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()
