"""Records that an accumulator holds."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.drawn_records import packed_blocks
from tests.unit.ops.test_shuffle import block_of, plain
from zephon.columns import Block
from zephon.ops.held_records import HeldRecords


def said(record: tuple[dict[str, Any], list[Any]]) -> str:
    """A record in words, whatever the order of its fields."""
    return repr((sorted(record[0].items()), record[1]))


@given(st.lists(packed_blocks(), max_size=4), st.randoms(use_true_random=False))
def test_records_leave_as_they_came_in_any_order(blocks: list[Block], random: object) -> None:
    held, known = HeldRecords(), []
    for block in blocks:
        held.add(block)
        known += plain(block)
    order = list(range(len(known)))
    random.shuffle(order)  # type: ignore[attr-defined]
    half = len(order) // 2
    for part in (order[:half], order[half:]):
        found = plain(held.take(np.array(part, np.int64)))
        assert list(map(said, found)) == [said(known[number]) for number in part]
    assert len(held) == 0


def test_a_few_records_do_not_keep_what_they_came_with_alive() -> None:
    held = HeldRecords()
    for _ in range(40):
        numbers = held.add(block_of(512))
        held.drop(numbers[1:])
    assert held.numbers.tolist() == list(range(0, 40 * 512, 512))
    assert sum(map(len, held._blocks.values())) <= 2048 + 512
    assert [row["id"] for row in held.take(held.numbers).to_rows()] == [0] * 40
