"""What the data is: two datasets, 70 to 30, tokenised and packed to 64 tokens + 1, in batches of 4 sequences."""
from __future__ import annotations

from pathlib import Path

from zephon import Dataset, MixtureSpec, Pipeline, StaticMixtureWorkSource

DATA = Path(__file__).parent / "data"

source = StaticMixtureWorkSource(
    datasets=[Dataset.from_path("web", DATA / "web"), Dataset.from_path("code", DATA / "code")],
    mixture=MixtureSpec({"web": 0.7, "code": 0.3}),
    seed=42,
    shuffle_within_shard=True,
)
pipeline = (
    Pipeline(source)
    .tokenize(tokenizer_id=DATA / "tokenizer.json", field="text", special_tokens="eos")
    .pack_flat(max_length=65, algorithm="wrap")
    .shuffle(buffer_size=32)
    .batch(microbatch_size=4)
    .options(canonical_replicas=8)
)
