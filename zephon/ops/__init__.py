"""The operators of a pipeline, one a file. Each works on blocks of columns (`zephon.columns.Block`).

The names here are for operators of a user's own (`zephon.ops.authoring`).
"""

from zephon.ops.authoring import (
    Accumulator,
    BaseOp,
    CountingAccumulator,
    OpContext,
    OpTraits,
    PassthroughAccumulator,
    spawn_child,
    tombstones_for_record,
)
from zephon.ops.homogeneity import DomainGroups
from zephon.randomness import generator

__all__ = [
    "Accumulator",
    "BaseOp",
    "DomainGroups",
    "CountingAccumulator",
    "OpContext",
    "OpTraits",
    "PassthroughAccumulator",
    "generator",
    "spawn_child",
    "tombstones_for_record",
]
