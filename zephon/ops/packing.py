"""The arithmetic of token sequences: documents laid end to end and cut."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zephon.columns import IntArray


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
