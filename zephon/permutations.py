"""Permutations that cost no memory, and the hash from which every seed is derived.

`permute` maps positions of `[0, n)` to `[0, n)`, one to one, for any n up to 2**62, at any position directly: a
Feistel network over digit pairs (left, right) with `a` values on the left and `b` on the right, `a * b >= n`, and
cycle walking for results beyond n. With `a = ceil(sqrt(n))` fewer than one in sqrt(n) walks. The smaller the digits
the more rounds it takes until pairs of positions look like chance: 6 from `LARGE` values on, 18 below (counted over
millions of keys). Up to `SMALL` values, the position's rank among n hashes is used instead: every permutation is then
as likely as any other.

Guarantees: integers only, so the same on every machine; a pure function of (position, n, key); any two keys give
unrelated orders.
Rejected: storing a permutation (8 TB for 10**12 rows); multiplying by a number coprime to n (neighbours stay at one
distance); bit-wise Feistel over the next power of four (up to four times the work in cycle walking).

`mix` joins numbers and strings into one seed. Python's `hash` is never used: it differs from process to process.
"""

from __future__ import annotations

import hashlib
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
Seedable = int | str | np.integer | NDArray[Any]

LARGEST = 2**62
SMALL = 16
LARGE = 4096

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_SPREAD = 0xD1342543DE82EF95
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # Stafford's variant 13, as in splitmix64
_ROUND_KEYS = tuple((_GAMMA * r + 0x2545F4914F6CDD1D) & _MASK for r in range(1, 19))


def _one(value: int) -> U64:
    """A number as an array of one: arrays wrap around in silence, numpy's scalars warn."""
    return np.array([value & _MASK], dtype=np.uint64)


_A_FIRST, _A_SECOND, _A_GAMMA = _one(_FIRST), _one(_SECOND), _one(_GAMMA)
_27, _30, _31, _32 = _one(27), _one(30), _one(31), _one(32)


def _scrambled(word: int) -> int:
    word = ((word ^ (word >> 30)) * _FIRST) & _MASK
    word = ((word ^ (word >> 27)) * _SECOND) & _MASK
    return word ^ (word >> 31)


def _scramble(words: U64) -> None:
    """`_scrambled` of every word, in place."""
    words ^= words >> _30
    words *= _A_FIRST
    words ^= words >> _27
    words *= _A_SECOND
    words ^= words >> _31


def _word(part: Seedable) -> int | U64:
    if isinstance(part, str):
        return int.from_bytes(hashlib.blake2b(part.encode(), digest_size=8).digest(), "little")
    if isinstance(part, np.ndarray) and part.ndim:
        if part.dtype.kind not in "iu":
            raise TypeError(f"a seed is made of integers and strings, not of an array of {part.dtype}")
        return part.astype(np.uint64)
    number = int(part)
    if -(2**63) <= number < 2**64:
        return number & _MASK
    return _word(f"integer {number}")


@overload
def mix(*parts: int | str | np.integer) -> int: ...
@overload
def mix(*parts: Seedable) -> Any: ...
def mix(*parts: Seedable) -> int | U64:
    """One 64-bit seed from integers and strings; the order of the parts matters.

    Integer arrays are allowed and broadcast: then the result is a uint64 array, each element what the same call with
    numbers returns.
    """
    state: int | U64 = _GAMMA
    for part in parts:
        word = _word(part)
        if isinstance(state, int) and isinstance(word, int):
            state = _scrambled((state * _SPREAD + word + _GAMMA) & _MASK)
            continue
        left = _one(state * _SPREAD) if isinstance(state, int) else state * _one(_SPREAD)
        joined: U64 = left + (_one(word) if isinstance(word, int) else word) + _A_GAMMA
        _scramble(joined)
        state = joined
    return state


