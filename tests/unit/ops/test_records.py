"""Copies of what a user's functions hand over: nobody else's, as wide and as deep as the value, and no larger."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
from zephon.columns import Objects
from zephon.digests import column_digest
from zephon.ops.records import NESTED, NestedTooDeep, own

VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=3) | st.binary(max_size=3).map(bytearray) | st.sets(st.integers()),
    lambda inner: st.lists(inner, max_size=3)
    | st.tuples(inner, inner)
    | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    | inner.map(lambda value: [value, value]),
    max_leaves=12,
)


def containers(value: Any) -> list[Any]:
    """All that could be changed in it, each once."""
    found, left = {}, [value]
    while left:
        value = left.pop()
        if isinstance(value, (list, dict, tuple)) and id(value) not in found:
            left += value.values() if isinstance(value, dict) else value
        if isinstance(value, (list, dict, set, bytearray, np.ndarray)):
            found[id(value)] = value
    return list(found.values())


def doubled(levels: int, leaf: Any) -> Any:
    """A value of `levels` lists that stands for 2 ** levels leaves."""
    for _ in range(levels):
        leaf = [leaf, leaf]
    return leaf


@given(VALUES)
def test_a_copy_equals_the_value_and_shares_nothing_that_can_change(value: Any) -> None:
    mine = own(value)
    assert mine == value
    assert not {id(each) for each in containers(mine)} & {id(each) for each in containers(value)}
    assert len(containers(mine)) == len(containers(value)), "what is in two places is so in the copy"


def test_what_is_found_in_many_places_is_copied_once() -> None:
    mine = own(doubled(150, {"x": [1]}))
    assert len(containers(mine)) == 152
    assert mine[0] is mine[1]
    wide = own([shared := list(range(1000))] * 1000)
    assert all(each is wide[0] for each in wide)
    assert wide[0] is not shared


@pytest.mark.parametrize("shared", [False, True])
def test_as_deep_as_it_may_be_and_no_deeper_wherever_it_is_found_first(shared: bool) -> None:
    def nested(levels: int, inside: Any) -> Any:
        for _ in range(levels):
            inside = [inside]
        return inside

    part = nested(NESTED // 2, {"x": [1]})
    first = [part] if shared else []
    assert own([*first, nested(NESTED // 2 - 3, part)])
    with pytest.raises(NestedTooDeep):
        own([*first, nested(NESTED // 2 + 1, part)])


@pytest.mark.parametrize("runner", ["inline", "process"])
def test_a_record_that_shares_much_goes_through_every_operator_at_once(runner: str) -> None:
    def share(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "much": doubled(60, [row["id"]])}

    source = StaticMixtureWorkSource([Dataset.from_dict("d", {"s": InMemoryShard([{"id": 1}, {"id": 2}])})], None)
    push = lambda state, records: (state, records)  # noqa: E731
    made = Pipeline(source).map_transform(share).stateful_transform("same", init_state=list, push=push)
    made = made.batch(2).options(canonical_replicas=1, runner=runner, max_workers=1)
    (batch,) = list(made)
    made.close()
    expected = Objects([doubled(60, [row]) for row in batch["id"].tolist()])
    assert batch.field_digest("much") == column_digest(expected).hex()
