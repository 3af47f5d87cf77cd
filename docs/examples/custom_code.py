"""Operators of your own: drop repeated sentences, cut texts into passages, hide some words, and keep a running count.

    python make_data.py
    zephon verify custom_code.py --dp 4,2,1 --steps 6
"""
from __future__ import annotations

from pathlib import Path
from typing import Any

import zephon
from zephon import Dataset, Pipeline, SampleRecord, StaticMixtureWorkSource
from zephon.ops import BaseOp, OpContext, spawn_child

DATA = Path(__file__).parent / "data"
HIDDEN_SHARE = 0.15


def passages(records: list[SampleRecord]) -> list[SampleRecord]:
    """Each text as passages of at most four sentences: children of their record."""
    made = []
    for record in records:
        sentences = record.payload["text"].split(". ")
        for index, low in enumerate(range(0, len(sentences), 4)):
            text = ". ".join(sentences[low : low + 4])
            made.append(SampleRecord(spawn_child(record.meta, index), {"text": text}))
    return made


class HideWords(BaseOp):
    """Some words of each record become a mark, others in every epoch, the same ones wherever it runs."""

    name = "hide words"

    def __init__(self, share: float) -> None:
        self.share = share

    def setup(self, ctx: OpContext) -> None:
        self.mark = "[mask]"  # here a model would be loaded, or a file opened

    def process_one(self, record: SampleRecord) -> list[SampleRecord]:
        words = record.payload["text"].split()
        hidden = zephon.generator().random(len(words)) < self.share
        record.payload["text"] = " ".join(self.mark if gone else word for word, gone in zip(words, hidden))
        return [record]


def drop_repeats(seen: set[str], records: list[SampleRecord]) -> tuple[set[str], list[SampleRecord]]:
    """What begins as another text of the window did is left out."""
    kept = []
    for record in records:
        beginning = record.payload["text"][:40]
        if beginning not in seen:
            seen.add(beginning)
            kept.append(record)
    return seen, kept


def describe(row: dict[str, Any]) -> dict[str, Any]:
    return {"text": row["text"], "words": len(row["text"].split())}


pipeline = (
    Pipeline(StaticMixtureWorkSource([Dataset.from_path("web", DATA / "web")], None, seed=42, chunk_size=32))
    .add_op("passages", process_many=passages)
    .add_op(HideWords(HIDDEN_SHARE))
    .stateful_transform("drop repeats", init_state=set, push=drop_repeats)
    .map_transform(describe)
    .batch(microbatch_size=4)
    .options(canonical_replicas=4)
)

if __name__ == "__main__":
    print(pipeline.validate(strict=True))
    for batch in pipeline:
        print(batch.lane, batch.samples[0], batch["words"].tolist(), batch["text"][0])
        break
    pipeline.close()
