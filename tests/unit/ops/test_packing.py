"""The arithmetic of packing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.ops.packing import Bins, pieces_of, restarting, wrapped

lengths = st.lists(st.integers(1, 40), max_size=60)


@given(lengths)
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


def reference_bins(sizes: list[int], capacity: int, settings: dict[str, Any]) -> tuple[list[int], list[int], list[int]]:
    """The rule of `Bins`, said as plainly as possible."""
    bins: list[list[int]] = []
    where: list[int] = []
    offsets: list[int] = []
    closed: list[int] = []

    def room(number: int) -> int:
        return capacity - sum(bins[number])

    for size in sizes:
        open_bins = [b for b in range(len(bins)) if b not in closed]
        fitting = [b for b in open_bins if room(b) >= size]
        if not fitting:
            if len(open_bins) >= settings["limit"]:
                closed.append(min(open_bins, key=room) if settings["close_fullest"] else open_bins[0])
            bins.append([])
            fitting = [len(bins) - 1]
        number = min(fitting, key=room) if settings["best"] else fitting[0]
        where.append(number)
        offsets.append(sum(bins[number]))
        bins[number].append(size)
        if room(number) == 0 or len(bins[number]) == (settings["most"] or -1):
            closed.append(number)
    return where, offsets, closed


@given(
    st.lists(st.integers(1, 20), max_size=80),
    st.fixed_dictionaries({
        "limit": st.integers(1, 6), "best": st.booleans(), "close_fullest": st.booleans(),
        "most": st.none() | st.integers(1, 4),
    }),
    st.integers(0, 80),
)  # fmt: skip
def test_bins_follow_the_plain_rule_however_documents_are_cut_into_calls(
    sizes: list[int], settings: dict[str, Any], cut: int
) -> None:
    bins = Bins(20, **settings)
    first, second = bins.place(sizes[:cut]), bins.place(sizes[cut:])
    found = tuple([*a, *b] for a, b in zip(first, second))
    expected = reference_bins(sizes, 20, settings)
    assert found == expected
    assert len(bins.open) <= settings["limit"]
    assert bins.close_all() == sorted(set(expected[0]) - set(expected[2]))
    assert bins.open == []


@pytest.mark.parametrize("best", [True, False])
def test_a_bin_that_a_document_fills_exactly_is_closed_at_once(best: bool) -> None:
    bins = Bins(10, best=best)
    assert bins.place([6, 10, 4]).closed == [1, 0]
