"""`pack_flat`: documents of tokens into sequences of one length.

`wrap` lays documents end to end and cuts; nothing is lost and only a window's last sequence is padded. `first_fit` and
`best_fit` keep documents whole, in one of a few open sequences, and pad what room is left when a sequence is closed;
documents longer than a sequence are cut into pieces, unless `drop_oversized` says otherwise.

Of each sequence come out `input_ids` and `positions` (int32 `[max_length]`; positions restart at each document, at the
sequence's beginning and at the padding), `sequence_length` (tokens before the padding), and `loss_mask` (float32, 1
where a document has none, 0 on padding) if one of its documents has one.

Tokens are copied once from a pushed block to where they belong, document by document: an index for each token would
cost eight times the copy.
"""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from zephon.columns import AnyArray, Block, Column, Fixed, IntArray, spans
from zephon.errors import SettingError
from zephon.ops.base import Accumulator, Faults, Stateful, WindowKey
from zephon.ops.packing import DEFAULT_BINS, Bins, pieces_of, restarting, wrapped
from zephon.ops.token_fields import AUTO, LOSS_MASK, Documents, documents_of, masks_column

_ALGORITHMS = ("first_fit", "best_fit", "wrap")
_LARGEST = 2**31 - 1
Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]


class PackFlat(Stateful):
    """Token sequences into sequences of exactly `max_length`.

    `algorithm`: "first_fit", "best_fit" or "wrap". `num_bins`: how many sequences the first two keep open (default 64),
    and `flush_strategy` which of them is closed when no more may be opened, the oldest ("fifo") or the fullest;
    `max_sequences_per_bin`: how many documents one of them may hold. `drop_oversized`: documents longer than
    `max_length` are cut into pieces (None), dropped and counted (True), or bad records (False); `wrap` needs no such
    rule and drops them only if told to. Documents shorter than `min_sequence_length` are dropped and counted.
    """

    name = "pack_flat"
    changes_counts = True

    def __init__(
        self,
        max_length: int,
        *,
        algorithm: str = "first_fit",
        num_bins: int | None = None,
        max_sequences_per_bin: int | None = None,
        tokens_field: str = "auto",
        pad_token_id: int | None = None,
        emit_positions: bool = True,
        drop_oversized: bool | None = None,
        min_sequence_length: int = 1,
        shuffle_strategy: str | None = None,
        shuffle_seed: int | None = None,
        flush_strategy: str = "fifo",
        candidate_pool_size: int | None = None,
        max_candidate_age: int | None = None,
        homogeneity: str = "none",
        groups: Any = None,
    ) -> None:
        for name, value, default in (
            ("shuffle_strategy", shuffle_strategy, None),
            ("shuffle_seed", shuffle_seed, None),
            ("candidate_pool_size", candidate_pool_size, None),
            ("max_candidate_age", max_candidate_age, None),
            ("homogeneity", homogeneity, "none"),
            ("groups", groups, None),
        ):
            if value != default:
                raise SettingError(f"pack_flat: {name}={value!r} is not available yet; leave it at {default!r}")
        if algorithm == "best_fit_wrap":
            raise SettingError(f"pack_flat: algorithm={algorithm!r} is not available yet; use one of {_ALGORITHMS}")
        if algorithm not in _ALGORITHMS:
            raise SettingError(f"pack_flat: algorithm={algorithm!r}: must be one of {', '.join(_ALGORITHMS)}")
        if flush_strategy not in ("fifo", "fullest"):
            raise SettingError(f"pack_flat: flush_strategy={flush_strategy!r}: must be 'fifo' or 'fullest'")
        if drop_oversized not in (None, True, False):
            raise SettingError(f"pack_flat: drop_oversized={drop_oversized!r}: must be None, True or False")
        if type(tokens_field) is not str or not tokens_field:
            raise SettingError(f"pack_flat: tokens_field={tokens_field!r}: must be the name of a field, or 'auto'")
        self.max_length = _whole("max_length", max_length, 1, _LARGEST)
        self.num_bins = DEFAULT_BINS if num_bins is None else _whole("num_bins", num_bins, 1, _LARGEST)
        self.max_sequences_per_bin = max_sequences_per_bin
        if max_sequences_per_bin is not None:
            _whole("max_sequences_per_bin", max_sequences_per_bin, 1, _LARGEST)
            if algorithm == "wrap":
                raise SettingError("pack_flat: max_sequences_per_bin: algorithm='wrap' has no bins; use 'best_fit'")
        self.min_sequence_length = _whole("min_sequence_length", min_sequence_length, 1, self.max_length)
        self.pad_token_id = 0 if pad_token_id is None else _whole("pad_token_id", pad_token_id, 0, _LARGEST)
        self.algorithm, self.flush_strategy, self.tokens_field = algorithm, flush_strategy, tokens_field
        self.drop_oversized, self.emit_positions = drop_oversized, bool(emit_positions)

    def describe(self) -> dict[str, Any]:
        described: dict[str, Any] = {
            "max_length": self.max_length,
            "algorithm": self.algorithm,
            "tokens_field": self.tokens_field,
            "pad_token_id": self.pad_token_id,
            "emit_positions": self.emit_positions,
            "drop_oversized": self.drop_oversized,
            "min_sequence_length": self.min_sequence_length,
        }
        if self.algorithm != "wrap":
            described["num_bins"] = self.num_bins
            described["flush_strategy"] = self.flush_strategy
            described["max_sequences_per_bin"] = self.max_sequences_per_bin
        return described

    def requires(self, downstream: frozenset[str] | None) -> frozenset[str] | None:
        names = AUTO if self.tokens_field == "auto" else (self.tokens_field,)
        return frozenset({*names, LOSS_MASK})

    def empty(self, block: Block) -> Block:
        rows = np.empty((0, self.max_length), np.int32)
        fields: dict[str, Column] = {"input_ids": Fixed(rows), "sequence_length": Fixed(np.empty(0, np.int32))}
        if self.emit_positions:
            fields["positions"] = Fixed(rows)
        return block.with_fields(fields)

    def accumulator(self, key: WindowKey) -> Accumulator:
        return _Wrapping(self) if self.algorithm == "wrap" else _Binning(self)


