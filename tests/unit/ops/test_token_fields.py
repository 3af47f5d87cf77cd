"""A block's token sequences and masks are the same whatever kind of column holds them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.columns import Block, Column, Fixed, Objects, Ragged
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
    with pytest.raises(RecordError, match="row 1: .*'loss_mask': 2 values for 1 token in 'input_ids'"):
        documents(ragged([[1], [2]], np.int32), ragged([[1], [0, 1]], np.float32))


@given(st.lists(st.lists(st.integers(-3, 3), min_size=1, max_size=4), min_size=1, max_size=6))
def test_a_negative_id_is_a_bad_record_in_every_kind_of_column(drawn: list[list[int]]) -> None:
    good = [record for record, ids in enumerate(drawn) if min(ids) >= 0]
    columns: list[Column] = [Objects(list(drawn)), ragged(drawn, np.int64), ragged(drawn, np.int32)]
    if len({len(ids) for ids in drawn}) == 1:
        columns.append(Fixed(np.array(drawn)))
    samples = np.array([(0, 0, i) for i in range(len(drawn))], np.int64)
    for column in columns:
        faults = Faults("skip")
        found = documents_of(Block({"input_ids": column}, samples), "auto", "pack", faults)
        assert found.records.tolist() == good
        assert found.tokens.tolist() == [token for record in good for token in drawn[record]]
        assert faults.skipped == len(drawn) - len(good)


@pytest.mark.parametrize("wrong", [-1, 2**31, 2**70])
@pytest.mark.parametrize("of", [list, np.array])
def test_an_id_out_of_range_is_named_with_the_range(wrong: int, of: Any) -> None:
    block = Block({"input_ids": Objects([of([7, wrong])])}, np.zeros((1, 3), np.int64))
    with pytest.raises(RecordError) as caught:
        documents_of(block, "auto", "pack", Faults())
    expected = "expected token ids (a list of integers from 0 to 2147483647), found"
    assert caught.value.cause == f"field 'input_ids': {expected} {wrong} at place 1"
