"""Two commits measured in turn: `python -m tests.benchmarks.compare BASE [--rounds N] [names...]`

Each round runs the benchmarks of both trees once, one right after the other, BASE in a worktree of its own; every tree
runs its own benchmark code over its own product code. What is compared is the ratio of this tree's figure to that of
BASE, round by round, so that whatever else the machine does meets both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.benchmarks.contest import REPOSITORY

NAMES = ("a", "b", "cpu", "memory", "next")
Figures = dict[str, float]


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """A checkout of that commit, removed on leaving."""
    with tempfile.TemporaryDirectory(prefix="zephon-base-") as folder:
        path = Path(folder, "tree")
        _git("worktree", "add", "--quiet", "--detach", str(path), commit)
        try:
            yield path
        finally:
            _git("worktree", "remove", "--force", str(path))


def figures(tree: Path, names: Sequence[str]) -> tuple[Figures, dict[str, str]]:
    """One round of a tree's benchmarks: each row's figure, and its unit."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.json")
        paths = os.pathsep.join(str(tree / part) for part in ("", "daemon", "client"))
        command = [sys.executable, "-m", "tests.benchmarks", "--repeats", "1", "--json", str(file), *names]
        environment = {**os.environ, "PYTHONPATH": paths}
        subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.DEVNULL, check=True)
        rows = json.loads(file.read_text())
    return {row["name"]: row["figure"] for row in rows}, {row["name"]: row["unit"] for row in rows}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.compare", description="Two commits, in turn.")
    parser.add_argument("base", help="the commit to compare this tree with")
    parser.add_argument("names", nargs="*", default=NAMES, help=f"benchmarks (default: {' '.join(NAMES)})")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_intermixed_args()
    here: dict[str, list[float]] = defaultdict(list)
    base: dict[str, list[float]] = defaultdict(list)
    units: dict[str, str] = {}
    with worktree(arguments.base) as tree:
        for number in range(arguments.rounds):
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
            for found, where in ((base, tree), (here, REPOSITORY)):
                measured, named = figures(where, arguments.names)
                units.update(named)
                for name, figure in measured.items():
                    found[name].append(figure)
    print(_table(here, base, units))
    return 0


def _table(here: dict[str, list[float]], base: dict[str, list[float]], units: dict[str, str]) -> str:
    both = [name for name in here if name in base]
    width = max(map(len, both), default=4)
    lines = [f"{'what':<{width}}  {'base':>9}  {'here':>9}  {'ratio':>6}  lowest to highest"]
    for name in both:
        each = [a / b for a, b in zip(here[name], base[name], strict=True) if b]
        low, mid, high = (min(each), statistics.median(each), max(each)) if each else (1.0, 1.0, 1.0)
        old, new = statistics.median(base[name]), statistics.median(here[name])
        lines.append(f"{name:<{width}}  {old:>9.3g}  {new:>9.3g}  {mid:>6.2f}  {low:.2f} to {high:.2f}  {units[name]}")
    return "\n".join(lines)


def _git(*arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=REPOSITORY, check=True)


if __name__ == "__main__":
    sys.exit(main())
