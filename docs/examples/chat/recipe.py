"""Conversations, packed to 512 tokens + 1 with a mask of what is learnt.

In `pipeline` a conversation teaches all that the assistant says in it; in `turns` each turn is a record of its own.
"""
from __future__ import annotations

from pathlib import Path

from zephon import Dataset, Pipeline, StaticMixtureWorkSource

DATA = Path(__file__).parent / "data"


def talks() -> Pipeline:
    dataset = Dataset.from_path("talks", DATA / "*.jsonl")
    return Pipeline(StaticMixtureWorkSource(datasets=[dataset], mixture=None, seed=1, shuffle_within_shard=True))


pipeline = (
    talks()
    .tokenize_chat(tokenizer_id=DATA / "model", max_length=513)
    .pack_flat(max_length=513, algorithm="best_fit")
    .batch(microbatch_size=4)
    .options(canonical_replicas=2)
)

turns = (
    talks()
    .expand_chat()
    .tokenize_chat(tokenizer_id=DATA / "model", max_length=513, loss_scope="last_span")
    .pack_flat(max_length=513, algorithm="best_fit")
    .batch(microbatch_size=4)
    .options(canonical_replicas=2)
)
