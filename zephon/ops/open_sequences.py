"""Documents on their way into sequences: those that wait, and those that lie in sequences which are still open.

Here a document is a number, in the order of coming, and its length. The caller keeps what belongs to it (tokens,
names) in a list of its own, in the same order: those held before, then the new ones. Each step says which *rows* of
that list make up the sequences that are finished now, and which rows are still held after it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zephon.columns import IntArray
from zephon.ops.bins import NUMBER_BITS, Placement, keys_of
from zephon.ops.homogeneity import ByComponent
from zephon.ops.packing import wrapped
from zephon.ops.packing_settings import Packer
from zephon.permutations import mix, permute

_DOCUMENT, _START, _LENGTH, _BIN, _OFFSET = range(5)


class Step(NamedTuple):
    """What one step finished. Arrays are int64; those of pieces are in the order of the sequences and inside them."""

    sequences: int  # how many are finished
    sequence: IntArray  # of each piece, ascending
    row: IntArray  # the document of each piece
    start: IntArray  # where in its document a piece begins
    length: IntArray  # of each piece
    kept: IntArray  # the rows that are still held, ascending
    flushed: npt.NDArray[np.bool_]  # of each sequence, whether only the window's end finished it


class OpenSequences:
    """The open sequences of one window. `seed` is what an order is drawn from, where one is drawn."""

    def __init__(self, settings: Packer, seed: int) -> None:
        self.settings, self.seed = settings, seed
        self.bins = settings.bins()
        self.seen = 0
        self._held = np.empty(0, np.int64)  # numbers of the documents held, ascending
        self._pieces = np.empty((5, 0), np.int64)  # of the open sequences, in the order of their placing
        self._closed: list[int] = []  # bins that wait for others, with which they leave in a drawn order
        self._left = 0  # how many have left

    def add(self, lengths: IntArray, components: IntArray | None) -> Step:
        """New documents: their lengths (1 to `max_length`, or any from 1 where documents are split)."""
        numbers = np.arange(self.seen, self.seen + len(lengths))
        self.seen += len(lengths)
        self._held = np.concatenate((self._held, numbers))
        if isinstance(self.bins, ByComponent):
            assert components is not None
            return self._step(self.bins.place(numbers, lengths, components))
        return self._step(self.bins.place(keys_of(numbers, lengths)))

    def finish(self) -> tuple[Step, Step]:
        """The window is over. What waits is placed, which may finish sequences; then all that are open are finished.

        Open sequences that may be split are filled up from one another, so that only the last of each component has
        room left.
        """
        placed = self._step(self.bins.finish())
        waiting, still_open = self._closed, self.bins.open
        pieces = self._pieces[:, self._order(self._pieces, still_open)]
        if self.settings.splits and self.settings.max_sequences_per_bin is None:
            pieces = self._filled_up(pieces)
        still_open = list(dict.fromkeys(pieces[_BIN].tolist()))
        flushed = np.arange(len(waiting) + len(still_open)) >= len(waiting)
        pieces = np.concatenate((self._pieces[:, self._order(self._pieces, waiting)], pieces), axis=1)
        if self.settings.shuffle_strategy == "bins" and len(flushed):
            order = self._drawn(len(flushed))
            place = np.empty(len(order), np.int64)
            place[order] = np.arange(len(order))
            sequence = np.cumsum(np.diff(pieces[_BIN], prepend=-1) != 0) - 1
            pieces, flushed = pieces[:, np.argsort(place[sequence], kind="stable")], flushed[order]
        self._pieces = np.empty((5, 0), np.int64)
        return placed, self._finished(pieces, flushed)

    def _step(self, made: Placement) -> Step:
        pieces = np.concatenate((self._pieces, made.pieces), axis=1) if made.pieces.size else self._pieces
        closed = made.closed
        if self.settings.shuffle_strategy == "bins":
            self._closed += closed
            count = len(self._closed) // self.settings.num_bins * self.settings.num_bins
            closed = [self._closed[number] for number in self._drawn(count).tolist()]
            self._closed = self._closed[count:]
        order = self._order(pieces, closed)
        left = np.ones(pieces.shape[1], np.bool_)
        left[order] = False
        self._pieces = pieces[:, left]
        return self._finished(pieces[:, order], np.zeros(len(closed), np.bool_))

    def _drawn(self, count: int) -> IntArray:
        """The order in which so many sequences leave: in blocks of `num_bins`, each permuted whole."""
        size, first, out = self.settings.num_bins, self._left, []
        self._left += count
        for low in range(0, count, size):
            several = min(size, count - low)
            key = mix(self.seed, "bins", first + low)
            out.append(low + permute(np.arange(several), several, key))
        return np.concatenate([np.empty(0, np.int64), *out])

    def _order(self, pieces: IntArray, bins: list[int]) -> IntArray:
        """The pieces of these bins, in the bins' order and by offset inside each (or as drawn)."""
        if not bins:
            return np.empty(0, np.int64)
        numbers = np.array(bins, np.int64)
        ascending = np.argsort(numbers)
        at = np.searchsorted(numbers[ascending], pieces[_BIN]).clip(max=len(bins) - 1)
        place = ascending[at]
        mine = np.flatnonzero(numbers[place] == pieces[_BIN])
        inside = pieces[_OFFSET, mine]
        if self.settings.shuffle_strategy == "within_bin":
            inside = mix(self.seed, pieces[_DOCUMENT, mine], pieces[_START, mine])
        return mine[np.lexsort((inside, place[mine]))]

    def _finished(self, pieces: IntArray, flushed: npt.NDArray[np.bool_]) -> Step:
        """These pieces leave; what of the documents is in no other piece and does not wait is no longer held."""
        held = self._held
        row = np.searchsorted(held, pieces[_DOCUMENT])
        still = np.ones(len(held), np.bool_)
        still[row] = False
        if self.settings.splits:
            still[np.searchsorted(held, self._pieces[_DOCUMENT])] = True
        kept = np.flatnonzero(still)
        self._held = held[kept]
        new = np.diff(pieces[_BIN], prepend=-1) != 0
        return Step(len(flushed), np.cumsum(new) - 1, row, pieces[_START], pieces[_LENGTH], kept, flushed)

    def _filled_up(self, pieces: IntArray) -> IntArray:
        """Pieces laid end to end, component by component, and cut where a sequence is full."""
        if not pieces.shape[1]:
            return pieces
        component = pieces[_BIN] >> NUMBER_BITS
        out = []
        for number in np.unique(component).tolist():
            mine = pieces[:, component == number]
            piece, sequence, length = wrapped(mine[_LENGTH], self.settings.max_length)
            ends = np.cumsum(mine[_LENGTH])
            start = np.cumsum(length) - length - (ends - mine[_LENGTH])[piece]
            bins = -2 - (number << NUMBER_BITS | sequence)  # like no other bin's number, and not -1
            out.append(np.stack((mine[_DOCUMENT, piece], mine[_START, piece] + start, length, bins, start)))
        return np.concatenate(out, axis=1)
