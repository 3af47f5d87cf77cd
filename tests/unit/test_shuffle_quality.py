"""How well the orders of a pass are mixed, measured: where rows that stand together in the files end up.

For each level of shuffling the correlation of a row's place in the files with its place in the pass, over the pass and
in each tenth of it. Unshuffled it is 1; for a random order of n rows it is below 4/sqrt(n) in all but one of 10,000.
"""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from zephon.curriculum import RowOrder, Shuffling
from zephon.work import StaticMixtureWorkSource

SHARDS, ROWS = 100, 200
LEVELS = {
    "none": Shuffling(shards=False),
    "shards": Shuffling(),
    "within": Shuffling(shards=False, within_shard=True),
    "both": Shuffling(within_shard=True),
    "blocks": Shuffling(shards=False, block_size=500),
    "auto": Shuffling(shards=False, block_size="auto"),
    "auto and shards": Shuffling(block_size="auto"),
    "global": Shuffling(block_size="global"),
}


def places(level: str, key: int = 5) -> np.ndarray:
    """Where in the files each row of a pass stands, in the pass's order."""
    order = RowOrder(np.full(SHARDS, ROWS), LEVELS[level], key)
    shard, row = order.locate(np.arange(order.rows))
    return shard * ROWS + row


def correlation(found: np.ndarray) -> float:
    return float(np.corrcoef(np.arange(len(found)), found)[0, 1])


def tenths(found: np.ndarray) -> list[float]:
    return [correlation(part) for part in np.split(found, 10)]


def neighbours(found: np.ndarray) -> float:
    """The share of rows that follow the row before them in the files."""
    return float((np.diff(found) == 1).mean())


CHANCE = 4 / np.sqrt(SHARDS * ROWS)
CHANCE_IN_A_TENTH = 4 / np.sqrt(SHARDS * ROWS / 10)


@pytest.mark.parametrize(
    ("level", "over_all", "in_tenths", "adjacent"),
    [
        ("none", (1, 1), (1, 1), (1, 1)),
        ("shards", (-0.35, 0.35), (-0.95, 0.95), (0.99, 1)),  # a hundred things in an order, whole shards inside
        ("within", (0.999, 1), (0.98, 1), (0, 0.02)),  # the files' order, but for the rows of a shard
        ("both", (-0.35, 0.35), (-0.95, 0.95), (0, 0.02)),
        ("blocks", (0.998, 1), (0.9, 0.99), (0, 0.02)),
        ("auto", (0.98, 1), (0.1, 0.99), (0, 0.02)),  # 1,600 rows a block, a tenth is 2,000
        ("auto and shards", (-0.35, 0.35), (-0.95, 0.95), (0, 0.02)),
        ("global", (-CHANCE, CHANCE), (-CHANCE_IN_A_TENTH, CHANCE_IN_A_TENTH), (0, 0.002)),
    ],
)
def test_places_in_the_pass_and_in_the_files_correlate_as_the_level_allows(level, over_all, in_tenths, adjacent):
    found = places(level)
    assert sorted(found.tolist()) == list(range(SHARDS * ROWS))
    assert over_all[0] <= round(correlation(found), 9) <= over_all[1]
    assert all(in_tenths[0] <= round(each, 9) <= in_tenths[1] for each in tenths(found))
    assert adjacent[0] <= neighbours(found) <= adjacent[1]


@pytest.mark.parametrize("level", ["shards", "both", "auto and shards", "global"])
def test_over_many_seeds_no_correlation_is_left(level):
    """The mean over seeds of what a single order of few shards has by chance is near 0, in every tenth too."""
    seeds = 200
    found = np.array([[correlation(p), *tenths(p)] for p in (places(level, key) for key in range(seeds))])
    assert np.abs(found.mean(axis=0)).max() < 4 * found.std(axis=0).max() / np.sqrt(seeds)


@pytest.mark.parametrize("level", ["global", "auto and shards"])
def test_every_tenth_of_a_pass_has_rows_of_every_part_of_the_files(level):
    tenth = places(level).reshape(10, -1) * 10 // (SHARDS * ROWS)
    seen = [len(set(part.tolist())) for part in tenth]
    assert min(seen) == 10 if level == "global" else min(seen) > 3


def test_a_global_shuffle_of_a_million_million_rows_starts_in_less_than_a_mebibyte():
    counts = np.full(1000, 10**9)

    class Web:
        name = "web"

        def __init__(self):
            self.counts = counts

    source = StaticMixtureWorkSource([Web()], None, shuffle_block_size="global")
    tracemalloc.start()
    try:
        curriculum = source.curriculum(3, 0, 64, source.auto_chunk_size(64))
        first, far = curriculum.pointers(63, 0), curriculum.pointers(5, 10**6)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert curriculum.total == 10**12
    assert peak < 2**20
    for pointers in (first, far):
        place = pointers[:, 1] * 10**9 + pointers[:, 2]
        assert len(set(place.tolist())) == 2048
        assert abs(correlation(place)) < 4 / np.sqrt(2048)
        assert np.bincount(place * 10 // 10**12, minlength=10).min() > 140
