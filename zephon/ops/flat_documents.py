"""What both ways of packing tokens share: which documents are packed, and how finished sequences become a block."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from zephon.columns import AnyArray, Block, Column, Fixed, IntArray, Ragged, spans
from zephon.ops.base import Accumulator, Faults
from zephon.ops.packing_settings import Packer
from zephon.ops.token_fields import LOSS_MASK, SAMPLE_TOKENS, Documents, documents_of, masks_column
from zephon.positions import positions_in

Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
# Rows of four numbers times these agree by chance only once in 2**63 pairs or so.
_HASH = np.array([pow(0x9E3779B97F4A7C15, power, 1 << 63) for power in range(4)])


class FlatPacker(Packer):
    """A packer whose sequences are arrays of tokens. `counts_tokens`: say how many tokens each sample has in them."""

    pad_token_id: int
    emit_positions: bool
    counts_tokens = False


class FlatPacking(Accumulator):
    """The choice of documents, and the making of output blocks."""

    def __init__(self, settings: FlatPacker) -> None:
        super().__init__()
        self.settings, self.length = settings, settings.max_length

    def documents(self, block: Block, faults: Faults) -> Documents:
        """The documents to pack, without those that the settings leave out."""
        settings = self.settings
        found = documents_of(block, settings.tokens_field, settings.name, faults)
        lengths = found.lengths
        if settings.drop_oversized is False and not settings.splits:
            for at in np.flatnonzero(lengths > self.length).tolist():
                faults.bad(
                    block.sample_of(int(found.records[at])),
                    settings.name,
                    f"{int(lengths[at])} tokens, more than max_length={self.length}; drop_oversized=None cuts such "
                    "documents into pieces, drop_oversized=True drops them",
                )
            found = found.take(np.flatnonzero(lengths <= self.length)) if (lengths > self.length).any() else found
            lengths = found.lengths
        out = lengths < settings.min_sequence_length
        if settings.drop_oversized:
            out |= lengths > self.length
        if out.any():
            self.count("dropped_records", int(out.sum()))
            self.count("dropped_tokens", int(lengths[out].sum()))
            found = found.take(np.flatnonzero(~out))
        return found

    def sequences(
        self,
        tokens: AnyArray,
        used: IntArray,
        segments: IntArray,
        mask: Floats | None,
        masked: Flags,
        names: tuple[IntArray, IntArray, IntArray],
        flushed: Flags,
    ) -> list[Block]:
        """Finished sequences as a block.

        `tokens` is int32 `[k, max_length]`, of which each has `used`; `segments` are the lengths of all runs in them,
        `mask` their loss mask, which only those have that are `masked`; `names` as `sample_names` has them. `flushed`:
        those that only the window's end finished.
        """
        fields: dict[str, Column] = {"input_ids": Fixed(tokens)}
        if self.settings.emit_positions:
            fields["positions"] = positions_in(segments, self.length)
        fields["sequence_length"] = Fixed(used.astype(np.int32))
        column = masks_column(mask, masked)
        if column is not None:
            fields[LOSS_MASK] = column
        samples, offsets, counts = names
        if self.settings.counts_tokens:
            fields[SAMPLE_TOKENS] = Ragged(counts, offsets)
        room = self.length - used
        self.count("padding_tokens", int(room.sum()))
        self.count("flush_padding_tokens", int(room[flushed].sum()))
        return [Block(fields, samples, offsets)]


def names_in(block: Block, records: IntArray) -> Block:
    """The samples of these records, and nothing else of them. Their places in the lane end here."""
    if block.sample_offsets is None and np.array_equal(records, np.arange(len(block))):
        return Block({}, block.samples[:, :3].copy())
    return Block({}, block.samples[:, :3], block.sample_offsets).take(records)


def sample_names(
    names: Block, row: IntArray, sequence: IntArray, length: IntArray, count: int
) -> tuple[IntArray, IntArray, IntArray]:
    """The samples of `count` sequences, each once a sequence, in order: `(samples [m, 3], offsets [count + 1], tokens
    of each [m])`.

    Piece `i` is `length[i]` tokens of record `row[i]` of `names`, in sequence `sequence[i]` (ascending). Where a record
    was made of several samples its tokens count for them in equal parts.
    """
    if names.sample_offsets is None:
        samples, of, tokens = names.samples[row], sequence, length
    else:
        starts, counts = names.sample_offsets[:-1][row], np.diff(names.sample_offsets)[row]
        samples, of = names.samples[spans(starts, counts)], np.repeat(sequence, counts)
        number = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
        share, many = np.repeat(length, counts), np.repeat(counts, counts)
        tokens = share // many + (number < share % many)
    same = _first_of_each(of, samples)
    if same is not None:
        first, which = same
        order = np.argsort(first)
        totals = np.zeros(len(first), np.int64)
        np.add.at(totals, which, tokens)
        samples, of, tokens = samples[first[order]], of[first[order]], totals[order]
    return samples, np.searchsorted(of, np.arange(count + 1)), tokens


def _first_of_each(sequence: IntArray, samples: IntArray) -> tuple[IntArray, IntArray] | None:
    """`(where each sample of a sequence comes first in it, which of those each is)`; None if none is named twice."""
    rows = np.column_stack((sequence, samples))
    hashed = rows @ _HASH
    hashed.sort()
    if not (hashed[1:] == hashed[:-1]).any():
        return None
    _, first, which = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    return first, which.reshape(-1)
