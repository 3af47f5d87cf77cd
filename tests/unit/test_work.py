"""The work source: every row as often as promised, the same positions for any cut into lanes and chunks."""

from __future__ import annotations

import inspect
import json
import pickle
import tracemalloc
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zephon.curriculum import RowOrder, Shuffling
from zephon.errors import DatasetError, SettingError
from zephon.proportions import Proportions, integer_weights
from zephon.work import MixtureSchedule, MixtureSpec, StaticMixtureWorkSource, TokenEstimation


@dataclass
class Rows:
    """A dataset as far as a work source looks at it."""

    name: str
    counts: np.ndarray


def shuffling(arguments):
    return Shuffling(*(arguments[f"shuffle_{name}"] for name in ("shards", "within_shard", "block_size")))


def rows(name, *counts):
    return Rows(name, np.array(counts, dtype=np.int64))


COUNTS = st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any)
SHUFFLES = st.fixed_dictionaries(
    {
        "shuffle_shards": st.booleans(),
        "shuffle_within_shard": st.booleans(),
        "shuffle_block_size": st.sampled_from([None, 1, 2, 7, 50, "auto", "global"]),
    }
)


@st.composite
def sources(draw, **fixed):
    datasets = [rows(f"d{i}", *counts) for i, counts in enumerate(draw(st.lists(COUNTS, min_size=1, max_size=4)))]
    weights = {d.name: draw(st.integers(1, 9)) for d in datasets}
    mixture = draw(st.sampled_from([None, MixtureSpec(weights)]))
    lanes = draw(st.sampled_from(["permute", "modulo"]))
    return StaticMixtureWorkSource(datasets, mixture, lane_assignment=lanes, **draw(SHUFFLES), **fixed)


def all_samples(curriculum):
    return [tuple(p) for p in curriculum.pointers_at(np.arange(curriculum.total)).tolist()]


def lane_stream(curriculum, lane):
    return [tuple(p) for n in range(curriculum.lane_chunks(lane)) for p in curriculum.pointers(lane, n).tolist()]


# Order


@given(counts=COUNTS, shuffle=SHUFFLES, key=st.integers(0, 2**64 - 1))
@settings(max_examples=200)
def test_every_pass_holds_every_row_once(counts, shuffle, key):
    order = RowOrder(np.array(counts), shuffling(shuffle), key)
    everything = [(s, r) for s, count in enumerate(counts) for r in range(count)]
    for number in (0, 1, 5):
        shard, row = order.locate(np.arange(number * order.rows, (number + 1) * order.rows))
        assert sorted(zip(shard.tolist(), row.tolist())) == everything


@given(counts=COUNTS, shuffle=SHUFFLES, data=st.data())
@settings(max_examples=100)
def test_any_position_is_found_directly(counts, shuffle, data):
    order = RowOrder(np.array(counts), shuffling(shuffle), 5)
    stream = list(zip(*(a.tolist() for a in order.locate(np.arange(6 * order.rows)))))
    wanted = data.draw(st.lists(st.integers(0, 6 * order.rows - 1), min_size=1, max_size=20))
    fresh = RowOrder(np.array(counts), shuffling(shuffle), 5)
    assert list(zip(*(a.tolist() for a in fresh.locate(np.array(wanted))))) == [stream[i] for i in wanted]


def test_many_passes_at_once_are_laid_out_part_by_part(monkeypatch):
    counts = np.array([3, 1, 4, 0, 1])
    index = np.random.default_rng(0).integers(0, 9 * 200, 500)
    whole = RowOrder(counts, Shuffling(within_shard=True), 1).locate(index)
    monkeypatch.setattr("zephon.curriculum._LAYOUT_CELLS", 12)
    parts = RowOrder(counts, Shuffling(within_shard=True), 1).locate(index)
    assert [a.tolist() for a in whole] == [a.tolist() for a in parts]


def test_nothing_shuffled_is_the_order_of_the_files():
    order = RowOrder(np.array([2, 0, 3]), Shuffling(shards=False), 9)
    shard, row = order.locate(np.arange(10))
    assert shard.tolist() == [0, 0, 2, 2, 2] * 2
    assert row.tolist() == [0, 1, 0, 1, 2] * 2


