"""A curriculum: mostly web text first, more code later, by tokens; every row comes once an epoch, and none twice.

Run as a script it prints what each tenth of the epoch is made of.
"""

from __future__ import annotations

from pathlib import Path

from zephon import Dataset, MixtureSchedule, Pipeline, StaticMixtureWorkSource
from zephon.work import TokenEstimation

DATA = Path(__file__).parent / "data"

source = StaticMixtureWorkSource(
    datasets=[Dataset.from_path("web", DATA / "web"), Dataset.from_path("code", DATA / "code")],
    mixture=MixtureSchedule(
        [
            (0, {"web": 0.9, "code": 0.1}),
            (0.3, {"web": 0.9, "code": 0.1}),
            (1.0, {"web": 0.55, "code": 0.45}, "linear"),
        ]
    ),
    seed=42,
    shuffle_block_size="global",
    max_repeats=0,
    token_estimation=TokenEstimation(),
)
pipeline = (
    Pipeline(source)
    .tokenize(tokenizer_id=DATA / "tokenizer.json", field="text", special_tokens="eos")
    .pack_flat(max_length=65, algorithm="wrap")
    .shuffle(buffer_size=32)
    .batch(microbatch_size=4)
    .options(canonical_replicas=8)
)


def main() -> None:
    print(pipeline.explain())
    curriculum = pipeline.plan().curriculum(0)
    total = curriculum.total
    before = curriculum.proportions.counts(0)
    for tenth in range(1, 11):
        counts = curriculum.proportions.counts(total * tenth // 10)
        web, code = (now - then for now, then in zip(counts, before))
        print(f"tenth {tenth}: web {web}, code {code}")
        before = counts


if __name__ == "__main__":
    main()
