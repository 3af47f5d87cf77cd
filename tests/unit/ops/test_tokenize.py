"""Text to token ids."""

from __future__ import annotations

import array
import functools
import json
import logging
import os
import pickle
import shutil
import socket
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import cloudpickle
import fastokens
import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.ops.cuts import assert_cuts_do_not_show
from zephon.columns import Block, Ragged, Text
from zephon.errors import RecordError, SettingError, TokenizerError
from zephon.ops import tokenizer_backend
from zephon.ops.base import Faults, Scope
from zephon.ops.tokenize import Tokenize
from zephon.whereabouts import NUMBERS, Whereabouts

shared = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
END = "<|endoftext|>"
texts = st.lists(
    st.text(max_size=40)
    | st.sampled_from(["", END, f"in{END}side", "def f(x):\n\treturn x  # é 😀\r\n", "word " * 40]),
    max_size=12,
)


@pytest.fixture(scope="session")
def reference(tokenizer_file: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(tokenizer_file))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tokenizer_backend.CHOICE, raising=False)


@functools.cache
def made(path: Path, **settings: Any) -> Tokenize:
    """One operator for each choice of settings: loading a tokenizer takes its time."""
    return Tokenize(tokenizer_id=path, field="text", **settings)


def block_of(values: list[Any], name: str = "text") -> Block:
    rows = [{"id": i, name: v} for i, v in enumerate(values)]
    return Block.from_rows(rows, np.array([(0, 0, i) for i in range(len(values))], np.int64).reshape(-1, 3))


def ids_of(block: Block) -> list[list[int]]:
    column = block.fields["input_ids"]
    assert isinstance(column, Ragged)
    assert column.values.dtype == np.int32
    return [ids.tolist() for ids in column.to_list()]


def valid(values: list[str]) -> list[str]:
    return [v.encode("utf-8", "ignore").decode() for v in values]


@shared
@given(texts, st.sampled_from(("bos_eos", "bos", "eos", "none", "tokenizer_default")))
def test_ids_are_those_of_the_reference_with_the_special_tokens_asked_for(
    tokenizer_file: Path, reference: tokenizers.Tokenizer, values: list[str], mode: str
) -> None:
    values = valid(values)
    end = reference.token_to_id(END)
    operator = made(tokenizer_file, special_tokens=mode)
    out = operator.process(block_of(values), Faults())
    assert operator.backend == "fastokens"
    before, after = [end] * (mode in ("bos", "bos_eos")), [end] * (mode in ("eos", "bos_eos"))
    expected = [
        [*before, *reference.encode(v, add_special_tokens=mode == "tokenizer_default").ids, *after] for v in values
    ]
    assert ids_of(out) == expected
    mask = out.fields["attention_mask"]
    assert isinstance(mask, Ragged)
    assert [m.tolist() for m in mask.to_list()] == [[1] * len(ids) for ids in expected]
    assert mask.values.dtype == np.int32


@shared
@given(texts, st.lists(st.integers(0, 12), max_size=4), st.booleans(), st.booleans())
def test_records_come_out_the_same_however_they_are_cut_into_blocks(
    tokenizer_file: Path, values: list[Any], cuts: list[int], split: bool, preserve: bool
) -> None:
    values = [v if i % 5 else 17 for i, v in enumerate(values)]
    operator = made(
        tokenizer_file, max_length=4, truncation=not split, split_long_samples=split, preserve_upstream_payload=preserve
    )
    assert_cuts_do_not_show(operator, block_of(values), cuts)


@shared
@given(texts, st.sampled_from((3, 8)), st.sampled_from(("bos_eos", "eos", "none", "tokenizer_default")))
def test_truncation_counts_special_tokens_and_splitting_loses_nothing(
    tokenizer_file: Path, values: list[str], limit: int, mode: str
) -> None:
    block, plain = block_of(valid(values)), functools.partial(made, tokenizer_file, special_tokens=mode)
    whole = ids_of(plain().process(block, Faults()))
    cut = ids_of(plain(max_length=limit, truncation=True).process(block, Faults()))
    end = 1 if mode in ("bos_eos", "eos") else 0
    for full, short in zip(whole, cut):
        kept = full if len(full) <= limit else full[: limit - end] + full[len(full) - end :]
        assert short == kept
    split = plain(max_length=limit, split_long_samples=True).process(block, Faults())
    joined: dict[int, list[list[int]]] = {}
    for ids, (_, _, row) in zip(ids_of(split), split.samples.tolist()):
        joined.setdefault(row, []).append(ids)
    assert [list(chain.from_iterable(joined[row])) for row in range(len(whole))] == whole
    assert all(len(piece) == limit for pieces in joined.values() for piece in pieces[:-1])
    assert all(len(piece) <= limit for pieces in joined.values() for piece in pieces)