def test_shuffled_shards_are_read_each_in_one_go():
    order = RowOrder(np.full(20, 5), Shuffling(), 9)
    shard, row = order.locate(np.arange(200))
    assert row.tolist() == [0, 1, 2, 3, 4] * 40
    first, second = shard[:100:5].tolist(), shard[100::5].tolist()
    assert sorted(first) == sorted(second) == list(range(20))
    assert list(range(20)) != first != second


def test_rows_shuffled_within_shards_stay_in_their_shard():
    order = RowOrder(np.full(4, 50), Shuffling(shards=False, within_shard=True), 9)
    shard, row = order.locate(np.arange(200))
    assert shard.tolist() == [s for s in range(4) for _ in range(50)]
    per_shard = row.reshape(4, 50).tolist()
    assert all(sorted(r) == list(range(50)) for r in per_shard)
    assert len({tuple(r) for r in per_shard}) == 4


def test_blocks_keep_their_rows_and_mix_them_across_shards():
    order = RowOrder(np.full(40, 10), Shuffling(shards=False, block_size="auto"), 9)
    shard, row = order.locate(np.arange(400))
    flat = (shard * 10 + row).reshape(5, 80)
    assert [sorted(block) for block in flat.tolist()] == np.arange(400).reshape(5, 80).tolist()
    assert len(set(shard[:80].tolist()[:20])) > 4


def test_a_global_shuffle_puts_every_row_anywhere(amount):
    counts = np.array([1, 4, 2])
    place, each = np.zeros((7, 7)), amount(200, 1000)
    for key in range(7 * each):
        shard, row = RowOrder(counts, Shuffling(block_size="global"), key).locate(np.arange(7))
        place[np.arange(7), np.array([0, 1, 5])[shard] + row] += 1
    assert ((place - each) ** 2 / each).sum() < 75  # 36 degrees of freedom


def test_a_global_shuffle_of_a_million_million_rows_costs_next_to_nothing():
    source = StaticMixtureWorkSource([rows("web", *[10**11] * 10)], None, shuffle_block_size="global")
    tracemalloc.start()
    curriculum = source.curriculum(1, 0, 8, 2048)
    assert curriculum.total == 10**12
    pointers = np.concatenate([curriculum.pointers(3, n) for n in (0, 10**5, 10**7)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
    assert len(pickle.dumps(curriculum)) < 10_000
    assert len(np.unique(pointers, axis=0)) == 3 * 2048
    assert np.bincount(pointers[:, 1], minlength=10).min() > 450
    assert pointers[:, 2].max() < 10**11


@given(source=sources(), data=st.data())
def test_seed_and_epoch_reshuffle_and_nothing_else_does(source, data):
    one = source.curriculum(1, 0, 4, 8)
    again = pickle.loads(
        pickle.dumps(source.curriculum(1, 0, data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))))
    )
    assert all_samples(one) == all_samples(again)
    for other in (source.curriculum(2, 0, 4, 8), source.curriculum(1, 1, 4, 8)):
        assert other.total == one.total
        assert Counter(p[0] for p in all_samples(other)) == Counter(p[0] for p in all_samples(one))


def test_another_seed_epoch_or_pass_is_another_order():
    source = StaticMixtureWorkSource([rows("a", *[1] * 50)], None, stop_after_passes=2)
    streams = [all_samples(source.curriculum(seed, epoch, 1, 8)) for seed, epoch in [(1, 0), (1, 1), (2, 0)]]
    passes = [tuple(stream[half]) for stream in streams for half in (slice(0, 50), slice(50, 100))]
    assert len(set(passes)) == 6


def test_a_pickled_curriculum_leaves_its_layouts_behind():
    curriculum = StaticMixtureWorkSource([rows("a", *[2] * 5000)], None).curriculum(1, 0, 2, 8)
    before = pickle.dumps(curriculum)
    curriculum.pointers(0, 0)
    assert len(pickle.dumps(curriculum)) == len(before)


