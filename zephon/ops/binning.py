"""Documents of tokens in open sequences.

Each document that is held keeps its tokens as bytes of its own: they are copied once when it comes, and once into a
finished sequence, document by document (an index for each token would cost eight times the copy).
"""

from __future__ import annotations

import numpy as np

from zephon.columns import Block, IntArray, cut, laid
from zephon.ops.base import Faults
from zephon.ops.flat_documents import FlatPacker, FlatPacking, names_in, sample_names
from zephon.ops.homogeneity import components_of
from zephon.ops.open_sequences import OpenSequences, Step
from zephon.ops.packing import pieces_of

_SIZE = 4  # bytes of a token, and of its weight in a loss mask


class Binning(FlatPacking):
    """Holds the documents that wait or lie in open sequences, each with its tokens, its loss mask and its names."""

    def __init__(self, settings: FlatPacker, seed: int) -> None:
        super().__init__(settings)
        self.open = OpenSequences(settings, seed)
        self.tokens: list[bytes] = []  # int32
        self.masks: list[bytes | None] | None = None  # float32; None while no document has one
        self.names = Block({}, np.empty((0, 3), np.int64))

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
        before, starts = len(self.tokens), bounds[:-1]
        self.tokens += [part.tobytes() for part in cut(found.tokens.astype(np.int32, copy=False), starts, lengths)]
        if found.mask is not None:
            masks = cut(found.mask, starts, lengths)
            self.masks = self.masks or [None] * before
            self.masks += [part.tobytes() if has else None for part, has in zip(masks, masked.tolist())]
        elif self.masks is not None:
            self.masks += [None] * len(lengths)
        self.names = Block.concat([self.names, names_in(block, records)])
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
        self.names = self.names.take(rows)
        if self.masks is not None:
            masks = [self.masks[row] for row in kept]
            self.masks = masks if any(mask is not None for mask in masks) else None

    def _finished(self, step: Step) -> list[Block]:
        """Finished sequences as a block."""
        if not step.sequences:
            return []
        ends = np.flatnonzero(np.diff(step.sequence, append=step.sequences)) + 1
        used = np.add.reduceat(step.length, np.concatenate((np.zeros(1, np.int64), ends[:-1])))
        room = self.length - used
        rows = step.row.tolist()
        parts, masks = [self.tokens[row] for row in rows], self.masks and [self.masks[row] for row in rows]
        if self.settings.splits:
            ranges = list(zip((_SIZE * step.start).tolist(), (_SIZE * (step.start + step.length)).tolist()))
            parts = [part[low:high] for part, (low, high) in zip(parts, ranges)]
            masks = masks and [mask and mask[low:high] for mask, (low, high) in zip(masks, ranges)]
        padding = np.full(int(room.max()), self.settings.pad_token_id, np.int32).tobytes()
        tokens = laid(_padded(parts, ends, room, padding), np.int32).reshape(step.sequences, self.length)
        masked, mask = np.zeros(step.sequences, np.bool_), None
        if masks is not None:
            ones = np.ones(int(step.length.max()), np.float32).tobytes()
            weights = [own or ones[: len(part)] for own, part in zip(masks, parts)]
            masked[step.sequence[[own is not None for own in masks]]] = True
            mask = laid(_padded(weights, ends, room, bytes(len(padding))), np.float32).reshape(tokens.shape)
        names = sample_names(self.names, step.row, step.sequence, step.length, step.sequences)
        padded = room > 0
        segments = np.insert(step.length, ends[padded], room[padded])
        return self.sequences(tokens, used, segments, mask, masked, names, step.flushed)


def _padded(parts: list[bytes], ends: IntArray, room: IntArray, padding: bytes) -> list[bytes]:
    """Parts, and behind part `ends[i] - 1`, a sequence's last, `room[i]` values of padding."""
    padded, low = [], 0
    for end, left in zip(ends.tolist(), (_SIZE * room).tolist()):
        padded += parts[low:end]
        if left:
            padded.append(padding[:left])
        low = end
    return padded
