"""Ends of datasets and epochs: who stops, who repeats, who drops out, and what contradicts what."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.small_recipes import examples
from zephon.errors import SettingError
from zephon.work import MixtureChange, MixtureSchedule, StaticMixtureWorkSource


@dataclass
class Rows:
    """A dataset as far as a work source looks at it."""

    name: str
    counts: np.ndarray


def datasets(*rows):
    return [Rows("abcdefgh"[number], np.array([count])) for number, count in enumerate(rows)]


def even(*rows, **settings):
    source = StaticMixtureWorkSource(datasets(*rows), {"abcdefgh"[i]: 1 for i in range(len(rows))}, **settings)
    return source.curriculum(1, 0, 2, 4)


def samples(curriculum, total=None):
    return [tuple(p) for p in curriculum.pointers_at(np.arange(curriculum.total if total is None else total)).tolist()]


SHUFFLES = [{"shuffle_shards": False}, {"shuffle_block_size": "global"}]


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_case_F6_first_exhausted_is_9_rows(shuffle):
    curriculum = even(3, 4, 3, exhausted_policy="stop", **shuffle)
    assert curriculum.total == 9
    assert Counter(dataset for dataset, _, _ in samples(curriculum)) == {0: 3, 1: 3, 2: 3}
    assert len(set(samples(curriculum))) == 9


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_case_F6_all_without_repeats_is_10_rows_each_once(shuffle):
    curriculum = even(3, 4, 3, max_repeats=0, **shuffle)
    assert sorted(samples(curriculum)) == [(d, 0, row) for d, count in enumerate((3, 4, 3)) for row in range(count)]


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_case_F6_all_with_repeats_stops_once_row_4_of_the_second_source_has_come(shuffle):
    curriculum = even(3, 4, 3, **shuffle)
    found = samples(curriculum)
    assert curriculum.total == 12
    assert found[-1][0] == 1
    assert len({p for p in found if p[0] == 1}) == len([p for p in found if p[0] == 1]) == 4


@st.composite
def limited(draw):
    """Rows, weights and most repeats of up to six datasets."""
    count = draw(st.integers(1, 6))
    return [
        draw(st.lists(strategy, min_size=count, max_size=count))
        for strategy in (st.integers(1, 30), st.integers(1, 9), st.integers(0, 3))
    ]


@examples(60)
@given(limited())
def test_with_most_repeats_for_all_every_row_comes_exactly_that_often(settings):
    rows, weights, repeats = settings
    names = "abcdef"[: len(rows)]
    source = StaticMixtureWorkSource(
        datasets(*rows), dict(zip(names, weights)), max_repeats=dict(zip(names, repeats)), shuffle_block_size="global"
    )
    curriculum = source.curriculum(1, 0, 3, 4)
    assert curriculum.total == sum(count * (1 + more) for count, more in zip(rows, repeats))
    assert Counter(samples(curriculum)) == {
        (d, 0, row): 1 + repeats[d] for d, count in enumerate(rows) for row in range(count)
    }


@examples(40)
@given(limited(), st.data())
def test_a_dataset_that_drops_out_leaves_the_others_in_their_own_proportions(settings, data):
    rows, weights, repeats = settings
    names = "abcdef"[: len(rows)]
    out = data.draw(st.integers(0, len(rows) - 1))
    source = StaticMixtureWorkSource(datasets(*rows), dict(zip(names, weights)), max_repeats={names[out]: repeats[out]})
    curriculum = source.curriculum(1, 0, 3, 4)
    last = curriculum.proportions.first_total_with(out, rows[out] * (1 + repeats[out]))
    with pytest.raises(ValueError, match=r"never|nothing beyond"):
        curriculum.proportions.first_total_with(out, rows[out] * (1 + repeats[out]) + 1)
    if len(rows) == 1:
        assert curriculum.total == last
        return
    assert curriculum.total is None
    others = np.array([0 if i == out else w for i, w in enumerate(weights)])
    grown = np.subtract(curriculum.proportions.counts(last + 1000), curriculum.proportions.counts(last))
    assert np.abs(grown - 1000 * others / others.sum()).max() <= 4


def test_a_stop_dataset_ends_the_epoch_and_others_repeat_until_then():
    curriculum = even(3, 4, 10, exhausted_policy={"b": "stop"})
    found = samples(curriculum)
    assert curriculum.total == 14
    assert Counter(d for d, _, _ in found) == {0: 5, 1: 4, 2: 5}
    assert max(Counter(found)[p] for p in found if p[0] == 1) == 1
    assert even(3, 4, exhausted_policy={"a": "repeat"}).total is None


def test_a_stop_dataset_waits_for_others_that_drop_out():
    curriculum = even(2, 3, 20, exhausted_policy={"c": "stop"}, max_repeats={"a": 0, "b": 1})
    assert Counter(d for d, _, _ in samples(curriculum)) == {0: 2, 1: 6, 2: 20}


def test_by_rows_without_repeats_is_one_pass():
    source = StaticMixtureWorkSource(datasets(30, 70), None, max_repeats=0)
    curriculum = source.curriculum(1, 0, 2, 4)
    plain = StaticMixtureWorkSource(datasets(30, 70), None).curriculum(1, 0, 2, 4)
    assert sorted(samples(curriculum)) == sorted(samples(plain))
    assert len(set(samples(curriculum))) == 100


def test_a_dataset_never_drawn_has_no_say_in_the_end():
    source = StaticMixtureWorkSource(
        datasets(3, 9), {"a": 1, "b": 0}, max_repeats={"a": 1, "b": 0}, exhausted_policy=None
    )
    assert source.curriculum(1, 0, 1, 4).total == 6
    source = StaticMixtureWorkSource(datasets(3, 9), {"a": 1, "b": 0}, exhausted_policy={"b": "stop"})
    assert source.curriculum(1, 0, 1, 4).total is None


@pytest.mark.parametrize("shuffle", [{"shuffle_within_shard": True}, {"shuffle_block_size": 5}, {}])
def test_without_reshuffling_all_passes_of_an_epoch_have_the_order_of_its_first(shuffle):
    data = [Rows("a", np.array([3, 9, 4, 1, 7])), Rows("b", np.array([3, 9, 4, 1, 7]))]
    source = StaticMixtureWorkSource(
        data, {"a": 1, "b": 1}, stop_after_passes=3, reshuffle_on_repeat={"a": False}, **shuffle
    )
    orders = []
    for epoch in (0, 1):
        found = samples(source.curriculum(1, epoch, 2, 4))
        per = [[p for p in found if p[0] == d] for d in (0, 1)]
        a, b = ([part[24 * n : 24 * n + 24] for n in range(3)] for part in per)
        assert a[0] == a[1] == a[2]
        assert b[0] != b[1] != b[2]
        orders.append(a[0])
    assert orders[0] != orders[1]
    again = StaticMixtureWorkSource(data, {"a": 1, "b": 1}, stop_after_passes=3, **shuffle).curriculum(1, 0, 2, 4)
    assert [p for p in samples(again) if p[0] == 0][:24] == orders[0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"exhausted_policy": "stop", "max_repeats": 2}, ["exhausted_policy", "max_repeats", "contradict", "'a', 'b'"]),
        ({"exhausted_policy": {"a": "stop"}, "max_repeats": {"a": 0}}, ["contradict", "'a'"]),
        ({"exhausted_policy": {"a": "stop"}, "max_repeats": 1}, ["contradict", "'a'"]),
        ({"max_repeats": 0, "stop_after_passes": 1}, ["max_repeats=0", "stop_after_passes=1"]),
        ({"exhausted_policy": {"a": "repeat"}, "stop_after_passes": 2}, ["exhausted_policy", "stop_after_passes=2"]),
        ({"exhausted_policy": {"c": "stop"}}, ["exhausted_policy names unknown datasets: ['c']"]),
        ({"max_repeats": {"c": 1}}, ["max_repeats names unknown datasets"]),
        ({"reshuffle_on_repeat": {"c": True}}, ["reshuffle_on_repeat names unknown datasets"]),
        ({"exhausted_policy": {"a": "halt"}}, ["exhausted_policy['a'] is 'halt'", "'stop', 'repeat'"]),
        ({"max_repeats": {"a": -1}}, ["max_repeats['a'] is -1", "at least 0"]),
    ],
)  # fmt: skip
def test_case_E14_settings_that_contradict_or_make_no_sense_are_refused_by_name(settings, words):
    with pytest.raises(SettingError) as caught:
        StaticMixtureWorkSource(datasets(3, 4), {"a": 1, "b": 1}, **settings)
    assert all(word in str(caught.value) for word in words), str(caught.value)


# A mixture that was changed inside an epoch


@examples(40)
@given(limited(), st.integers(0, 60), st.integers(0, 2**20))
def test_limits_count_over_a_change_of_the_mixture(settings, position, seed):
    rows, weights, repeats = settings
    names = "abcdef"[: len(rows)]
    before = dict(zip(names, np.random.default_rng(seed).integers(1, 9, len(rows)).tolist()))
    source = StaticMixtureWorkSource(
        datasets(*rows), dict(zip(names, weights)), max_repeats=dict(zip(names, repeats)), shuffle_block_size="global"
    )
    old = StaticMixtureWorkSource(
        datasets(*rows), before, max_repeats=dict(zip(names, repeats)), shuffle_block_size="global"
    )
    changed = source.curriculum(1, 0, 3, 4, [MixtureChange(0, position, before)])
    same = min(position, changed.total)
    assert samples(changed, same) == samples(old.curriculum(1, 0, 3, 4), same)
    assert Counter(samples(changed)) == Counter(samples(source.curriculum(1, 0, 3, 4)))
    assert samples(source.curriculum(1, 1, 3, 4, [MixtureChange(0, position, before)])) == samples(
        source.curriculum(1, 1, 3, 4)
    )


def test_a_schedule_may_follow_weights_and_weights_a_schedule():
    schedule = MixtureSchedule([(0, {"a": 1, "b": 0}), (60, {"a": 0, "b": 1})])
    steady = {"a": 1, "b": 1}
    data = datasets(500, 500)
    to_schedule = StaticMixtureWorkSource(data, schedule, exhausted_policy="repeat").curriculum(
        1, 0, 1, 4, [MixtureChange(0, 20, steady)]
    )
    assert [to_schedule.proportions.counts(at) for at in (20, 60, 100)] == [[10, 10], [50, 10], [50, 50]]
    to_steady = StaticMixtureWorkSource(data, steady, exhausted_policy="repeat").curriculum(
        1, 0, 1, 4, [MixtureChange(0, 80, schedule.describe())]
    )
    assert [to_steady.proportions.counts(at) for at in (60, 80, 100)] == [[60, 0], [60, 20], [70, 30]]