# Ends


@given(source=sources(stop_after_passes=2))
@settings(max_examples=60)
def test_by_default_every_dataset_completes_its_passes_and_the_last_one_only_just(source):
    curriculum = source.curriculum(3, 0, 2, 4)
    seen = Counter(all_samples(curriculum))
    for number, dataset in enumerate(source.datasets):
        for shard, count in enumerate(dataset.counts.tolist()):
            assert all(seen[number, shard, row] >= 2 for row in range(count))
    drawn = curriculum.proportions.counts(curriculum.total - 1)
    assert any(n < 2 * d.counts.sum() for n, d in zip(drawn, source.datasets))


@given(counts=st.lists(COUNTS, min_size=1, max_size=4), passes=st.integers(1, 3), shuffle=SHUFFLES)
@settings(max_examples=60)
def test_in_proportion_to_the_rows_every_row_comes_exactly_once_a_pass(counts, passes, shuffle):
    datasets = [rows(f"d{i}", *c) for i, c in enumerate(counts)]
    source = StaticMixtureWorkSource(datasets, None, stop_after_passes=passes, **shuffle)
    seen = Counter(all_samples(source.curriculum(3, 0, 2, 4)))
    everything = {(d, s, r) for d, c in enumerate(counts) for s, count in enumerate(c) for r in range(count)}
    assert set(seen) == everything
    assert set(seen.values()) == {passes}


@given(source=sources(exhausted_policy="stop"))
@settings(max_examples=60)
def test_stop_ends_just_before_a_second_pass_would_begin(source):
    curriculum = source.curriculum(3, 0, 2, 4)
    assert max(Counter(all_samples(curriculum)).values()) == 1
    sizes = [int(d.counts.sum()) for d in source.datasets]
    after = curriculum.proportions.counts(curriculum.total + 1)
    assert any(n > size for n, size in zip(after, sizes))


def test_repeat_is_endless():
    source = StaticMixtureWorkSource([rows("a", 3), rows("b", 5)], {"a": 1, "b": 1}, exhausted_policy="repeat")
    curriculum = source.curriculum(3, 0, 2, 4)
    assert (curriculum.total, curriculum.lane_chunks(1), curriculum.lane_samples(0)) == (None, None, None)
    assert curriculum.pointers(1, 10**12).shape == (4, 3)
    assert curriculum.chunk_length(1, 10**12) == 4


def test_case_F1_a_source_hardly_ever_drawn_is_no_error():
    datasets = [rows("big", 10), rows("small", 10), rows("never", 10)]
    mixture = MixtureSpec({"big": 0.999, "small": 0.001, "never": 1e-9})
    source = StaticMixtureWorkSource(datasets, mixture, exhausted_policy="repeat")
    drawn = source.curriculum(1, 0, 2, 8).components(np.arange(1000))
    assert np.abs(np.bincount(drawn, minlength=3) - [999, 1, 0]).max() <= 1
    assert StaticMixtureWorkSource(datasets, mixture).curriculum(1, 0, 2, 8).total > 9 * 10**9


def test_a_dataset_of_weight_zero_is_never_drawn_nor_waited_for_even_when_empty():
    datasets = [rows("a", 3), rows("unused", 10**6), rows("empty", 0)]
    source = StaticMixtureWorkSource(datasets, {"a": 1, "unused": 0, "empty": 0.0})
    assert all_samples(source.curriculum(1, 0, 1, 4)) == [(0, 0, row) for row in range(3)]
    by_rows = StaticMixtureWorkSource([rows("empty", 0), rows("a", 3)], None)
    assert by_rows.curriculum(1, 0, 1, 4).total == 3


def test_an_empty_dataset_with_a_weight_is_named_when_the_curriculum_is_made():
    source = StaticMixtureWorkSource([rows("a", 3), rows("hollow", 0, 0)], {"a": 1, "hollow": 1})
    with pytest.raises(DatasetError, match="'hollow' has no rows in its 2 shards"):
        source.curriculum(1, 0, 1, 4)
    with pytest.raises(DatasetError, match="no dataset has any rows: 'x', 'y'"):
        StaticMixtureWorkSource([rows("x", 0), rows("y")], None).curriculum(1, 0, 1, 4)


