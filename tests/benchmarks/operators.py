"""Stateful operators alone, in one process: their speed beside the bare loop, and how full packed sequences are.

They get what a worker hands them: blocks of 512 documents of the corpus, int32 ids, two datasets in turn, in windows of
16384 samples, in a process that keeps freed memory as an engine does.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from tests.benchmarks.corpus import Corpus
from tests.benchmarks.floors import LENGTH, files, packed
from tests.benchmarks.report import Row, Scale
from zephon.columns import Block, Ragged
from zephon.ops.base import Faults, Stateful, WindowKey
from zephon.ops.ensure_mixture import EnsureMixture
from zephon.ops.pack_flat import PackFlat
from zephon.ops.pack_sequences import PackSequences
from zephon.ops.shuffle import Shuffle
from zephon_daemon.pages import KEEP

BLOCK, WINDOW = 512, 16_384
TARGET = 50.0  # million tokens a CPU second
KEY = WindowKey(0, 0, 0, 0)
MIXTURE = {"0": 1, "1": 1}

OPERATORS: dict[str, Callable[[], Stateful]] = {
    "pack_flat wrap": lambda: PackFlat(LENGTH, algorithm="wrap"),
    "pack_flat first_fit": lambda: PackFlat(LENGTH, algorithm="first_fit"),
    "pack_flat first_fit, pool of 64": lambda: PackFlat(LENGTH, algorithm="first_fit", candidate_pool_size=64),
    "pack_flat best_fit": lambda: PackFlat(LENGTH, algorithm="best_fit"),
    "pack_flat best_fit, no pool": lambda: PackFlat(LENGTH, algorithm="best_fit", candidate_pool_size=0),
    "pack_flat best_fit_wrap": lambda: PackFlat(LENGTH, algorithm="best_fit_wrap"),
    "pack_flat best_fit, datasets apart": lambda: PackFlat(LENGTH, algorithm="best_fit", homogeneity="full"),
    "pack_flat best_fit, within_bin": lambda: PackFlat(LENGTH, algorithm="best_fit", shuffle_strategy="within_bin"),
    "pack_flat best_fit, bins": lambda: PackFlat(LENGTH, algorithm="best_fit", shuffle_strategy="bins"),
    "pack_sequences best_fit": lambda: PackSequences(LENGTH, algorithm="best_fit", drop_oversized=True),
    "shuffle streaming": lambda: Shuffle(1024),
    "shuffle block": lambda: Shuffle(1024, algorithm="block"),
    "ensure_mixture": lambda: EnsureMixture(mixture=MIXTURE),
    "ensure_mixture by samples": lambda: EnsureMixture(mixture=MIXTURE, weight_by="samples"),
    "ensure_mixture strict": lambda: EnsureMixture(mixture=MIXTURE, max_buffer_size=None),
}

PACKINGS: dict[str, dict[str, object]] = {
    "first_fit": {"algorithm": "first_fit"},
    "best_fit": {"algorithm": "best_fit"},
    "best_fit, fullest": {"algorithm": "best_fit", "flush_strategy": "fullest"},
    "best_fit, no pool": {"algorithm": "best_fit", "candidate_pool_size": 0},
    "best_fit, pool of 256": {"algorithm": "best_fit", "candidate_pool_size": 256},
    "best_fit_wrap": {"algorithm": "best_fit_wrap"},
    "wrap": {"algorithm": "wrap"},
}


def speed(corpus: Corpus, scale: Scale) -> list[Row]:
    """Million tokens a CPU second of each stateful operator, beside a bare loop that lays the same ids end to end."""
    documents = WINDOW if scale.factor >= 1 else 2048
    command = [sys.executable, "-m", __name__, str(corpus.ids), str(documents), str(max(2, scale.rounds))]
    said = subprocess.run(command, env={**os.environ, **KEEP}, stdout=subprocess.PIPE, check=True).stdout
    rates: dict[str, list[float]] = json.loads(said)
    bare = rates.pop("bare")
    rows = [Row("operator: bare loop", statistics.median(bare), "M tokens/CPU s", None)]
    for name, each in rates.items():
        share = statistics.median(rate / floor for rate, floor in zip(each, bare, strict=True))
        detail = f"{min(each):.0f} to {max(each):.0f}; {share:.2f} of the bare loop"
        rows.append(Row(f"operator: {name}", statistics.median(each), "M tokens/CPU s", TARGET, True, detail))
        print(f"  {name}: {rows[-1].figure:.0f} M tokens a CPU second", file=sys.stderr, flush=True)
    return rows


def main(folder: Path, documents: int, rounds: int) -> dict[str, list[float]]:
    """Million tokens a CPU second in each round."""
    blocks = _blocks(folder, documents)
    tokens = sum(len(_ids(block)) for block in blocks)
    rates: dict[str, list[float]] = {}
    for _ in range(rounds):
        rates.setdefault("bare", []).append(_rate(tokens, lambda: _bare(blocks)))
        for name, make in OPERATORS.items():
            operator = make()
            rates.setdefault(name, []).append(_rate(tokens, lambda operator=operator: run(operator, blocks)))  # type: ignore[misc]
    return rates


def fill(corpus: Corpus, scale: Scale) -> list[Row]:
    """How full sequences of 2049 are, before a window's end and with what its flush costs."""
    blocks = _blocks(corpus.ids, WINDOW)
    rows = []
    for name, settings in PACKINGS.items():
        out, counters = run(PackFlat(LENGTH, **settings), blocks)  # type: ignore[arg-type]
        before, whole = shares(out, counters)
        target = 99.5 if name == "best_fit" else None
        detail = f"{whole:.2%} with the flush of a window of {sum(map(len, blocks))} documents"
        rows.append(Row(f"fill: {name}", 100 * before, "%", target, True, detail))
    return rows


