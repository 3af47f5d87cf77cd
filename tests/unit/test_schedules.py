"""Mixture schedules: weights that change along an epoch, at whole positions, at fractions of it, and in ramps."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.unit.small_recipes import Lockstep, Recipe, examples
from zephon import MixtureSchedule, MixtureSpec
from zephon.errors import CheckpointMismatch, SettingError
from zephon.schedules import LARGEST_STAIRCASE, mixture_from, timeline
from zephon.work import StaticMixtureWorkSource


@dataclass
class Rows:
    """A dataset as far as a work source looks at it."""

    name: str
    counts: np.ndarray


def curriculum_of(points, *rows, **settings):
    data = [Rows("abcdefgh"[number], np.array([count])) for number, count in enumerate(rows)]
    return StaticMixtureWorkSource(data, MixtureSchedule(points), **settings).curriculum(1, 0, 2, 4)


def plain_integral(points, names, total):
    """The definition: float64 [total + 1, components]; between points constant, or a straight line."""
    shares = [np.array([w[name] for name in names]) / sum(w.values()) for _, w, *_ in points]
    times = [position if isinstance(position, int) else position * total for position, *_ in points]
    edges = np.arange(total + 1)
    out = np.zeros((total + 1, len(names)))
    for number, (start, share) in enumerate(zip(times, shares)):
        last = number + 1 == len(points)
        end = total if last else times[number + 1]
        within = np.clip(edges - start, 0, max(end - start, 0))[:, None]
        out += within * share
        if not last and len(points[number + 1]) == 3:
            out += within**2 / (2 * (end - start)) * (shares[number + 1] - share)
    return out


@st.composite
def schedules(draw, fractions=False):
    size = draw(st.sampled_from([1, 2, 3, 8, 64]))
    names = [f"d{i}" for i in range(size)]
    weights = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 1000)), min_size=size, max_size=size).filter(any)
    places = st.integers(1, 3999)
    later = sorted(draw(st.sets(places, max_size=5)))
    points = [(0, dict(zip(names, draw(weights))))]
    for place in later:
        kind = draw(st.sampled_from([(), ("linear",)]))
        points.append((place / 4000 if fractions else place, dict(zip(names, draw(weights))), *kind))
    return names, points


@examples(50)
@given(schedules())
def test_at_any_position_no_count_is_off_its_integral_by_more_than_two_samples_and_none_runs_backwards(schedule):
    names, points = schedule
    data = [Rows(name, np.array([100])) for name in names]
    source = StaticMixtureWorkSource(data, MixtureSchedule(points), exhausted_policy="repeat")
    drawn = source.curriculum(1, 0, 2, 4).proportions
    component, index = drawn.locate(np.arange(5000))
    counts = np.zeros((5001, len(names)), np.int64)
    counts[np.arange(1, 5001), component] = 1
    counts = counts.cumsum(axis=0)
    assert (index == counts[np.arange(5000), component]).all()
    assert np.abs(counts - plain_integral(points, names, 5000)).max() <= 2


@examples(40)
@given(schedules(fractions=True), st.data())
def test_fractions_are_of_the_epochs_own_length(schedule, data):
    names, points = schedule
    rows = [data.draw(st.integers(1, 60)) for _ in names]
    settings = data.draw(
        st.sampled_from([{"max_repeats": 1}, {"exhausted_policy": "stop"}, {}, {"stop_after_passes": 2}])
    )
    drawn = [i for i, name in enumerate(names) if any(weights[name] for _, weights, *_ in points)]
    data = [Rows(name, np.array([count])) for name, count in zip(names, rows)]
    source = StaticMixtureWorkSource(data, MixtureSchedule(points), **settings)
    try:
        curriculum = source.curriculum(1, 0, 2, 4)
    except SettingError as error:
        assume("max_repeats" not in settings or "rows left and weight 0" not in str(error))
        raise
    counts = np.array(curriculum.proportions.counts(curriculum.total))
    passes = settings.get("stop_after_passes", 1)
    if "max_repeats" in settings:
        assert curriculum.total == sum(2 * rows[i] for i in drawn)
        assert counts[drawn].tolist() == [2 * rows[i] for i in drawn]
    elif "exhausted_policy" in settings:
        assert all(counts[i] <= rows[i] for i in drawn)
        assert any(counts[i] >= rows[i] - 2 for i in drawn)
    else:
        assert all(counts[i] >= passes * rows[i] for i in drawn)
        assert any(counts[i] <= passes * rows[i] + 2 for i in drawn)
    if "max_repeats" not in settings and curriculum.total < 20_000:
        component = curriculum.components(np.arange(curriculum.total))
        everywhere = np.zeros((curriculum.total + 1, len(names)))
        everywhere[np.arange(1, curriculum.total + 1), component] = 1
        error = everywhere.cumsum(axis=0) - plain_integral(points, names, curriculum.total)
        assert np.abs(error).max() <= 2


def test_the_weights_change_where_the_schedule_says():
    points = [(0, {"a": 0.9, "b": 0.1}), (0.8, {"a": 0.2, "b": 0.8})]
    curriculum = curriculum_of(points, 740, 260, max_repeats=0)
    assert curriculum.total == 1000
    counts = [curriculum.proportions.counts(at)[1] for at in (0, 800, 801, 900)]
    assert counts == [0, 80, 81, 160]
    assert Counter(p[0] for p in curriculum.pointers_at(np.arange(1000)).tolist()) == {0: 740, 1: 260}


def test_a_ramp_is_a_straight_line_and_may_end_with_the_epoch():
    points = [(0, {"a": 1, "b": 0}), (1.0, {"a": 0, "b": 1}, "linear")]
    curriculum = curriculum_of(points, 5000, 5000, exhausted_policy="stop")
    assert curriculum.total in (10_000, 10_001)
    ideal = [t**2 / (2 * curriculum.total) for t in (1000, 5000, 9000)]
    found = [curriculum.proportions.counts(t)[1] for t in (1000, 5000, 9000)]
    assert np.abs(np.subtract(found, ideal)).max() <= 1


def test_a_long_ramp_is_a_staircase_of_a_bounded_number_of_steps_that_meets_the_line_at_each():
    points = [(0, {"a": 1, "b": 0}), (10**12, {"a": 0, "b": 1}, "linear")]
    spec = MixtureSchedule(points)
    steps = timeline(spec, ["a", "b"], None, lambda shares: shares)
    assert len(steps) == LARGEST_STAIRCASE + 1
    drawn = curriculum_of(points, 10, 10, exhausted_policy="repeat").proportions
    for at in (steps[1][0], steps[700][0], steps[-1][0]):
        assert abs(drawn.counts(int(at))[1] - int(at) ** 2 / (2 * 10**12)) <= 2


def test_tokens_are_what_the_weights_of_a_schedule_mean_where_they_are_estimated():
    data = [Rows("a", np.array([9000])), Rows("b", np.array([9000]))]
    points = [(0, {"a": 1, "b": 1}), (1000, {"a": 1, "b": 0}), (3000, {"a": 0, "b": 1}, "linear")]
    source = StaticMixtureWorkSource(data, MixtureSchedule(points), exhausted_policy="repeat")
    drawn = source.curriculum(1, 0, 1, 8, (), {"a": 10.0, "b": 90.0}).proportions
    assert np.abs(np.subtract(drawn.counts(1000), [900, 100])).max() <= 1
    middle = np.subtract(drawn.counts(2010), drawn.counts(1990))  # tokens half and half
    assert np.abs(middle - [18, 2]).max() <= 2


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ([], "the points are"), ({"a": 1}, "the points are"), ("ab", "the points are"), (5, "the points are"),
        ([(1, {"a": 1})], "the first point"), ([(0, {"a": 1}, "linear")], "the first point"),
        ([(0, {"a": 1}), (0, {"a": 2})], "does not come after point 1"),
        ([(0, {"a": 1}), (7, {"a": 2}), (3, {"a": 2})], "does not come after point 2"),
        ([(0, {"a": 1}), (0.5, {"a": 2}), (3, {"a": 2})], "counts otherwise"),
        ([(0, {"a": 1}), (1.0, {"a": 2})], "position of point 2 is 1.0"), ([(0, {"a": 1}), (1.5, {"a": 2})], "1.5"),
        ([(0, {"a": 1}), (True, {"a": 2})], "position of point 2 is True"), ([(0, {"a": 1}), (-4, {"a": 2})], "is -4"),
        ([(0, {"a": 1}), (4, {"a": 2}, "ramp")], "ends with 'ramp'"), ([(0, {"a": 1}), (4,)], "point 2 is"),
        ([(0, {"a": 1}), (4, {"b": 2})], "do not both name ['a', 'b']"),
        ([(0, {"a": 1}), (4, {"a": 0})], "no weight is above 0"), ([(0, {"a": float("nan")})], "the weight of 'a'"),
    ],
)  # fmt: skip
def test_case_E14_a_senseless_schedule_is_refused_with_what_is_allowed(points, words):
    with pytest.raises(SettingError) as caught:
        MixtureSchedule(points)
    assert words in str(caught.value)
    assert "Allowed" in str(caught.value) or "come after" in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"exhausted_policy": "repeat"},
        {"exhausted_policy": {"a": "stop"}, "max_repeats": {"b": 1}},
        {"max_repeats": {"a": 1}},
    ],
)
def test_fractions_of_an_epoch_without_a_known_length_are_refused_with_what_would_do(settings):
    with pytest.raises(SettingError, match="needs an epoch whose length is known.*whole numbers of samples"):
        curriculum_of([(0, {"a": 1, "b": 1}), (0.5, {"a": 1, "b": 3})], 10, 10, **settings)


def test_a_schedule_that_never_comes_to_an_end_or_to_nothing_says_so():
    points = [(0, {"a": 1, "b": 0}), (10, {"a": 0, "b": 1})]
    with pytest.raises(SettingError, match="dataset 'a' never completes its 1 pass,"):
        curriculum_of(points, 50, 50)
    with pytest.raises(SettingError, match=r"at sample 3 of the epoch.*\['b'\] have rows left"):
        curriculum_of(points, 3, 50, max_repeats=0)
    assert curriculum_of(points, 10, 50).total == 60


@given(schedules())
def test_a_schedule_is_json_and_comes_back_from_it(schedule):
    spec = MixtureSchedule(schedule[1])
    again = mixture_from(json.loads(json.dumps(spec.describe())))
    assert again == spec
    assert again.describe() == spec.describe()
    assert mixture_from({"schedule": 2, "b": 1}) == MixtureSpec({"schedule": 2, "b": 1})


# In a run


SETTINGS = {
    "rows": (300, 200), "weights": (1, 1), "steps": ("shuffle",), "lanes": 4, "source": (("chunk_size", 5),),
    "drop_last": False,
}  # fmt: skip


def scheduled(points):
    class Scheduled(Recipe):
        def pipeline(self, microbatch_size=2, **options):
            made = super().pipeline(microbatch_size, **options)
            made.source.mixture = MixtureSchedule(points)
            return made

    return Scheduled(**SETTINGS)


POINTS = [(0, {"d0": 1, "d1": 1}), (90, {"d0": 1, "d1": 3}), (260, {"d0": 5, "d1": 1}, "linear")]


@pytest.mark.parametrize("points", [POINTS, [(p / 400 if p else 0, *rest) for p, *rest in POINTS]])
def test_a_scheduled_run_is_elastic(points):
    recipe = scheduled(points)
    whole = Lockstep(recipe, 1)
    whole.to_the_end()
    parts, state = {lane: [] for lane in range(4)}, None
    for dp, rounds in ((2, 9), (4, 12), (1, 10**6)):
        run = Lockstep(recipe, dp, state=state)
        run.rounds(rounds)
        for lane, samples in parts.items():
            samples += run.lane(lane).samples.tolist()
        state = json.loads(json.dumps(run.checkpoint()))
        run.close()
    assert all(samples == whole.lane(lane).samples.tolist() for lane, samples in parts.items())
    whole.close()


def test_a_run_may_change_to_a_schedule_by_samples_and_not_to_one_by_fractions():
    recipe = scheduled(POINTS)
    pipeline = Recipe(**SETTINGS).pipeline()
    batches = iter(pipeline)
    seen = [sample for _ in range(40) for sample in next(batches).samples]
    state = json.loads(json.dumps(pipeline.checkpoint()))
    with pytest.raises(CheckpointMismatch, match="mixture"):
        recipe.pipeline().restore(state)
    again = recipe.pipeline().restore(state, allow_changed=["mixture"])
    seen += [sample for batch in again for sample in batch.samples]
    assert len({s for s in seen if s[0] == "d1"}) == 200
    assert Counter(name for name, _, _ in seen[-100:])["d0"] > 75
    fractions = replace(recipe).pipeline()
    fractions.source.mixture = MixtureSchedule([(0, {"d0": 1, "d1": 1}), (0.5, {"d0": 1, "d1": 3})])
    with pytest.raises(CheckpointMismatch, match="schedule by fractions inside an epoch"):
        fractions.restore(state, allow_changed=["mixture"])
