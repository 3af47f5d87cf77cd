"""How often a token is copied between the worker's ring and the rank's array: once packed, once into the slot."""

from __future__ import annotations

import numpy as np
import pytest

from zephon.batches import Batch
from zephon.batching import LaneStream
from zephon.columns import Block, Ragged
from zephon.ops.base import Faults, WindowKey
from zephon.ops.pack_flat import PackFlat
from zephon.transport import layout

LENGTH, BATCH = 65, 4


def in_the_workers_ring(documents: int = 200) -> tuple[np.ndarray, Block]:
    """A worker's memory, and the block of documents that the engine finds in it."""
    lengths = np.arange(documents) % 23 + 1
    offsets = np.append(0, np.cumsum(lengths))
    samples = np.stack((np.zeros(documents), np.zeros(documents), np.arange(documents)), axis=1).astype(np.int64)
    made = Block({"input_ids": Ragged(np.arange(offsets[-1], dtype=np.int32), offsets)}, samples)
    laid_out = layout.measure(made)
    memory = np.zeros(laid_out.nbytes, np.uint8)
    laid_out.write(memory)
    return memory, layout.read(memory)


def tokens(block: Block) -> np.ndarray:
    values: np.ndarray = block.fields["input_ids"].values  # type: ignore[attr-defined]
    return values


@pytest.mark.parametrize("algorithm", ["wrap", "first_fit", "best_fit"])
def test_between_the_finished_sequence_and_the_ranks_array_a_token_is_copied_once(algorithm: str) -> None:
    memory, block = in_the_workers_ring()
    assert np.shares_memory(tokens(block), memory)
    packing = PackFlat(LENGTH, algorithm=algorithm).accumulator(WindowKey(0, 0, 0, 0))
    finished = [*packing.push(block, Faults()), *packing.flush(Faults())]
    stream = LaneStream(0)
    for sequences in finished:
        assert not np.shares_memory(tokens(sequences), memory)  # the first copy: the worker has its slot back
        stream.append(sequences)
    assert len(finished[0]) >= BATCH
    for _ in range(len(finished[0]) // BATCH):
        batch = stream.take(BATCH)
        assert np.shares_memory(tokens(batch), tokens(finished[0]))
        laid_out = layout.measure(batch)
        slot = np.zeros(laid_out.nbytes, np.uint8)
        tokens(batch)[0, 0] += 1000  # what is changed now still arrives, so nothing was copied yet
        expected = tokens(batch).tolist()
        laid_out.write(slot)  # the second copy
        got = Batch(layout.read(slot), lane=0, first_record=0)["input_ids"]
        assert np.shares_memory(got, slot)
        assert got.tolist() == expected
