"""Digests of Python objects: equal for equal values, however these came about; and cheap where much is shared."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.columns import Objects
from zephon.digests import column_digest

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3)
    | st.tuples(inner)
    | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=10,
)


def digest(*values: Any) -> bytes:
    return column_digest(Objects(list(values)))


@given(VALUES)
def test_two_references_to_one_object_are_two_equal_objects(value: Any) -> None:
    assert digest([value, [value]]) == digest([copy.deepcopy(value), [copy.deepcopy(value)]])
    assert digest(value, value) == digest(value, pickle.loads(pickle.dumps(value)))


@given(VALUES, VALUES)
def test_values_that_differ_have_other_digests(one: Any, other: Any) -> None:
    assert (digest(one) == digest(other)) == (repr(one) == repr(other)), "repr tells True from 1, and -0.0 from 0.0"


def test_a_value_that_stands_for_very_many_is_walked_once() -> None:
    value: Any = [1]
    for _ in range(200):
        value = [value, value]
    assert digest(value) == digest(copy.deepcopy(value))


def test_what_holds_itself_is_the_same_wherever_it_stands() -> None:
    def round_about() -> list[Any]:
        loop: list[Any] = [1]
        loop.append({"up": loop})
        return loop

    one = round_about()
    assert digest([one, [one]]) == digest([round_about(), [round_about()]])
    assert digest(one) != digest([1, {"up": round_about()}])
    held: list[Any] = []
    inner = [held]  # leads out of itself: one digest here, another there
    held += [inner, [inner]]
    assert digest(held) == digest(pickle.loads(pickle.dumps(held)))


@pytest.mark.parametrize("dtype", ["i8", "f4", "?", "U3"])
def test_masked_arrays_are_what_their_masks_show(dtype: str) -> None:
    array = np.ma.MaskedArray(np.array([1, 0, 1]).astype(dtype), mask=[False, True, False])
    hidden = np.ma.MaskedArray(np.array([1, 1, 1]).astype(dtype), mask=[False, True, False])
    shown = np.ma.MaskedArray(np.array([1, 0, 1]).astype(dtype))
    assert digest(array) == digest(array.copy()) == digest(pickle.loads(pickle.dumps(array))) == digest(hidden)
    assert len({digest(array), digest(shown), digest(array.data)}) == 3
    assert digest(shown) == digest(np.ma.MaskedArray(shown.data, mask=[False] * 3))
