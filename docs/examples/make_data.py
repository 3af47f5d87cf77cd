"""Writes a small corpus and trains a tokenizer on it: `data/` beside this file, or the folder that is named.

Everything is drawn from a fixed seed, so that every run of this script writes the same bytes.
"""
from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

NOUNS = ("river", "lamp", "engine", "garden", "letter", "window", "number", "bridge", "signal", "winter")
VERBS = ("finds", "turns", "carries", "writes", "follows", "leaves", "opens", "counts")
NAMES = ("total", "index", "value", "offset", "lane", "window", "shard", "row")
ROWS_A_SHARD = 200


def sentence(rng: random.Random) -> str:
    return f"The {rng.choice(NOUNS)} {rng.choice(VERBS)} the {rng.choice(NOUNS)}."


def function(rng: random.Random) -> str:
    name, a, b = rng.sample(NAMES, 3)
    return f"def {name}({a}, {b}):\n    return {a} {rng.choice('+-*')} {b}\n"


def write(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def make(folder: Path) -> None:
    rng = random.Random(7)
    texts = []
    for shard in range(3):
        web = [" ".join(sentence(rng) for _ in range(rng.randint(1, 12))) for _ in range(ROWS_A_SHARD)]
        write(folder / "web" / f"part-{shard}.jsonl", web)
        texts += web
    code = ["\n".join(function(rng) for _ in range(rng.randint(1, 4))) for _ in range(ROWS_A_SHARD)]
    write(folder / "code" / "part-0.jsonl", code)

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*texts, *code], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "data")
