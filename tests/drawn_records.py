"""Records for property tests: rows of every kind of value that a function may return, and cuts of them into blocks."""

from __future__ import annotations

import datetime
import enum
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from zephon.columns import Block


class Colour(enum.IntEnum):
    RED = 1
    BLUE = 2


@dataclass
class Point:
    x: int
    y: list[int]


INTEGERS = st.integers(-5, 5) | st.integers(-(2**70), 2**70)
TEXT = st.text(st.characters(), max_size=6)
NUMBERS = st.sampled_from(
    [np.int8, np.int32, np.int64, np.uint8, np.uint64, np.float16, np.float32, np.float64, np.bool_]
)
ARRAY_TYPES = st.sampled_from(
    ["i1", "i4", "<i8", ">i4", "u2", "u8", "f4", "f8", ">f8", "?", "c8", "U3", "S2", "M8[s]", "M8[D]"]
)


def _array(dtype: str, shape: tuple[int, ...], seed: int) -> Any:
    count = int(np.prod(shape))
    return (np.random.default_rng(seed).integers(0, 100, count)).astype(np.dtype(dtype)).reshape(shape)


arrays = st.builds(
    _array, ARRAY_TYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3), st.integers(0, 9)
)
odd = st.one_of(
    st.none(),
    st.sampled_from([Colour.RED, Colour.BLUE, {1, 2}, frozenset("ab"), datetime.date(2020, 1, 2), len, Colour]),
    st.builds(Point, st.integers(0, 3), st.lists(st.integers(0, 3), max_size=2)),
    st.lists(st.integers(0, 3) | st.text(max_size=2), max_size=3).map(tuple),
    st.builds(np.datetime64, st.sampled_from(["2020", "2020-01", "2020-01-01"])),
    st.builds(lambda n: np.zeros(n, [("a", "i4"), ("b", "f8")]), st.integers(0, 2)),
    st.builds(lambda n: np.array([None, "x"][:n], object), st.integers(0, 2)),
    st.dictionaries(st.text(max_size=2), st.integers() | st.none() | st.lists(st.floats(), max_size=2), max_size=2),
)
any_value = st.one_of(
    INTEGERS,
    st.floats(),
    st.booleans(),
    TEXT,
    st.binary(max_size=4),
    st.builds(lambda kind, n: kind(n), NUMBERS, st.integers(0, 100)),
    arrays,
    st.lists(st.integers(-3, 3), max_size=3),
    st.lists(st.floats(), max_size=3),
    odd,
)
one_kind = st.sampled_from([
    st.integers(-5, 5), INTEGERS, st.floats(), TEXT, st.binary(max_size=4), st.booleans(),
    st.builds(_array, st.just("i4"), st.tuples(st.integers(0, 3)), st.integers(0, 9)),
    st.builds(_array, st.sampled_from(["i4", "i8", "u2"]), st.tuples(st.integers(0, 3)), st.integers(0, 9)),
    st.builds(_array, st.just("f4"), st.just((2, 3)), st.integers(0, 9)),
    st.lists(st.integers(-3, 3), max_size=3),
    arrays, odd, any_value,
])  # fmt: skip


@st.composite
def rows(draw: st.DrawFn, min_size: int = 0, max_size: int = 8) -> list[dict[str, Any]]:
    """Rows with up to four fields, each of one kind of value or of any, some missing here and there."""
    count = draw(st.integers(min_size, max_size))
    out: list[dict[str, Any]] = [{} for _ in range(count)]
    for name in draw(st.lists(st.sampled_from(["a", "b", "é", "\ud800", "input_ids"]), unique=True, max_size=4)):
        values = draw(one_kind)
        present = draw(st.booleans())
        for row in out:
            if present or draw(st.booleans()):
                row[name] = draw(values)
    return out


def samples_of(count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """`count` samples, each with a name of its own."""
    return np.stack([np.arange(count) % 2, np.arange(count) % 3, np.arange(count)], axis=1).astype(np.int64)


@st.composite
def packed_blocks(draw: st.DrawFn, min_size: int = 0) -> Block:
    """A block of any rows, half of the time with several samples a record."""
    drawn = draw(rows(min_size=min_size))
    if draw(st.booleans()):
        return Block.from_rows(drawn, samples_of(len(drawn)))
    lengths = draw(st.lists(st.integers(1, 3), min_size=len(drawn), max_size=len(drawn)))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Block.from_rows(drawn, samples_of(int(offsets[-1])), offsets)


def cut(drawn: list[dict[str, Any]], places: list[int]) -> list[Block]:
    """The rows as several blocks, cut at `places`; an empty block where two places agree."""
    bounds = [0, *sorted(p % (len(drawn) + 1) for p in places), len(drawn)]
    samples = samples_of(len(drawn))
    return [Block.from_rows(drawn[a:b], samples[a:b]) for a, b in pairwise(bounds)]
