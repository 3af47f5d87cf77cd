"""Conversations to token ids and loss masks: whole pipelines, settings, and what is dropped, refused or kept.

That ids and masks are the right ones is `test_chat_against_transformers`' business.
"""

from __future__ import annotations

import functools
import json
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat_templates import BOS, DATED, EOS, MARKED, trained, unmarked
from tests.corpora import write_parquet
from tests.unit.ops.cuts import assert_cuts_do_not_show
from tests.unit.small_recipes import folder_of_this_process
from zephon import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
from zephon.columns import Block, Ragged
from zephon.errors import RecordError, SettingError, TokenizerError
from zephon.frontiers import Frontier
from zephon.ops import chat_encoding
from zephon.ops.base import Faults
from zephon.ops.chat_encoding import byte_sizes
from zephon.ops.expand_chat import ExpandChat
from zephon.ops.tokenize_chat import TokenizeChat
from zephon.producer import LaneProducer
from zephon.recipe import load_recipe
from zephon.testing import assert_resumes_exactly
from zephon.windows import Front

TALK = [
    {"role": "user", "content": "Say hello, été!"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Again"},
    {"role": "assistant", "content": "Hello, again 😀."},
]
ASKED = TALK[:1]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@functools.cache
def model(kind: str = "bytes", template: str = "chatml") -> Path:
    """A folder as models are published: tokenizer, configuration, template."""
    folder = folder_of_this_process("zephon-chat-")
    trained(kind, ["Say hello, again and again.", "Hello! user system assistant"]).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS, "eos_token": EOS}))
    (folder / "chat_template.jinja").write_text(MARKED[template])
    return folder


@functools.cache
def made(kind: str = "bytes", **settings: Any) -> TokenizeChat:
    return TokenizeChat(tokenizer_id=model(kind), **settings)


def block_of(values: list[Any], **fields: Any) -> Block:
    rows = [{"id": i, "messages": v, **{n: f[i] for n, f in fields.items()}} for i, v in enumerate(values)]
    return Block.from_rows(rows, np.array([(0, 0, i) for i in range(len(values))], np.int64).reshape(-1, 3))


def learnt(operator: TokenizeChat, messages: Any, **fields: Any) -> list[str]:
    """The runs of text that are learnt, put back together from tokens."""
    from tokenizers import Tokenizer

    out = operator.process(block_of([messages], **{n: [f] for n, f in fields.items()}), Faults())
    (row,) = out.to_rows()
    ids, mask = row["input_ids"], row[operator.mask_field_out]
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    tokenizer = Tokenizer.from_file(str(model() / "tokenizer.json"))
    return [tokenizer.decode(ids[a:b].tolist(), skip_special_tokens=False) for a, b in edges.reshape(-1, 2)]


CHATML_ENDS = "<|im_end|>"
words = st.text("ab é😀\n", max_size=8)
talks = st.lists(words, min_size=2, max_size=6).map(
    lambda said: [{"role": "assistant" if at % 2 else "user", "content": each} for at, each in enumerate(said)]
)
value = talks | talks.map(json.dumps) | talks.map(lambda talk: talk[:1]) | st.sampled_from([17, "x", []])
values = st.lists(value, max_size=8)


@given(values, st.lists(st.integers(0, 8), max_size=4), st.sampled_from([None, 12, 30]), st.booleans())
def test_records_come_out_the_same_however_they_are_cut_into_blocks(
    drawn: list[Any], cuts: list[int], limit: int | None, preserve: bool
) -> None:
    operator = made("bytes-nfc", max_length=limit, preserve_upstream_payload=preserve)
    assert_cuts_do_not_show(operator, block_of(drawn), cuts)


def test_a_block_of_more_conversations_than_are_encoded_together_is_cut_nowhere() -> None:
    said = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * (n % 7)}] for n in range(300)]
    said[140] = said[140][:1]  # nothing to learn
    assert_cuts_do_not_show(made(), block_of(said), [100, 129, 200])


