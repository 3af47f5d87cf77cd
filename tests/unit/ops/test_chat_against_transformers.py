"""Conversations, held against the `transformers` library: the same ids, and the same masks wherever it defines them."""

from __future__ import annotations

import functools
import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat_templates import BOS, DATED, EOS, MARKED, REASONING, trained, unmarked
from zephon.columns import Block, Objects, Ragged
from zephon.errors import RecordError
from zephon.ops.base import Faults
from zephon.ops.tokenize_chat import TokenizeChat

transformers = pytest.importorskip("transformers", reason="the oracle of chat templates is not installed")

KINDS = ("bytes", "bytes-nfc", "bytes-trimmed", "pieces")
FAST = {"bytes": "fastokens", "bytes-nfc": "fastokens", "bytes-trimmed": "fastokens", "pieces": "tokenizers"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Says what the weather's like in <place> & when",
            "parameters": {"type": "object", "properties": {"place": {"type": "string", "description": "été 😀"}}},
        },
    }
]

words = (
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
    | st.text("ab \n\t.", max_size=20)
    | st.sampled_from(["", " ", "\n", " hello ", "e\u0301te\u0301", "é", "<|im_end|>", "in<s>side", "[/INST]"])
    | st.just("\U0001f44d\U0001f3fd\U0001f468\u200d\U0001f469\u200d\U0001f467")
)


def message(role: str) -> st.SearchStrategy[dict[str, Any]]:
    return words.map(lambda content: {"role": role, "content": content})


calls = st.builds(
    lambda content, name, place: {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": {"place": place}}}],
    },
    st.none() | words,
    st.sampled_from(["weather", "été"]),
    words,
)
turn = st.one_of(
    st.tuples(message("user"), message("assistant")),
    st.tuples(message("user"), message("assistant"), message("assistant")),
    st.tuples(message("user"), calls, message("tool"), message("tool"), message("assistant")),
    st.tuples(message("user")),
    st.tuples(message("assistant")),
)
plain_turn = st.tuples(message("user"), message("assistant"))
conversations = st.tuples(
    st.lists(message("system"), max_size=1),
    st.lists(plain_turn, min_size=1, max_size=4) | st.lists(turn, min_size=1, max_size=4),
    st.lists(message("user"), max_size=1),
).map(lambda parts: [*parts[0], *(m for group in parts[1] for m in group), *parts[2]])
records = st.lists(st.tuples(conversations, st.none() | st.just(TOOLS) | st.just([])), min_size=1, max_size=4)


