"""What is a conversation, in which shapes it may come, and what is wrong with one that is none."""

from __future__ import annotations

import datetime
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.ops.conversations import SPEAKERS, messages_of, tools_of

parts = st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=5)})
contents = st.text(max_size=12) | st.lists(parts)
conversations = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": contents}),
    min_size=1,
    max_size=5,
)


@given(conversations)
def test_json_in_a_string_keys_that_are_null_and_other_containers_mean_the_same(messages: list[dict[str, Any]]) -> None:
    assert messages_of(messages) == messages
    assert messages_of(json.dumps(messages)) == messages
    assert messages_of(tuple(messages)) == messages
    assert messages_of(np.array([*messages, None], object)[:-1]) == messages
    struct = [{"tool_calls": None, "from": None, "value": None, **message, "name": None} for message in messages]
    assert messages_of(struct) == messages


@given(st.lists(st.tuples(st.sampled_from(sorted(SPEAKERS)), st.text(max_size=12)), min_size=1, max_size=5))
def test_speakers_and_their_words_become_roles_and_contents(said: list[tuple[str, str]]) -> None:
    given_so = [{"from": who, "value": what, "weight": 1} for who, what in said]
    assert messages_of(given_so) == [{"role": SPEAKERS[who], "content": what, "weight": 1} for who, what in said]


def test_what_comes_out_shares_nothing_with_what_went_in() -> None:
    arguments = {"place": ["here"]}
    given_so = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]
    made = messages_of(given_so)
    assert made == given_so
    made[0]["tool_calls"][0]["function"]["arguments"]["place"].append("there")
    assert arguments == {"place": ["here"]}


def test_numbers_of_numpy_become_python_s_and_reasoning_is_known_by_both_names() -> None:
    odd = {"n": np.float64(1.5), "v": np.arange(2)}
    made = messages_of([{"role": "assistant", "content": "x", "thinking": "hm", **odd}])
    assert made == [
        {"role": "assistant", "content": "x", "thinking": "hm", "n": 1.5, "v": [0, 1], "reasoning_content": "hm"}
    ]
    assert type(made[0]["n"]) is float


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "expected a list of messages, found null"),
        (17, "expected a list of messages, found int"),
        ([], "expected a list of messages, found an empty one"),
        (b"[]", "found bytes; decode_text() makes text of bytes"),
        ("hello", "expected a list, or one as JSON; found str 'hello', which is no JSON"),
        ("[NaN]", "NaN is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("{}", "expected a list of messages, found dict"),
        ([USER, "hi"], "message 1: expected a dict with 'role' and 'content', found str"),
        ([{"content": "hi"}], "message 0: 'role': expected a name, found the keys 'content'"),
        ([{"role": 3, "content": "hi"}], "message 0: 'role': expected a name, found 3"),
        ([{"from": "narrator", "value": "hi"}], "message 0: 'from': expected one of human, user, gpt"),
        ([USER, {"role": "user", "text": "hi"}], "message 1: expected 'content', found only the keys 'role', 'text'"),
        ([{"role": "user", "content": None}], "message 0: expected 'content', found only the keys 'role'"),
        ([{"from": "human", "value": None}], "message 0: expected 'content', found only the keys 'role'"),
        ([{"role": "user", "content": 5}], "message 0: 'content': expected str or a list of text parts, found int"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "url": "b"}]}],
            "message 0: 'content' part 1: expected {'type': 'text', 'text': …}, found the type 'image'",
        ),
        ([{"role": "user", "content": ["a"]}], "part 0: expected {'type': 'text', 'text': …}, found str"),
        ([{**USER, "at": datetime.date(2025, 1, 1)}], "message 0: expected what JSON can hold, found date"),
        ([{**USER, "x": {1: 2}}], "message 0: expected keys of type str, found 1"),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_refused_by_what_was_expected_and_found(value: Any, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        messages_of(value)
    assert words in str(caught.value)


def test_tools_are_schemas_or_json_of_them_or_none() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert tools_of(None) is None
    assert tools_of("null") is None
    assert tools_of([tool]) == tools_of(json.dumps([tool])) == tools_of([json.dumps(tool)]) == [tool]
    assert tools_of([]) == []
    for value, words in ((5, "expected a list of JSON schemas, found int"), ([5], "tool 0: expected a JSON schema")):
        with pytest.raises(ValueError, match=words):
            tools_of(value)
