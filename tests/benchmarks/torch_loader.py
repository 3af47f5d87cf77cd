"""The same work by torch's DataLoader with two workers, as a careful user writes it.

    python -m tests.benchmarks.torch_loader text FOLDER TOKENIZER
    python -m tests.benchmarks.torch_loader ids FOLDER

Each worker takes every second file, reads it a block at a time, tokenises with `tokenizers`, packs with numpy, and
yields whole batches, which travel as tensors in shared memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.benchmarks.contest import deliver
from tests.benchmarks.floors import SLOWLY, encoder, files, ids_of, packed, texts_of

WORKERS, PREFETCH = 2, 8


class Packed(IterableDataset):  # type: ignore[type-arg]
    """Batches of 8 packed sequences, over and over."""

    def __init__(self, folder: Path, tokenizer: Path | None) -> None:
        self.folder, self.tokenizer = folder, tokenizer

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        torch.set_num_threads(1)
        paths = files(self.folder, worker.id, worker.num_workers) if worker else files(self.folder)
        if self.tokenizer is None:
            blocks = ids_of(paths)
        else:
            encode = encoder(self.tokenizer, "tokenizers")
            blocks = (encode(texts) for texts in texts_of(paths, SLOWLY))
        for batch in packed(blocks):
            yield torch.from_numpy(batch.astype(np.int64))


def main(arguments: list[str]) -> None:
    workload, folder, *more = arguments
    dataset = Packed(Path(folder), Path(more[0]) if workload == "text" else None)
    loader = DataLoader(dataset, batch_size=None, num_workers=WORKERS, prefetch_factor=PREFETCH)
    deliver(batch.numel() for batch in loader)


if __name__ == "__main__":
    main(sys.argv[1:])
