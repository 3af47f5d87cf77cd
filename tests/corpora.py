"""Small corpora and tokenizers that tests are written against; all of them pure functions of their arguments.

`COUNT(n, shards, folder)` is the standard one: JSON lines rows `{"id": i, "text": …}`, i = 0..n-1, contiguous over
equal files, so that any list of ids says at once what was lost, repeated or reordered.
"""
from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def row_of(i: int) -> dict[str, Any]:
    """The row of COUNT with id `i`; its text has 3 to 19 words, so that lengths differ."""
    return {"id": i, "text": " ".join([f"row {i}", *(f"w{(i * 7 + j) % 97}" for j in range(1 + i % 17))])}


def COUNT(
    n: int, shards: int, folder: Path | str, *, suffix: str = ".jsonl", row: Callable[[int], Row] = row_of
) -> Path:
    """Writes ids 0..n-1 over `shards` files of equal size (the first ones hold one more where it does not divide).

    `suffix` chooses the format: `.jsonl`, `.jsonl.gz`, `.jsonl.zst` or `.parquet`. Returns the folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    start = 0
    for shard in range(shards):
        stop = start + n // shards + (shard < n % shards)
        write(folder / f"part-{shard:05d}{suffix}", [row(i) for i in range(start, stop)])
        start = stop
    return folder


def write(path: Path, rows: Sequence[Row]) -> Path:
    """Writes rows in the format that the suffix names."""
    if path.suffix == ".parquet":
        return write_parquet(path, rows)
    data = "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    elif path.suffix == ".zst":
        import zstandard

        data = zstandard.ZstdCompressor().compress(data)
    path.write_bytes(data)
    return path


def write_parquet(path: Path, rows: Sequence[Row], *, row_group_size: int = 100) -> Path:
    """Writes rows as Parquet, with small row groups, so that reads cross them."""
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([dict(r) for r in rows]), path, row_group_size=row_group_size)
    return path


def word_tokenizer(path: Path, words: Iterable[str]) -> Path:
    """Writes a `tokenizer.json` that turns each word, split at spaces, into one id: its place in `words`.

    `<unk>`, `<bos>` and `<eos>` come after the words.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate(words)}
    for special in ("<unk>", "<bos>", "<eos>"):
        vocabulary[special] = len(vocabulary)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<unk>", "<bos>", "<eos>"])
    tokenizer.save(str(path))
    return path


def byte_tokenizer(path: Path) -> Path:
    """Writes a byte-level BPE without merges as `tokenizer.json`: any text, one id a byte, then `<bos>` and `<eos>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.save(str(path))
    return path
