"""Seeded permutations: one to one, any position directly, as good as chance."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zephon.permutations import LARGE, LARGEST, SMALL, mix, permute

KEYS = st.integers(0, 2**64 - 1)


def chi_squared_per_degree(counts: np.ndarray) -> float:
    """About 1 for draws from a uniform distribution over the cells."""
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum() / (counts.size - 1))


@given(n=st.integers(1, 2 * LARGE), key=KEYS)
@settings(max_examples=150)
def test_every_position_goes_to_a_place_of_its_own(n, key):
    assert sorted(permute(np.arange(n), n, key).tolist()) == list(range(n))


@given(
    cells=st.lists(
        st.tuples(
            st.one_of(st.integers(1, 40), st.integers(1, 2 * LARGE), st.integers(1, LARGEST)),
            KEYS,
            st.integers(0, LARGEST),
        ),
        min_size=1,
        max_size=30,
    )
)
def test_sizes_and_keys_for_each_element_give_what_single_calls_give(cells):
    n = np.array([c[0] for c in cells])
    keys = np.array([c[1] for c in cells], dtype=np.uint64)
    x = np.array([c[2] % c[0] for c in cells])
    together = permute(x, n, keys)
    assert together.tolist() == [int(permute(int(a), int(b), int(c))) for a, b, c in zip(x, n, keys)]
    assert ((together >= 0) & (together < n)).all()


@given(n=st.integers(1, LARGEST), key=KEYS, start=st.integers(0, LARGEST))
def test_distinct_positions_of_huge_domains_stay_distinct(n, key, start):
    x = np.unique((start % n + np.arange(200)) % n)
    assert len(set(permute(x, n, key).tolist())) == len(x)


def test_positions_sizes_and_keys_broadcast():
    table = permute(np.arange(20)[None, :], 20, np.arange(5)[:, None])
    assert table.shape == (5, 20)
    assert all(table[key].tolist() == permute(np.arange(20), 20, key).tolist() for key in range(5))
    assert permute(np.empty(0, np.int64), 5, 1).shape == (0,)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_permutations_of_a_tiny_domain_are_equally_likely(n):
    keys = np.arange(24_000)
    rows = permute(np.arange(n)[None, :], n, keys[:, None])
    seen = Counter(map(tuple, rows.tolist()))
    assert set(seen) == set(itertools.permutations(range(n)))
    assert chi_squared_per_degree(np.array(list(seen.values()))) < 3.5


@pytest.mark.parametrize("n", [7, SMALL, SMALL + 1, 25, 36])
def test_pairs_of_images_are_equally_likely(n):
    keys = np.arange(300_000)
    for a, b in [(0, 1), (0, n - 1), (n // 2, n // 2 + 1)]:
        pairs = permute(a, n, keys) * n + permute(b, n, keys)
        counts = np.bincount(pairs, minlength=n * n).reshape(n, n)
        assert (np.diag(counts) == 0).all()
        assert chi_squared_per_degree(counts[~np.eye(n, dtype=bool)]) < 1.5


@pytest.mark.parametrize("n", [1000, LARGE - 1, LARGE, 2**20 - 3, 10**12])
def test_neighbours_end_up_unrelated(n):
    images = permute(np.arange(min(n, 200_000)), n, 7)
    steps = (np.diff(images) % n) * 40 // n
    assert chi_squared_per_degree(np.bincount(steps, minlength=40)) < 2.5
    assert abs(np.corrcoef(images[:-1], images[1:])[0, 1]) < 0.1


def test_neighbouring_keys_give_unrelated_orders():
    n = 10_000
    tables = permute(np.arange(n)[None, :], n, np.arange(40)[:, None])
    in_place = [(tables[i] == tables[j]).sum() for i in range(40) for j in range(i)]
    assert 0.7 < np.mean(in_place) < 1.3
    assert max(in_place) < 10


def test_positions_outside_the_domain_are_refused():
    for x, n in [(5, 5), (-1, 5), (0, 0), (0, LARGEST + 1)]:
        with pytest.raises(ValueError, match="positions must lie in"):
            permute(x, n, 1)
    with pytest.raises(ValueError, match="positions must lie in"):
        permute(np.array([1, 2, 3]), np.array([2, 2, 4]), 1)


@given(st.lists(st.one_of(st.integers(-(2**63), 2**63 - 1), st.text(max_size=5)), min_size=1, max_size=4), st.data())
def test_mix_of_arrays_equals_mix_of_their_elements(parts, data):
    place = data.draw(st.integers(0, len(parts) - 1))
    values = data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5))
    with_array = [*parts[:place], np.array(values), *parts[place + 1 :]]
    one_by_one = [mix(*parts[:place], value, *parts[place + 1 :]) for value in values]
    assert np.broadcast_to(mix(*with_array), len(values)).tolist() == one_by_one


def test_mix_tells_parts_their_order_and_their_number_apart():
    calls = [(), (0,), (0, 0), (0, 1), (1, 0), (1,), ("0",), ("", 0), ("a", "b"), ("ab",), (2**64,), (2**200,), (-1,)]
    assert len({mix(*call) for call in calls}) == len(calls)
    grid = mix(np.arange(300)[:, None], np.arange(300)[None, :])
    assert len(np.unique(grid)) == 300 * 300
    with pytest.raises(TypeError, match="float64"):
        mix(np.array([0.5]))


def test_the_same_in_another_process_and_for_good():
    code = "from zephon.permutations import *; print(mix(1, 'web', -2), permute(3, 10, 4), permute(12345, 10**12, 99))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    mine = f"{mix(1, 'web', -2)} {permute(3, 10, 4)} {permute(12345, 10**12, 99)}"
    assert other.stdout.strip() == mine == "17513867751350582257 0 75384760367"
