"""Keeping the mixture by reordering."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.ops.cuts import cuts_of
from tests.unit.ops.test_pack_flat import KEY, run
from zephon import Dataset, InMemoryShard, MixtureSchedule, MixtureSpec, Pipeline, StaticMixtureWorkSource
from zephon.columns import Block, Column, Fixed, Objects, Ragged
from zephon.errors import RecordError, SettingError
from zephon.ops.base import Faults
from zephon.ops.ensure_mixture import EnsureMixture
from zephon.ops.mixture_weights import TOKENS, weighed
from zephon.ops.token_fields import SAMPLE_TOKENS
from zephon.windows import run_window

weights = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def named(weights: list[int]) -> dict[str, int]:
    return {str(number): weight for number, weight in enumerate(weights)}


def block_of(datasets: list[int], tokens: list[int] | None = None) -> Block:
    samples = np.array([(dataset, 0, row) for row, dataset in enumerate(datasets)], np.int64).reshape(-1, 3)
    lengths = [1 + row % 5 for row in range(len(datasets))] if tokens is None else tokens
    offsets = np.cumsum([0, *lengths])
    return Block(
        {"id": Fixed(np.arange(len(datasets))), "input_ids": Ragged(np.arange(offsets[-1]), offsets)}, samples
    )


def packed_of(datasets: list[int], sizes: list[int], carry: bool) -> Block:
    """Records of one to three samples each, with their tokens if `carry`."""
    offsets = np.cumsum([0, *sizes])
    samples = np.array([(datasets[i % len(datasets)], 0, i) for i in range(int(offsets[-1]))], np.int64)
    tokens = Ragged(np.arange(len(samples)) % 7 + 1, offsets)
    length = Fixed(np.add.reduceat(tokens.values, offsets[:-1]))
    fields: dict[str, Column] = {"id": Fixed(np.arange(len(sizes))), "sequence_length": length}
    return Block({**fields, **({SAMPLE_TOKENS: tokens} if carry else {})}, samples.reshape(-1, 3), offsets)


def ids(block: Block) -> list[int]:
    return [row["id"] for row in block.to_rows()]


def datasets_in(block: Block) -> np.ndarray[Any, Any]:
    return block.samples[:, 0]


def furthest(datasets: np.ndarray[Any, Any], weights: list[int], width: int = 64) -> float:
    """The furthest that any dataset's share is from the mixture, in any `width` records in a row."""
    off = 0.0
    for dataset, weight in enumerate(weights):
        counts = np.cumsum(np.concatenate(([0], datasets == dataset)))
        shares = (counts[width:] - counts[:-width]) / width
        off = max(off, float(np.abs(shares - weight / sum(weights)).max(initial=0)))
    return off


settings = st.fixed_dictionaries({
    "max_buffer_size": st.none() | st.integers(1, 30),
    "weight_by": st.sampled_from(("auto", "samples", "id", lambda payload: payload["id"] % 3)),
    "drain_target_ratio": st.sampled_from((0, 0.5, 0.8, 1)),
    "warn_tolerance": st.none() | st.just(0.05),
})  # fmt: skip
sources = st.lists(st.integers(0, 5), max_size=80)


@given(weights, sources, settings, st.lists(st.integers(0, 80), max_size=6), st.sampled_from(("one", "packed", "told")))
def test_order_is_the_same_however_records_are_cut_into_pushes_and_nothing_is_lost_but_what_is_counted(
    mixture: list[int], datasets: list[int], given_settings: dict[str, Any], cuts: list[int], kind: str
) -> None:
    datasets = [dataset % len(mixture) for dataset in datasets] or [0]
    sizes = [1 + row % 3 for row in range(len(datasets))]
    block = block_of(datasets) if kind == "one" else packed_of(datasets, sizes, kind == "told")
    operator = EnsureMixture(mixture=named(mixture), **given_settings)
    whole, cut = operator.accumulator(KEY), operator.accumulator(KEY)
    said, said_in_pieces = Faults(), Faults()
    out = run(whole, [block], said)
    assert ids(run(cut, cuts_of(block, cuts), said_in_pieces)) == ids(out)
    assert (whole.counters, said.reports) == (cut.counters, said_in_pieces.reports)
    assert len(set(ids(out))) == len(out) == len(block) - whole.counters.get("dropped_records", 0)
    for row, record in enumerate(ids(out)):
        assert out.take(np.array([row])).samples.tolist() == block.take(np.array([record])).samples.tolist()
    assert given_settings["max_buffer_size"] is None or len(out) == len(block)
    assert len(said.reports) <= 1


