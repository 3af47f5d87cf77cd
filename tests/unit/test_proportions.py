"""Proportions: the tree's closed forms against the definition written plainly."""

from __future__ import annotations

import heapq
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zephon.errors import SettingError
from zephon.proportions import LARGEST_TOTAL, Proportions, checked_weights, integer_weights

WEIGHTS = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 10**6)), min_size=1, max_size=20).filter(any)
HUGE_WEIGHTS = st.lists(st.integers(1, LARGEST_TOTAL // 8), min_size=1, max_size=8)


def plain_counts(weights, total):
    """The definition: the two lightest first, ties by index; floor(T*l/(l+r) + 1/2) to the lighter child."""
    heap = [(w, i, i) for i, w in enumerate(weights) if w]
    heapq.heapify(heap)
    tie = len(weights)
    while len(heap) > 1:
        (light_weight, _, light), (heavy_weight, _, heavy) = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, (light_weight + heavy_weight, tie, (light, heavy, light_weight, heavy_weight)))
        tie += 1
    out = [0] * len(weights)

    def send(tree, here):
        if isinstance(tree, int):
            out[tree] = here
            return
        light, heavy, lighter, heavier = tree
        to_light = (Fraction(here * lighter, lighter + heavier) + Fraction(1, 2)).__floor__()
        send(light, to_light)
        send(heavy, here - to_light)

    send(heap[0][2], total)
    return out


@given(weights=WEIGHTS, start=st.integers(0, 10**6))
@settings(max_examples=60)
def test_counts_only_grow_and_a_position_adds_one_sample_to_the_component_located(weights, start):
    proportions = Proportions(weights)
    component, index = proportions.locate(np.arange(start, start + 60))
    before = plain_counts(weights, start)
    for step in range(60):
        assert before == proportions.counts(start + step)
        after = plain_counts(weights, start + step + 1)
        grown = [i for i, (a, b) in enumerate(zip(before, after)) if a != b]
        assert grown == [component[step]]
        assert after[grown[0]] == before[grown[0]] + 1 == index[step] + 1
        before = after


@given(weights=HUGE_WEIGHTS, positions=st.lists(st.integers(0, 2**62 - 1), min_size=1, max_size=20))
def test_huge_positions_and_weights_are_exact(weights, positions):
    proportions = Proportions(weights)
    component, index = proportions.locate(np.array(positions))
    for position, c, i in zip(positions, component.tolist(), index.tolist()):
        before, after = plain_counts(weights, position), plain_counts(weights, position + 1)
        assert before == proportions.counts(position)
        assert (before[c], after[c]) == (i, i + 1)


@given(weights=WEIGHTS, total=st.integers(0, 10**5))
def test_counts_stay_within_two_samples_of_their_share(weights, total):
    counts = Proportions(weights).counts(total)
    assert sum(counts) == total
    assert max(abs(c - total * w / sum(weights)) for c, w in zip(counts, weights)) < 2


def test_counts_of_64_unequal_components_stay_within_a_sample_and_a_fifth():
    rng = np.random.default_rng(3)
    weights = rng.choice([1, 2, 5, 10, 100, 1000, 10**6], 64).tolist()
    proportions = Proportions(weights)
    shares = np.array(weights) / sum(weights)
    errors = [np.abs(np.array(proportions.counts(total)) - total * shares).max() for total in range(2000)]
    assert max(errors) < 1.2


@given(weights=WEIGHTS)
def test_weights_as_rows_are_met_exactly_after_their_sum(weights):
    assert Proportions(weights).counts(sum(weights)) == weights


@given(
    weights=st.one_of(WEIGHTS, HUGE_WEIGHTS), count=st.one_of(st.integers(1, 50), st.integers(1, 2**50)), data=st.data()
)
def test_first_total_with_is_the_least_total(weights, count, data):
    component = data.draw(st.sampled_from([i for i, w in enumerate(weights) if w]))
    proportions = Proportions(weights)
    total = proportions.first_total_with(component, count)
    assert plain_counts(weights, total)[component] == count
    assert plain_counts(weights, total - 1)[component] == count - 1
    assert proportions.first_total_with(component, 0) == 0


def test_a_component_of_weight_zero_is_never_drawn():
    proportions = Proportions([0, 3, 0, 1])
    assert set(proportions.locate(np.arange(1000))[0].tolist()) == {1, 3}
    with pytest.raises(ValueError, match="never drawn"):
        proportions.first_total_with(0, 1)


def test_one_component_takes_every_position():
    component, index = Proportions([7]).locate(np.arange(5, 10))
    assert component.tolist() == [0] * 5
    assert index.tolist() == [5, 6, 7, 8, 9]


def test_case_F1_extreme_weights_are_apportioned():
    proportions = Proportions(integer_weights([0.999, 0.001, 1e-9]))
    large, small, never = proportions.counts(1000)
    assert abs(large - 999) <= 1
    assert abs(small - 1) <= 1
    assert never == 0


def test_decimal_weights_mean_their_decimals():
    assert integer_weights([0.7, 0.3]) == [7, 3]
    assert integer_weights([0.1, 0.2, 0.7]) == [1, 2, 7]
    assert integer_weights([2, 4, 0]) == [1, 2, 0]
    assert integer_weights([1e-9, 1]) == [1, 10**9]
    assert integer_weights([10**12, 3 * 10**12 + 1]) == [10**12, 3 * 10**12 + 1]


@given(
    weights=st.lists(st.floats(0, 1e300, allow_nan=False), min_size=1, max_size=12).filter(any),
    largest=st.sampled_from([100, 2**30, LARGEST_TOTAL]),
)
def test_weights_beyond_the_largest_total_are_rounded_and_positive_ones_stay_positive(weights, largest):
    whole = integer_weights(weights, largest)
    assert sum(whole) <= largest
    assert all((a > 0) == (b > 0) for a, b in zip(weights, whole))
    exact = [Fraction(repr(w)) for w in weights]
    if sum(whole) == largest:
        for w, e in zip(whole, exact):
            assert abs(w - e * largest / sum(exact)) <= len(weights)
    else:
        assert [Fraction(w, sum(whole)) for w in whole] == [e / sum(exact) for e in exact]


@pytest.mark.parametrize("weight", [-1, -0.5, float("nan"), float("inf"), "1", None, True])
def test_case_E14_a_senseless_weight_is_refused_by_name(weight):
    with pytest.raises(SettingError, match=r"mixture: the weight of 'web'.*Allowed: .*at least 0"):
        checked_weights("mixture", {"code": 1, "web": weight})


@pytest.mark.parametrize("weights", [{"a": 0, "b": 0.0}, {}])
def test_case_E14_weights_that_are_all_zero_are_refused(weights):
    with pytest.raises(SettingError, match="mixture: no weight is above 0"):
        checked_weights("mixture", weights)


def test_numbers_of_numpy_become_plain_ones():
    checked = checked_weights("mixture", {"a": np.float64(0.5), "b": np.int64(3)})
    assert [type(value) for value in checked.values()] == [float, int]
