"""What the benchmarks read, made once into the cache folder: workload A, Parquet text; workload B, its tokens; and for
others the second half of the text as JSON lines, and the tokens as documents a tenth and ten times as long.

A document is a few runs of consecutive words from the text that a Python installation ships (modules, their comments
and docs), as many words as a log-normal draw says: some 350 tokens on average under the byte-level BPE that is trained
on that same text. So words are as frequent and as various as people write them, and no document is there twice.
"""

from __future__ import annotations

import json
import os
import shutil
import sysconfig
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

VERSION = 2  # of what is made
SEED = 20240229
TOKENS_A_DOCUMENT = 350
SPREAD = 0.8  # sigma of the log-normal lengths
RUN_WORDS = 40  # a document is made of runs of about so many consecutive words
ROW_GROUP = 1000
END = "<eos>"
_SUFFIXES = (".py", ".pyi", ".txt", ".rst", ".md")
_LEFT_OUT = {"__pycache__", "test", "tests"}


@dataclass(frozen=True)
class Size:
    """How much is made: documents, shards, bytes of text they are drawn from and the tokenizer is trained on, ids."""

    name: str
    documents: int
    shards: int
    pool: int
    trained_on: int
    vocabulary: int


FULL = Size("full", 163_840, 16, 256 << 20, 24 << 20, 32_768)
QUICK = Size("quick", 8_192, 4, 4 << 20, 2 << 20, 4_096)


@dataclass(frozen=True)
class Corpus:
    """The two workloads, and what is in them."""

    folder: Path
    documents: int
    tokens: int
    text_bytes: int
    vocabulary: int

    @property
    def text(self) -> Path:
        return self.folder / "text"

    @property
    def lines(self) -> Path:
        """The second half of the text's shards, as JSON lines."""
        return self.folder / "lines"

    @property
    def ids(self) -> Path:
        return self.folder / "ids"

    @property
    def short(self) -> Path:
        """The tokens as documents of a tenth of the length."""
        return self.folder / "short"

    @property
    def long(self) -> Path:
        """The tokens as documents of ten times the length."""
        return self.folder / "long"

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer.json"


def corpus(size: Size) -> Corpus:
    """The corpus of that size, made now if the cache folder does not have it."""
    root = Path(os.environ.get("ZEPHON_CACHE") or Path(tempfile.gettempdir(), f"zephon-benchmarks-{os.getuid()}"))
    folder = root / f"benchmark-corpus-{VERSION}-{size.name}-{size.documents}-{size.pool >> 20}-{ROW_GROUP}"
    if not (folder / "corpus.json").exists():
        root.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=root))
        try:
            _make(making, size)
            making.rename(folder)
        except OSError:
            if not folder.exists():  # else another process has made it meanwhile
                raise
        finally:
            shutil.rmtree(making, ignore_errors=True)
    facts: dict[str, Any] = json.loads((folder / "corpus.json").read_text())
    return Corpus(folder, **facts)


