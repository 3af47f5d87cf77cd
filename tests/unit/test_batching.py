"""A batch is the next records of its lane in their final form, wherever blocks begin and end."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.drawn_records import packed_blocks
from zephon.batching import LaneStream
from zephon.columns import HIDDEN, Block, Fixed, canonical
from zephon.digests import block_digest


def as_operators_leave_it(block: Block, width: int) -> Block:
    """The records with one more field, and one that is the operators' own; the fields in no order."""
    own = {f"{HIDDEN}number": Fixed(np.arange(len(block))), "rows": Fixed(np.zeros((len(block), width), np.int32))}
    return Block({**own, **dict(reversed(block.fields.items()))}, block.samples, block.sample_offsets)


@given(
    packed_blocks(min_size=1), st.integers(0, 2), st.lists(st.integers(0, 12), max_size=4), st.integers(0, 3), st.data()
)
def test_a_batch_is_the_final_form_of_the_lanes_next_records(
    block: Block, width: int, cuts: list[int], drop: int, data: st.DataObject
) -> None:
    block = as_operators_leave_it(block, width)
    bounds = sorted({0, len(block), *(min(at, len(block)) for at in cuts)})
    stream = LaneStream(100, drop)
    for low, high in pairwise(bounds):
        stream.append(block.slice(low, high))
    at = min(drop, len(block))
    assert stream.produced == 100 + len(block) - at
    while len(stream):
        count = data.draw(st.integers(1, 6))
        batch, due = stream.take(count), canonical(block.slice(at, min(at + count, len(block))))
        at += len(batch)
        assert list(batch.fields) == list(due.fields)
        assert block_digest(batch) == block_digest(due)
        assert np.array_equal(batch.samples, due.samples)
        assert np.array_equal(batch.sample_offsets, due.sample_offsets)  # type: ignore[arg-type]
    assert at == len(block)