def _whole(name: str, value: int, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise SettingError(f"pack_flat: {name}={value!r}: must be a whole number from {least} to {most}")
    return value


class _Packing(Accumulator):
    """What both ways of packing share: the choice of documents, and the making of output blocks."""

    def __init__(self, settings: PackFlat) -> None:
        super().__init__()
        self.settings, self.length = settings, settings.max_length

    def documents(self, block: Block, faults: Faults) -> Documents:
        """The documents to pack, without those that the settings leave out."""
        settings = self.settings
        found = documents_of(block, settings.tokens_field, settings.name, faults)
        lengths = found.lengths
        if settings.drop_oversized is False and settings.algorithm != "wrap":
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
        samples: tuple[IntArray, IntArray],
    ) -> list[Block]:
        """Finished sequences as a block. `tokens` is `[k, max_length]`, `segments` the lengths of all runs in it."""
        if not len(tokens):
            return []
        fields: dict[str, Column] = {"input_ids": Fixed(tokens)}
        if self.settings.emit_positions:
            fields["positions"] = Fixed(restarting(segments).reshape(tokens.shape))
        fields["sequence_length"] = Fixed(used.astype(np.int32))
        column = masks_column(mask, masked)
        if column is not None:
            fields[LOSS_MASK] = column
        self.count("padding_tokens", int(tokens.size - used.sum()))
        return [Block(fields, *samples)]


def _samples_of(block: Block, records: IntArray) -> tuple[IntArray, IntArray]:
    """`(samples, offsets)` of these records. Places end here: a sequence names each sample once."""
    of = Block({}, block.samples, block.sample_offsets).take(records)
    return of.samples[:, :3], np.arange(len(records) + 1) if of.sample_offsets is None else of.sample_offsets


