"""The shuffle buffer."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.ops.cuts import cuts_of
from zephon.columns import Block
from zephon.errors import SettingError
from zephon.ops.base import Accumulator, Faults, WindowKey
from zephon.ops.shuffle import Shuffle

KEY = WindowKey(1, 0, 2, 3)
VALUES = (
    lambda i: i,
    lambda i: f"text {i}",
    lambda i: np.full(3, i, np.int32),
    lambda i: np.arange(i % 5),
    lambda i: [i, "x"] if i % 2 else None,
)


def block_of(count: int, value: Any = VALUES[0], odd: bool = False) -> Block:
    rows = [{"id": i, "value": value(i)} for i in range(count)]
    if odd and count > 3:
        rows[3] = {"id": "three"}
    return Block.from_rows(rows, np.array([(0, 1, i) for i in range(count)], np.int64).reshape(-1, 3))


def run(accumulator: Accumulator, blocks: list[Block]) -> list[Any]:
    out: list[Any] = []
    for block in blocks:
        for made in accumulator.push(block, Faults()):
            out += plain(made)
    for made in accumulator.flush(Faults()):
        out += plain(made)
    return out


def plain(block: Block) -> list[Any]:
    rows = [{k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in row.items()} for row in block.to_rows()]
    offsets = block.sample_offsets if block.sample_offsets is not None else np.arange(len(block) + 1)
    return [(row, block.samples[a:b].tolist()) for row, (a, b) in zip(rows, pairwise(offsets.tolist()))]


algorithms = st.sampled_from(("streaming", "block"))
counts, sizes, cuts = st.integers(0, 60), st.integers(1, 30), st.lists(st.integers(0, 60), max_size=8)


@given(algorithms, counts, sizes, cuts, st.sampled_from(VALUES), st.booleans())
def test_order_is_the_same_however_records_are_cut_into_pushes(
    algorithm: str, count: int, size: int, at: list[int], value: Any, odd: bool
) -> None:
    block, shuffle = block_of(count, value, odd), Shuffle(size, algorithm=algorithm)
    whole = run(shuffle.accumulator(KEY), [block])
    assert run(shuffle.accumulator(KEY), cuts_of(block, at)) == whole
    by_row = [Block.from_rows([row], block.samples[i : i + 1]) for i, row in enumerate(block.to_rows())]
    assert run(shuffle.accumulator(KEY), by_row) == whole
    assert sorted(sample[0][2] for _, sample in whole) == list(range(count))
    assert sorted(map(repr, whole)) == sorted(map(repr, plain(block)))


@given(algorithms, counts, sizes)
def test_a_record_moves_less_than_the_buffer(algorithm: str, count: int, size: int) -> None:
    shuffle = Shuffle(size, algorithm=algorithm)
    order = [sample[0][2] for _, sample in run(shuffle.accumulator(KEY), [block_of(count)])]
    for place, number in enumerate(order):
        assert place - size < number < place + size or size == 1 == 1 + abs(place - number)


@given(counts, sizes)
def test_a_block_is_permuted_whole_and_no_record_leaves_it(count: int, size: int) -> None:
    shuffle = Shuffle(size, algorithm="block")
    order = [sample[0][2] for _, sample in run(shuffle.accumulator(KEY), [block_of(count)])]
    assert [number // size for number in order] == [number // size for number in range(count)]


def test_within_a_block_every_order_is_as_likely_as_any_other() -> None:
    block, found = block_of(3), Counter[tuple[int, ...]]()
    for seed in range(1200):
        out = run(Shuffle(3, seed=seed, algorithm="block").accumulator(KEY), [block])
        found[tuple(sample[0][2] for _, sample in out)] += 1
    assert len(found) == 6
    assert sum((count - 200) ** 2 / 200 for count in found.values()) < 20.5  # chi-square, 5 degrees: 1 in 1000


@given(algorithms, counts, sizes, cuts)
def test_no_more_than_the_buffer_and_one_push_are_held(algorithm: str, count: int, size: int, at: list[int]) -> None:
    accumulator = Shuffle(size, algorithm=algorithm).accumulator(KEY)
    held = 0
    for block in cuts_of(block_of(count), at):
        held += len(block) - sum(map(len, accumulator.push(block, Faults())))
        assert held <= size


def test_records_of_several_samples_keep_them() -> None:
    block = block_of(4)
    made = Block(block.fields, np.array([(0, 0, i) for i in range(6)], np.int64), np.array([0, 1, 3, 3, 6]))
    out = run(Shuffle(8).accumulator(KEY), [made.slice(0, 2), made.slice(2, 4)])
    assert {row["id"]: [s[2] for s in samples] for row, samples in out} == {0: [0], 1: [1, 2], 2: [], 3: [3, 4, 5]}


def test_what_is_held_is_a_copy() -> None:
    block = block_of(8, VALUES[2])
    accumulator = Shuffle(100).accumulator(KEY)
    early = [row["value"].tolist() for made in accumulator.push(block, Faults()) for row in made.to_rows()]
    block.fields["value"].values[:] = -1  # type: ignore[attr-defined]
    block.samples[:] = -1
    (out,) = accumulator.flush(Faults())
    assert sorted([*early, *(row["value"].tolist() for row in out.to_rows())]) == [[i] * 3 for i in range(8)]
    assert out.samples.min() == 0


@pytest.mark.parametrize("algorithm", ["streaming", "block"])
@pytest.mark.parametrize("other", [KEY._replace(**{name: 7}) for name in KEY._fields])
def test_every_part_of_the_windows_name_changes_the_order(other: WindowKey, algorithm: str) -> None:
    block, shuffle = block_of(60), Shuffle(30, algorithm=algorithm)
    assert run(shuffle.accumulator(other), [block]) != run(shuffle.accumulator(KEY), [block])
    seeded = Shuffle(30, seed=1, algorithm=algorithm)
    assert run(seeded.accumulator(KEY), [block]) != run(shuffle.accumulator(KEY), [block])


def test_a_buffer_of_one_keeps_the_order() -> None:
    assert run(Shuffle(1).accumulator(KEY), [block_of(20)]) == plain(block_of(20))


def test_the_order_is_fixed_for_all_time() -> None:
    order = [sample[0][2] for _, sample in run(Shuffle(6).accumulator(KEY), [block_of(12)])]
    assert order == [0, 3, 2, 4, 1, 5, 6, 10, 7, 9, 8, 11]
    blocks = run(Shuffle(6, algorithm="block").accumulator(KEY), [block_of(12)])
    assert [sample[0][2] for _, sample in blocks] == [5, 0, 1, 2, 3, 4, 7, 11, 9, 10, 6, 8]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"buffer_size": 0}, "buffer_size=0"),
        ({"buffer_size": True}, "buffer_size=True"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"algorithm": "riffle"}, "algorithm='riffle'"),
    ],
)
def test_case_E14_settings_that_make_no_sense_are_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        Shuffle(**settings)
