"""What comes out: rows with a figure, a target and how they compare, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.benchmarks.contest import Timing


@dataclass(frozen=True)
class Scale:
    """How much is measured: rounds of a contest, its timing, and a factor for everything that is counted."""

    rounds: int
    timing: Timing
    factor: float

    def count(self, full: int) -> int:
        return max(2, int(full * self.factor))

    def seconds(self, full: float) -> float:
        return max(0.2, full * self.factor)


@dataclass(frozen=True)
class Row:
    """One figure. With `at_least` it should reach the target, else stay under it; without a target it only informs."""

    name: str
    figure: float
    unit: str
    target: float | None
    at_least: bool = False
    detail: str = ""

    @property
    def ratio(self) -> float | None:
        """The figure to its target, unless that is zero."""
        return self.figure / self.target if self.target else None

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.figure >= self.target if self.at_least else self.figure <= self.target

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio, "met": self.met}


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    cells = [("what", "figure", "target", "ratio", "", "")]
    for row in rows:
        bound = "from" if row.at_least else "under" if row.target else "at most"
        target = "" if row.target is None else f"{bound} {row.target:g} {row.unit}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        met = {None: "", True: "ok", False: "MISSED"}[row.met]
        cells.append((row.name, f"{row.figure:.3g} {row.unit}", target, ratio, met, row.detail))
    widths = [max(len(line[i]) for line in cells) for i in range(6)]
    return "\n".join(_line(line, widths) for line in cells)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(_padded(cells, widths)).rstrip()


def _padded(cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    for number, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        yield cell.rjust(width) if number in (1, 3) else cell.ljust(width)