# Routing


@given(source=sources(), lanes=st.integers(1, 20), chunk_size=st.integers(1, 30))
@settings(max_examples=100)
def test_lanes_share_out_all_positions_and_none_twice(source, lanes, chunk_size):
    curriculum = source.curriculum(3, 0, lanes, chunk_size)
    taken = []
    for lane in range(lanes):
        pieces = [curriculum.positions(lane, n) for n in range(curriculum.lane_chunks(lane))]
        assert [curriculum.chunk_length(lane, n) for n in range(len(pieces))] == [len(p) for p in pieces]
        assert all(pieces)
        assert sum(map(len, pieces)) == curriculum.lane_samples(lane)
        taken += [position for piece in pieces for position in piece]
    assert sorted(taken) == list(range(curriculum.total))


@given(source=sources(), lanes=st.integers(1, 20), chunk_size=st.integers(1, 30))
def test_lanes_are_even_to_one_sample_and_the_lowest_have_it(source, lanes, chunk_size):
    curriculum = source.curriculum(3, 0, lanes, chunk_size)
    samples = [curriculum.lane_samples(lane) for lane in range(lanes)]
    assert max(samples) - min(samples) <= 1
    assert samples == sorted(samples, reverse=True)


@given(source=sources(), lanes=st.integers(1, 8), chunk_size=st.integers(1, 30))
def test_pointers_of_a_lane_are_those_at_its_positions(source, lanes, chunk_size):
    curriculum = source.curriculum(3, 0, lanes, chunk_size)
    samples = all_samples(curriculum)
    for lane in range(lanes):
        places = [p for n in range(curriculum.lane_chunks(lane)) for p in curriculum.positions(lane, n)]
        assert lane_stream(curriculum, lane) == [samples[p] for p in places]
    assert curriculum.components(np.arange(curriculum.total)).tolist() == [s[0] for s in samples]


@given(source=sources(), lanes=st.integers(1, 8), chunk_size=st.integers(1, 30), data=st.data())
def test_any_range_of_a_lanes_samples_is_cut_from_its_stream(source, lanes, chunk_size, data):
    curriculum = source.curriculum(3, 0, lanes, chunk_size)
    lane = data.draw(st.integers(0, lanes - 1))
    samples = curriculum.lane_samples(lane)
    low, high = sorted(data.draw(st.tuples(st.integers(0, samples), st.integers(0, samples))))
    assert [tuple(p) for p in curriculum.lane_pointers(lane, low, high).tolist()] == lane_stream(curriculum, lane)[
        low:high
    ]
    for outside in [(0, samples + 1), (-1, samples)]:
        with pytest.raises(IndexError, match=f"lane {lane} has no samples"):
            curriculum.lane_pointers(lane, *outside)


def test_96_rows_on_8_lanes_are_12_rows_a_lane():
    source = StaticMixtureWorkSource([rows("a", 50, 46)], None)
    curriculum = source.curriculum(0, 0, 8, 2048)
    assert [curriculum.lane_samples(lane) for lane in range(8)] == [12] * 8
    assert [curriculum.lane_chunks(lane) for lane in range(8)] == [1] * 8


def test_a_lane_without_a_piece_of_the_last_round_has_no_chunk_for_it():
    curriculum = StaticMixtureWorkSource([rows("a", 10)], None).curriculum(0, 0, 4, 2)
    assert [curriculum.lane_chunks(lane) for lane in range(4)] == [2, 2, 1, 1]
    with pytest.raises(IndexError, match="lane 3 has no chunk 1"):
        curriculum.pointers(3, 1)