class _Wrapping(_Packing):
    """Holds less than one sequence of tokens: what the next sequence begins with."""

    def __init__(self, settings: PackFlat) -> None:
        super().__init__(settings)
        self.tokens: AnyArray = np.empty(0, np.int32)
        self.mask: Floats | None = None
        self.lengths = np.empty(0, np.int64)  # of the documents' runs in `tokens`
        self.masked = np.empty(0, np.bool_)
        self.samples, self.offsets = np.empty((0, 3), np.int64), np.zeros(1, np.int64)

    def push(self, block: Block, faults: Faults) -> list[Block]:
        found = self.documents(block, faults)
        if not len(found.records):
            return []
        samples, offsets = _samples_of(block, found.records)
        self.samples = np.concatenate((self.samples, samples))
        self.offsets = np.concatenate((self.offsets, offsets[1:] + self.offsets[-1]))
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
        out = self._finished(
            tokens, np.full(whole, self.length), document[:done], sequence[:done], length[:done], length[:done], mask
        )
        rest = document[done:]
        self.lengths, self.masked = length[done:], self.masked[rest]
        first = int(rest[0]) if len(rest) else len(self.offsets) - 1
        base = self.offsets[first]
        self.samples, self.offsets = self.samples[base:].copy(), self.offsets[first:] - base
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
    ) -> list[Block]:
        masked = np.zeros(len(tokens), np.bool_)
        masked[sequence[self.masked[document]]] = True
        starts, counts = self.offsets[:-1][document], np.diff(self.offsets)[document]
        samples, of = self.samples[spans(starts, counts)], np.repeat(sequence, counts)
        first = _first_of_each(of, samples)
        if first is not None:
            samples, of = samples[first], of[first]
        offsets = np.searchsorted(of, np.arange(len(tokens) + 1))
        rows = None if mask is None else mask.reshape(tokens.shape)
        return self.sequences(tokens, used, segments, rows, masked, (samples, offsets))

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
        return self._finished(tokens, np.array([held]), document, one, self.lengths, segments, mask)


def _first_of_each(sequence: IntArray, samples: IntArray) -> IntArray | None:
    """Where each sample of a sequence comes first in it; None if no sequence names one twice."""
    rows = np.column_stack((sequence, samples)).astype(np.uint64)
    hashed = rows[:, 0]
    for column in range(1, 4):
        hashed = hashed * np.uint64(0x9E3779B97F4A7C15) + rows[:, column]
    hashed.sort()
    if not (hashed[1:] == hashed[:-1]).any():
        return None
    return np.sort(np.unique(rows, axis=0, return_index=True)[1])


