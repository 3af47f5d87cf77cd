"""The state of a work source: what JSON gives back as it was, and nothing else."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.errors import CheckpointError
from zephon.frontiers import Announcement, Checkpoint, Frontier, merge_checkpoints, parse_checkpoint
from zephon.source_state import STATE_LIMIT, SourceState, parse_state, unlike_json

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
ANYTHING = st.recursive(
    PLAIN | st.floats() | st.binary() | st.tuples(st.integers()) | st.just({1: 2}) | st.complex_numbers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=8,
)


def same(one: object, other: object) -> bool:
    """Equal, and of the same types throughout."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (isinstance(one, float) and math.isnan(one))


@given(ANYTHING)
def test_a_value_is_plain_exactly_if_json_gives_it_back(value):
    def comes_back() -> bool:
        try:
            return same(value, json.loads(json.dumps(value, allow_nan=False)))
        except (TypeError, ValueError):
            return False

    assert (unlike_json(value) is None) == comes_back()


@given(PLAIN, st.integers(0, 2**40))
def test_a_state_travels_through_a_frontier_and_a_checkpoint_unchanged(state, samples):
    text = SourceState(samples, "ab", state).to_text()
    assert same(parse_state(text).state, state)
    frontier = Frontier(9, 2, 30, 1, text)
    assert frontier.announcement == Announcement(9, 28, 1, text)
    checkpoint = Checkpoint({"canonical_replicas": 2}, 0, {0: frontier, 1: Frontier(0, 2, 30)})
    written = json.dumps(checkpoint.to_json())
    again = parse_checkpoint(json.loads(written))
    assert again.lanes == checkpoint.lanes
    assert json.dumps(again.to_json()) == written
    parts = [Checkpoint(checkpoint.identity, 0, {lane: checkpoint.lanes[lane]}).to_json() for lane in (0, 1)]
    assert json.dumps(merge_checkpoints(parts)) == written


def test_a_state_that_no_source_could_have_given_is_refused():
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    for state in ("x" * STATE_LIMIT * 2, nested, object(), {1, 2}):
        lanes = {"0": {**Frontier().to_json(), "source": {"samples": 0, "window": "", "state": state}}}
        checkpoint = {"format": 1, "identity": {"canonical_replicas": 1}, "epoch": 0, "lanes": lanes}
        with pytest.raises(CheckpointError, match="lane 0: the work source's state"):
            parse_checkpoint(checkpoint)


@pytest.mark.parametrize("text", ["[]", "{}", '{"samples": -1, "window": "", "state": 1}', '{"samples": 1}'])
def test_a_malformed_state_is_refused(text):
    with pytest.raises(ValueError, match="must"):
        parse_state(text)
