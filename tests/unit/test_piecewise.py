"""Proportions in pieces: counts follow the integral of the weights through any change, and meet limits exactly."""

from __future__ import annotations

import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.unit.small_recipes import examples
from zephon.piecewise import Course, NothingToDraw, PiecewiseProportions, ideal_course, settled

WEIGHT = st.one_of(st.integers(0, 2), st.integers(0, 1000), st.sampled_from([0, 1, 10**6]))


@st.composite
def timelines(draw, most=64, latest=4000):
    """Weights that change at whole and broken times."""
    size, times = draw(st.integers(1, most)), st.integers(0, latest)
    row = st.lists(WEIGHT, min_size=size, max_size=size).filter(any)
    found = sorted({Fraction(0), *(Fraction(draw(times), draw(st.sampled_from([1, 1, 3]))) for _ in range(5))})
    return [(time, draw(row)) for time in found]


def plain_ideals(timeline, total):
    """The definition: float64 [total + 1, components], the integral of the shares at every position."""
    out = np.zeros((total + 1, len(timeline[0][1])))
    for (start, weights), end in zip(timeline, [*(time for time, _ in timeline[1:]), Fraction(total)]):
        shares = np.array(weights) / sum(weights)
        at = np.arange(total + 1)
        out += np.clip(at - float(start), 0, float(max(end - start, 0)))[:, None] * shares
    return out


def counts_everywhere(proportions, total, components):
    component, index = proportions.locate(np.arange(total))
    counts = np.zeros((total + 1, components), np.int64)
    counts[np.arange(1, total + 1), component] = 1
    counts = counts.cumsum(axis=0)
    assert (index == counts[np.arange(total), component]).all()
    return counts


@examples(60)
@given(timelines(), st.integers(1, 5000))
def test_at_any_position_no_count_is_off_the_integral_of_its_weights_by_more_than_two_samples(timeline, total):
    components = len(timeline[0][1])
    proportions = PiecewiseProportions(ideal_course(timeline, [None] * components))
    counts = counts_everywhere(proportions, total, components)
    assert np.abs(counts - plain_ideals(timeline, total)).max() <= 2
    for position in {0, 1, total // 2, total}:
        assert proportions.counts(position) == counts[position].tolist()


def test_errors_do_not_add_up_over_hundreds_of_changes():
    rng = np.random.default_rng(7)
    timeline = [
        (Fraction(int(time)), (rng.choice([0, 1, 3, 50], 64) + (np.arange(64) == 0)).tolist())
        for time in np.cumsum([0, *rng.integers(1, 60, 399)])
    ]
    total = int(timeline[-1][0]) + 100
    proportions = PiecewiseProportions(ideal_course(timeline, [None] * 64, total))
    counts = counts_everywhere(proportions, total, 64)
    assert np.abs(counts - plain_ideals(timeline, total)).max() < 2


def test_changes_at_every_sample_are_followed_too():
    """Five wait with six tenths each while only three can be served, and two of them must not wait any longer."""
    timeline = [(Fraction(0), [1] * 5), (Fraction(3), [0, 0, 0, 1, 1])]
    timeline.append((Fraction(4), [1, 0, 0, 0, 0]))
    proportions = PiecewiseProportions(ideal_course(timeline, [None] * 5, 6))
    errors = counts_everywhere(proportions, 6, 5) - plain_ideals(timeline, 6)
    assert np.abs(errors[[0, 3, 4, 6]]).max() < 1


@examples(60)
@given(timelines(8, 60), st.data())
def test_components_with_a_limit_have_exactly_that_many_samples_and_the_last_one_is_the_end(timeline, data):
    drawn = [i for i in range(len(timeline[0][1])) if any(weights[i] for _, weights in timeline)]
    limits = [data.draw(st.integers(0, 40)) if i in drawn else None for i in range(len(timeline[0][1]))]
    try:
        course = ideal_course(timeline, limits)
    except NothingToDraw:
        assume(False)
    proportions = PiecewiseProportions(course)
    assert proportions.total == sum(limits[i] for i in drawn)
    assert proportions.counts(proportions.total) == [limit or 0 for limit in limits]
    counts = counts_everywhere(proportions, proportions.total, len(limits))
    assert (np.diff(counts, axis=0) >= 0).all()


def test_those_that_are_left_go_on_in_their_own_proportions():
    timeline = [(Fraction(0), [4, 2, 1])]
    proportions = PiecewiseProportions(ideal_course(timeline, [400, None, None]))
    assert proportions.total is None
    assert proportions.counts(700) == [400, 200, 100]
    assert proportions.counts(1000) == [400, 400, 200]
    assert np.bincount(proportions.locate(np.arange(700, 10_000))[0]).tolist() == [0, 6200, 3100]


@examples(40)
@given(timelines(6, 300), st.integers(1, 60), st.data())
def test_first_total_with_is_the_least_total_in_any_piece(timeline, count, data):
    proportions = PiecewiseProportions(ideal_course(timeline, [None] * len(timeline[0][1])))
    component = data.draw(st.integers(0, len(timeline[0][1]) - 1))
    try:
        total = proportions.first_total_with(component, count)
    except ValueError:
        assert not timeline[-1][1][component]
        assert proportions.counts(10**6)[component] < count
        return
    assert proportions.counts(total)[component] == count
    assert proportions.counts(total - 1)[component] == count - 1


def test_positions_of_hundreds_of_pieces_are_found_in_any_order():
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 9, (300, 12)) + (np.arange(12) == 3)
    timeline = [(Fraction(200 * i), row.tolist()) for i, row in enumerate(rows)]
    proportions = PiecewiseProportions(ideal_course(timeline, [None] * 12))
    component, index = proportions.locate(np.arange(70_000))
    wanted = rng.integers(0, 70_000, 5000)
    again = pickle.loads(pickle.dumps(proportions)).locate(wanted)
    assert (again[0] == component[wanted]).all()
    assert (again[1] == index[wanted]).all()
    assert proportions.locate(np.empty(0, np.int64))[0].shape == (0,)


def test_long_pieces_and_far_positions_are_exact():
    limits = [10**16, 3 * 10**16]
    proportions = PiecewiseProportions(ideal_course([(Fraction(0), [1, 1])], limits))
    assert proportions.total == 4 * 10**16
    assert proportions.counts(2 * 10**16) == [10**16, 10**16]
    component, index = proportions.locate(np.array([2 * 10**16 - 2, 2 * 10**16 + 5, 4 * 10**16 - 1]))
    assert component[1:].tolist() == [1, 1]
    assert index[1:].tolist() == [10**16 + 5, 3 * 10**16 - 1]


def test_nothing_left_with_a_weight_is_an_error_that_says_where():
    timeline = [(Fraction(0), [1, 0]), (Fraction(10), [0, 1])]
    with pytest.raises(NothingToDraw, match=r"components \[1\] .* position 3") as caught:
        ideal_course(timeline, [3, 5])
    assert caught.value.time == 3


def test_a_course_that_nobody_can_follow_within_half_a_sample_is_followed_within_one():
    course = Course([0, 1, 2], [[0] * 64] * 3, [[0.0] * 64, [1 / 64] * 64, [2 / 64] * 64], None)
    found = settled(course)
    assert found.counts.sum(axis=1).tolist() == [0, 1, 2]
    assert 0.9 < np.abs(found.ahead).max() < 1