@pytest.mark.parametrize("where", ["file", "folder", "object", "positional path"])
def test_a_tokenizer_is_known_by_its_content_wherever_it_comes_from(
    where: str, tokenizer_file: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "tokenizer.json"
    copy.write_text(json.dumps(json.loads(tokenizer_file.read_text(encoding="utf-8")), indent=7), encoding="utf-8")
    arguments: dict[str, Any] = {
        "file": {"tokenizer_id": str(copy)},
        "folder": {"tokenizer_id": tmp_path},
        "object": {"tokenizer": tokenizers.Tokenizer.from_file(str(copy))},
        "positional path": {"tokenizer": str(copy)},
    }[where]
    assert Tokenize(**arguments, field="text").describe() == made(tokenizer_file).describe()


def test_case_B11_another_vocabulary_is_another_identity(tokenizer_file: Path, tmp_path: Path) -> None:
    data = json.loads(tokenizer_file.read_text(encoding="utf-8"))
    data["model"]["merges"].pop()
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    one, other = (Tokenize(tokenizer_id=path, field="text").describe() for path in (tokenizer_file, tmp_path))
    assert {name for name in one if one[name] != other[name]} == {"tokenizer"}


def test_truncation_and_padding_saved_in_a_tokenizer_have_no_effect(tokenizer_file: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    plain = Tokenize(tokenizer_id=tokenizer_file, field="text")
    operator = Tokenize(tokenizer, field="text")
    block = block_of(["some words here", "x"])
    assert ids_of(operator.process(block, Faults())) == ids_of(plain.process(block, Faults()))
    assert operator.describe() == plain.describe()


def test_an_operator_travels_with_its_tokenizer_but_not_the_loaded_one(tokenizer_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizer_file.read_bytes())
    operator = Tokenize(tokenizer_id=path, field="text")
    expected = ids_of(operator.process(block_of(["hello"]), Faults()))
    data = cloudpickle.dumps(operator)
    path.unlink()
    copied = pickle.loads(data)
    assert copied.backend is None
    copied.setup()
    loaded = copied._backend
    copied.setup()
    assert copied._backend is loaded
    assert ids_of(copied.process(block_of(["hello"]), Faults())) == expected
    assert copied.describe() == operator.describe()


def test_special_tokens_come_from_arguments_then_the_configuration_then_usual_names(
    tokenizer_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    end = tokenizers.Tokenizer.from_file(str(tokenizer_file)).token_to_id(END)
    described = Tokenize(tokenizer_id=tmp_path, field="text").describe()
    assert (described["bos_token_id"], described["eos_token_id"]) == (end, end)
    other = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "A"}, "eos_token": "B"}))
    described = Tokenize(tokenizer_id=tmp_path, field="text", eos_token_id=5).describe()
    assert (described["bos_token_id"], described["eos_token_id"]) == (other.token_to_id("A"), 5)


