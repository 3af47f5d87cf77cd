"""The benchmarks run; what their figures are worth is for `make bench` to say."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.soak
@pytest.mark.parametrize("names", [["import", "resume"], []])
def test_a_quick_run_gives_figures_and_a_table(tmp_path: Path, names: list[str]) -> None:
    figures = tmp_path / "rows.json"
    command = [sys.executable, "-m", "tests.benchmarks", "--quick", "--json", str(figures), *names]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(figures.read_text())
    if names:
        assert list(dict.fromkeys(row["name"].split()[0] for row in rows)) == names
    assert all(math.isfinite(row["figure"]) for row in rows)
    assert all(row["name"] in done.stdout for row in rows)
    assert len({row["name"] for row in rows}) == len(rows), "a row is found by its name"


def test_a_name_that_no_benchmark_has_is_refused() -> None:
    command = [sys.executable, "-m", "tests.benchmarks", "throughputs"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no benchmark is called throughputs" in done.stderr
