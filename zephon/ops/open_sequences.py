"""Documents on their way into sequences: those that wait, and those that lie in sequences which are still open.

Here a document is a number, in the order of coming, and its length. The caller keeps what belongs to it (tokens,
names) in a list of its own, in the same order: those held before, then the new ones. Each step says which *rows* of
that list make up the sequences that are finished now, and which rows are still held after it.
"""

from __future__ import annotations

from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zephon.columns import IntArray
from zephon.ops.bins import NUMBER, NUMBER_BITS, START_BITS, pieces_in
from zephon.ops.packing_settings import Packer
from zephon.permutations import mix, permute

_AHEAD = 1024  # sequences that an order is drawn for at once, since each draw costs as much as hundreds of them


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
        self._held, self._rest = np.empty(0, np.int64), np.empty(0, np.int64)
        # numbers of the documents held, ascending, and how many tokens of each are in no finished sequence
        self._closed: list[list[int]] = []  # bins that wait for others, with which they leave in a drawn order
        self._drawn = 0  # how many have left in a drawn order
        self._ahead = np.empty(0, np.int64)  # the order in which those after them leave

    def add(self, lengths: IntArray, components: IntArray | None) -> Step:
        """New documents: their lengths (1 to `max_length`, or any from 1 where documents are split)."""
        numbers = np.arange(self.seen, self.seen + len(lengths))
        self.seen += len(lengths)
        self._held, self._rest = np.concatenate((self._held, numbers)), np.concatenate((self._rest, lengths))
        return self._step(self.bins.place(numbers, lengths, components))

    def finish(self) -> tuple[Step, Step]:
        """The window is over. What waits is placed, which may finish sequences; then all that are open are finished.

        Open sequences that may be split are filled up from one another, so that only the last of each component has
        room left.
        """
        placed = self._step(self.bins.finish())
        still_open = [self._arranged(bins) for bins in self.bins.open]
        if self.settings.splits and self.settings.max_sequences_per_bin is None:
            still_open = [self._filled_up(bins) for bins in still_open]
        sequences = self._closed + list(chain.from_iterable(still_open))
        flushed = np.arange(len(sequences)) >= len(self._closed)
        if self.settings.shuffle_strategy == "bins":
            order = self._order(len(sequences)) - self._drawn
            sequences, flushed = [sequences[at] for at in order.tolist()], flushed[order]
        return placed, self._finished(sequences, flushed)

    def _step(self, closed: list[list[int]]) -> Step:
        if self.settings.shuffle_strategy == "bins":
            waiting = self._closed + closed
            count = len(waiting) // self.settings.num_bins * self.settings.num_bins
            closed, self._closed = [waiting[at] for at in self._draw(count).tolist()], waiting[count:]
        return self._finished(self._arranged(closed), np.zeros(len(closed), np.bool_))

    def _draw(self, count: int) -> IntArray:
        """The order in which so many sequences leave, whole blocks of them."""
        if count > len(self._ahead):
            size = self.settings.num_bins
            self._ahead = self._order(max(count, _AHEAD // size * size))
        order, self._ahead = self._ahead[:count] - self._drawn, self._ahead[count:]
        self._drawn += count
        return order

    def _order(self, count: int) -> IntArray:
        """The numbers of the next so many sequences in the order in which they leave: in blocks of `num_bins`, each
        permuted whole.
        """
        size, number = self.settings.num_bins, self._drawn + np.arange(count)
        place = number % size
        low = number - place
        return low + permute(place, np.minimum(size, self._drawn + count - low), mix(self.seed, "bins", low))

    def _arranged(self, sequences: list[list[int]]) -> list[list[int]]:
        """The pieces of each sequence in a drawn order, if one is wanted."""
        if self.settings.shuffle_strategy != "within_bin":
            return sequences
        pieces = list(chain.from_iterable(sequences))
        document, start, _ = pieces_in(pieces, split=self.settings.splits)
        order = np.lexsort((mix(self.seed, document, start), _numbered(sequences)))
        arranged = iter([pieces[at] for at in order.tolist()])
        return [list(islice(arranged, len(sequence))) for sequence in sequences]

    def _filled_up(self, sequences: list[list[int]]) -> list[list[int]]:
        """The pieces of sequences laid end to end, and cut where a sequence is full."""
        filled: list[list[int]] = []
        room = 0
        for piece in chain.from_iterable(sequences):
            rest = piece
            while length := rest >> NUMBER_BITS & NUMBER:
                if not room:
                    filled.append([])
                    room = self.settings.max_length
                part = min(length, room)
                filled[-1].append(rest - (length - part << NUMBER_BITS))
                rest += (part << START_BITS) - (part << NUMBER_BITS)
                room -= part
        return filled

    def _finished(self, sequences: list[list[int]], flushed: npt.NDArray[np.bool_]) -> Step:
        """These sequences leave; documents that are in no others and do not wait are no longer held."""
        pieces = list(chain.from_iterable(sequences))
        document, start, length = pieces_in(pieces, split=self.settings.splits)
        row = np.searchsorted(self._held, document)
        self._rest -= np.bincount(row, length, len(self._rest)).astype(np.int64)
        kept = np.flatnonzero(self._rest)
        self._held, self._rest = self._held[kept], self._rest[kept]
        return Step(len(sequences), _numbered(sequences), row, start, length, kept, flushed)


def _numbered(sequences: list[list[int]]) -> IntArray:
    """For each piece of the sequences, the sequence that it is in."""
    return np.repeat(np.arange(len(sequences)), np.array(list(map(len, sequences)), np.int64))