@given(values, st.sampled_from([1, 9, 14, 15, 16, 20, 25, 40]))
def test_a_conversation_is_cut_off_mask_and_all_and_dropped_if_nothing_is_left_to_learn(
    drawn: list[Any], limit: int
) -> None:
    block, faults = block_of(drawn), Faults("skip")
    short = made(max_length=limit).process(block, faults)
    whole = made().process(block, Faults("skip"))
    expected = {
        row: (ids[:limit].tolist(), mask[:limit].tolist())
        for row, ids, mask in zip(whole.samples[:, 2].tolist(), *(c.to_list() for c in whole.fields.values()))
        if mask[:limit].any()
    }
    found = zip(short.samples[:, 2].tolist(), *(c.to_list() for c in short.fields.values()))
    assert {row: (ids.tolist(), mask.tolist()) for row, ids, mask in found} == expected
    assert faults.counters.get("dropped_records", 0) == len(block) - faults.skipped - len(expected)


def test_what_is_learnt_are_the_assistant_s_words_and_the_token_that_ends_them() -> None:
    both, last = f"Hello!{CHATML_ENDS}", f"Hello, again 😀.{CHATML_ENDS}"
    asked_last = [*TALK, *ASKED]
    assert learnt(made(), TALK) == [both, last]
    assert learnt(made(loss_scope="last_span"), TALK) == [last]
    assert learnt(made(loss_scope="last_span"), asked_last) == [last]
    assert learnt(made(loss_scope="after_last_user"), TALK) == [last]
    called = [{"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "5"}]
    calls = [*ASKED, *called, TALK[1]]
    call = '\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' + CHATML_ENDS
    assert learnt(made(loss_scope="after_last_user"), calls, tools=TOOLS) == [call, both]
    assert learnt(made(loss_scope="last_span"), calls, tools=json.dumps(TOOLS)) == [both]
    faults = Faults()
    assert len(made(loss_scope="after_last_user").process(block_of([asked_last, ASKED]), faults)) == 0
    assert faults.counters == {"dropped_records": 2}
    without_marks = made(chat_template=unmarked(MARKED["chatml"]))
    assert learnt(without_marks, TALK) == [both + "\n", last + "\n"]  # the template puts a line end after each turn


def test_tools_are_in_the_prompt_of_records_that_have_them() -> None:
    operator = made(preserve_upstream_payload=True)
    out = operator.process(block_of([TALK, TALK, TALK], tools=[TOOLS, None, []]), Faults())
    lengths = [len(row["input_ids"]) for row in out.to_rows()]
    assert lengths[0] > lengths[1] == lengths[2]
    elsewhere = made(tools_field="functions").process(block_of([TALK, TALK], functions=[TOOLS, TOOLS]), Faults())
    assert [len(row["input_ids"]) for row in elsewhere.to_rows()] == lengths[:1] * 2
    ignored = made(tools_field=None).process(block_of([TALK], tools=[TOOLS]), Faults())
    assert [len(row["input_ids"]) for row in ignored.to_rows()] == lengths[1:2]


def test_other_fields_are_kept_only_if_asked_for() -> None:
    block = block_of([TALK, ASKED, TALK])
    assert set(made().process(block, Faults()).fields) == {"input_ids", "loss_mask"}
    kept = made(preserve_upstream_payload=True, mask_field_out="learn").process(block, Faults())
    assert set(kept.fields) == {"id", "messages", "input_ids", "learn"}
    assert [row["id"] for row in kept.to_rows()] == [0, 2]
    assert made().requires(None) == {"messages", "tools"}
    assert made(preserve_upstream_payload=True).requires(frozenset({"input_ids", "id"})) == {"messages", "tools", "id"}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (17, "field 'messages': expected a list of messages, found int"),
        ([{"role": "user", "content": "a\udc80"}], "field 'messages': not valid Unicode, it holds a lone surrogate"),
        ([{"role": "user", "content": "a", "x": float("nan")}, *TALK], None),
        ([{"role": "assistant", "content": "a"}], "'dict object' has no attribute|list object has no element 0"),
    ],
)
def test_bad_records_are_named_and_may_be_skipped(value: Any, words: str | None) -> None:
    operator = made(chat_template=unmarked(MARKED["chatml"]))
    if words is None:
        assert len(operator.process(block_of([value]), Faults())) == 1
        return
    with pytest.raises(RecordError, match=words) as caught:
        operator.process(block_of([TALK, value]), Faults())
    assert (caught.value.row, caught.value.operator) == (1, "tokenize_chat")
    faults = Faults("skip")
    out = operator.process(block_of([TALK, value, TALK]), faults)
    assert (out.samples[:, 2].tolist(), faults.skipped) == ([0, 2], 1)