def test_modulo_deals_chunks_in_lane_order_and_permute_anew_each_round():
    data = [rows("a", 6 * 4 * 50)]
    modulo = StaticMixtureWorkSource(data, None, lane_assignment="modulo").curriculum(0, 0, 6, 4)
    assert [modulo.positions(lane, n).start for n in range(50) for lane in range(6)] == list(range(0, 1200, 4))
    permuted = StaticMixtureWorkSource(data, None).curriculum(0, 0, 6, 4)
    rounds = {tuple(permuted.positions(lane, n).start - 24 * n for lane in range(6)) for n in range(50)}
    assert len(rounds) > 30


def test_lanes_and_positions_that_do_not_exist_are_refused():
    curriculum = StaticMixtureWorkSource([rows("a", 10)], None).curriculum(0, 0, 4, 2)
    for call in (lambda: curriculum.lane_chunks(4), lambda: curriculum.pointers(-1, 0)):
        with pytest.raises(IndexError, match="lanes are numbered from 0 to 3"):
            call()
    for bad in ([10], [-1], [0, 2**40]):
        with pytest.raises(IndexError, match=r"\[0, 10\)"):
            curriculum.pointers_at(np.array(bad))
    assert curriculum.pointers_at(np.empty(0, np.int64)).shape == (0, 3)


# Settings


@given(counts=COUNTS, lanes=st.integers(1, 64), scale=st.sampled_from([1, 100, 10**6]))
def test_auto_chunks_make_a_pass_of_64_rounds_or_are_single_samples(counts, lanes, scale):
    size = StaticMixtureWorkSource([rows("a", *[c * scale for c in counts])], None).auto_chunk_size(lanes)
    total = sum(counts) * scale
    assert 1 <= size <= 2048
    assert size == 1 or total / (size * lanes) >= 64
    assert size == 2048 or total / ((size + 1) * lanes) < 64


def test_the_signature_is_the_published_one():
    parameters = inspect.signature(StaticMixtureWorkSource).parameters
    defaults = {n: p.default for n, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
    assert defaults == {
        "datasets": inspect.Parameter.empty, "mixture": inspect.Parameter.empty, "chunk_size": "auto", "seed": 0,
        "shuffle_shards": True, "shuffle_within_shard": False, "shuffle_block_size": None, "exhausted_policy": None,
        "reshuffle_on_repeat": True, "max_repeats": None, "stop_after_passes": 1, "lane_assignment": "permute",
        "token_estimation": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("chunk_size", 0), ("chunk_size", -5), ("chunk_size", "big"), ("chunk_size", 1.5), ("chunk_size", True),
        ("seed", 0.5), ("seed", None), ("seed", "x"),
        ("shuffle_shards", "yes"), ("shuffle_within_shard", 1), ("reshuffle_on_repeat", "no"),
        ("reshuffle_on_repeat", None), ("max_repeats", -1), ("max_repeats", True), ("max_repeats", 0.5),
        ("token_estimation", "measure"),
        ("shuffle_block_size", 0), ("shuffle_block_size", "row"), ("shuffle_block_size", False),
        ("exhausted_policy", "halt"), ("exhausted_policy", 3), ("lane_assignment", "random"), ("lane_assignment", None),
        ("stop_after_passes", 0), ("stop_after_passes", 1.0), ("stop_after_passes", None),
    ],
)  # fmt: skip
def test_case_E14_a_senseless_setting_is_refused_with_its_name_and_range(setting, value):
    with pytest.raises(SettingError, match=rf"^{setting} is {value!r}\. Allowed: "):
        StaticMixtureWorkSource([rows("a", 5)], None, **{setting: value})


@pytest.mark.parametrize("policy", ["stop", "repeat"])
def test_a_policy_with_explicit_passes_is_an_error_and_without_them_is_none(policy):
    data = [rows("a", 5)]
    assert StaticMixtureWorkSource(data, None, exhausted_policy=policy).stop_after_passes is None
    with pytest.raises(SettingError, match=r"exhausted_policy.*stop_after_passes=1"):
        StaticMixtureWorkSource(data, None, exhausted_policy=policy, stop_after_passes=1)