def run(operator: Stateful, blocks: list[Block]) -> tuple[list[Block], dict[str, int]]:
    """One window."""
    accumulator, faults = operator.accumulator(KEY), Faults()
    out = [made for block in blocks for made in accumulator.push(block, faults)]
    return out + accumulator.flush(faults), accumulator.counters


def shares(out: list[Block], counters: dict[str, int]) -> tuple[float, float]:
    """How full sequences are: those finished before the flush, and all."""
    slots = sum(block.fields["input_ids"].nbytes // 4 for block in out)
    padding, flushed = counters.get("padding_tokens", 0), counters.get("flush_padding_tokens", 0)
    return 1 - (padding - flushed) / slots, 1 - padding / slots


def _rate(tokens: int, work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return tokens / (time.process_time() - began) / 1e6


def _bare(blocks: list[Block]) -> int:
    return sum(batch.size for batch in packed(iter([_ids(block) for block in blocks])))


def _ids(block: Block) -> np.ndarray:
    column = block.fields["input_ids"]
    assert isinstance(column, Ragged)
    return column.values


def _blocks(folder: Path, documents: int) -> list[Block]:
    """The first documents of a folder of ids."""
    blocks: list[Block] = []
    for path in files(folder):
        for batch in pq.ParquetFile(path).iter_batches(BLOCK):
            column = batch.column(0)
            offsets = column.offsets.to_numpy().astype(np.int64)
            ids = column.values.to_numpy()[offsets[0] : offsets[-1]].astype(np.int32)
            first = sum(map(len, blocks))
            row = np.arange(first, first + len(batch))
            samples = np.stack((row % 2, np.zeros_like(row), row), axis=1)
            blocks.append(Block({"input_ids": Ragged(ids, offsets - offsets[0])}, samples))
            if first + len(batch) >= documents:
                return blocks
    return blocks


if __name__ == "__main__":
    json.dump(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])), sys.stdout)
