"""How many samples and tokens of each dataset are in a block of records: what shares are shown from."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zephon.columns import MISSING, Block, Column, Fixed, Objects, Ragged
from zephon.ops.token_fields import AUTO

I64 = NDArray[np.int64]


def tokens_of_records(block: Block) -> I64 | None:
    """The tokens of each record, int64 [n], by the first of the fields `input_ids`, `tokens`, `token_ids` that the
    block has; None if it has none of them.
    """
    found = (block.fields[name] for name in AUTO if name in block.fields)
    column = next((each for each in found if not _nowhere(each)), None)
    if column is None:
        return None
    if isinstance(column, Ragged):
        return column.lengths
    if isinstance(column, Fixed):
        return np.full(len(block), column.values.shape[1] if column.values.ndim > 1 else 0, np.int64)
    sized = [0 if value is MISSING or not hasattr(value, "__len__") else len(value) for value in column.to_list()]
    return np.array(sized, np.int64)


def _nowhere(column: Column) -> bool:
    """Whether it is a field that no record has."""
    return isinstance(column, Objects) and all(value is MISSING for value in column.values)


class DrawnCounts:
    """Samples and tokens by the number of their dataset, added up block by block. A sample cut into several records
    counts once.
    """

    def __init__(self, datasets: int) -> None:
        self.samples: I64 = np.zeros(datasets, np.int64)
        self.tokens: I64 = np.zeros(datasets, np.int64)

    def add(self, block: Block) -> None:
        """Add a block whose records were each made from one sample."""
        if not len(block) or block.sample_offsets is not None:
            return
        samples, size = block.samples, len(self.samples)
        other = samples[1:] != samples[:-1]
        # A sample's place in its lane is its own.
        first = np.append(True, other[:, 3] if samples.shape[1] == 4 else other.any(axis=1))
        dataset = samples[:, 0]
        self.samples += np.bincount(dataset[first], minlength=size)
        tokens = tokens_of_records(block)
        if tokens is not None:
            self.tokens += np.bincount(dataset, weights=tokens, minlength=size).astype(np.int64)
