"""Whatever a checkpoint holds, it is loaded or refused with a CheckpointError, at once, and then gives what it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zephon.checkpoints import load_checkpoint, merge_checkpoints
from zephon.errors import CheckpointError
from zephon.frontiers import checkpoint_from_text, complete_checkpoint, parse_checkpoint

numbers = st.one_of(st.integers(-2, 5), st.sampled_from([2**31, 2**62, 2**63, 10**30, -(2**63)]))
anything = st.recursive(
    st.none() | st.booleans() | numbers | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
keys = st.one_of(numbers.map(str), st.sampled_from(["01", "+1", " 1", "١", "1_0", "9" * 5000, ""]), numbers)
frontier = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("chunk", "offset", "records", "skipped", "source"), numbers | anything)
)
whole = st.fixed_dictionaries(
    {"format": st.just(1) | anything, "lanes": st.dictionaries(keys, frontier | anything, max_size=4) | anything},
    optional={
        "identity": st.fixed_dictionaries({"canonical_replicas": numbers | anything}) | anything,
        "epoch": numbers | anything,
        "complete": anything,
    },
)


@given(whole | anything)
def test_any_value_is_a_checkpoint_or_refused_and_one_that_was_taken_is_given_back(state: Any) -> None:
    try:
        checkpoint = parse_checkpoint(state)
    except CheckpointError as error:
        assert len(str(error)) < 1000  # noqa: PT017  either is right
        return
    again = json.loads(json.dumps(checkpoint.to_json()))
    assert parse_checkpoint(again).to_json() == checkpoint.to_json()
    if not checkpoint.missing:
        assert complete_checkpoint(state).lanes == checkpoint.lanes


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=50), whole.map(lambda state: json.dumps(state).encode())), st.integers(0, 400))
def test_any_file_is_a_checkpoint_or_an_error_that_names_it(tmp_path: Path, data: bytes, cut: int) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(data[:cut])
    try:
        state = load_checkpoint(path)
    except CheckpointError as error:
        assert "state.json" in str(error)  # noqa: PT017
    else:
        parse_checkpoint(state)


@given(st.lists(whole, max_size=3))
def test_any_parts_are_merged_or_refused(parts: list[Any]) -> None:
    try:
        merged = merge_checkpoints(parts)
    except CheckpointError:
        return
    assert parse_checkpoint(merged).to_json() == merged


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "", "\x00", "1e999", "9" * 5000, '"\ud800"'])
def test_text_that_is_no_checkpoint_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError):
        checkpoint_from_text(text)


@pytest.mark.parametrize("lanes", [2**62, 10**30, 1 << 17])
def test_a_checkpoint_of_more_lanes_than_there_can_be_is_refused_at_once(lanes: int) -> None:
    state = {"format": 1, "identity": {"canonical_replicas": lanes}, "epoch": 0, "lanes": {"0": {}}, "complete": True}
    with pytest.raises(CheckpointError, match="canonical_replicas"):
        parse_checkpoint(state)
