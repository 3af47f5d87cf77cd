"""One conversation becomes a record for each turn of the assistant."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.ops.cuts import assert_cuts_do_not_show
from zephon.columns import Block
from zephon.errors import RecordError, SettingError
from zephon.ops.base import Faults
from zephon.ops.expand_chat import ExpandChat

roles = st.sampled_from(["user", "assistant", "system", "tool"])
conversations = st.lists(st.lists(roles, min_size=1, max_size=6), max_size=6)


def said(who: list[str]) -> list[dict[str, str]]:
    return [{"role": role, "content": f"{number} {role}"} for number, role in enumerate(who)]


def block_of(values: list[Any]) -> Block:
    rows = [{"id": number, "messages": value, "tags": [number]} for number, value in enumerate(values)]
    return Block.from_rows(rows, np.array([(0, 0, i) for i in range(len(values))], np.int64).reshape(-1, 3))


@given(conversations)
def test_each_turn_comes_once_with_all_before_it_and_the_other_fields_repeated(drawn: list[list[str]]) -> None:
    faults = Faults()
    values = [said(who) if at % 2 else json.dumps(said(who)) for at, who in enumerate(drawn)]
    out = ExpandChat().process(block_of(values), faults)
    expected = [
        {"id": at, "messages": said(who)[: turn + 1], "tags": [at]}
        for at, who in enumerate(drawn)
        for turn, role in enumerate(who)
        if role == "assistant"
    ]
    assert out.to_rows()[: len(out)] == expected
    assert out.samples[:, 2].tolist() == [row["id"] for row in expected]
    assert faults.counters.get("dropped_records", 0) == sum("assistant" not in who for who in drawn)


@given(conversations, st.lists(st.integers(0, 6), max_size=3))
def test_records_come_out_the_same_however_they_are_cut_into_blocks(drawn: list[list[str]], cuts: list[int]) -> None:
    block = block_of([said(who) if at % 4 else 17 for at, who in enumerate(drawn)])
    assert_cuts_do_not_show(ExpandChat(), block, cuts)


def test_speakers_count_as_roles_and_messages_stay_as_they_are() -> None:
    messages = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}]
    assert ExpandChat().process(block_of([messages]), Faults()).to_rows()[0]["messages"] == messages[:2]


def test_bad_records_are_named() -> None:
    for value, words in ((5, "'messages': expected a list of messages, found int"), ([5], "'messages': message 0: ")):
        with pytest.raises(RecordError, match=words):
            ExpandChat().process(block_of([value]), Faults())
    with pytest.raises(RecordError, match="'talk': expected a list of messages, found no such field"):
        ExpandChat("talk").process(block_of([said(["user"])]), Faults())
    with pytest.raises(SettingError, match="field=''"):
        ExpandChat("")
