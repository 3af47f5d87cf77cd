"""The cores that a process may keep busy are the least of its affinity and of every CPU quota above it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zephon.cores import allowed_cores


class Machine:
    """A made-up /proc and /sys/fs/cgroup, and a process with an affinity of 8 cores."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroups.mkdir()

    def member(self, lines: str) -> None:
        (self.proc / "self" / "cgroup").write_text(lines)

    def level(self, path: str, **files: str) -> None:
        folder = self.cgroups / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (folder / name.replace("__", ".")).write_text(f"{value}\n")

    @property
    def cores(self) -> int:
        return allowed_cores(self.proc, self.cgroups, affinity=8).count


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_a_quota_it_is_the_affinity(machine: Machine) -> None:
    assert machine.cores == 8
    machine.member("0::/job\n")
    machine.level("job", cpu__max="max 100000")
    assert machine.cores == 8
    assert allowed_cores(machine.proc, machine.cgroups).count == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("quota", "cores"), [("400000 100000", 4), ("150000 100000", 2), ("1000 100000", 1), ("6400000 100000", 8)]
)
def test_a_quota_of_version_2_counts_and_a_part_of_a_core_is_one(machine: Machine, quota: str, cores: int) -> None:
    machine.member("0::/job\n")
    machine.level("job", cpu__max=quota)
    assert machine.cores == cores


def test_the_tightest_level_counts_and_is_named(machine: Machine) -> None:
    machine.member("0::/slice/job/step\n")
    machine.level("slice", cpu__max="600000 100000")
    machine.level("slice/job", cpu__max="60000 20000")
    machine.level("slice/job/step", cpu__max="500000 100000")
    found = allowed_cores(machine.proc, machine.cgroups, affinity=8)
    assert found.count == 3
    assert found.limited_by.endswith("cgroup/slice/job")


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("250000", 3)])
def test_a_quota_of_version_1_counts(machine: Machine, quota: str, cores: int) -> None:
    machine.member("4:cpu,cpuacct:/docker/abc\n3:memory:/\n0::/\n")
    machine.level("cpu/docker/abc", cpu__cfs_quota_us=quota, cpu__cfs_period_us="100000")
    assert machine.cores == cores


def test_inside_a_container_the_path_may_begin_with_parts_that_only_the_host_sees(machine: Machine) -> None:
    machine.member("0::/kubepods/pod1/container\n")
    machine.level("", cpu__max="200000 100000")
    assert machine.cores == 2


@pytest.mark.parametrize("content", ["", "nonsense", "max", "0 0", "100000 0"])
def test_what_is_no_quota_limits_nothing(machine: Machine, content: str) -> None:
    machine.member("0::/job\n")
    machine.level("job", cpu__max=content)
    assert machine.cores == 8
