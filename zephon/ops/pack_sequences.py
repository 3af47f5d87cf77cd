"""`pack_sequences`: records into sequences of at most one length, each record kept whole.

The sequences are those of `pack_flat`, but nothing is cut, laid end to end or padded. Of each come out
`packed_samples`, a list of its records' payloads (dicts with all of their fields), and `sequence_length`, the sum of
their lengths. A record's length is the number of its tokens, or what `length_fn(payload)` returns.

`padding_tokens` counts the room that was left in sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from zephon.columns import Block, Fixed, IntArray, Objects
from zephon.errors import SettingError
from zephon.function_digest import digest_of
from zephon.ops.base import Accumulator, Faults, WindowKey
from zephon.ops.flat_documents import sample_names
from zephon.ops.held_records import HeldRecords
from zephon.ops.homogeneity import components_of
from zephon.ops.open_sequences import OpenSequences, Step
from zephon.ops.packing_settings import SPLITTING, Packer
from zephon.ops.record_numbers import numbers_of
from zephon.ops.token_fields import documents_of
from zephon.permutations import mix


class PackSequences(Packer):
    """Records into sequences of at most `max_length`; see `zephon.ops.packing_settings.Packer`.

    `length_fn(payload) -> int` is the length of a record, in place of the number of its tokens. A record longer than
    `max_length` cannot be cut: it is a bad one unless `drop_oversized=True` drops it. `pack_payloads` can only be
    "keep_list"; `pad_token_id` and `emit_positions` are accepted and change nothing, as nothing is padded.
    """

    name = "pack_sequences"
    algorithms = ("first_fit", "best_fit")

    def __init__(
        self,
        max_length: int,
        *,
        length_fn: Callable[[dict[str, Any]], int] | None = None,
        pack_payloads: str = "keep_list",
        pad_token_id: int | None = None,
        emit_positions: bool = True,
        **settings: Any,
    ) -> None:
        if settings.get("algorithm") in SPLITTING:
            raise SettingError(
                f"pack_sequences: algorithm={settings['algorithm']!r} splits records, and pack_sequences keeps them "
                "whole; use 'first_fit' or 'best_fit'"
            )
        super().__init__(max_length, **settings)
        if length_fn is not None and not callable(length_fn):
            raise SettingError(f"pack_sequences: length_fn must be a function of one record's dict, not {length_fn!r}")
        self._choice("pack_payloads", pack_payloads, ("keep_list",))
        self.length_fn, self.users_code = length_fn, length_fn is not None

    def describe(self) -> dict[str, Any]:
        described = super().describe()
        if self.length_fn is not None:
            del described["tokens_field"]
            described["length_fn"] = digest_of(self.length_fn)
        return described

    def requires(self, downstream: frozenset[str] | None) -> frozenset[str] | None:
        return None

    def empty(self, block: Block) -> Block:
        return block.with_fields({"packed_samples": Objects([]), "sequence_length": Fixed(np.empty(0, np.int32))})

    def accumulator(self, key: WindowKey) -> Accumulator:
        seed = mix("pack", *key, 0 if self.shuffle_seed is None else self.shuffle_seed)
        return _Keeping(self, seed)


class _Keeping(Accumulator):
    """Holds the records that wait or lie in open sequences."""

    def __init__(self, settings: PackSequences, seed: int) -> None:
        super().__init__()
        self.settings = settings
        self.open = OpenSequences(settings, seed)
        self.held = HeldRecords()

    def push(self, block: Block, faults: Faults) -> list[Block]:
        settings = self.settings
        records, lengths = self._lengths(block, faults)
        records, lengths = self._fitting(block, records, lengths, faults)
        components = None
        if settings.homogeneity != "none":
            kept, components = components_of(
                block, records, settings.homogeneity, settings.groups, settings.name, faults
            )
            records, lengths = records[kept], lengths[kept]
        if not len(records):
            return []
        self.held.add(block if len(records) == len(block) else block.take(records), owned=len(records) < len(block))
        return self._finished(self.open.add(lengths, components))

    def flush(self, faults: Faults) -> list[Block]:
        placed, rest = self.open.finish()
        return self._finished(placed) + self._finished(rest)

    def _lengths(self, block: Block, faults: Faults) -> tuple[IntArray, IntArray]:
        """The records that have a length, and their lengths. One without tokens has length 0."""
        settings = self.settings
        if settings.length_fn is not None:
            wanted = "a length, a whole number from 0"
            numbers = numbers_of(settings.length_fn, block, settings, faults, wanted, whole=True)
            good = [record for record, number in enumerate(numbers) if number is not None]
            return np.array(good, np.int64), np.array([numbers[record] for record in good], np.int64)
        before = faults.skipped
        found = documents_of(block, settings.tokens_field, settings.name, faults)
        without = len(block) - len(found.records) - (faults.skipped - before)
        self.count("dropped_records", without)
        return found.records, found.lengths

    def _fitting(self, block: Block, records: IntArray, lengths: IntArray, faults: Faults) -> tuple[IntArray, IntArray]:
        """Without the records that are too long or too short."""
        settings = self.settings
        long, out = lengths > settings.max_length, lengths < settings.min_sequence_length
        if settings.drop_oversized:
            out |= long
        else:
            for at in np.flatnonzero(long).tolist():
                faults.bad(
                    block.sample_of(int(records[at])),
                    settings.name,
                    f"a length of {int(lengths[at])}, more than max_length={settings.max_length}; pack_sequences keeps "
                    "records whole: drop_oversized=True drops such records, pack_flat cuts them",
                )
        self.count("dropped_records", int(out.sum()))
        self.count("dropped_tokens", int(lengths[out].sum()))
        kept = np.flatnonzero(~(out | long))
        return (records, lengths) if len(kept) == len(records) else (records[kept], lengths[kept])

    def _finished(self, step: Step) -> list[Block]:
        if not step.sequences:
            return []
        records = self.held.take(self.held.numbers[step.row])
        rows = records.to_rows()
        bounds = np.searchsorted(step.sequence, np.arange(step.sequences + 1))
        lists = [rows[low:high] for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist())]
        used = np.add.reduceat(step.length, bounds[:-1])
        room = self.settings.max_length - used
        self.count("padding_tokens", int(room.sum()))
        self.count("flush_padding_tokens", int(room[step.flushed].sum()))
        names = Block({}, records.samples[:, :3], records.sample_offsets)
        samples, offsets, _ = sample_names(names, np.arange(len(rows)), step.sequence, step.length, step.sequences)
        fields = {"packed_samples": Objects(lists), "sequence_length": Fixed(used.astype(np.int32))}
        return [Block(dict(fields), samples, offsets)]
