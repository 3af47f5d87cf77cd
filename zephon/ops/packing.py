"""The arithmetic of token sequences: documents laid end to end and cut, and positions inside them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zephon.columns import IntArray, laid

_LONG = 48  # tokens a segment from which copying segment by segment is cheaper than arithmetic for each token


def restarting(lengths: IntArray) -> npt.NDArray[np.int32]:
    """Positions that count from 0 in each segment: int32 `[sum(lengths)]`."""
    if len(lengths) and lengths.sum() > _LONG * len(lengths):
        counting = np.arange(int(lengths.max()), dtype=np.int32).data
        return laid([counting[:length] for length in lengths.tolist()], np.int32)
    ends = np.cumsum(lengths)
    out = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int32)
    out -= np.repeat((ends - lengths).astype(np.int32), lengths)
    return out


def pieces_of(lengths: IntArray, capacity: int) -> tuple[IntArray, IntArray, IntArray]:
    """Documents cut into pieces of at most `capacity`: `(document, start within it, length)` of each piece."""
    counts = -(-lengths // capacity)
    document = np.repeat(np.arange(len(lengths)), counts)
    within = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = within * capacity
    return document, starts, np.minimum(lengths[document] - starts, capacity)


class Segments(NamedTuple):
    """Runs of tokens of one document inside one sequence, in the order of the stream."""

    document: IntArray
    sequence: IntArray
    length: IntArray


def wrapped(lengths: IntArray, capacity: int) -> Segments:
    """Documents of `lengths` (all at least 1) laid end to end from a sequence's beginning."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    bounds = np.concatenate((np.zeros(1, np.int64), ends, np.arange(capacity, total + 1, capacity)))
    bounds.sort()
    length = bounds[1:] - bounds[:-1]
    real = length > 0
    bounds, length = bounds[1:][real], length[real]
    return Segments(np.searchsorted(ends, bounds), (bounds - 1) // capacity, length)