def _make(folder: Path, size: Size) -> None:
    import fastokens
    import pyarrow as pa
    import pyarrow.parquet as pq

    pool = _pool(size.pool)
    words = _words(pool)
    _train(pool, words, size, folder / "tokenizer.json")
    tokenizer = fastokens.Tokenizer.from_file(str(folder / "tokenizer.json"))
    rng = np.random.default_rng(SEED)
    per_word = _tokens_a_word(tokenizer, pool, words, rng)
    mean = np.log(TOKENS_A_DOCUMENT / per_word) - SPREAD**2 / 2
    counts = np.maximum(1, rng.lognormal(mean, SPREAD, size.documents)).astype(np.int64)
    facts = Corpus(folder, size.documents, 0, 0, len(_vocabulary(folder / "tokenizer.json")))
    tokens = text_bytes = 0
    for name in ("text", "lines", "ids", "short", "long"):
        (folder / name).mkdir()
    for shard in range(size.shards):
        mine = counts[size.documents * shard // size.shards : size.documents * (shard + 1) // size.shards]
        texts = _documents(pool, words, mine, rng)
        ids, offsets = tokenizer.encode_batch_flat(texts, False)
        values, bounds = np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.int64)
        tables = {"text": pa.table({"text": pa.array(texts, pa.string())})}
        tenths = [bounds[:-1] + np.diff(bounds) * part // 10 for part in range(10)]
        shorter, longer = np.unique(np.concatenate((*tenths, bounds))), np.append(bounds[:-1:10], bounds[-1])
        for field, ends in (("ids", bounds), ("short", shorter), ("long", longer)):
            column = pa.LargeListArray.from_arrays(pa.array(ends), pa.array(values.astype(np.uint16)))
            tables[field] = pa.table({"input_ids": column})
        for field, table in tables.items():
            path = folder / field / f"part-{shard:05d}.parquet"
            rows = max(1, ROW_GROUP * table.num_rows // len(texts))
            pq.write_table(table, path, row_group_size=rows, compression="zstd")
        if shard >= size.shards // 2:
            lines = "".join(json.dumps({"id": row, "text": text}) + "\n" for row, text in enumerate(texts))
            (folder / "lines" / f"part-{shard:05d}.jsonl").write_text(lines)
        tokens += len(values)
        text_bytes += sum(len(text.encode()) for text in texts)
    found = asdict(facts) | {"tokens": tokens, "text_bytes": text_bytes}
    del found["folder"]
    (folder / "corpus.json").write_text(json.dumps(found))


def _pool(size: int) -> bytes:
    """Text of this Python installation: the standard library's first, then site-packages', by name."""
    parts, have = [], 0
    paths = sysconfig.get_paths()
    for root in dict.fromkeys(paths[kind] for kind in ("stdlib", "purelib", "platlib")):
        for folder, inner, names in os.walk(root):
            inner[:] = sorted(name for name in inner if name not in _LEFT_OUT and "-packages" not in name)
            for name in sorted(names):
                if name.endswith(_SUFFIXES):
                    data = _text(Path(folder, name))
                    parts.append(data)
                    have += len(data)
            if have >= size:
                return b"\n".join(parts)[:size].decode(errors="ignore").encode()
    return b"\n".join(parts)


def _text(path: Path) -> bytes:
    """The file's bytes if they are text of a size that a person would write, else none."""
    try:
        data = path.read_bytes() if path.stat().st_size < 1 << 20 else b""
        data.decode()
    except (OSError, UnicodeDecodeError):
        return b""
    return data


def _words(pool: bytes) -> np.ndarray:
    """Where words begin: behind white space, and so never inside a character."""
    data = np.frombuffer(pool, np.uint8)
    space = (data == 32) | (data == 10)
    return np.flatnonzero(space[:-1] & ~space[1:]) + 1


def _documents(pool: bytes, words: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> list[str]:
    """A document for each count of words."""
    runs = -(-counts // RUN_WORDS)
    ends = np.cumsum(runs)
    length = np.repeat(counts // runs, runs)
    starts = rng.integers(0, len(words) - int(length.max()) - 1, len(length))
    spans = zip(words[starts].tolist(), words[starts + length].tolist(), strict=True)
    pieces = [pool[low:high] for low, high in spans]
    bounds = zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)
    return [b"".join(pieces[low:high]).decode() for low, high in bounds]


def _train(pool: bytes, words: np.ndarray, size: Size, target: Path) -> None:
    """A byte-level BPE with as many ids as asked for, or as the text supports."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size.vocabulary,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    every = max(1, len(pool) // size.trained_on)
    lines = pool.decode().split("\n")
    tokenizer.train_from_iterator(("\n".join(lines[i : i + 50]) for i in range(0, len(lines), 50 * every)), trainer)
    tokenizer.save(str(target))


def _vocabulary(path: Path) -> dict[str, int]:
    vocabulary: dict[str, int] = json.loads(path.read_text())["model"]["vocab"]
    return vocabulary


def _tokens_a_word(tokenizer: Any, pool: bytes, words: np.ndarray, rng: np.random.Generator) -> float:
    texts = _documents(pool, words, np.full(512, 200), rng)
    ids, _ = tokenizer.encode_batch_flat(texts, False)
    return len(ids) / 4 / (512 * 200)
