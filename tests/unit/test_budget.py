"""The budget of a node is divided without a rest, and refused with both numbers where it cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.budget import LEAST, Budget
from zephon.errors import MemoryLimit
from zephon.transport.headroom import MIB, MemoryHeadroom


def free(folder: Path, mib: int, cgroup: int | None = None) -> MemoryHeadroom:
    """A machine with so much memory free, and a cgroup of that limit around this process."""
    proc, groups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (groups / "job").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemAvailable: {mib * 1024} kB\n")
    (proc / "self" / "cgroup").write_text("0::/job\n")
    if cgroup is not None:
        (groups / "job" / "memory.max").write_text(f"{cgroup * MIB}\n")
        (groups / "job" / "memory.current").write_text("0\n")
    return MemoryHeadroom(proc=proc, cgroups=groups)


@given(st.integers(LEAST, 1 << 45), st.integers(1, 512))
def test_the_parts_are_the_whole_and_lane_rings_get_half_at_least(total: int, workers: int) -> None:
    budget = Budget(total, workers, "drawn")
    assert budget.lane_rings + workers * (budget.cache + budget.worker_ring) == total
    assert 2 * budget.lane_rings >= total


def test_untold_it_is_half_of_what_the_tightest_limit_leaves(tmp_path: Path) -> None:
    budget = Budget.of(None, 2, free(tmp_path, 4000, cgroup=512))
    assert budget.total == 256 * MIB
    assert "512 MiB" in budget.describe()
    assert "cgroup" in budget.describe()


@pytest.mark.parametrize(("asked", "needed"), [(2000 * MIB, 2000 * MIB), (None, 2 * LEAST)])
def test_case_C6_one_that_cannot_be_had_is_refused_with_both_numbers(
    tmp_path: Path, asked: int | None, needed: int
) -> None:
    with pytest.raises(MemoryLimit, match=rf"{needed} bytes.* but {100 * MIB} bytes .*--memory"):
        Budget.of(asked, 2, free(tmp_path, 100))
