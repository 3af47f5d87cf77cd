"""Documents of tokens in open sequences.

A pushed block's tokens are copied as a whole, and from there document by document into finished sequences (an index for
each token would cost eight times the copy). Where few documents that are still held keep many such copies alive, those
few move together, so that memory stays proportional to what is held.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from zephon.columns import AnyArray, Block, IntArray
from zephon.ops.base import Faults
from zephon.ops.flat_documents import FlatPacker, FlatPacking, Floats, names_in, sample_names
from zephon.ops.homogeneity import components_of
from zephon.ops.open_sequences import OpenSequences, Step
from zephon.ops.packing import pieces_of

_SPARSE = 4  # copied tokens for each one held, from which those held are moved
_FEW = 1 << 18  # copied tokens that are never worth moving


class Binning(FlatPacking):
    """Holds the documents that wait or lie in open sequences, each with its tokens, its loss mask and its names."""

    def __init__(self, settings: FlatPacker, seed: int) -> None:
        super().__init__(settings)
        self.open = OpenSequences(settings, seed)
        self.tokens: list[AnyArray] = []
        self.masks: list[Floats | None] | None = None  # None while no document has one
        self.names = Block({}, np.empty((0, 3), np.int64))
        self.sizes = np.empty(0, np.int64)
        self._copied = 0  # tokens in memory that the documents held are parts of

    def push(self, block: Block, faults: Faults) -> list[Block]:
        found = self.documents(block, faults)
        components = None
        if self.settings.homogeneity != "none":
            settings = self.settings
            kept, components = components_of(
                block, found.records, settings.homogeneity, settings.groups, settings.name, faults
            )
            found = found if len(kept) == len(found.records) else found.take(kept)
        if not len(found.records):
            return []
        bounds, lengths, records, masked = found.offsets, found.lengths, found.records, found.masked
        if not self.settings.splits and lengths.max() > self.length:
            document, _, lengths = pieces_of(lengths, self.length)
            bounds = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
            records, masked = records[document], masked[document]
            components = None if components is None else components[document]
        before = len(self.tokens)
        tokens = found.tokens.astype(np.int32)
        self._copied += len(tokens)
        limits = bounds.tolist()
        self.tokens += [tokens[a:b] for a, b in pairwise(limits)]
        if self.masks is not None or found.mask is not None:
            if self.masks is None:
                self.masks = [None] * before
            mask = None if found.mask is None else found.mask.copy()
            self.masks += [
                None if mask is None or not has else mask[a:b] for has, (a, b) in zip(masked.tolist(), pairwise(limits))
            ]
        self.names = Block.concat([self.names, names_in(block, records)])
        self.sizes = np.concatenate((self.sizes, lengths))
        step = self.open.add(lengths, components)
        out = self._finished(step)
        self._keep(step.kept)
        return out

    def flush(self, faults: Faults) -> list[Block]:
        placed, rest = self.open.finish()
        out = self._finished(placed)
        self._keep(placed.kept)
        return out + self._finished(rest)

    def _keep(self, rows: IntArray) -> None:
        """Hold these documents only."""
        kept = rows.tolist()
        self.tokens = [self.tokens[row] for row in kept]
        self.names, self.sizes = self.names.take(rows), self.sizes[rows]
        if self.masks is not None:
            masks = [self.masks[row] for row in kept]
            self.masks = masks if any(mask is not None for mask in masks) else None
        held = int(self.sizes.sum())
        if self._copied > _FEW + _SPARSE * held:
            self._copied = held
            bounds = [0, *np.cumsum(self.sizes).tolist()]
            tokens = np.concatenate([np.empty(0, np.int32), *self.tokens])
            self.tokens = [tokens[low:high] for low, high in pairwise(bounds)]
            self.masks = self.masks and [None if mask is None else mask.copy() for mask in self.masks]

    def _finished(self, step: Step) -> list[Block]:
        """Finished sequences as a block."""
        if not step.sequences:
            return []
        ends = np.flatnonzero(np.diff(step.sequence, append=step.sequences)) + 1
        used = np.add.reduceat(step.length, np.concatenate((np.zeros(1, np.int64), ends[:-1])))
        room = self.length - used
        tokens = np.empty((step.sequences, self.length), np.int32)
        padding = np.full(int(room.max()), self.settings.pad_token_id, np.int32)
        rows = step.row.tolist()
        parts = [self.tokens[row] for row in rows]
        if self.settings.splits:
            ranges = zip(parts, step.start.tolist(), (step.start + step.length).tolist())
            parts = [part[low:high] for part, low, high in ranges]
        _lay(parts, ends, room, padding, tokens)
        masked, mask = np.zeros(step.sequences, np.bool_), None
        if self.masks is not None:
            masks, ones = [self.masks[row] for row in rows], np.ones(int(step.length.max()), np.float32)
            ranges = zip(masks, step.start.tolist(), step.length.tolist())
            weights = [ones[:n] if own is None else own[low : low + n] for own, low, n in ranges]
            masked[step.sequence[[own is not None for own in masks]]] = True
            mask = np.empty(tokens.shape, np.float32)
            _lay(weights, ends, room, np.zeros(len(padding), np.float32), mask)
        names = sample_names(self.names, step.row, step.sequence, step.length, step.sequences)
        padded = room > 0
        segments = np.insert(step.length, ends[padded], room[padded])
        return self.sequences(tokens, used, segments, mask, masked, names, step.flushed)


def _lay(parts: list[Any], ends: IntArray, room: IntArray, padding: AnyArray, out: AnyArray) -> None:
    """Parts end to end into `out`, and behind part `ends[i] - 1`, a sequence's last, `room[i]` of padding."""
    laid, low = [], 0
    for end, left in zip(ends.tolist(), room.tolist()):
        laid += parts[low:end]
        if left:
            laid.append(padding[:left])
        low = end
    np.concatenate(laid, out=out.reshape(-1))
