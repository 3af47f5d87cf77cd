"""Stages: which operators run on workers, and what is in between.

    front                    on workers         reading and the leading stateless operators
    chain                    lane by lane       the first stateful operator and those after it
    later stage              on workers         stateless operators with `parallelism`
      and its chain          lane by lane       what comes after them
    ...

A later stage works on blocks that the chain before it gives out. How they are cut into tasks is an execution detail:
a stateless operator's records depend on each record alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from zephon.columns import Block, IntArray
from zephon.ops.base import Operator, Stateful, Stateless
from zephon.ops.divided import LIST, list_borders

STAGE_RECORDS = 128
STAGE_BYTES = 1 << 20
"""A task of a later stage has at most so many records and, unless one alone is larger, about so many bytes."""


class LaterStage(NamedTuple):
    """`operators` run on workers, on `parallelism` of them at once, and `chain` behind them lane by lane."""

    operators: tuple[Stateless, ...]
    chain: tuple[Operator, ...]
    parallelism: int

    @property
    def holds(self) -> bool:
        """Whether everything that goes through the chain is copied on its way, by an operator that holds records."""
        return any(isinstance(operator, Stateful) for operator in self.chain)


def cut_into_stages(back: Sequence[Operator]) -> tuple[tuple[Operator, ...], tuple[LaterStage, ...]]:
    """The operators behind the front: the first chain, and the later stages with theirs.

    Neighbours with `parallelism` are one stage, on as many workers as the least of them says.
    """
    first: list[Operator] = []
    stages: list[tuple[list[Stateless], list[Operator]]] = []
    for operator in back:
        if isinstance(operator, Stateless) and operator.parallelism is not None:
            if not stages or stages[-1][1]:
                stages.append(([], []))
            stages[-1][0].append(operator)
        else:
            (stages[-1][1] if stages else first).append(operator)
    return tuple(first), tuple(
        LaterStage(tuple(operators), tuple(chain), min(op.parallelism or 1 for op in operators))
        for operators, chain in stages
    )


def pieces(blocks: Sequence[Block]) -> list[Block]:
    """What a chain has given out at once, cut evenly into blocks for tasks."""
    return [piece for whole in _joined(blocks) for piece in _cut(whole)]


def borders(block: Block) -> IntArray:
    """The records before which a block may be cut: int64, rising, without 0.

    Lists stay whole. Neighbours made of one sample stay together, since they are told apart by their number
    (`zephon.ops.numbering`).
    """
    if LIST in block.fields:
        return list_borders(block)
    if block.sample_offsets is not None or block.samples.shape[1] < 4:
        return np.arange(1, len(block))
    return np.flatnonzero(np.diff(block.samples[:, 3])) + 1


def _joined(blocks: Sequence[Block]) -> Iterator[Block]:
    """The blocks, neighbours made one where nobody can tell."""
    run: list[Block] = []
    for block in blocks:
        if run and not _alike(run[-1], block):
            yield Block.concat(run)
            run = []
        run.append(block)
    if run:
        yield Block.concat(run)


def _alike(one: Block, other: Block) -> bool:
    """Whether two blocks may become one: they are of one form, and no sample is on both sides of the border."""
    if (one.sample_offsets is None) != (other.sample_offsets is None):
        return False
    width = one.samples.shape[1]
    if width != other.samples.shape[1]:
        return False
    if LIST in one.fields or one.sample_offsets is not None or width < 4:
        return True
    return bool(one.samples[-1, 3] != other.samples[0, 3])


def _cut(whole: Block) -> list[Block]:
    count = max(-(-len(whole) // STAGE_RECORDS), -(-whole.nbytes // STAGE_BYTES))
    if count == 1:
        return [whole]
    possible = borders(whole)
    if not len(possible):
        return [whole]
    wanted = np.arange(1, count) * len(whole) // count
    nearest = np.minimum(np.searchsorted(possible, wanted), len(possible) - 1)
    cuts = np.unique(possible[nearest]).tolist()
    return [whole.slice(low, high) for low, high in pairwise([0, *cuts, len(whole)])]