def permute(positions: Any, n: Any, key: Any) -> NDArray[np.int64]:
    """Where a seeded permutation of `[0, n)` sends each position.

    `positions`, `n` and `key` are integers or integer arrays and broadcast: every element may have its own n and key.
    Returns int64 of the broadcast shape. Raises ValueError for a position outside `[0, n)` or an n above 2**62.
    """
    shape = np.broadcast_shapes(np.shape(positions), np.shape(n), np.shape(key))
    sizes, given = _spread(n, shape), _spread(key, shape)
    x: U64 = np.broadcast_to(np.asarray(positions), shape).reshape(-1).astype(np.uint64)
    if not x.size:
        return np.empty(shape, dtype=np.int64)
    if (x >= sizes).any() or (sizes > _one(LARGEST)).any():
        raise ValueError(f"permute: positions must lie in [0, n), n at most 2**62; n is {sizes.min()} to {sizes.max()}")
    keys = given * _one(_SPREAD) + _A_GAMMA
    _scramble(keys)
    out = np.empty_like(x)
    small, large = sizes <= _one(SMALL), sizes >= _one(LARGE)
    for where, rounds in ((small, 0), (~(small | large), 18), (large, 6)):
        if where.all():
            out = _by_network(x, sizes, keys, rounds) if rounds else _by_rank(x, sizes, keys)
        elif where.any():
            out[where] = permute(x[where], sizes[where], _pick(given, where)).view(np.uint64)
    return out.view(np.int64).reshape(shape)


def _spread(values: Any, shape: tuple[int, ...]) -> U64:
    """As a flat uint64 array of the full length, or of length one where all elements are equal."""
    if isinstance(values, int):
        return _one(values)
    array = np.asarray(values)
    if array.size and (array == array.flat[0]).all():
        return array.reshape(-1)[:1].astype(np.uint64)
    full: U64 = np.broadcast_to(array, shape).reshape(-1).astype(np.uint64)
    return full


def _pick(values: U64, where: Any) -> U64:
    return values if len(values) == 1 else values[where]


def _by_rank(x: U64, sizes: U64, keys: U64) -> U64:
    if len(sizes) == 1 and len(keys) == 1 and len(x) > int(sizes[0]):
        table = _by_rank(np.arange(int(sizes[0]), dtype=np.uint64), sizes, keys)
        return table[x.view(np.int64)]
    own = x * _A_GAMMA + keys
    _scramble(own)
    rank = np.zeros_like(x)
    for other in range(int(sizes.max())):
        theirs = keys + _one(_GAMMA * other)
        _scramble(theirs)
        rank += ((theirs < own) & (_one(other) < sizes)).astype(np.uint64)  # never a tie: the hash is one to one
    return rank


def _by_network(x: U64, sizes: U64, keys: U64, rounds: int) -> U64:
    lefts: U64 = np.ceil(np.sqrt(sizes.astype(np.float64))).astype(np.uint64)  # sqrt rounds alike everywhere
    rights: U64 = (sizes + lefts - _one(1)) // lefts
    out = _network(x, lefts, rights, keys, rounds)
    walking = np.flatnonzero(out >= sizes)
    while walking.size:
        moved = _network(out[walking], _pick(lefts, walking), _pick(rights, walking), _pick(keys, walking), rounds)
        out[walking] = moved
        walking = walking[moved >= _pick(sizes, walking)]
    return out


def _network(x: U64, lefts: U64, rights: U64, keys: U64, rounds: int) -> U64:
    left: U64 = x // rights
    right: U64 = x - left * rights
    moving, fixed, size, other = left, right, lefts, rights
    for constant in _ROUND_KEYS[:rounds]:
        word = fixed * _A_GAMMA
        word += keys + _one(constant)
        _scramble(word)
        word >>= _32
        word *= size  # below 2**63, as sizes are at most 2**31
        word >>= _32
        moving += word
        np.minimum(moving, moving - size, out=moving)  # modulo: a negative difference is a huge number
        moving, fixed, size, other = fixed, moving, other, size
    left *= rights
    left += right
    return left