def test_a_tokenizer_without_an_end_token_asks_for_the_argument(tokenizer_file: Path, tmp_path: Path) -> None:
    data = json.loads(tokenizer_file.read_text(encoding="utf-8").replace(END, "~~"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(TokenizerError, match="pass eos_token_id="):
        Tokenize(tokenizer_id=tmp_path, field="text", special_tokens="eos")
    assert Tokenize(tokenizer_id=tmp_path, field="text", special_tokens="none").describe()["eos_token_id"] is None


@pytest.mark.parametrize(
    ("content", "words"),
    [(b'{"model": {"vo', "not valid JSON"), (b"{}", "holds no tokenizer"), (b"\xff\xfe", "cannot be read")],
)
def test_a_broken_tokenizer_file_is_named(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(TokenizerError, match=f"{path}.*{words}"):
        Tokenize(tokenizer_id=path, field="text")
    path.write_text('{"model": {"type": "Nonsense", "vocab": {"</s>": 0, "<s>": 1}}}')
    with pytest.raises(TokenizerError, match=f"{path} cannot be loaded"):
        Tokenize(tokenizer_id=path, field="text").setup()


def test_a_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=f"there is no file {tmp_path / 'no.json'}"):
        Tokenize(tokenizer_id=tmp_path / "no.json", field="text")


def test_a_hub_name_that_cannot_be_fetched_says_so_without_a_download_that_tries_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound and not listening: whoever connects is refused
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/tokenizer.json"
        monkeypatch.setattr(hub, "hf_hub_url", lambda *_: url)
        monkeypatch.setattr(hub, "hf_hub_download", lambda *_: pytest.fail("a download was tried"))
        with pytest.raises(TokenizerError, match="fetching it from the hub failed .Connect.*give that path"):
            Tokenize(tokenizer_id="somebody/something", field="text")


def test_a_tokenizer_in_the_hubs_cache_is_used_where_the_hub_cannot_be_reached(
    tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network")

    def cached(name: str, file: str) -> str | None:
        return str(tokenizer_file) if file == "tokenizer.json" else None

    monkeypatch.setattr(hub, "get_hf_file_metadata", offline)
    monkeypatch.setattr(hub, "try_to_load_from_cache", cached)
    monkeypatch.setattr(hub, "hf_hub_download", cached)
    shutil.copy(tokenizer_file, tmp_path / "tokenizer.json")
    here = Tokenize(tokenizer_id=tmp_path, field="text").describe()
    assert Tokenize(tokenizer_id="somebody/something", field="text").describe() == here


ROWS: list[tuple[dict[str, Any], str]] = [
    ({"id": 0}, "field 'text': expected str, found no such field"),
    ({"text": None}, "field 'text': expected str, found null"),
    ({"text": 7}, "field 'text': expected str, found int"),
    ({"text": ["a", 1]}, "field 'text': expected str, found list"),
    ({"text": b"raw"}, "expected str, found bytes; decode_text"),
    ({"text": "a\ud800"}, "lone surrogate at character 1"),
]


@pytest.mark.parametrize(("row", "words"), ROWS)
@pytest.mark.parametrize("neighbours", [True, False])
def test_case_E3_a_record_without_proper_text_is_bad_and_says_why(
    row: dict[str, Any], words: str, neighbours: bool, tokenizer_file: Path
) -> None:
    rows = [{"text": "before"}, row, {"text": "after"}] if neighbours else [row]
    block = Block.from_rows(rows, np.array([(0, 0, i) for i in range(len(rows))], np.int64))
    operator = Tokenize(tokenizer_id=tokenizer_file, field="text")
    with pytest.raises(RecordError, match=words) as error:
        operator.process(block, Faults())
    assert error.value.row == rows.index(row)
    faults = Faults("skip")
    assert len(operator.process(block, faults)) == len(rows) - 1
    assert faults.skipped == 1


def test_missing_fields_can_be_dropped_without_a_word_but_wrong_types_cannot(tokenizer_file: Path) -> None:
    operator = Tokenize(tokenizer_id=tokenizer_file, field="text", missing_field="skip")
    rows = [{"text": "a"}, {"id": 1}, {"text": None}, {"text": "b"}]
    samples = np.array([(0, 0, i) for i in range(4)], np.int64)
    out = operator.process(Block.from_rows(rows, samples), Faults())
    assert out.samples[:, 2].tolist() == [0, 3]
    assert operator.changes_counts
    with pytest.raises(RecordError, match="found int"):
        operator.process(Block.from_rows([{"text": 1}], samples[:1]), Faults())


def test_case_E3_extra_fields_pass_if_the_payload_is_preserved(tokenizer_file: Path) -> None:
    operator = Tokenize(tokenizer_id=tokenizer_file, field="text", preserve_upstream_payload=True, max_length=2,
                        split_long_samples=True, add_attention_mask=False)  # fmt: skip
    rows = operator.process(block_of(["one two three"]), Faults()).to_rows()
    assert len(rows) > 2
    assert all(row.keys() == {"id", "text", "input_ids"} and row["id"] == 0 for row in rows)


def test_it_asks_upstream_for_no_more_than_it_needs(tokenizer_file: Path) -> None:
    plain = Tokenize(tokenizer_id=tokenizer_file, field="text")
    kept = Tokenize(tokenizer_id=tokenizer_file, field="text", preserve_upstream_payload=True)
    assert plain.requires(None) == plain.requires(frozenset({"input_ids"})) == {"text"}
    assert kept.requires(None) is None
    assert kept.requires(frozenset({"input_ids", "url"})) == {"text", "url"}


def test_text_whose_column_is_a_slice_is_read_from_the_right_place(tokenizer_file: Path) -> None:
    block = block_of(["first", "second é", "third"]).slice(1, 3)
    assert isinstance(block.fields["text"], Text)
    operator, whole = made(tokenizer_file), block_of(["second é", "third"])
    assert ids_of(operator.process(block, Faults())) == ids_of(operator.process(whole, Faults()))


def test_an_id_beyond_the_vocabulary_of_an_own_tokenizer_is_refused_where_its_size_is_known() -> None:
    class Sized(Letters):
        n_vocab = 300

    assert Tokenize(Letters(), field="text", bos_token_id=300).describe()["bos_token_id"] == 300
    assert Tokenize(Sized(), field="text", bos_token_id=299).describe()["bos_token_id"] == 299
    with pytest.raises(SettingError, match="bos_token_id=300: beyond the vocabulary of tokenizer the Sized object"):
        Tokenize(Sized(), field="text", bos_token_id=300)


class Letters:
    """A user's own tokenizer."""

    eos_token_id = 1

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift

    def encode(self, text: str) -> list[int]:
        if "!" in text:
            raise ValueError("no shouting")
        return [ord(c) + self.shift for c in text]


def test_any_object_with_encode_is_a_tokenizer() -> None:
    operator = Tokenize(Letters(), field="text", special_tokens="eos")
    assert ids_of(operator.process(block_of(["ab", ""]), Faults())) == [[97, 98, 1], [1]]
    assert operator.backend == "own"
    assert operator.describe() == Tokenize(Letters(), field="text", special_tokens="eos").describe()
    assert operator.describe() != Tokenize(Letters(2), field="text", special_tokens="eos").describe()
    with pytest.raises(TokenizerError, match="pass bos_token_id="):
        Tokenize(Letters(), field="text")


def test_a_text_that_the_tokenizer_refuses_is_a_bad_record() -> None:
    operator = Tokenize(Letters(), field="text", special_tokens="eos")
    with pytest.raises(RecordError, match="ValueError: no shouting") as error:
        operator.process(block_of(["ab", "c!", "d"]), Faults())
    assert error.value.row == 1
    faults = Faults("skip")
    out = operator.process(block_of(["ab", "c!", "d"]), faults)
    assert (ids_of(out), faults.skipped) == ([[97, 98, 1], [100, 1]], 1)
    assert out.samples[:, 2].tolist() == [0, 2]


def test_length_alone_warns_that_it_has_no_effect(tokenizer_file: Path) -> None:
    with pytest.warns(UserWarning, match="max_length=5 alone has no effect"):
        operator = Tokenize(tokenizer_id=tokenizer_file, field="text", max_length=5)
    assert operator.describe() == Tokenize(tokenizer_id=tokenizer_file, field="text").describe()


def test_truncation_beside_splitting_warns_that_it_has_no_effect(tokenizer_file: Path) -> None:
    given: dict[str, Any] = {"tokenizer_id": tokenizer_file, "field": "text", "max_length": 5}
    with pytest.warns(UserWarning, match="truncation=True has no effect beside split_long_samples=True"):
        operator = Tokenize(truncation=True, split_long_samples=True, **given)
    assert operator.describe() == Tokenize(split_long_samples=True, **given).describe()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"field": ""}, "field=''"),
        ({"missing_field": "drop"}, "missing_field='drop'"),
        ({"special_tokens": "all"}, "special_tokens='all'"),
        ({"max_length": 0, "truncation": True}, "max_length=0"),
        ({"max_length": 2, "truncation": True}, "must be a whole number from 3"),
        ({"truncation": True}, "needs max_length"),
        ({"split_long_samples": True}, "needs max_length"),
        ({"bos_token_id": -1}, "bos_token_id=-1"),
        ({"eos_token_id": True}, "eos_token_id=True"),
        ({"eos_token_id": 10**6}, r"eos_token_id=1000000: beyond the vocabulary of tokenizer .*ids are 0 to \d+"),
        ({"tokenizer_id": None}, "give one of tokenizer"),
        ({"tokenizer": Letters()}, "give one of tokenizer"),
        ({"tokenizer": object(), "tokenizer_id": None}, "must have encode"),
    ],
)
def test_case_E14_settings_that_make_no_sense_are_refused_by_name(
    arguments: dict[str, Any], words: str, tokenizer_file: Path
) -> None:
    with pytest.raises(SettingError, match=words):
        Tokenize(**{"field": "text", "tokenizer_id": tokenizer_file, **arguments})