@functools.cache
def tokenizer_of(kind: str) -> Any:
    """The same tokenizer as the `transformers` library has it."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:4]
    texts = [line for source in sources for line in source.read_text(encoding="utf-8").splitlines()]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained(kind, texts), bos_token=BOS, eos_token=EOS, unk_token="<unk>"
    )


@functools.cache
def operator_of(kind: str, template: str, **settings: Any) -> TokenizeChat:
    return TokenizeChat(tokenizer_of(kind), chat_template=template, **settings)


def block_of(conversations: Sequence[tuple[Any, Any]]) -> Block:
    rows = {"messages": Objects([c for c, _ in conversations]), "tools": Objects([t for _, t in conversations])}
    return Block(dict(rows), np.array([(0, 0, i) for i in range(len(conversations))], np.int64))


def results(operator: TokenizeChat, block: Block) -> dict[int, tuple[list[int], list[int]]]:
    """(ids, mask) by row, of those that came out."""
    out = operator.process(block, Faults("skip"))
    ids, mask = out.fields["input_ids"], out.fields["loss_mask"]
    assert isinstance(ids, Ragged)
    assert isinstance(mask, Ragged)
    assert (ids.values.dtype, mask.values.dtype) == (np.int32, np.float32)
    rows = out.samples[:, 2].tolist()
    return {row: (i.tolist(), m.tolist()) for row, i, m in zip(rows, ids.to_list(), mask.to_list(), strict=True)}


def by_marks(tokenizer: Any, template: str, messages: Any, tools: Any) -> tuple[list[int], list[int]] | None:
    """What the library says; None where its template refuses the conversation."""
    try:
        made = tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
        )
    except Exception:
        return None
    return made["input_ids"], made["assistant_masks"]


def by_beginnings(
    tokenizer: Any, template: str, messages: list[dict[str, Any]], tools: Any, turns: Sequence[int] | None = None
) -> tuple[list[int], list[int]] | None:
    """The rule of templates without marks, said with the library's rendering and its tokens' characters."""

    def text(count: int, prompt: bool = False) -> str:
        rendered: list[str] = tokenizer.apply_chat_template(
            [messages[:count]], tools=tools, chat_template=template, tokenize=False, add_generation_prompt=prompt
        )
        return rendered[0]

    if turns is None:
        turns = [at for at, one in enumerate(messages) if one["role"] == "assistant"]
    try:
        whole = text(len(messages))
        beginnings = [(text(at, prompt=True), text(at + 1)) for at in turns]
    except Exception:
        return None
    if not all(through.startswith(before) and whole.startswith(through) for before, through in beginnings):
        return None
    spans = [(len(before), len(through)) for before, through in beginnings]
    made = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    learnt = [any(a < end and b > start for start, end in spans) for a, b in made["offset_mapping"]]
    return made["input_ids"], [int(one) for one in learnt]


@given(st.sampled_from(KINDS), st.sampled_from(sorted(MARKED)), records)
def test_ids_and_masks_are_those_of_transformers_where_the_template_has_marks(
    kind: str, name: str, drawn: list[Any]
) -> None:
    operator, template = operator_of(kind, MARKED[name]), MARKED[name]
    found = results(operator, block_of(drawn))
    expected = [by_marks(tokenizer_of(kind), template, *one) for one in drawn]
    assert found == {row: one for row, one in enumerate(expected) if one is not None and any(one[1])}
    assert operator.backend == FAST[kind]


@given(st.sampled_from(KINDS), st.sampled_from(sorted(MARKED)), records)
def test_without_marks_ids_are_those_of_transformers_and_masks_are_what_it_adds_to_the_prompt(
    kind: str, name: str, drawn: list[Any]
) -> None:
    template = unmarked(MARKED[name])
    assert "generation %}" not in template
    found = results(operator_of(kind, template), block_of(drawn))
    expected = [by_beginnings(tokenizer_of(kind), template, *one) for one in drawn]
    assert found == {row: one for row, one in enumerate(expected) if one is not None and any(one[1])}


@given(records)
def test_the_scopes_learn_the_last_turn_or_what_follows_the_users_last_message(drawn: list[Any]) -> None:
    template = unmarked(MARKED["chatml"])
    tokenizer = tokenizer_of("bytes")
    for scope in ("last_span", "after_last_user"):
        for marked in (False, True):
            operator = operator_of("bytes", MARKED["chatml"] if marked else template, loss_scope=scope)
            found = results(operator, block_of(drawn))
            for row, (messages, tools) in enumerate(drawn):
                roles = [one["role"] for one in messages]
                last_user = max((at for at, role in enumerate(roles) if role == "user"), default=-1)
                turns = [at for at, role in enumerate(roles) if role == "assistant"]
                turns = turns[-1:] if scope == "last_span" else [at for at in turns if at > last_user]
                expected = by_beginnings(tokenizer, template, messages, tools, turns)
                if expected is not None and marked:
                    newline = tokenizer("<|im_end|>\n")["input_ids"][1]
                    expected = expected[0], without_line_ends(*expected, newline)
                if expected is not None and any(expected[1]):
                    assert found[row] == expected
                elif expected is not None:
                    assert row not in found


def without_line_ends(ids: list[int], mask: list[int], newline: int) -> list[int]:
    """The mask without the line end after each turn, which the marks leave out."""
    ends = [at for at, learnt in enumerate(mask) if learnt and (at + 1 == len(mask) or not mask[at + 1])]
    for at in ends:
        assert ids[at] == newline
    return [0 if at in ends else learnt for at, learnt in enumerate(mask)]


@given(st.lists(plain_turn, min_size=1, max_size=3), words)
def test_a_template_that_drops_earlier_reasoning_is_learnt_turn_by_turn_and_refused_otherwise(
    turns: list[Any], reasoning: str
) -> None:
    messages = [one for pair in turns for one in pair]
    for one in messages[1::2]:
        one["reasoning_content"] = "because " + reasoning
    last = results(operator_of("bytes", REASONING, loss_scope="last_span"), block_of([(messages, None)]))
    expected = by_beginnings(tokenizer_of("bytes"), REASONING, messages, None, [len(messages) - 1])
    assert last == {0: expected}
    if len(turns) > 1:
        with pytest.raises(RecordError, match="message 1: the chat template renders the messages through it other"):
            operator_of("bytes", REASONING).process(block_of([(messages, None)]), Faults())


def test_a_date_that_the_user_names_is_the_one_that_transformers_writes() -> None:
    messages = [{"role": "user", "content": "What day is it?"}, {"role": "assistant", "content": "Friday."}]
    tokenizer = tokenizer_of("bytes")
    expected = tokenizer.apply_chat_template(
        messages, chat_template=DATED, date_string="31 Jan 2025", return_dict=True
    )["input_ids"]
    for given_date in ({"date_string": "31 Jan 2025"}, {"strftime_now": "2025-01-31"}):
        operator = TokenizeChat(tokenizer, chat_template=DATED, chat_template_kwargs=given_date)
        assert results(operator, block_of([(messages, None)]))[0][0] == expected


def test_a_saved_tokenizer_is_read_from_its_folder_with_templates_and_special_tokens(tmp_path: Path) -> None:
    import copy

    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    tokenizer = copy.deepcopy(tokenizer_of("bytes"))
    several = {"default": MARKED["llama"], "tool_use": MARKED["chatml"]}
    for number, templates in enumerate((MARKED["llama"], several)):
        tokenizer.chat_template = templates
        for files in (True, False):
            folder = tmp_path / f"{number}{files}"
            tokenizer.save_pretrained(folder, save_jinja_files=files)
            assert (folder / "chat_template.jinja").exists() == files
            read = transformers.AutoTokenizer.from_pretrained(folder)
            operator = TokenizeChat(tokenizer_id=folder)
            drawn = [(messages, None), (messages, TOOLS), (messages, [])]
            found = results(operator, block_of(drawn))
            for row, (_, tools) in enumerate(drawn):
                made = read.apply_chat_template(
                    messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
                )
                assert found[row] == (made["input_ids"], made["assistant_masks"])
            assert operator.describe() == TokenizeChat(read).describe()


def test_values_that_json_writes_in_another_way_are_written_as_transformers_writes_them() -> None:
    template = "{% for m in messages %}{{ m | tojson }}{{ m.content | tojson(indent=2, sort_keys=true) }}{% endfor %}"
    odd = {"b": [1, 2.5, None, True], "ü</script>&'": {"z": 1, "a": 10**20}}
    messages = [{"role": "user", "content": "<é>", "odd": odd}, {"role": "assistant", "content": "x"}]
    tokenizer = tokenizer_of("bytes")
    marked = template.replace("{{ m | tojson }}", "{% generation %}{{ m | tojson }}{% endgeneration %}")
    expected = by_marks(tokenizer, marked, json.loads(json.dumps(messages)), None)
    assert results(TokenizeChat(tokenizer, chat_template=marked), block_of([(messages, None)])) == {0: expected}
