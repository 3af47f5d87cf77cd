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
def test_a_quick_run_gives_figures_and_a_table(tmp_path: Path) -> None:
    figures = tmp_path / "rows.json"
    command = [sys.executable, "-m", "tests.benchmarks", "--quick", "--json", str(figures), "import", "resume"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(figures.read_text())
    assert [row["name"].split()[0] for row in rows] == ["import", "resume", "resume"]
    assert all(math.isfinite(row["figure"]) and row["figure"] > 0 for row in rows)
    assert all(row["name"] in done.stdout for row in rows)


def test_a_name_that_no_benchmark_has_is_refused() -> None:
    command = [sys.executable, "-m", "tests.benchmarks", "throughputs"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no benchmark is called throughputs" in done.stderr