class _Binning(_Packing):
    """Holds the open sequences, each in a row of one array; a closed one's row is used again."""

    def __init__(self, settings: PackFlat) -> None:
        super().__init__(settings)
        self.bins = Bins(
            self.length,
            settings.num_bins,
            best=settings.algorithm == "best_fit",
            close_fullest=settings.flush_strategy == "fullest",
            most=settings.max_sequences_per_bin,
        )
        self.tokens = np.empty((0, self.length), np.int32)
        self.mask: Floats | None = None
        self.rows: dict[int, int] = {}  # bin -> row
        self.free: list[int] = []
        self.segments: dict[int, list[int]] = {}  # bin -> lengths of its documents
        self.samples: dict[int, dict[tuple[int, ...], None]] = {}  # bin -> its samples, each once, in order
        self.masked: set[int] = set()

    def push(self, block: Block, faults: Faults) -> list[Block]:
        found = self.documents(block, faults)
        if not len(found.records):
            return []
        document, starts, lengths = np.arange(len(found.records)), found.offsets[:-1], found.lengths
        if lengths.max() > self.length:
            document, within, lengths = pieces_of(lengths, self.length)
            starts = starts[document] + within
        sizes = lengths.tolist()
        bins, offsets, closed = self.bins.place(sizes)
        self._open_rows(bins)
        self._copy(found, bins, offsets, starts.tolist(), sizes, document)
        self._note_samples(block, found.records[document], bins)
        return self._close(closed)

    def flush(self, faults: Faults) -> list[Block]:
        return self._close(self.bins.close_all())

    def _open_rows(self, bins: list[int]) -> None:
        """A row for each new bin."""
        new = [number for number in dict.fromkeys(bins) if number not in self.rows]
        missing = len(new) - len(self.free)
        if missing > 0:
            have = len(self.tokens)
            more = max(missing, have // 2)
            self.tokens = np.concatenate((self.tokens, np.empty((more, self.length), np.int32)))
            if self.mask is not None:
                self.mask = np.concatenate((self.mask, np.ones((more, self.length), np.float32)))
            self.free.extend(range(have + more - 1, have - 1, -1))
        for number in new:
            self.rows[number] = self.free.pop()
            self.segments[number], self.samples[number] = [], {}

    def _copy(
        self,
        found: Documents,
        bins: list[int],
        offsets: list[int],
        starts: list[int],
        sizes: list[int],
        document: IntArray,
    ) -> None:
        """Each document's tokens into the row of its bin."""
        flat, rows, segments, width = self.tokens.reshape(-1), self.rows, self.segments, self.length
        tokens = found.tokens
        for number, offset, start, size in zip(bins, offsets, starts, sizes):
            at = rows[number] * width + offset
            flat[at : at + size] = tokens[start : start + size]
            segments[number].append(size)
        if found.mask is None and self.mask is None:
            return
        if self.mask is None:
            self.mask = np.ones(self.tokens.shape, np.float32)
        flat_mask = self.mask.reshape(-1)
        for number, offset, start, size, piece in zip(bins, offsets, starts, sizes, document.tolist()):
            at = rows[number] * width + offset
            flat_mask[at : at + size] = 1 if found.mask is None else found.mask[start : start + size]
            if found.masked[piece]:
                self.masked.add(number)

    def _note_samples(self, block: Block, records: IntArray, bins: list[int]) -> None:
        names = self.samples
        samples, bounds = _samples_of(block, records)
        rows = list(map(tuple, samples.tolist()))
        if len(rows) == len(bins):
            for number, row in zip(bins, rows):
                names[number][row] = None
        else:
            for number, (low, high) in zip(bins, pairwise(bounds.tolist())):
                names[number].update(dict.fromkeys(rows[low:high]))

    def _close(self, closed: list[int]) -> list[Block]:
        """Closed bins as finished sequences."""
        if not closed:
            return []
        width = self.length
        index = [self.rows.pop(number) for number in closed]
        lists = [self.segments.pop(number) for number in closed]
        used = [sum(sizes) for sizes in lists]
        tokens = self.tokens.take(index, axis=0)
        mask = None if self.mask is None else self.mask.take(index, axis=0)
        for row, filled in enumerate(used):
            if filled < width:
                tokens[row, filled:] = self.settings.pad_token_id
                lists[row].append(width - filled)
                if mask is not None:
                    mask[row, filled:] = 0
        self.free.extend(index)
        masked = np.array([number in self.masked for number in closed], np.bool_)
        self.masked.difference_update(closed)
        names = [self.samples.pop(number) for number in closed]
        offsets = np.zeros(len(closed) + 1, np.int64)
        np.cumsum([len(of) for of in names], out=offsets[1:])
        flat = chain.from_iterable(chain.from_iterable(names))
        samples = np.fromiter(flat, np.int64, 3 * int(offsets[-1])).reshape(-1, 3)
        segments = np.fromiter(chain.from_iterable(lists), np.int64)
        return self.sequences(tokens, np.array(used), segments, mask, masked, (samples, offsets))
