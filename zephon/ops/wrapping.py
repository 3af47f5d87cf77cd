"""Documents of tokens laid end to end and cut into sequences: what is held is less than one sequence."""

from __future__ import annotations

import numpy as np

from zephon.columns import AnyArray, Block, IntArray
from zephon.ops.base import Faults
from zephon.ops.flat_documents import Flags, FlatPacker, FlatPacking, Floats, names_in, sample_names
from zephon.ops.packing import wrapped
from zephon.ops.token_fields import Documents


class Wrapping(FlatPacking):
    """Holds what the next sequence begins with."""

    def __init__(self, settings: FlatPacker) -> None:
        super().__init__(settings)
        self.tokens: AnyArray = np.empty(0, np.int32)
        self.mask: Floats | None = None
        self.lengths = np.empty(0, np.int64)  # of the documents' runs in `tokens`
        self.masked: Flags = np.empty(0, np.bool_)
        self.names = Block({}, np.empty((0, 3), np.int64))  # of the documents

    def push(self, block: Block, faults: Faults) -> list[Block]:
        found = self.documents(block, faults)
        if not len(found.records):
            return []
        self.names = Block.concat([self.names, names_in(block, found.records)])
        self.lengths = np.concatenate((self.lengths, found.lengths))
        self.masked = np.concatenate((self.masked, found.masked))
        held, whole = len(self.tokens), (len(self.tokens) + len(found.tokens)) // self.length
        size = whole * self.length
        cut = max(0, size - held)
        tokens = np.empty(max(size, held + len(found.tokens) if not whole else 0), np.int32)
        tokens[:held] = self.tokens
        tokens[held:] = found.tokens[:cut] if whole else found.tokens
        mask = self._mask_of(held, found, cut, whole)
        if not whole:
            self.tokens, self.mask = tokens, mask
            return []
        self.tokens = found.tokens[cut:].astype(np.int32)
        self.mask = None if mask is None or found.mask is None else found.mask[cut:].copy()
        return self._cut(tokens.reshape(whole, self.length), mask)

    def _mask_of(self, held: int, found: Documents, cut: int, whole: int) -> Floats | None:
        """The loss mask of what is held and pushed, up to the cut; None if no document has one."""
        if self.mask is None and found.mask is None:
            return None
        count = cut if whole else len(found.tokens)
        mask = np.ones(held + count, np.float32)
        if self.mask is not None:
            mask[:held] = self.mask
        if found.mask is not None:
            mask[held:] = found.mask[:count]
        return mask

    def _cut(self, tokens: AnyArray, mask: Floats | None) -> list[Block]:
        """The finished sequences; the runs beyond them stay."""
        whole = len(tokens)
        document, sequence, length = wrapped(self.lengths, self.length)
        done = int(np.searchsorted(sequence, whole))
        used = np.full(whole, self.length)
        out = self._finished(tokens, used, document[:done], sequence[:done], length[:done], length[:done], mask)
        rest = document[done:]
        self.lengths, self.masked = length[done:], self.masked[rest]
        self.names = self.names.take(rest)
        return out

    def _finished(
        self,
        tokens: AnyArray,
        used: IntArray,
        document: IntArray,
        sequence: IntArray,
        length: IntArray,
        segments: IntArray,
        mask: Floats | None,
        flushed: bool = False,
    ) -> list[Block]:
        masked = np.zeros(len(tokens), np.bool_)
        masked[sequence[self.masked[document]]] = True
        names = sample_names(self.names, document, sequence, length, len(tokens))
        rows = None if mask is None else mask.reshape(tokens.shape)
        return self.sequences(tokens, used, segments, rows, masked, names, np.full(len(tokens), flushed))

    def flush(self, faults: Faults) -> list[Block]:
        held = len(self.tokens)
        if not held:
            return []
        tokens = np.full((1, self.length), self.settings.pad_token_id, np.int32)
        tokens[0, :held] = self.tokens
        mask = None
        if self.mask is not None:
            mask = np.zeros(self.length, np.float32)
            mask[:held] = self.mask
        document = np.arange(len(self.lengths))
        segments = np.append(self.lengths, self.length - held)
        one = np.zeros(len(document), np.int64)
        return self._finished(tokens, np.array([held]), document, one, self.lengths, segments, mask, flushed=True)
