"""Records cut into blocks, and whether that shows."""

from __future__ import annotations

from itertools import pairwise

from zephon.columns import Block, canonical
from zephon.ops.base import Faults, Stateless


def cuts_of(block: Block, cuts: list[int]) -> list[Block]:
    """The block in pieces, cut before these records."""
    bounds = [0, *sorted(min(cut, len(block)) for cut in cuts), len(block)]
    return [block.slice(low, high) for low, high in pairwise(bounds)]


def assert_cuts_do_not_show(operator: Stateless, block: Block, cuts: list[int]) -> None:
    """`process(a + b)` gives what `process(a)` and `process(b)` give: records, samples, reports and counts."""
    one, many = Faults("skip"), Faults("skip")
    whole = operator.process(block, one)
    parts = Block.concat([operator.process(part, many) for part in cuts_of(block, cuts)])
    assert repr(canonical(parts).to_rows()) == repr(canonical(whole).to_rows())
    assert parts.samples.tolist() == whole.samples.tolist()
    assert (one.reports, one.skipped, one.counters) == (many.reports, many.skipped, many.counters)