def test_datasets_and_mixture_must_fit():
    a, b = rows("a", 5), rows("b", 5)
    for datasets, mixture, message in [
        ([], None, "datasets is empty"),
        (a, None, "datasets is .*Allowed: a list"),
        ([a, a], None, r"names \['a'\] occur more than once"),
        ([a, b], MixtureSpec({"a": 1}), r"mixture lacks datasets: \['b'\]"),
        ([a], MixtureSpec({"a": 1, "c": 1}), r"mixture names unknown datasets: \['c'\]"),
        ([a], 0.5, "mixture: weights are 0.5"),
        ([a, b], {"a": 0, "b": 0}, "mixture: no weight is above 0"),
    ]:
        with pytest.raises(SettingError, match=message):
            StaticMixtureWorkSource(datasets, mixture)


def test_lanes_and_chunk_sizes_below_one_are_refused_by_the_curriculum():
    source = StaticMixtureWorkSource([rows("a", 5)], None)
    with pytest.raises(SettingError, match="canonical_replicas is 0"):
        source.curriculum(0, 0, 0, 1)
    with pytest.raises(SettingError, match="chunk_size is 0"):
        source.curriculum(0, 0, 1, 0)


@given(source=sources(), other=sources())
def test_the_description_is_json_and_equal_descriptions_mean_equal_settings(source, other):
    described = source.describe()
    assert json.loads(json.dumps(described)) == described
    same = (source.mixture, source.shuffling, source.lane_assignment) == (
        other.mixture,
        other.shuffling,
        other.lane_assignment,
    )
    assert (described == other.describe()) == same


def test_the_description_tells_settings_apart_and_leaves_seed_and_chunk_size_to_the_plan():
    data = [rows("a", 5), rows("b", 5)]
    changes = [
        {}, {"mixture": {"a": 1, "b": 2}}, {"mixture": {"a": 0.5, "b": 0.5}}, {"shuffle_shards": False},
        {"shuffle_within_shard": True}, {"shuffle_block_size": 4}, {"shuffle_block_size": "auto"},
        {"exhausted_policy": "stop"}, {"exhausted_policy": "repeat"}, {"stop_after_passes": 2},
        {"lane_assignment": "modulo"}, {"exhausted_policy": {"a": "stop"}}, {"max_repeats": 0}, {"max_repeats": 1},
        {"max_repeats": {"a": 1}}, {"reshuffle_on_repeat": False}, {"reshuffle_on_repeat": {"b": False}},
        {"mixture": MixtureSchedule([(0, {"a": 1, "b": 1}), (5, {"a": 1, "b": 2})])},
        {"mixture": MixtureSchedule([(0, {"a": 1, "b": 1}), (5, {"a": 1, "b": 2}, "linear")])},
        {"mixture": {"a": 1, "b": 1}, "token_estimation": TokenEstimation()},
        {"mixture": {"a": 1, "b": 1}, "token_estimation": TokenEstimation({"a": 2, "b": 2})},
    ]  # fmt: skip
    described = [StaticMixtureWorkSource(data, **{"mixture": None, **c}).describe() for c in changes]
    assert len({json.dumps(d, sort_keys=True) for d in described}) == len(changes)
    assert StaticMixtureWorkSource(data, None, chunk_size=7, seed=3).describe() == described[0]


def test_the_default_is_the_tree_over_the_weights():
    """What a plain mixture draws does not depend on what else a work source can do."""
    source = StaticMixtureWorkSource([rows("a", 50), rows("b", 9)], {"a": 0.7, "b": 0.3})
    plain = Proportions([7, 3]).locate(np.arange(50))[0]
    assert source.curriculum(1, 0, 2, 8).components(np.arange(50)).tolist() == plain.tolist()


def test_rows_beyond_the_exact_range_warn_of_repeats():
    source = StaticMixtureWorkSource([rows("a", 2**50), rows("b", 3)], None)
    with pytest.warns(UserWarning, match="more than 2\\*\\*48 rows"):
        curriculum = source.curriculum(1, 0, 8, 2048)
    assert curriculum.proportions.weights == Proportions(integer_weights([2**50, 3])).weights
