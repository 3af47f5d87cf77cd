"""The arithmetic of packing."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zephon.ops.packing import pieces_of, wrapped
from zephon.positions import restarting

lengths = st.lists(st.integers(1, 40), max_size=60)


@given(st.lists(st.integers(0, 40) | st.integers(100, 140), max_size=60))
def test_positions_restart_at_each_segment(sizes: list[int]) -> None:
    assert restarting(np.array(sizes, np.int64)).tolist() == [i for size in sizes for i in range(size)]


@given(lengths, st.integers(1, 20))
def test_pieces_cover_each_document_in_order(sizes: list[int], capacity: int) -> None:
    document, start, length = pieces_of(np.array(sizes, np.int64), capacity)
    assert all(1 <= size <= capacity for size in length.tolist())
    covered = [(d, s + i) for d, s, n in zip(document.tolist(), start.tolist(), length.tolist()) for i in range(n)]
    assert covered == [(d, i) for d, size in enumerate(sizes) for i in range(size)]


@given(lengths, st.integers(1, 20))
def test_wrapped_segments_are_the_stream_cut_at_documents_and_sequences(sizes: list[int], capacity: int) -> None:
    document, sequence, length = wrapped(np.array(sizes, np.int64), capacity)
    stream = [d for d, size in enumerate(sizes) for _ in range(size)]
    assert np.repeat(document, length).tolist() == stream
    assert np.repeat(sequence, length).tolist() == [at // capacity for at in range(len(stream))]
    assert len(set(zip(document.tolist(), sequence.tolist()))) == len(document)
