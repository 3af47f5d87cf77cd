"""A block's token sequences and masks are the same whatever kind of column holds them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.columns import Block, Column, Objects, Ragged
from zephon.errors import RecordError
from zephon.ops.base import Faults
from zephon.ops.token_fields import Documents, documents_of

weights = st.sampled_from([0.0, 1.0, 0.5])
records = st.lists(st.lists(st.tuples(st.integers(0, 2**31 - 1), weights), max_size=6), max_size=8)


def ragged(values: list[list[Any]], dtype: Any) -> Ragged:
    offsets = np.cumsum([0, *map(len, values)])
    return Ragged(np.array([v for value in values for v in value], dtype), offsets)


def documents(tokens: Column, mask: Column, faults: Faults | None = None) -> Documents:
    samples = np.array([(0, 0, i) for i in range(len(tokens))], np.int64).reshape(-1, 3)
    return documents_of(Block({"input_ids": tokens, "loss_mask": mask}, samples), "auto", "pack", faults or Faults())


dtypes = st.tuples(st.sampled_from([np.int64, np.uint32]), st.sampled_from([np.float32, np.float64, np.uint8]))


@given(records, dtypes, st.booleans())
def test_a_mask_in_arrays_means_the_same_as_one_in_lists(drawn: Any, dtypes: Any, sliced: bool) -> None:
    ids, mask = dtypes
    tokens, masks = [[t for t, _ in one] for one in drawn], [[w for _, w in one] for one in drawn]
    columns = ragged(tokens, ids), ragged(masks, mask)
    if sliced and tokens:
        columns = columns[0].slice(1, len(tokens)), columns[1].slice(1, len(tokens))
        tokens, masks = tokens[1:], masks[1:]
    found = documents(*columns)
    expected = documents(Objects(tokens), Objects([np.array(one, mask) for one in masks]))
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.offsets.tolist() == expected.offsets.tolist()
    assert found.records.tolist() == expected.records.tolist()
    assert found.masked.tolist() == expected.masked.tolist()
    if len(found.records):
        assert found.mask is not None
        assert expected.mask is not None
        assert found.mask.dtype == expected.mask.dtype == np.float32
        assert found.mask.tolist() == expected.mask.tolist()


def test_a_mask_in_arrays_that_is_longer_than_its_tokens_is_a_bad_record() -> None:
    with pytest.raises(RecordError, match="row 1: .*'loss_mask': 2 values for 1 tokens in 'input_ids'"):
        documents(ragged([[1], [2]], np.int32), ragged([[1], [0, 1]], np.float32))
