"""What `explain` finds out by looking at a few rows: which fields there are, and which are looked for in vain."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.corpora import word_tokenizer
from tests.unit.small_recipes import tokenizer
from zephon import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource

ROWS = [{"id": number, "text": "w1 w2"} for number in range(20)]


def in_format(kind: str, folder: Path, rows: list[dict[str, Any]] = ROWS) -> Dataset:
    if kind == "memory":
        return Dataset.from_dict("web", {"one": InMemoryShard(rows)})
    path = folder / f"part.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(text) if kind.endswith("gz") else text)
    return Dataset.from_path("web", path)


def recipe(dataset: Dataset) -> Pipeline:
    return Pipeline(StaticMixtureWorkSource([dataset], None)).options(canonical_replicas=2)


def warned(pipeline: Pipeline) -> list[str]:
    lines = pipeline.batch(2).explain(dp_degree=1).splitlines()
    return [line.removeprefix("warning: ") for line in lines if line.startswith("warning: ")]


@pytest.mark.parametrize("kind", ["memory", "jsonl", "jsonl.gz", "parquet"])
def test_a_wrong_field_name_is_told_before_anything_runs(tmp_path: Path, kind: str) -> None:
    dataset = in_format(kind, tmp_path)
    built = recipe(dataset).decode_text().tokenize(tokenizer_id=tokenizer(), field="txt", special_tokens="none")
    (warning,) = warned(built.pack_flat(8))
    shard = dataset.shard_path(0)
    assert warning == (
        f"tokenize: dataset 'web', shard {shard}, row 0 has no field 'txt' (it has: id, text; did you mean 'text'?)"
    )
    assert "fields of its first rows: id (int), text (str)" in built.explain()


def test_the_row_that_lacks_it_is_named_where_others_before_it_do_not(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": "b"}, {"body": "c"}, {"text": "d"}]
    built = recipe(in_format("jsonl", tmp_path, rows)).tokenize(tokenizer_id=tokenizer(), field="text")
    assert "row 2 has no field 'text' (it has: body)" in warned(built)[0]


@pytest.mark.parametrize("build", [
    lambda p: p.tokenize(tokenizer_id=tokenizer(), field="text", special_tokens="none").pack_flat(8),
    lambda p: p.tokenize(tokenizer_id=tokenizer(), field="txt", special_tokens="none", missing_field="skip"),
    lambda p: p.map_transform(lambda row: {"txt": row["text"]}).tokenize(tokenizer_id=tokenizer(), field="txt"),
    lambda p: p.ensure_mixture(weight_by="id").shuffle(4),
])  # fmt: skip
def test_nothing_is_said_of_fields_that_are_there_or_may_be(tmp_path: Path, build: Any) -> None:
    word_tokenizer(tmp_path / "tokenizer.json", ["a"])
    assert warned(build(recipe(in_format("jsonl", tmp_path)))) == []


@pytest.mark.parametrize(("build", "said"), [
    (lambda p: p.pack_flat(8), "pack_flat: .* no field 'input_ids' or 'tokens' or 'token_ids'"),
    (lambda p: p.expand_chat(), "expand_chat: .* no field 'messages'"),
    (lambda p: p.ensure_mixture(weight_by="tokens"), "ensure_mixture: .* no field 'tokens'"),
    (lambda p: p.pack_sequences(8, tokens_field="ids"), "pack_sequences: .* no field 'ids'.*did you mean 'id'"),
])  # fmt: skip
def test_every_operator_that_needs_a_field_tells(tmp_path: Path, build: Any, said: str) -> None:
    (warning,) = warned(build(recipe(in_format("memory", tmp_path))))
    assert re.search(said, warning)


def test_a_first_row_that_cannot_be_read_is_told_and_the_plan_is_shown_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": \n{"text": "b"}\n')
    built = recipe(Dataset.from_path("web", path)).batch(1)
    shown = built.explain()
    assert "fields of its first rows: not known: its first rows cannot be read" in shown
    assert "warning: read: dataset 'web'" in shown
    assert "ends: after 1 round" in shown
