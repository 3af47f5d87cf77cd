"""Positions that count from 0 in each run of a record's tokens, made when somebody asks for them.

They are a function of the runs' lengths, which is what packing knows, what travels, and a thousandth of their size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from zephon.columns import Column, Fixed, IntArray, Ragged, laid
from zephon.errors import ProtocolError

_LONG = 48  # tokens a run from which copying run by run is cheaper than arithmetic for each token


def restarting(lengths: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
    """Positions that count from 0 in each run: int32 `[sum(lengths)]`."""
    if len(lengths) and lengths.sum() > _LONG * len(lengths):
        counting = np.arange(int(lengths.max()), dtype=np.int32).data
        return laid([counting[:length] for length in lengths.tolist()], np.int32)
    ends = np.cumsum(lengths)
    out = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int32)
    out -= np.repeat((ends - lengths).astype(np.int32), lengths)
    return out


def positions_in(lengths: IntArray, width: int) -> Positions:
    """Those of records of `width` tokens each, whose runs have these lengths (int64, end to end)."""
    lengths = lengths[lengths > 0]
    ends = np.cumsum(lengths)
    offsets = np.searchsorted(ends, np.arange(0, int(ends[-1]) + 1 if len(ends) else 1, width), side="right")
    return Positions(Ragged(lengths.astype(np.int32), offsets), width)


class Positions(Fixed):
    """int32 `[n, width]`. `runs` holds the lengths of each record's runs (int32, each at least 1), which fill it.

    The values are kept once they are made, since they may be changed in place, unless the runs are read-only: then so
    are the values, as those that lie in such memory.
    """

    __slots__ = ("_made", "runs", "width")

    def __init__(self, runs: Ragged, width: int) -> None:
        self.runs, self.width = runs, width
        self._made: npt.NDArray[np.int32] | None = None

    @property
    def values(self) -> npt.NDArray[np.int32]:  # type: ignore[override]
        if self._made is None:
            lengths, records = self.runs.compact().values, len(self)
            fill = int(lengths.sum(dtype=np.int64)) == records * self.width and int(lengths.min(initial=0)) >= 0
            made = restarting(lengths).reshape(self.shape) if fill else None
            if made is None or made[:, :1].any():
                raise ProtocolError(f"corrupt block: runs of positions do not fill {records} records of {self.width}")
            if not self.runs.values.flags.writeable:
                made.flags.writeable = False
            self._made = made
        return self._made

    @property
    def touched(self) -> bool:
        """Whether the values exist, and so may have been changed in place."""
        return self._made is not None

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self), self.width

    def __len__(self) -> int:
        return len(self.runs)

    def take(self, index: IntArray) -> Fixed:
        return super().take(index) if self.touched else Positions(self.runs.take(index), self.width)

    def slice(self, low: int, high: int) -> Fixed:
        return super().slice(low, high) if self.touched else Positions(self.runs.slice(low, high), self.width)

    def joined(self, others: Sequence[Column]) -> Column | None:
        alike = [c for c in (self, *others) if isinstance(c, Positions) and c.width == self.width and not c.touched]
        if len(alike) <= len(others):
            return super().joined(others)
        runs = self.runs.joined([other.runs for other in alike[1:]])
        assert isinstance(runs, Ragged)
        return Positions(runs, self.width)

    @property
    def nbytes(self) -> int:
        return self.runs.nbytes if self._made is None else self._made.nbytes

    def copy(self) -> Fixed:
        return super().copy() if self.touched else Positions(self.runs.copy(), self.width)

    def __reduce__(self) -> tuple[type[Fixed], tuple[npt.NDArray[np.int32]]]:
        return Fixed, (self.values,)