@pytest.fixture
def fast_is_wrong_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a fast library in place that gives wrong ids wherever some text holds the given words."""
    real = fastokens.Tokenizer

    def on(words: str) -> None:
        class Wrong:
            def __init__(self, inner: Any) -> None:
                self.inner = inner

            @staticmethod
            def from_json_str(text: str) -> Wrong:
                return Wrong(real.from_json_str(text))

            def encode_batch_flat(self, given: list[str], special: bool) -> tuple[bytes, bytes]:
                ids, offsets = self.inner.encode_batch_flat(given, special)
                if any(words in text for text in given):
                    ids = (np.frombuffer(ids, np.int32) ^ 1).tobytes()
                return ids, offsets

        monkeypatch.setattr(fastokens, "Tokenizer", Wrong)

    return on


@pytest.mark.parametrize(("wrong_on", "what"), [("quick brown", "probe texts"), ("zebra", "documents of this run")])
def test_a_fast_library_that_differs_at_the_start_is_not_used(
    wrong_on: str, what: str, tokenizer_file: Path, reference: tokenizers.Tokenizer,
    fast_is_wrong_on: Callable[[str], None], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    fast_is_wrong_on(wrong_on)
    operator = Tokenize(tokenizer_id=tokenizer_file, field="text", special_tokens="none")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            out = ids_of(operator.process(block_of(["a zebra", "b"]), Faults()))
            assert out == [reference.encode(v, add_special_tokens=False).ids for v in ("a zebra", "b")]
    assert operator.backend == "tokenizers"
    assert [what in record.getMessage() for record in caplog.records] == [True]


def test_a_fast_library_that_differs_later_stops_the_run_and_names_the_document(
    tokenizer_file: Path, fast_is_wrong_on: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_backend, "CHECK_ONE_IN", 3)
    fast_is_wrong_on("zebra")
    operator = Tokenize(tokenizer_id=tokenizer_file, field="text")
    operator.process(block_of(["quiet"] * 40), Faults("skip"))
    with pytest.raises(TokenizerError, match="row [0-9]+: fastokens gave other ids") as error:
        operator.process(block_of(["zebra"] * 40), Faults("skip"))
    with pytest.raises(TokenizerError) as again:
        operator.process(block_of(["zebra"] * 40), Faults("skip"))
    assert str(error.value) == str(again.value)


def test_a_tokenizer_that_the_fast_library_cannot_load_is_left_to_the_reference(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing:
        @staticmethod
        def from_json_str(text: str) -> None:
            raise ValueError("NFKC is not supported")

    monkeypatch.setattr(fastokens, "Tokenizer", Refusing)
    operator = Tokenize(tokenizer_id=tokenizer_file, field="text")
    with caplog.at_level(logging.WARNING):
        operator.setup()
        operator.setup()
    assert operator.backend == "tokenizers"
    assert ["NFKC is not supported" in record.getMessage() for record in caplog.records] == [True]


def test_the_reference_can_be_chosen(tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = Tokenize(tokenizer_id=tokenizer_file, field="text")
    monkeypatch.setenv(tokenizer_backend.CHOICE, "tokenizers")
    slow = Tokenize(tokenizer_id=tokenizer_file, field="text")
    block = block_of(["some words", "and é more 😀"])
    assert ids_of(slow.process(block, Faults())) == ids_of(fast.process(block, Faults()))
    assert (slow.backend, slow.describe()) == ("tokenizers", fast.describe())


def test_loading_leaves_the_processs_own_thread_settings_alone(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.setenv("RAYON_NUM_THREADS", "3")
    Tokenize(tokenizer_id=tokenizer_file, field="text").setup()
    assert (os.environ["TOKENIZERS_PARALLELISM"], os.environ["RAYON_NUM_THREADS"]) == ("true", "3")
    monkeypatch.delenv("RAYON_NUM_THREADS")
    Tokenize(tokenizer_id=tokenizer_file, field="text").setup()
    assert "RAYON_NUM_THREADS" not in os.environ
    assert "FASTOKENS_BPE_THREADS" not in os.environ


def test_pieces_of_a_long_block_are_told_of_one_after_another_and_do_not_show() -> None:
    class Letters:
        name_or_path = "letters"

        def encode(self, text: str) -> list[int]:
            return [ord(letter) for letter in text[:3]]

    operator = Tokenize(Letters(), field="text", special_tokens="eos", eos_token_id=7)
    many, long = ["abc"] * 300, ["x" * 400_000] * 3 + ["y" * 2_000_000, "z"]
    for values, moves in ((many, 3), (long, 4), ([], 1)):
        at = Whereabouts(array.array("q", [0] * NUMBERS))
        watched = Faults(scope=Scope(None, 0, 0, at))  # type: ignore[arg-type]
        out = operator.process(block_of(values), watched)
        assert at.moves == moves
        if values:
            assert ids_of(out) == [[ord(letter) for letter in value[:3]] + [7] for value in values]