def test_what_a_template_refuses_is_a_bad_record_in_its_own_words() -> None:
    with pytest.raises(RecordError, match="the chat template refuses it: Conversation roles must alternate"):
        made(chat_template=MARKED["mistral"]).process(block_of([ASKED * 2]), Faults())
    with pytest.raises(RecordError, match="'tools': tool 0: expected a JSON schema .a dict., found int"):
        made().process(block_of([TALK], tools=[[1]]), Faults())
    endless = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{% if messages | length > 1 %}{{ f(1) }}{% endif %}"
    with pytest.raises(RecordError, match="the chat template refuses it: nested too deeply"):
        made(chat_template=endless).process(block_of([TALK]), Faults())
    with pytest.raises(RecordError, match=r"found no such field"):
        made(field="chat").process(block_of([TALK]), Faults())


def test_a_template_that_reads_the_clock_is_refused_when_the_recipe_is_written() -> None:
    with pytest.raises(SettingError, match="strftime_now"):
        made(chat_template=DATED)
    sometimes = "{% if messages | length > 1 %}{{ strftime_now('%Y') }}{% endif %}{% generation %}x{% endgeneration %}"
    with pytest.raises(SettingError, match="the same record would give other tokens tomorrow"):
        made(chat_template=sometimes).process(block_of([TALK]), Faults("skip"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss_scope": "all"}, "loss_scope='all': must be one of all_assistant, last_span, after_last_user"),
        ({"max_length": 0}, "max_length=0: must be None or a whole number from 1"),
        ({"field": ""}, "field=''"),
        ({"tools_field": "messages"}, "tools_field='messages': must be another field"),
        ({"mask_field_out": "input_ids"}, "mask_field_out='input_ids'"),
        ({"chat_template": "{% for %}"}, "chat_template, line 1"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs has 'messages', which tokenize_chat itself"),
        ({"chat_template_kwargs": {"f": len}}, "chat_template_kwargs: expected what JSON can hold, found builtin"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs=.1.: must be a dict"),
        ({"tokenizer": object()}, "tokenize_chat: give one of tokenizer"),
    ],
)
def test_senseless_settings_are_refused_with_what_is_allowed(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        TokenizeChat(tokenizer_id=model(), **settings)


def test_a_special_token_that_nobody_tells_is_said_once_when_the_recipe_is_written(tmp_path: Path) -> None:
    bare = tmp_path / "tokenizer.json"
    bare.write_bytes((model() / "tokenizer.json").read_bytes())
    with pytest.warns(UserWarning, match=r"uses bos_token, eos_token, .*chat_template_kwargs=\{'bos_token': …\}"):
        TokenizeChat(tokenizer_id=bare, chat_template=MARKED["mistral"])
    tokens = {"bos_token": BOS, "eos_token": EOS}
    told = TokenizeChat(tokenizer_id=bare, chat_template=MARKED["mistral"], chat_template_kwargs=tokens)
    assert learnt(told, TALK[:2]) == [f"Hello!{EOS}"]
    with pytest.raises(SettingError, match="the tokenizer brings none"):
        TokenizeChat(tokenizer_id=bare)
    with pytest.raises(TokenizerError, match="there is no file"):
        TokenizeChat(tokenizer_id=tmp_path / "missing" / "tokenizer.json")


def test_the_identity_has_what_decides_the_data_and_nothing_else(tmp_path: Path) -> None:
    first = TokenizeChat(tokenizer_id=model()).describe()
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in model().iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    config = {"bos_token": BOS, "eos_token": EOS, "pad_token": "<unk>", "model_max_length": 5}
    (moved / "tokenizer_config.json").write_text(json.dumps(config))
    assert TokenizeChat(tokenizer_id=moved).describe() == first == json.loads(json.dumps(first))
    others = [
        {"chat_template": unmarked(MARKED["chatml"])}, {"max_length": 7}, {"loss_scope": "last_span"}, {"field": "m"},
        {"tools_field": "t"}, {"mask_field_out": "m"}, {"preserve_upstream_payload": True},
        {"chat_template_kwargs": {"x": 1}},
    ]  # fmt: skip
    texts = [json.dumps(TokenizeChat(tokenizer_id=model(), **one).describe()) for one in others]
    assert len({json.dumps(first), *texts}) == len(others) + 1
    tokens = {"bos_token": BOS, "eos_token": EOS}
    (moved / "chat_template.jinja").write_text(MARKED["mistral"])
    with_tokens = TokenizeChat(tokenizer_id=moved).describe()["template"]
    (moved / "tokenizer_config.json").write_text(json.dumps({**tokens, "eos_token": "<|im_end|>"}))
    assert TokenizeChat(tokenizer_id=moved).describe()["template"] != with_tokens


def test_it_travels_to_workers_and_gives_the_same_there() -> None:
    operator = TokenizeChat(tokenizer_id=model())
    expected = operator.process(block_of([TALK]), Faults()).to_rows()
    for copy in (pickle.loads(pickle.dumps(operator)), cloudpickle.loads(cloudpickle.dumps(operator))):
        assert repr(copy.process(block_of([TALK]), Faults()).to_rows()) == repr(expected)


def test_a_process_that_renders_and_encodes_never_loads_torch_or_transformers(tmp_path: Path) -> None:
    path = tmp_path / "operator"
    path.write_bytes(pickle.dumps((TokenizeChat(tokenizer_id=model()), block_of([TALK]))))
    code = (
        "import pickle, sys; from zephon.ops.base import Faults\n"
        f"operator, block = pickle.load(open({str(path)!r}, 'rb')); print(len(operator.process(block, Faults())))\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["1", "[]"]


class Letters:
    """A tokenizer of the user's own: one id a letter, and nothing known of characters."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def test_a_tokenizer_of_one_s_own_encodes_the_pieces_between_the_ends_of_spans() -> None:
    operator = TokenizeChat(Letters(), chat_template=MARKED["chatml"])
    (row,) = operator.process(block_of([TALK]), Faults()).to_rows()
    text = "".join(map(chr, row["input_ids"]))
    assert text == operator.template.render(TALK).text
    marked = "".join(letter for letter, mask in zip(text, row["loss_mask"]) if mask)
    assert marked == f"Hello!{CHATML_ENDS}Hello, again 😀.{CHATML_ENDS}"
    assert operator.backend == "own"


def test_a_text_that_one_s_own_tokenizer_refuses_is_a_bad_record() -> None:
    class Picky(Letters):
        def encode(self, text: str) -> list[int]:
            if "q" in text:
                raise ValueError("no q please")
            return super().encode(text)

    operator = TokenizeChat(Picky(), chat_template=MARKED["chatml"])
    bad = [{"role": "user", "content": "q"}, TALK[1]]
    faults = Faults("skip")
    out = operator.process(block_of([TALK, bad, TALK]), faults)
    assert out.samples[:, 2].tolist() == [0, 2]
    assert (faults.skipped, "row 1: ValueError: no q please" in faults.reports[0]) == (1, True)


# Sizes of tokens


def test_sizes_of_tokens_are_used_only_where_tokens_stand_for_just_their_bytes() -> None:
    def altered(kind: str, change: Callable[[dict[str, Any]], object]) -> bool:
        data = json.loads((model(kind) / "tokenizer.json").read_text())
        change(data)
        return byte_sizes(json.dumps(data)) is not None

    assert altered("bytes", lambda data: None)
    assert altered("bytes-nfc", lambda data: None)
    assert altered("bytes-trimmed", lambda data: None)
    assert not altered("pieces", lambda data: None)
    assert not altered("bytes", lambda data: data.update(normalizer={"type": "Lowercase"}))
    assert not altered("bytes", lambda data: data["pre_tokenizer"].update(add_prefix_space=True))
    assert not altered("bytes", lambda data: data["added_tokens"][0].update(rstrip=True))
    assert not altered("bytes", lambda data: data["model"].update(byte_fallback=True))
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
    steps = {"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel", "add_prefix_space": False}]}
    assert not altered("bytes", lambda data: data.update(pre_tokenizer=steps))
    steps["pretokenizers"] = [{**split, "behavior": "Isolated"}, {"type": "ByteLevel", "add_prefix_space": False}]
    assert altered("bytes", lambda data: data.update(pre_tokenizer=steps))


def test_a_text_whose_tokens_sizes_do_not_add_up_is_left_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = made().process(block_of([TALK, TALK[:2]]), Faults()).to_rows()
    sizes = byte_sizes((model() / "tokenizer.json").read_text())
    assert sizes is not None
    wrong = sizes._replace(of_id=sizes.of_id + (np.arange(len(sizes.of_id)) == 212))
    monkeypatch.setattr(chat_encoding, "byte_sizes", lambda text: wrong)
    operator = TokenizeChat(tokenizer_id=model())
    assert 212 in expected[0]["input_ids"]
    assert repr(operator.process(block_of([TALK, TALK[:2]]), Faults()).to_rows()) == repr(expected)
    assert operator.backend == "fastokens"


def test_where_sizes_and_the_reference_disagree_the_reference_decides_and_a_log_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = made().process(block_of([TALK] * 3), Faults()).to_rows()
    assert made().backend == "fastokens"
    monkeypatch.setattr(chat_encoding, "_in_bytes", lambda rendered: [(0, 3)])
    operator = TokenizeChat(tokenizer_id=model())
    assert repr(operator.process(block_of([TALK] * 3), Faults()).to_rows()) == repr(expected)
    assert operator.backend == "tokenizers"
    assert "sizes of tokens and the tokenizers library disagree" in caplog.text


# Whole pipelines


def talk(number: int) -> list[dict[str, Any]]:
    turns = 1 + number % 3
    return [
        {"role": role, "content": f"{role} {turn} of {number} été"}
        for turn in range(turns)
        for role in ("user", "assistant")
    ]


def rows_of(count: int) -> list[dict[str, Any]]:
    """Every fifth conversation has nothing to learn from."""
    return [{"id": i, "messages": talk(i)[: 1 if i % 5 == 0 else None]} for i in range(count)]


def pipeline_of(dataset: Dataset, **options: Any) -> Pipeline:
    pipeline = Pipeline(StaticMixtureWorkSource([dataset], None, chunk_size=4, shuffle_within_shard=True))
    pipeline.expand_chat().tokenize_chat(tokenizer_id=model(), loss_scope="last_span").pack_flat(96, algorithm="wrap")
    return pipeline.batch(2, drop_last=False).options(canonical_replicas=2, flush_every_k_chunks=2, **options)


def digests(pipeline: Pipeline) -> list[str]:
    try:
        return [batch.digest for batch in pipeline]
    finally:
        pipeline.close()


def test_parquet_json_in_parquet_json_lines_and_rows_in_memory_give_the_same_batches(tmp_path: Path) -> None:
    rows = rows_of(40)
    nested = [{**row, "tools": TOOLS if row["id"] % 2 else None} for row in rows]
    encoded = [{**row, "messages": json.dumps(row["messages"]), "tools": json.dumps(row["tools"])} for row in nested]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in nested))
    sources = [
        Dataset.from_dict("chat", {"0": InMemoryShard(nested)}),
        Dataset.from_path("chat", tmp_path / "lines.jsonl"),
        Dataset.from_path("chat", write_parquet(tmp_path / "nested.parquet", nested)),
        Dataset.from_path("chat", write_parquet(tmp_path / "encoded.parquet", encoded)),
    ]
    found = [digests(pipeline_of(source)) for source in sources]
    assert found[1:] == found[:1] * 3
    assert len(found[0]) > 10


def test_the_mask_travels_through_packing_to_the_labels_in_every_runner() -> None:
    dataset = Dataset.from_dict("chat", {"0": InMemoryShard(rows_of(40))})
    expected = digests(pipeline_of(dataset, runner="inline"))
    for runner in ("threads", "process"):
        assert digests(pipeline_of(dataset, runner=runner, max_workers=2)) == expected
    learnt_tokens = 0
    packed = pipeline_of(dataset)
    for batch in packed:  # the last ones may be empty, and have the same fields
        assert batch["loss_mask"].dtype == np.float32
        assert batch["loss_mask"].shape == batch["input_ids"].shape
        learnt_tokens += int(batch["loss_mask"].sum())
    packed.close()
    alone = Pipeline(StaticMixtureWorkSource([dataset], None)).expand_chat()
    alone.tokenize_chat(tokenizer_id=model(), loss_scope="last_span").batch(1).options(canonical_replicas=1)
    assert learnt_tokens == sum(int(batch["loss_mask"].sum()) for batch in alone)
    alone.close()


def test_a_run_of_conversations_resumes_exactly() -> None:
    dataset = Dataset.from_dict("chat", {"0": InMemoryShard(rows_of(30))})
    assert_resumes_exactly(pipeline_of(dataset))


def test_what_is_dropped_is_counted_in_the_lane_however_tasks_are_cut() -> None:
    dataset = Dataset.from_dict("chat", {"0": InMemoryShard(rows_of(40))})
    pipeline = Pipeline(StaticMixtureWorkSource([dataset], None, chunk_size=4))
    pipeline.tokenize_chat(tokenizer_id=model()).batch(1).options(canonical_replicas=2)
    plan = pipeline.plan()
    for task_samples in (1, 3, 512):
        counted: Counter[str] = Counter()
        for lane in range(2):
            front, producer = Front(plan), LaneProducer(plan, 0, lane, Frontier(0, 0, 0, 0), task_samples)
            while (task := producer.next_task()) is not None:
                producer.accept(task[0], front.run(task[1]))
            counted.update(producer.counters)
        assert counted == {"dropped_records": 8}


def test_an_argument_that_steers_nothing_here_is_ignored_and_named_and_others_are_refused() -> None:
    source = StaticMixtureWorkSource([Dataset.from_dict("chat", {"0": InMemoryShard(rows_of(5))})], None)
    with pytest.warns(UserWarning, match=r"tokenize_chat\(\): ignored.*span_source, padding"):
        Pipeline(source).tokenize_chat(tokenizer_id=model(), span_source="template", padding=True)
    with pytest.raises(TypeError, match="did you mean 'loss_scope'"):
        Pipeline(source).tokenize_chat(tokenizer_id=model(), loss_scop="last_span")
    with pytest.raises(TypeError, match=r"expand_chat\(\) has no argument 'fields'"):
        Pipeline(source).expand_chat(fields="x")


TOML = """\
[[sources]]
name = "chat"
path = "chat.jsonl"

[expand_chat]

[tokenize_chat]
tokenizer_id = "model"
chat_template = TEMPLATE
loss_scope = "last_span"
chat_template_kwargs = {date_string = "31 Jan 2025"}

[batch]
microbatch_size = 1
"""


def test_a_recipe_in_toml_may_hold_a_template_or_the_path_of_one(tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(5)))
    (tmp_path / "model").symlink_to(model())
    (tmp_path / "dated.jinja").write_text(DATED)
    described = []
    for template in ("'dated.jinja'", f"\"\"\"{DATED}\"\"\""):
        (tmp_path / "recipe.toml").write_text(TOML.replace("TEMPLATE", template.replace("\\n", "\\\\n")))
        pipeline = load_recipe(str(tmp_path / "recipe.toml")).pipeline()
        described.append([operator.describe() for operator in pipeline.operators])
    python = TokenizeChat(
        tokenizer_id=model(),
        chat_template=DATED,
        loss_scope="last_span",
        chat_template_kwargs={"date_string": "31 Jan 2025"},
    )
    assert described[0] == described[1] == [ExpandChat().describe(), python.describe()]


def test_the_ragged_columns_have_one_set_of_lengths() -> None:
    out = made().process(block_of([TALK, ASKED, TALK[:2]]), Faults())
    ids, mask = out.fields["input_ids"], out.fields["loss_mask"]
    assert isinstance(ids, Ragged)
    assert isinstance(mask, Ragged)
    assert (ids.values.dtype, mask.values.dtype) == (np.int32, np.float32)
    assert ids.lengths.tolist() == mask.lengths.tolist()
