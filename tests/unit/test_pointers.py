"""Pointers as bytes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zephon.pointers import packed, unpacked
from zephon.windows import TASK_SAMPLES

NUMBERS = st.one_of(st.integers(0, 300), st.integers(0, 2**17), st.integers(0, 2**33), st.integers(0, 2**62))


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), max_size=30))
def test_what_is_packed_comes_back(pointers):
    array = np.array(pointers, np.int64).reshape(-1, 3)
    found = unpacked(packed(array))
    assert found.dtype == np.int64
    assert np.array_equal(found, array)


def test_the_pointers_of_a_usual_task_fit_a_descriptor_of_4_kib():
    rows = np.arange(TASK_SAMPLES)
    assert len(packed(np.column_stack((rows % 20, rows * 100, rows * 10**6)))) < 4096
