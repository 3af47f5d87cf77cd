"""`pack_flat`: documents of tokens into sequences of one length.

`wrap` lays documents end to end and cuts; nothing is lost and only a window's last sequence is padded. `first_fit` and
`best_fit` keep documents whole, in one of a few open sequences, and pad what room is left when a sequence is closed;
documents longer than a sequence are cut into pieces, unless `drop_oversized` says otherwise. `best_fit_wrap` keeps
documents whole where they fit, and splits one where instead a sequence would have to be closed before it is full; at a
window's end what lies in open sequences is laid end to end, so that, as with `wrap`, only the last one is padded.

Of each sequence come out `input_ids` and `positions` (int32 `[max_length]`; positions restart at each document, at the
sequence's beginning and at the padding), `sequence_length` (tokens before the padding), and `loss_mask` (float32, 1
where a document has none, 0 on padding) if one of its documents has one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zephon.columns import Block, Column, Fixed
from zephon.ops.base import Accumulator, WindowKey
from zephon.ops.binning import Binning
from zephon.ops.flat_documents import FlatPacker
from zephon.ops.token_fields import AUTO, LOSS_MASK
from zephon.ops.wrapping import Wrapping
from zephon.permutations import mix


class PackFlat(FlatPacker):
    """Token sequences into sequences of exactly `max_length`; see `zephon.ops.packing_settings.Packer`.

    `pad_token_id` (0) fills what room is left; `emit_positions=False` leaves `positions` out. With "wrap" and
    "best_fit_wrap" a document longer than a sequence is cut in any case, unless `drop_oversized=True`.
    """

    name = "pack_flat"

    def __init__(
        self,
        max_length: int,
        *,
        pad_token_id: int | None = None,
        emit_positions: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(max_length, **settings)
        self.pad_token_id = 0 if pad_token_id is None else self._whole("pad_token_id", pad_token_id, 0)
        self.emit_positions = bool(emit_positions)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "pad_token_id": self.pad_token_id, "emit_positions": self.emit_positions}

    def requires(self, downstream: frozenset[str] | None) -> frozenset[str] | None:
        names = AUTO if self.tokens_field == "auto" else (self.tokens_field,)
        return frozenset({*names, LOSS_MASK})

    def empty(self, block: Block) -> Block:
        rows = np.empty((0, self.max_length), np.int32)
        fields: dict[str, Column] = {"input_ids": Fixed(rows), "sequence_length": Fixed(np.empty(0, np.int32))}
        if self.emit_positions:
            fields["positions"] = Fixed(rows)
        if LOSS_MASK in block.fields:
            fields[LOSS_MASK] = Fixed(np.empty((0, self.max_length), np.float32))
        return block.with_fields(fields)

    def accumulator(self, key: WindowKey) -> Accumulator:
        seed = mix("pack", *key, 0 if self.shuffle_seed is None else self.shuffle_seed)
        plain = self.algorithm == "wrap" and self.homogeneity == "none" and self.shuffle_strategy is None
        return Wrapping(self) if plain else Binning(self, seed)
