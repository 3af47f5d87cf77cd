"""Reading samples by pointer, over several datasets and shards, in the order asked for.

Pointers are sorted once, each shard is read in one go with its rows ascending, and the records are put back into
pointer order at the end. Bad records are reported in pointer order too, whatever order they were read in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from zephon.columns import Block, IntArray
from zephon.datasets.open_files import resources
from zephon.datasets.source import Source
from zephon.ops.base import READ, Faults

if TYPE_CHECKING:
    from zephon.datasets.dataset import Dataset


def read(datasets: Sequence[Dataset], pointers: IntArray, fields: frozenset[str] | None, faults: Faults) -> Block:
    """The samples at `pointers` (int64 `[m, 3]`: dataset, shard, row), one record each; bad ones go to `faults`.

    A fourth column, the samples' places in their lane, is passed on.
    """
    return gather(lambda number: datasets[number].source, pointers, fields, faults)


def gather(
    source_of: Callable[[int], Source], pointers: IntArray, fields: frozenset[str] | None, faults: Faults
) -> Block:
    """`read`, given how a dataset's number leads to its source."""
    pointers = np.asarray(pointers, np.int64)
    if not len(pointers):
        return Block.empty()
    order = np.lexsort((pointers[:, 2], pointers[:, 1], pointers[:, 0]))
    ordered = bool((order[1:] > order[:-1]).all())
    sorted_pointers = pointers if ordered else pointers[order]
    cuts = np.flatnonzero((sorted_pointers[1:, :2] != sorted_pointers[:-1, :2]).any(axis=1)) + 1
    blocks: list[Block] = []
    bad: list[tuple[int, str]] = []
    good = np.ones(len(pointers), np.bool_)
    for low, high in zip([0, *cuts.tolist()], [*cuts.tolist(), len(pointers)], strict=True):
        dataset, shard, first = sorted_pointers[low, :3].tolist()
        rows = np.ascontiguousarray(sorted_pointers[low:high, 2])
        source = source_of(dataset)
        if not (0 <= shard < len(source.counts) and first >= 0 and int(rows[-1]) < int(source.counts[shard])):
            raise IndexError(f"no such sample: dataset {dataset}, shard {shard}, rows {first} to {int(rows[-1])}")
        piece = source.read(shard, rows, fields)
        faults.moved()
        samples = sorted_pointers[low:high]
        if piece.bad:
            good[[low + place for place, _ in piece.bad]] = False
            bad += [(int(order[low + place]), cause) for place, cause in piece.bad]
            samples = samples[good[low:high]]
        blocks.append(Block(piece.columns, samples))
    _report_stumbles(faults)
    for place, cause in sorted(bad):
        faults.bad(tuple(pointers[place, :3].tolist()), READ, cause)
    block = Block.concat(blocks)
    if ordered:
        return block
    return block.take(np.argsort(order[good], kind="stable"))


def _report_stumbles(faults: Faults) -> None:
    """What storage failed at and was read again is counted and logged; it changes no record."""
    stumbles = resources().stumbles
    while stumbles:
        faults.count("storage retries", 1)
        faults.reports.append(stumbles.popleft())
