"""Packing records that stay whole."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.ops.cuts import cuts_of
from tests.unit.ops.test_pack_flat import KEY, block_of, documents, run
from zephon.columns import Block
from zephon.errors import RecordError, SettingError
from zephon.ops.base import Faults
from zephon.ops.pack_sequences import PackSequences

settings = st.fixed_dictionaries({
    "max_length": st.integers(1, 40),
    "algorithm": st.sampled_from(("first_fit", "best_fit")),
    "num_bins": st.integers(1, 4),
    "flush_strategy": st.sampled_from(("fifo", "fullest")),
    "drop_oversized": st.just(True),
    "shuffle_strategy": st.sampled_from((None, "within_bin", "bins")),
    "homogeneity": st.sampled_from(("none", "full")),
    "max_sequences_per_bin": st.sampled_from((None, 2)),
})  # fmt: skip


def records(docs: list[list[int]]) -> Block:
    block = block_of(docs)
    texts = Block.from_rows([{"text": f"t{number}"} for number in range(len(docs))], block.samples)
    return block.with_fields({**block.fields, **texts.fields})


def plain(block: Block) -> list[Any]:
    """Of each sequence its records' texts and tokens, its length, and its samples' rows."""
    offsets = block.sample_offsets if block.sample_offsets is not None else np.arange(len(block) + 1)
    return [
        (
            [(payload["text"], np.asarray(payload["input_ids"]).tolist()) for payload in row["packed_samples"]],
            row["sequence_length"],
            block.samples[low:high, 2].tolist(),
        )
        for row, (low, high) in zip(block.to_rows(), pairwise(offsets.tolist()))
    ]


@given(documents, settings, st.lists(st.integers(0, 40), max_size=6))
def test_records_stay_whole_and_output_is_the_same_however_they_are_cut_into_pushes(
    docs: list[list[int]], given_settings: dict[str, Any], cuts: list[int]
) -> None:
    block, longest = records(docs), given_settings["max_length"]
    whole, cut = (PackSequences(**given_settings).accumulator(KEY) for _ in range(2))
    made = plain(run(whole, [block]))
    assert plain(run(cut, cuts_of(block, cuts))) == made
    assert whole.counters == cut.counters
    fitting = [(f"t{number}", doc) for number, doc in enumerate(docs) if 1 <= len(doc) <= longest]
    assert sorted(item for packed, _, _ in made for item in packed) == sorted(fitting)
    for packed, length, rows in made:
        assert length == sum(len(tokens) for _, tokens in packed) <= longest
        assert [f"t{row}" for row in rows] == [text for text, _ in packed]
        assert len(packed) <= (given_settings["max_sequences_per_bin"] or len(docs))
        assert given_settings["homogeneity"] == "none" or len({row % 3 for row in rows}) == 1
    dropped = [doc for doc in docs if not 1 <= len(doc) <= longest]
    assert whole.counters.get("dropped_records", 0) == len(dropped)
    assert whole.counters.get("dropped_tokens", 0) == sum(map(len, dropped))
    assert whole.counters.get("padding_tokens", 0) == sum(longest - length for _, length, _ in made)


def test_the_length_may_be_a_functions() -> None:
    pack = PackSequences(10, length_fn=lambda payload: len(payload["text"]))
    block = Block.from_rows([{"text": "a" * size} for size in (4, 7, 6, 3, 0)], np.zeros((5, 3), np.int64))
    made = run(pack.accumulator(KEY), [block])
    packed = [[payload["text"] for payload in row["packed_samples"]] for row in made.to_rows()]
    assert packed == [["aaaa", "aaaaaa"], ["aaaaaaa", "aaa"]]
    assert pack.requires(frozenset({"packed_samples"})) is None


@pytest.mark.parametrize("value", [-1, 1.5, None, "3", True, float("nan")])
def test_a_length_that_is_none_makes_a_bad_record(value: Any) -> None:
    pack = PackSequences(10, length_fn=lambda payload: value if payload["text"] == "b" else 1)
    block = Block.from_rows([{"text": text} for text in "abc"], np.array([(0, 0, row) for row in range(3)]))
    with pytest.raises(RecordError, match="row 1.*expected a length"):
        run(pack.accumulator(KEY), [block])
    faults = Faults("skip")
    (row,) = run(pack.accumulator(KEY), [block], faults).to_rows()
    assert ([payload["text"] for payload in row["packed_samples"]], faults.skipped) == (["a", "c"], 1)


def test_a_record_that_cannot_be_handed_to_the_function_is_bad() -> None:
    value: list[Any] = []
    value.append(value)
    pack = PackSequences(10, length_fn=lambda payload: 1)
    block = Block.from_rows([{"text": "a"}, {"text": value}], np.array([(0, 0, row) for row in range(2)]))
    with pytest.raises(RecordError, match="row 1.*holds itself"):
        run(pack.accumulator(KEY), [block])


def test_a_function_that_raises_makes_a_bad_record() -> None:
    pack = PackSequences(10, length_fn=lambda payload: payload["length"])
    block = Block.from_rows([{"text": "a"}], np.zeros((1, 3), np.int64))
    with pytest.raises(RecordError, match="KeyError: 'length'"):
        run(pack.accumulator(KEY), [block])


@pytest.mark.parametrize("drop_oversized", [None, False])
def test_a_record_that_fits_no_sequence_is_a_bad_one_unless_it_is_to_be_dropped(drop_oversized: bool | None) -> None:
    pack = PackSequences(4, drop_oversized=drop_oversized)
    with pytest.raises(RecordError, match="a length of 5, more than max_length=4.*drop_oversized=True"):
        run(pack.accumulator(KEY), [block_of([[1], [1, 2, 3, 4, 5]])])


def test_records_without_tokens_are_dropped_and_counted_and_bad_ones_are_not_counted_twice() -> None:
    rows: list[dict[str, Any]] = [{"input_ids": ids} for ids in ([1], [], "x", [2])]
    block = Block.from_rows(rows, np.array([(0, 0, row) for row in range(4)]))
    faults, accumulator = Faults("skip"), PackSequences(4).accumulator(KEY)
    run(accumulator, [block], faults)
    assert (accumulator.counters["dropped_records"], faults.skipped) == (1, 1)


def test_another_function_is_another_identity() -> None:
    one, other = (PackSequences(4, length_fn=fn).describe() for fn in (lambda p: 1, lambda p: 2))
    assert one != other
    assert PackSequences(4, length_fn=lambda p: 1).describe() == one


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"algorithm": "wrap"}, "splits records"),
        ({"algorithm": "best_fit_wrap"}, "splits records"),
        ({"algorithm": "magic"}, "algorithm='magic'"),
        ({"pack_payloads": "concat"}, "pack_payloads='concat'"),
        ({"length_fn": 3}, "length_fn"),
        ({"max_length": 0}, "pack_sequences: max_length=0"),
    ],
)
def test_case_E14_settings_that_make_no_sense_are_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        PackSequences(**{"max_length": 8, **settings})