@given(weights, sources, st.integers(1, 20), st.floats(0, 1), st.lists(st.integers(0, 80), max_size=6))
def test_no_more_than_the_buffer_is_held_and_it_is_drained_as_far_as_told(
    mixture: list[int], datasets: list[int], size: int, ratio: float, cuts: list[int]
) -> None:
    operator = EnsureMixture(mixture=named(mixture), max_buffer_size=size, drain_target_ratio=ratio)
    accumulator, held = operator.accumulator(KEY), 0
    for dataset in datasets:
        out = sum(map(len, accumulator.push(block_of([dataset % len(mixture)]), Faults())))
        assert out in (0, held + 1 - int(size * ratio))
        held += 1 - out
        assert held <= size


@given(st.lists(st.integers(1, 60), min_size=2, max_size=8), st.integers(0, 2**32))
def test_any_64_records_are_within_5_points_of_the_mixture_where_the_buffer_allows_it(
    mixture: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    # Each stretch of up to 480 records has the mixture, but its datasets come one after another.
    stretch = np.repeat(np.arange(len(mixture)), mixture)
    stretches = [np.concatenate([stretch[stretch == d] for d in rng.permutation(len(mixture))]) for _ in range(12)]
    given_order = np.concatenate(stretches)
    block = block_of(given_order.tolist(), [1] * len(given_order))
    out = run(EnsureMixture(mixture=named(mixture)).accumulator(KEY), [block])
    assert furthest(datasets_in(out), mixture) <= 0.05


@given(weights, st.lists(st.integers(0, 5), min_size=64, max_size=400))
def test_a_strict_output_keeps_the_mixture_whatever_comes(mixture: list[int], datasets: list[int]) -> None:
    datasets = [dataset % len(mixture) for dataset in datasets]
    accumulator = EnsureMixture(mixture=named(mixture), max_buffer_size=None, weight_by="samples").accumulator(KEY)
    out = run(accumulator, [block_of(datasets)])
    assert furthest(datasets_in(out), mixture) <= 0.05
    kept, came, total = Counter(datasets_in(out).tolist()), Counter(datasets), sum(mixture)
    scarce = min(came[dataset] * total / weight for dataset, weight in enumerate(mixture))
    assert len(out) >= scarce - total / min(mixture)
    assert all(abs(kept[d] - len(out) * weight / total) <= 2 for d, weight in enumerate(mixture))


def test_by_tokens_each_dataset_has_its_share_of_them() -> None:
    datasets, tokens = [0, 0, 0, 0, 1] * 400, [40, 40, 40, 40, 400] * 400
    strict = EnsureMixture(mixture={"0": 1, "1": 1}, max_buffer_size=None).accumulator(KEY)
    out = run(strict, [block_of(datasets, tokens)])
    held = [int(ragged.lengths[datasets_in(out) == dataset].sum()) for dataset in (0, 1)
            for ragged in [out.fields["input_ids"]] if isinstance(ragged, Ragged)]  # fmt: skip
    assert abs(held[0] - held[1]) <= 400
    assert held[0] == 1600 * 40
    assert strict.counters["dropped_tokens"] == 400 * 400 - held[1]


@pytest.mark.parametrize("weight_by", ["size", "words", lambda payload: payload["size"]])
def test_weights_may_be_a_fields_number_its_length_or_a_functions(weight_by: Any) -> None:
    rows = [{"size": 1 + 2 * (row % 2), "words": ["w"] * (1 + 2 * (row % 2))} for row in range(400)]
    samples = np.array([(row % 2, 0, row) for row in range(400)], np.int64)
    operator = EnsureMixture(mixture={"0": 1, "1": 1}, max_buffer_size=None, weight_by=weight_by)
    out = run(operator.accumulator(KEY), [Block.from_rows(rows, samples)])
    counts = np.bincount(datasets_in(out), minlength=2)
    assert counts[0] == 200
    assert abs(counts[1] * 3 - 200) <= 4  # a record of each


def test_a_sequence_counts_for_each_dataset_by_the_tokens_it_holds() -> None:
    """Sequences that come in long runs, of one dataset and of two, leave so that their tokens keep the mixture."""
    block = packed_of([0], [2] * 400, True)
    block.samples[:, 0] = [1 if row < 400 else 0 for row in range(800)]
    block.samples[::2, 0] = 0
    tokens = block.fields[SAMPLE_TOKENS]
    assert isinstance(tokens, Ragged)
    tokens.values[:] = 50
    out = run(EnsureMixture(mixture={"0": 3, "1": 1}, max_buffer_size=400).accumulator(KEY), [block])
    share = np.convolve(out.samples[:, 0] == 1, np.ones(128) / 128, "valid")
    assert np.abs(share - 0.25).max() <= 0.05


def test_records_of_a_dataset_that_is_not_wanted_leave_last_or_not_at_all() -> None:
    datasets = [1, 0] * 20
    last = run(EnsureMixture(mixture={"0": 1, "1": 0}).accumulator(KEY), [block_of(datasets)])
    assert datasets_in(last).tolist() == [0] * 20 + [1] * 20
    strict = run(EnsureMixture(mixture={"0": 1, "1": 0}, max_buffer_size=None).accumulator(KEY), [block_of(datasets)])
    assert datasets_in(strict).tolist() == [0] * 20


def test_a_window_that_leaves_the_tolerance_is_reported_once_with_both_numbers() -> None:
    faults = Faults()
    operator = EnsureMixture(mixture={"0": 1, "1": 1}, warn_tolerance=0.05)
    run(operator.accumulator(KEY), [block_of([0] * 60 + [1] * 20)], faults)
    (line,) = faults.reports
    assert "'0' has 75.0% of the output, the mixture says 50.0%" in line
    quiet = Faults()
    run(operator.accumulator(KEY), [block_of([0, 1] * 40)], quiet)
    run(EnsureMixture(mixture={"0": 1, "1": 1}).accumulator(KEY), [block_of([0] * 60 + [1] * 20)], quiet)
    assert quiet.reports == []


def test_a_run_in_this_process_logs_that_a_window_left_the_tolerance(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="zephon"):
        for _ in pipeline({"a": 3, "b": 1}, mixture={"a": 1, "b": 1}, warn_tolerance=0.1).options(canonical_replicas=1):
            pass
    (line,) = [record.message for record in caplog.records if "ensure_mixture" in record.message]
    assert "dataset 'a' has 75.0% of the output, the mixture says 50.0%" in line


@pytest.mark.parametrize(
    ("row", "words"),
    [({}, "no such field"), ({"size": -1}, "found -1"), ({"size": None}, "None"), ({"size": float("nan")}, "nan")],
)
def test_a_record_without_a_weight_is_a_bad_one(row: dict[str, Any], words: str) -> None:
    rows = [{"size": 1}, row, {"size": 2.5}]
    block = Block.from_rows(rows, np.array([(0, 0, i) for i in range(3)]))
    operator = EnsureMixture(mixture={"0": 1}, weight_by="size")
    with pytest.raises(RecordError, match=f"row 1.*{words}"):
        run(operator.accumulator(KEY), [block])
    faults = Faults("skip")
    assert len(run(operator.accumulator(KEY), [block], faults)) == 2
    assert faults.skipped == 1


def test_lists_and_objects_count_by_their_length_and_records_without_tokens_as_one() -> None:
    block = Block({"tokens": Objects([[1, 2, 3], None, [4]])}, np.array([(0, 0, i) for i in range(3)]))
    operator = EnsureMixture(mixture={"0": 1}, max_buffer_size=None)
    accumulator = operator.accumulator(KEY)
    assert len(run(accumulator, [block])) == 3


def test_each_record_is_weighed_by_the_token_field_that_it_has_whatever_others_have() -> None:
    rows = [{"tokens": [1] * 9}, {"input_ids": [1]}, {"tokens": [1] * 3, "input_ids": [1, 2]}, {"text": "x"}] * 30
    block = Block.from_rows(rows, np.array([(row % 2, 0, row) for row in range(len(rows))], np.int64))
    by_tokens = [9.0, 1.0, 2.0, 1.0]
    operator = EnsureMixture(mixture={"0": 1, "1": 1}, max_buffer_size=10)
    for cut in ([block], [block.take(np.array([row])) for row in range(len(block))]):
        weights = [charge for part in cut for charge in weighed(part, TOKENS, [1, 1], operator, Faults())[2]]
        assert weights == by_tokens * 30


def pipeline(weights: dict[str, int], **settings: Any) -> Pipeline:
    datasets = [
        Dataset.from_dict(name, {0: InMemoryShard([{"id": row, "of": name} for row in range(400)])}) for name in weights
    ]
    source = StaticMixtureWorkSource(datasets, MixtureSpec(weights), chunk_size=40)
    return Pipeline(source).shuffle(200).ensure_mixture(**settings).batch(8).options(canonical_replicas=2)


def test_the_work_sources_own_mixture_is_kept_unless_told_otherwise() -> None:
    def window(**settings: Any) -> np.ndarray[Any, Any]:
        return datasets_in(Block.concat(list(run_window(pipeline({"a": 3, "b": 1}, **settings).plan(), 0, 0, 0))))

    assert len(window()) > 512
    assert furthest(window(), [3, 1]) <= 0.05
    assert furthest(window(max_buffer_size=1), [3, 1]) > 0.05  # what the shuffle before it leaves
    assert furthest(window(mixture={"a": 1, "b": 1}, max_buffer_size=None), [1, 1]) <= 0.05


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_schedules_last_window_ends_with_the_epoch(lanes: int) -> None:
    sets = [Dataset.from_dict(name, {"0": InMemoryShard([{"id": i} for i in range(60)])}) for name in "ab"]
    schedule = MixtureSchedule([(0.0, {"a": 3, "b": 1}), (1.0, {"a": 1, "b": 3}, "linear")])
    source = StaticMixtureWorkSource(sets, schedule, chunk_size=16, max_repeats=0)
    kept = Pipeline(source).ensure_mixture(max_buffer_size=8).batch(4, drop_last=False)
    batches = list(kept.options(canonical_replicas=lanes, flush_every_k_chunks=8))
    delivered = Counter(sample for batch in batches for sample in batch.samples)
    assert delivered == Counter({(name, 0, row): 1 for name in "ab" for row in range(60)})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_buffer_size": 0}, "max_buffer_size=0"),
        ({"max_buffer_size": True}, "max_buffer_size=True"),
        ({"weight_by": ""}, "weight_by=''"),
        ({"weight_by": 3}, "weight_by=3"),
        ({"warn_tolerance": 0}, "warn_tolerance=0"),
        ({"warn_tolerance": 1.5}, "warn_tolerance=1.5"),
        ({"drain_target_ratio": -0.1}, "drain_target_ratio=-0.1"),
        ({"drain_target_ratio": None}, "drain_target_ratio=None"),
        ({"mixture": {"a": -1}}, "mixture"),
    ],
)
def test_case_E14_settings_that_make_no_sense_are_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        EnsureMixture(**settings)


@pytest.mark.parametrize("mixture", [{"a": 1}, {"a": 1, "b": 1, "c": 1}])
def test_a_mixture_that_does_not_name_the_runs_datasets_is_refused_when_it_is_planned(mixture: dict[str, int]) -> None:
    with pytest.raises(SettingError, match="ensure_mixture: mixture"):
        pipeline({"a": 3, "b": 1}, mixture=mixture).plan()
