"""The usual loader, for comparison: each rank has its own part of the documents, tokenises and packs them by itself.

It is built from torch's own `DistributedSampler`, which deals a shuffled order of all documents to the ranks in turn.
What it saves is what is usually saved: how many documents rank 0 has consumed. On another number of ranks that count is
scaled, so that all ranks together go on from the same place in the shuffled order.

That is nearly right, and cannot be quite right. Ranks have not consumed equally many documents, since documents differ
in length; the tokens that a rank had left over from its last document are nowhere saved; and from then on other
documents lie side by side in each sequence. So after a change of the number of ranks every batch is another one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from zephon_daemon.demo.corpus import END, read_documents
from zephon_daemon.demo.model import SEQUENCE

SEED = 42
ROWS = 2
"""Sequences of one batch, as in the recipe; `STEP_BATCHES` of them, over all ranks, are one global step."""
STEP_BATCHES = 8


class UsualBatch:
    """Packed sequences, int64 `[ROWS, SEQUENCE + 1]`."""

    def __init__(self, rows: torch.Tensor, ends_round: bool) -> None:
        self.rows, self.ends_round = rows, ends_round

    def to_training(self) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[:, :-1], "labels": self.rows[:, 1:]}

    def names(self) -> list[str]:
        """A digest of each sequence, so that steps compare as sets: the order within one is not held against it."""
        return [hashlib.blake2b(row.numpy().tobytes(), digest_size=16).hexdigest() for row in self.rows]


class UsualLoader:
    """The batches of one rank of `world`."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        from tokenizers import Tokenizer

        self._texts = [d.text for name in ("code", "prose") for d in read_documents(folder / "corpus" / name)]
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._end = self._tokenizer.encode(END).ids[0]
        self._sampler = DistributedSampler(self._texts, num_replicas=world, rank=rank, shuffle=True, seed=SEED)
        self._world = world
        self._consumed = 0

    def state_dict(self) -> dict[str, int]:
        """How many documents this rank has consumed, and of how many ranks it was one."""
        return {"documents": self._consumed, "ranks": self._world}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._consumed = state["documents"] * state["ranks"] // self._world

    def __iter__(self) -> Iterator[UsualBatch]:
        kept: list[int] = []
        batches, own = 0, STEP_BATCHES // self._world
        size = ROWS * (SEQUENCE + 1)
        for index in list(self._sampler)[self._consumed :]:
            kept += [*self._tokenizer.encode(self._texts[index]).ids, self._end]
            self._consumed += 1
            while len(kept) >= size:
                rows, kept = torch.tensor(kept[:size]).view(ROWS, -1), kept[size:]
                batches += 1
                yield UsualBatch(rows, ends_round=batches % own == 0)


def save(path: Path, state: dict[str, Any]) -> None:
    path.write_text(json.dumps(state))


def load(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))
