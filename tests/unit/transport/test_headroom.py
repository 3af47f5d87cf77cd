"""Free memory is the least of what the machine and every cgroup level leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from zephon.errors import MemoryLimit
from zephon.transport.headroom import MIB, MemoryHeadroom, free_memory

UNLIMITED = 9223372036854771712


class Machine:
    """A made-up /proc and /sys/fs/cgroup."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroups.mkdir()
        self.available(1000)
        self.member("")

    def available(self, mib: int) -> None:
        (self.proc / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemFree: 7 kB\nMemAvailable: {mib * 1024} kB\n")

    def member(self, lines: str) -> None:
        (self.proc / "self" / "cgroup").write_text(lines)

    def level(self, path: str, **files: int | str) -> None:
        folder = self.cgroups / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (folder / name.replace("__", ".")).write_text(f"{value}\n")

    @property
    def free(self) -> int:
        return free_memory(self.proc, self.cgroups)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_cgroups_the_machine_decides(machine: Machine) -> None:
    assert machine.free == 1000 * MIB


def test_a_machine_without_a_cgroup_file_still_has_an_answer(machine: Machine) -> None:
    (machine.proc / "self" / "cgroup").unlink()
    assert machine.free == 1000 * MIB


def test_version_2_limits_count_at_every_level_above_the_process(machine: Machine) -> None:
    machine.member("0::/slice/job/step\n")
    machine.level("slice", memory__max=900 * MIB, memory__current=800 * MIB)
    machine.level("slice/job", memory__max="max", memory__current=700 * MIB)
    machine.level("slice/job/step", memory__max=600 * MIB, memory__current=100 * MIB)
    assert machine.free == 100 * MIB
    assert MemoryHeadroom(proc=machine.proc, cgroups=machine.cgroups).measure().limited_by.endswith("cgroup/slice")


def test_cache_that_the_kernel_would_drop_counts_as_free_but_shared_memory_does_not(machine: Machine) -> None:
    machine.member("0::/job\n")
    stat = f"anon 1\nshmem {300 * MIB}\ninactive_anon {300 * MIB}\ninactive_file {60 * MIB}\nactive_file {40 * MIB}"
    machine.level("job", memory__max=500 * MIB, memory__current=450 * MIB, memory__stat=stat)
    assert machine.free == 150 * MIB


def test_a_throttling_limit_counts_like_a_hard_one(machine: Machine) -> None:
    machine.member("0::/job\n")
    machine.level("job", memory__max="max", memory__high=300 * MIB, memory__current=100 * MIB)
    assert machine.free == 200 * MIB


def test_version_1_limits_count_at_every_level_and_its_huge_number_means_none(machine: Machine) -> None:
    machine.member("5:cpu,cpuacct:/\n4:memory:/outer/inner\n0::/\n")
    stat = f"inactive_file 5\ntotal_inactive_file {10 * MIB}\ntotal_active_file {5 * MIB}"
    machine.level("memory", memory__limit_in_bytes=UNLIMITED, memory__usage_in_bytes=77)
    machine.level("memory/outer", memory__limit_in_bytes=200 * MIB, memory__usage_in_bytes=150 * MIB, memory__stat=stat)
    machine.level("memory/outer/inner", memory__limit_in_bytes=UNLIMITED, memory__usage_in_bytes=9)
    assert machine.free == 65 * MIB


def test_in_a_container_the_part_of_the_path_that_only_the_host_sees_is_dropped(machine: Machine) -> None:
    machine.member("0::/docker/0123/child\n")
    machine.level("", memory__max=800 * MIB, memory__current=0)
    machine.level("child", memory__max=300 * MIB, memory__current=0)
    assert machine.free == 300 * MIB


def test_a_level_over_its_limit_leaves_nothing_rather_than_less_than_nothing(machine: Machine) -> None:
    machine.member("0::/job\n")
    machine.level("job", memory__max=10 * MIB, memory__current=50 * MIB)
    assert machine.free == 0


def test_case_C6_what_does_not_fit_is_refused_with_needed_and_free_bytes_and_the_setting(machine: Machine) -> None:
    machine.member("0::/job\n")
    machine.level("job", memory__max=512 * MIB, memory__current=12 * MIB)
    headroom = MemoryHeadroom(setting="--rings", keep=100 * MIB, proc=machine.proc, cgroups=machine.cgroups)
    headroom.check(400 * MIB, "lane rings")
    with pytest.raises(MemoryLimit) as refused:
        headroom.check(400 * MIB + 1, "lane rings")
    for part in ("lane rings", str(400 * MIB + 1), str(400 * MIB), "--rings", "cgroup/job"):
        assert part in str(refused.value)


def test_this_machine_is_measured() -> None:
    assert 0 < free_memory() < 1 << 50
