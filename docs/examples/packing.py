"""Packing and mixture keeping: web text and code in sequences of their own, in an order that keeps the mixture.

Run as a script it packs the same data in four ways and prints how full the sequences are, then how many of every 16
sequences in a row are code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zephon import Dataset, MixtureSpec, Pipeline, StaticMixtureWorkSource
from zephon.ops import DomainGroups

DATA = Path(__file__).parent / "data"
LENGTH = 257


def documents() -> Pipeline:
    source = StaticMixtureWorkSource(
        datasets=[Dataset.from_path("web", DATA / "web"), Dataset.from_path("code", DATA / "code")],
        mixture=MixtureSpec({"web": 3, "code": 1}),
        seed=42,
        shuffle_block_size="global",
    )
    return Pipeline(source).tokenize(tokenizer_id=DATA / "tokenizer.json", field="text", special_tokens="eos")


pipeline = (
    documents()
    .pack_flat(
        max_length=LENGTH,
        algorithm="best_fit",
        homogeneity="group",
        groups=DomainGroups({"prose": ["web"], "programs": ["code"]}),
    )
    .ensure_mixture(max_buffer_size=64, mixture=MixtureSpec({"web": 3, "code": 1}))
    .batch(microbatch_size=4, drop_last=False)
    .options(canonical_replicas=2)
)


def main() -> None:
    for settings in ({"algorithm": "wrap"}, {"algorithm": "best_fit_wrap"}, {"algorithm": "best_fit"}, {}):
        tell(settings)
    for batches in lanes_of(pipeline):
        whole = range(0, len(batches) - 15, 16)
        print("code in 16 sequences:", " ".join(str(sum(batches[low : low + 16])) for low in whole))


def tell(settings: dict[str, Any]) -> None:
    packed = documents().pack_flat(LENGTH, **settings).batch(4, drop_last=False).options(canonical_replicas=1)
    sequences = tokens = 0
    for batch in packed:
        sequences += len(batch)
        tokens += int(batch["sequence_length"].sum())
    packed.close()
    name = settings.get("algorithm", "first_fit")
    print(f"{name}: {sequences} sequences, {tokens / sequences / LENGTH:.1%} full")


def lanes_of(pipeline: Pipeline) -> list[list[bool]]:
    """For each lane, which of its sequences are code."""
    lanes: dict[int, list[bool]] = {}
    for batch in pipeline:
        lanes.setdefault(batch.lane, []).extend(samples[0][0] == "code" for samples in batch.samples)
    pipeline.close()
    return [lanes[lane] for lane in sorted(lanes)]


if __name__ == "__main__":
    main()
