"""The demo's recipe: what the data is, and nothing about how many ranks or workers will process it.

`zephon demo` puts a copy of this file beside the corpus that it makes. There it can be used like any recipe:

    zephon explain recipe.py
    zephon verify recipe.py
    zephon launch recipe.py -- torchrun --nproc-per-node 4 your_train.py
"""

from pathlib import Path

from zephon import Dataset, MixtureSpec, Pipeline, StaticMixtureWorkSource

HERE = Path(__file__).parent

# A dataset is a folder of shards under a name. Its format is told by its files: JSON lines here, Parquet there.
code = Dataset.from_path("code", HERE / "corpus" / "code")
prose = Dataset.from_path("prose", HERE / "corpus" / "prose")

# The work source decides which samples come, in which order: two documents of prose for one of code, drawn from all
# shards. The order is a function of the seed, so any part of it can be worked out again at any time.
source = StaticMixtureWorkSource(
    datasets=[code, prose],
    mixture=MixtureSpec({"code": 1, "prose": 2}),
    shuffle_block_size="global",
    seed=42,
)

pipeline = (
    Pipeline(source)
    .tokenize(tokenizer_id=HERE / "tokenizer.json", field="text", special_tokens="eos")
    # Sequences of 256 tokens, and one more for the labels, which are shifted by one.
    .pack_flat(max_length=257, algorithm="wrap")
    .shuffle(buffer_size=64)
    # A batch is 2 sequences of one lane, so a global step of one batch from each lane is 16 sequences.
    .batch(microbatch_size=2)
    # 8 lanes for the whole life of the run: it can be trained on 8, 4, 2 or 1 ranks and change at every resume.
    .options(canonical_replicas=8, flush_every_k_chunks=8)
)
