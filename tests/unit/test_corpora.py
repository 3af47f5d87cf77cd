"""The corpora that other tests stand on."""
from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.corpora import COUNT, byte_tokenizer, row_of, word_tokenizer


@pytest.mark.parametrize(("n", "shards"), [(0, 1), (1, 1), (96, 4), (10, 4), (3, 5)])
def test_count_holds_each_id_once_in_order_over_equal_files(tmp_path: Path, n: int, shards: int) -> None:
    files = sorted(COUNT(n, shards, tmp_path).iterdir())
    lines = [path.read_text().splitlines() for path in files]
    assert [json.loads(line)["id"] for shard in lines for line in shard] == list(range(n))
    assert len(files) == shards
    assert max(map(len, lines)) - min(map(len, lines)) <= 1


def test_compressed_forms_hold_the_same_rows_and_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    first, second = (COUNT(20, 1, tmp_path / name, suffix=".jsonl.gz") / "part-00000.jsonl.gz" for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    assert [json.loads(line) for line in gzip.decompress(first.read_bytes()).splitlines()] == [*map(row_of, range(20))]


def test_the_word_tokenizer_gives_each_word_its_place(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    path = word_tokenizer(tmp_path / "tokenizer.json", (str(i) for i in range(50)))
    assert tokenizers.Tokenizer.from_file(str(path)).encode("7 7 42 0").ids == [7, 7, 42, 0]


def test_the_byte_tokenizer_decodes_what_it_encodes(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(byte_tokenizer(tmp_path / "tokenizer.json")))
    text = "naïve text,\n\ttabs and 漢字"
    assert len(tokenizer.encode(text).ids) == len(text.encode())
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
