"""Rows in memory: the same values, a digest of them, nothing shared."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.datasets import Dataset, InMemoryShard
from zephon.errors import DatasetError, SettingError
from zephon.ops.base import Faults

VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=5,
)
ROWS = st.lists(st.dictionaries(st.text(max_size=2), VALUE, max_size=3), min_size=1, max_size=6)


def of(rows: list[dict[str, Any]], name: str = "d") -> Dataset:
    return Dataset.from_dict(name, {"s": InMemoryShard(rows)})


@given(ROWS, st.data())
def test_rows_come_back_in_any_order(rows: list[dict[str, Any]], data: st.DataObject) -> None:
    order = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1))
    block = of(rows).fetch(0, np.array(order), None, Faults())
    assert block.to_rows() == [rows[i] for i in order]


@given(ROWS, ROWS)
def test_digests_are_equal_where_rows_are(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    assert of(one).digest == of([dict(reversed(row.items())) for row in one], "other").digest
    if repr(one) != repr(other) and one != other:
        assert of(one).digest != of(other).digest


def test_types_that_look_alike_have_digests_of_their_own() -> None:
    values: list[Any] = [
        1, 1.0, True, "1", b"1", [1], (1,), {1}, frozenset({1}), np.int64(1), np.int32(1), np.array([1]),
        np.array([[1]]), 2**70, {"1": 1}, {1: 1}, None,
    ]  # fmt: skip
    assert len({of([{"a": value}]).digest for value in values}) == len(values)


def test_case_A9_a_digest_does_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    program = (
        "from zephon import Dataset, InMemoryShard\n"
        "rows = [{'s': {'a', 'b', 'c', 'd'}, 'f': frozenset('xyz'), 't': ('p', {'q': {'r', 's'}})}]\n"
        "print(Dataset.from_dict('d', {'s': InMemoryShard(rows)}).digest)"
    )
    root = Path(__file__).parents[3]
    digests = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            check=True, capture_output=True, text=True,
        ).stdout
        for seed in ("0", "1", "12345")
    }  # fmt: skip
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 32


def test_shards_keep_the_order_given_and_empty_ones_are_left_out() -> None:
    shards = {"b10": InMemoryShard([{"i": 0}]), "none": InMemoryShard([]), "b2": InMemoryShard([{"i": 1}, {"i": 2}])}
    dataset = Dataset.from_dict("d", shards)
    assert dataset.counts.tolist() == [1, 2]
    assert [dataset.shard_path(i) for i in range(dataset.shard_count)] == ["b10", "b2"]
    assert dataset.total == 3
    assert dataset.raw_bytes > 0
    assert dataset.digest != Dataset.from_dict("d", dict(reversed(shards.items()))).digest


def test_rows_are_counted_once_and_not_with_each_read() -> None:
    source = of([{"id": 1}]).source
    assert source.counts is source.counts


def test_a_function_that_changes_its_input_changes_no_row() -> None:
    dataset = of([{"messages": [{"role": "user"}], "array": np.zeros(2)}])
    row = dataset.fetch(0, np.array([0]), None, Faults()).to_rows()[0]
    row["messages"][0]["role"] = "changed"
    row["array"][:] = 1
    again = dataset.fetch(0, np.array([0]), None, Faults()).to_rows()[0]
    assert again["messages"] == [{"role": "user"}]
    assert again["array"].tolist() == [0, 0]


def test_only_needed_fields_are_given() -> None:
    dataset = of([{"a": 1, "b": 2}, {"b": 3}])
    assert dataset.fetch(0, np.array([0, 1]), frozenset({"a"}), Faults()).to_rows() == [{"a": 1}, {}]


@pytest.mark.parametrize("shards", [{}, {"a": InMemoryShard([])}, {"a": [{"x": 1}]}, [{"x": 1}]])
def test_what_holds_no_rows_is_refused(shards: Any) -> None:
    with pytest.raises(DatasetError, match="'d'"):
        Dataset.from_dict("d", shards)


def test_rows_that_are_no_dicts_and_names_that_are_no_names_are_refused() -> None:
    rows: Any = [{"a": 1}, ["a"]]
    with pytest.raises(DatasetError, match="row 1 is list"):
        InMemoryShard(rows)
    rows = [{1: "a"}]
    with pytest.raises(DatasetError, match="str keys"):
        InMemoryShard(rows)
    with pytest.raises(SettingError, match="name"):
        of([{"a": 1}], "")
