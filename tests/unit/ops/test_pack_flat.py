"""Packing documents into sequences."""

from __future__ import annotations

from collections import Counter
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.corpus import SEED, SPREAD, TOKENS_A_DOCUMENT
from tests.unit.ops.cuts import cuts_of
from zephon import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
from zephon.columns import Block, Column, Fixed, Objects, Ragged, canonical
from zephon.errors import RecordError, SettingError
from zephon.ops import DomainGroups
from zephon.ops.base import Accumulator, Faults, WindowKey
from zephon.ops.binning import Binning
from zephon.ops.pack_flat import PackFlat
from zephon.ops.token_fields import SAMPLE_TOKENS
from zephon.training import to_training
from zephon.windows import run_window

pytestmark = pytest.mark.filterwarnings("ignore:pack_(flat|sequences) has no use for")

KEY = WindowKey(0, 0, 0, 0)
ALGORITHMS = ("first_fit", "best_fit", "wrap", "best_fit_wrap")
SPLITTING = ("wrap", "best_fit_wrap")


def block_of(documents: list[list[int]], first: int = 0, dtype: Any = np.int32, field: str = "input_ids") -> Block:
    offsets = np.cumsum([0, *map(len, documents)])
    values = np.array(list(chain.from_iterable(documents)), dtype)
    samples = np.array([((first + i) % 3, 0, first + i) for i in range(len(documents))], np.int64).reshape(-1, 3)
    return Block({field: Ragged(values, offsets)}, samples)


def run(accumulator: Accumulator, blocks: list[Block], faults: Faults | None = None) -> Block:
    faults = faults or Faults()
    out = [made for block in blocks for made in accumulator.push(block, faults)]
    return Block.concat([*out, *accumulator.flush(faults)])


def plain(block: Block) -> list[Any]:
    """Records and samples as plain values."""
    rows = [{k: np.asarray(v).tolist() for k, v in row.items()} for row in block.to_rows()]
    offsets = block.sample_offsets if block.sample_offsets is not None else np.arange(len(block) + 1)
    return [(row, block.samples[a:b].tolist()) for row, (a, b) in zip(rows, pairwise(offsets.tolist()))]


def packed(documents: list[list[int]], **settings: Any) -> tuple[list[dict[str, Any]], Accumulator]:
    accumulator = PackFlat(**settings).accumulator(KEY)
    return [row for row, _ in plain(run(accumulator, [block_of(documents)]))], accumulator


def tokens_in(rows: list[dict[str, Any]]) -> list[int]:
    return [token for row in rows for token in row["input_ids"][: row["sequence_length"]]]


documents = st.lists(st.integers(0, 30), max_size=40).map(
    lambda sizes: [[100 * number + at + 1 for at in range(size)] for number, size in enumerate(sizes)]
)
settings = st.fixed_dictionaries({
    "max_length": st.integers(1, 16),
    "algorithm": st.sampled_from(ALGORITHMS),
    "num_bins": st.integers(1, 4),
    "flush_strategy": st.sampled_from(("fifo", "fullest")),
    "drop_oversized": st.sampled_from((None, True)),
    "shuffle_strategy": st.sampled_from((None, None, "within_bin", "bins")),
    "homogeneity": st.sampled_from(("none", "none", "full", "group")),
    "max_sequences_per_bin": st.sampled_from((None, None, 2)),
    "candidate_pool_size": st.sampled_from((None, 0, 3)),
    "max_candidate_age": st.sampled_from((None, None, 2)),
}).map(lambda given: {
    **{n: v for n, v in given.items() if given["algorithm"] != "wrap" or n not in ONLY_BINS},
    "groups": {"a": ["0", "1"]},
})  # fmt: skip
ONLY_BINS = ("max_sequences_per_bin", "candidate_pool_size", "max_candidate_age")
masks = st.sampled_from((None, "all", "some"))


def with_masks(block: Block, kind: str | None) -> Block:
    if kind is None:
        return block
    mask: Column = Ragged(np.arange(len(block.fields["input_ids"].values)) % 2 == 0, block.fields["input_ids"].offsets)  # type: ignore[attr-defined]
    if kind == "some":
        from zephon.columns import MISSING

        mask = Objects([m if i % 3 == 0 else MISSING for i, m in enumerate(mask.to_list())])
    return block.with_fields({**block.fields, "loss_mask": mask})


@given(documents, settings, masks, st.lists(st.integers(0, 40), max_size=6))
def test_output_is_the_same_however_the_input_is_cut_into_pushes(
    docs: list[list[int]], given_settings: dict[str, Any], mask: str | None, cuts: list[int]
) -> None:
    block = with_masks(block_of(docs), mask)
    whole, cut = (PackFlat(**given_settings).accumulator(KEY) for _ in range(2))
    assert plain(run(whole, [block])) == plain(run(cut, cuts_of(block, cuts)))
    assert whole.counters == cut.counters


@given(documents, settings)
def test_no_token_is_lost_or_invented_and_what_is_dropped_is_counted(
    docs: list[list[int]], given_settings: dict[str, Any]
) -> None:
    rows, accumulator = packed(docs, **given_settings)
    dropped = [d for d in docs if given_settings["drop_oversized"] and len(d) > given_settings["max_length"]]
    assert Counter(tokens_in(rows)) == Counter(chain(*docs)) - Counter(chain(*dropped))
    assert accumulator.counters.get("dropped_tokens", 0) == sum(map(len, dropped))
    assert accumulator.counters.get("dropped_records", 0) == len(dropped)
    slots = len(rows) * given_settings["max_length"]
    padding, at_the_flush = (accumulator.counters.get(n, 0) for n in ("padding_tokens", "flush_padding_tokens"))
    assert padding == slots - len(tokens_in(rows))
    assert at_the_flush <= padding
    if given_settings["algorithm"] in SPLITTING and given_settings.get("max_sequences_per_bin") is None:
        components = {"none": 1, "group": 2, "full": 3}[given_settings["homogeneity"]]
        assert padding == at_the_flush < given_settings["max_length"] * components


@given(documents, settings)
def test_positions_count_each_run_of_one_document_from_zero(
    docs: list[list[int]], given_settings: dict[str, Any]
) -> None:
    given_settings = {**given_settings, "shuffle_strategy": None}  # else runs of a document that was cut may meet
    rows, _ = packed(docs, **given_settings)
    for row in rows:
        used = row["sequence_length"]
        assert 1 <= used <= given_settings["max_length"] == len(row["input_ids"]) == len(row["positions"])
        ids, positions = row["input_ids"], row["positions"]
        for at in range(used):
            continues = at > 0 and ids[at] == ids[at - 1] + 1 and (ids[at] - 1) // 100 == (ids[at - 1] - 1) // 100
            assert positions[at] == (positions[at - 1] + 1 if continues else 0)
        assert positions[used:] == list(range(len(positions) - used))
        assert ids[used:] == [0] * (len(ids) - used)


@given(documents, st.integers(1, 16))
def test_wrap_is_the_plain_concatenation(docs: list[list[int]], max_length: int) -> None:
    rows, accumulator = packed(docs, max_length=max_length, algorithm="wrap")
    assert tokens_in(rows) == list(chain(*docs))
    assert all(row["sequence_length"] == max_length for row in rows[:-1])
    assert accumulator.counters.get("padding_tokens", 0) < max_length


@given(documents, settings)
def test_each_sequence_names_the_samples_of_its_tokens_once_in_order(
    docs: list[list[int]], given_settings: dict[str, Any]
) -> None:
    out = run(PackFlat(**given_settings).accumulator(KEY), [block_of(docs)])
    for row, samples in plain(out):
        tokens = row["input_ids"][: row["sequence_length"]]
        assert [s[2] for s in samples] == list(dict.fromkeys((token - 1) // 100 for token in tokens))


@given(documents, settings)
def test_no_sequence_holds_two_components_or_more_documents_than_allowed(
    docs: list[list[int]], given_settings: dict[str, Any]
) -> None:
    component = {"none": lambda _: 0, "full": lambda d: d, "group": lambda d: d // 2}[given_settings["homogeneity"]]
    for _, samples in plain(run(PackFlat(**given_settings).accumulator(KEY), [block_of(docs)])):
        assert len({component(sample[0]) for sample in samples}) == 1
        assert len(samples) <= (given_settings.get("max_sequences_per_bin") or len(docs))


@given(documents, settings)
def test_tokens_of_each_sample_are_counted_where_they_are_asked_for(
    docs: list[list[int]], given_settings: dict[str, Any]
) -> None:
    pack = PackFlat(**given_settings)
    pack.counts_tokens = True
    out = run(pack.accumulator(KEY), [block_of(docs)])
    counted = out.fields[SAMPLE_TOKENS].to_list() if len(out) else []
    for (row, samples), tokens in zip(plain(out), counted, strict=True):
        held = Counter((token - 1) // 100 for token in row["input_ids"][: row["sequence_length"]])
        assert tokens.tolist() == [held[sample[2]] for sample in samples]


def test_the_tokens_of_a_record_of_several_samples_count_for_them_in_equal_parts() -> None:
    block = block_of([[1, 2, 3, 4, 5], [6, 7]])
    made = Block(block.fields, np.array([(0, 0, 0), (1, 0, 1), (0, 0, 0)], np.int64), np.array([0, 2, 3]))
    pack = PackFlat(8, algorithm="wrap")
    pack.counts_tokens = True
    out = run(pack.accumulator(KEY), [made])
    assert (out.samples.tolist(), out.fields[SAMPLE_TOKENS].to_list()[0].tolist()) == ([[0, 0, 0], [1, 0, 1]], [5, 2])


@given(documents, settings)
def test_boundaries_for_training_increase_strictly_and_cover_every_token(
    docs: list[list[int]], given_settings: dict[str, Any]
) -> None:
    out = run(PackFlat(**given_settings).accumulator(KEY), [block_of(docs)])
    if len(out):
        for labels in (False, True):
            made = to_training(
                canonical(out), output="numpy", return_cu_seqlens=True, return_labels=labels, flatten=True
            )
            bounds, width = made["cu_seqlens"], given_settings["max_length"] - labels
            assert (bounds[0], bounds[-1]) == (0, len(out) * width)
            assert width == 0 or (np.diff(bounds) > 0).all()
            assert set(np.flatnonzero(made["positions"] == 0)) <= set(bounds.tolist())


@given(documents, st.integers(1, 16), masks)
def test_wrap_is_one_open_sequence_that_is_always_filled_up(
    docs: list[list[int]], max_length: int, mask: str | None
) -> None:
    block, pack = with_masks(block_of(docs), mask), PackFlat(max_length, algorithm="wrap")
    assert plain(run(Binning(pack, 0), [block])) == plain(run(pack.accumulator(KEY), [block]))


def test_within_bin_changes_the_order_of_documents_in_a_sequence_and_nothing_else() -> None:
    docs = [[100 * number + at + 1 for at in range(number % 5 + 1)] for number in range(200)]
    kept, mixed = (
        [samples for _, samples in plain(run(PackFlat(24, shuffle_strategy=how).accumulator(KEY), [block_of(docs)]))]
        for how in (None, "within_bin")
    )
    assert [sorted(samples) for samples in kept] == [sorted(samples) for samples in mixed]
    assert sum(a != b for a, b in zip(kept, mixed)) > len(kept) // 2


def test_bins_changes_the_order_of_sequences_and_nothing_else() -> None:
    docs = [[100 * number + at + 1 for at in range(number % 5 + 1)] for number in range(200)]
    kept, mixed = (
        plain(run(PackFlat(8, num_bins=16, shuffle_strategy=how).accumulator(KEY), [block_of(docs)]))
        for how in (None, "bins")
    )
    for low in range(0, len(kept) - 16, 16):
        assert kept[low : low + 16] != mixed[low : low + 16]
        assert sorted(map(repr, kept[low : low + 16])) == sorted(map(repr, mixed[low : low + 16]))


@pytest.mark.parametrize("strategy", ["within_bin", "bins"])
@pytest.mark.parametrize("other", [KEY._replace(**{name: 7}) for name in KEY._fields])
def test_every_part_of_the_windows_name_and_the_seed_change_a_drawn_order(other: WindowKey, strategy: str) -> None:
    docs = [[100 * number + at + 1 for at in range(number % 5 + 1)] for number in range(100)]
    pack, block = PackFlat(12, shuffle_strategy=strategy), block_of(docs)
    here = plain(run(pack.accumulator(KEY), [block]))
    assert plain(run(pack.accumulator(other), [block])) != here
    seeded = PackFlat(12, shuffle_strategy=strategy, shuffle_seed=1)
    assert plain(run(seeded.accumulator(KEY), [block])) != here


def test_a_record_made_of_datasets_that_are_kept_apart_is_a_bad_one() -> None:
    block = block_of([[1, 2], [3]])
    made = Block(block.fields, np.array([(0, 0, 0), (1, 0, 1), (1, 0, 2)], np.int64), np.array([0, 2, 3]))
    pack = PackFlat(8, homogeneity="full")
    with pytest.raises(RecordError, match="homogeneity='full' keeps apart"):
        run(pack.accumulator(KEY), [made])
    faults = Faults("skip")
    out = run(pack.accumulator(KEY), [made], faults)
    assert (tokens_in([row for row, _ in plain(out)]), faults.skipped) == ([3], 1)


def test_the_pieces_of_a_document_are_named_by_it_also_where_they_are_as_many_as_the_records() -> None:
    out = run(PackFlat(1).accumulator(KEY), [block_of([[], [101, 102]])])
    assert [samples for _, samples in plain(out)] == [[[1, 0, 1]], [[1, 0, 1]]]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_sample_that_comes_as_several_records_is_named_once_a_sequence(algorithm: str) -> None:
    block = block_of([[1, 2], [3], [4], [5, 6, 7], [8]])
    block.samples[:] = [(0, 0, row) for row in (0, 7, 0, 7, 0)]
    out = run(PackFlat(16, algorithm=algorithm).accumulator(KEY), [block.slice(0, 2), block.slice(2, 5)])
    assert [sorted(samples) for _, samples in plain(out)] == [[[0, 0, 0], [0, 0, 7]]]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_records_made_of_several_samples_keep_them_all(algorithm: str) -> None:
    block = block_of([[1, 2], [3], [4, 5]])
    samples = np.array([(0, 0, i) for i in range(5)], np.int64)
    made = Block(block.fields, samples, np.array([0, 2, 3, 5]))
    out = run(PackFlat(3, algorithm=algorithm, num_bins=1).accumulator(KEY), [made])
    held = {tuple(row["input_ids"][: row["sequence_length"]]): [s[2] for s in names] for row, names in plain(out)}
    assert held in ({(1, 2, 3): [0, 1, 2], (4, 5): [3, 4]}, {(4, 5, 3): [3, 4, 2], (1, 2): [0, 1]})


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_loss_mask_follows_its_tokens(algorithm: str) -> None:
    block = block_of([[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]])
    block = block.with_fields({**block.fields, "loss_mask": Objects([[1, 0, 1], None, [0], [0, 0, 0.5, 1]])})
    out = run(PackFlat(10, algorithm=algorithm).accumulator(KEY), [block])
    found = {
        token: weight
        for row, _ in plain(out)
        for token, weight in zip(row["input_ids"][: row["sequence_length"]], row["loss_mask"])
    }
    assert sum(row["sequence_length"] for row, _ in plain(out)) == len(found)
    assert found == {1: 1, 2: 0, 3: 1, 4: 1, 5: 1, 6: 0, 7: 0, 8: 0, 9: 0.5, 10: 1}
    assert all(sum(row["loss_mask"][row["sequence_length"] :]) == 0 for row, _ in plain(out))


def test_sequences_without_a_masked_document_have_no_loss_mask() -> None:
    block = block_of([[1, 2], [3, 4], [5, 6]])
    block = block.with_fields({**block.fields, "loss_mask": Objects([None, [0, 1], None])})
    out = run(PackFlat(2, algorithm="wrap").accumulator(KEY), [block])
    assert [row.get("loss_mask") for row, _ in plain(out)] == [None, [0, 1], None]


@pytest.mark.parametrize("dtype", [np.uint16, np.int64, np.uint8, np.int32])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_any_integers_come_out_as_int32(dtype: Any, algorithm: str) -> None:
    out = run(PackFlat(4, algorithm=algorithm).accumulator(KEY), [block_of([[1, 2, 3], [200]], dtype=dtype)])
    for name in ("input_ids", "positions", "sequence_length"):
        column = out.fields[name]
        assert isinstance(column, Fixed)
        assert column.values.dtype == np.int32
    assert plain(out)[0][0]["input_ids"] == [1, 2, 3, 200]


@pytest.mark.parametrize(
    "column",
    [Fixed(np.array([[1, 2], [3, 4]], np.uint16)), Objects([[1, 2], [3, 4]]), Objects([np.array([1, 2]), (3, 4)])],
)
@pytest.mark.parametrize("field", ["input_ids", "tokens", "token_ids", "mine"])
def test_tokens_are_found_in_every_kind_of_column_and_under_the_usual_names(column: Column, field: str) -> None:
    block = Block({field: column}, np.zeros((2, 3), np.int64))
    pack = PackFlat(4, algorithm="wrap", tokens_field=field if field == "mine" else "auto")
    assert field in (pack.requires(None) or ())
    assert plain(run(pack.accumulator(KEY), [block]))[0][0]["input_ids"] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "x"}, "no such field"),
        ({"input_ids": "abc"}, "found str"),
        ({"input_ids": [1, "a"]}, "list of int, str"),
        ({"input_ids": [1.5]}, "list of float"),
        ({"input_ids": None}, "found null"),
        ({"input_ids": 7}, "found int"),
        ({"input_ids": [True]}, "list of bool"),
        ({"input_ids": [2**31]}, "token ids"),
        ({"input_ids": np.array([2**40])}, "token ids"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "1 value for 2 tokens"),
        ({"input_ids": [1, 2], "loss_mask": "ab"}, "'loss_mask'"),
    ],
)
def test_case_E3_a_record_without_proper_tokens_is_bad_and_says_why(row: dict[str, Any], words: str) -> None:
    rows = [{"input_ids": [1, 2, 3]}, row, {"input_ids": [4]}]
    block = Block.from_rows(rows, np.array([(0, 0, i) for i in range(3)], np.int64))
    with pytest.raises(RecordError, match=words) as error:
        run(PackFlat(4, algorithm="wrap").accumulator(KEY), [block])
    assert error.value.row == 1
    faults = Faults("skip")
    out = run(PackFlat(4, algorithm="wrap").accumulator(KEY), [block], faults)
    assert plain(out)[0][0]["input_ids"] == [1, 2, 3, 4]
    assert faults.skipped == 1


def test_oversized_documents_are_bad_records_if_neither_cutting_nor_dropping_is_allowed() -> None:
    pack = PackFlat(4, algorithm="best_fit", drop_oversized=False)
    with pytest.raises(RecordError, match="5 tokens, more than max_length=4"):
        run(pack.accumulator(KEY), [block_of([[1], [1, 2, 3, 4, 5]])])
    faults = Faults("skip")
    out = run(pack.accumulator(KEY), [block_of([[1], [1, 2, 3, 4, 5]])], faults)
    assert (len(out), faults.skipped) == (1, 1)


def test_documents_below_the_minimum_are_dropped_and_counted() -> None:
    rows, accumulator = packed([[1], [2, 3], [4, 5, 6], []], max_length=4, algorithm="wrap", min_sequence_length=2)
    assert tokens_in(rows) == [2, 3, 4, 5, 6]
    assert accumulator.counters["dropped_tokens"] == 1


def test_a_bin_holds_no_more_documents_than_allowed() -> None:
    rows, _ = packed([[1], [2], [3], [4], [5]], max_length=8, algorithm="best_fit", max_sequences_per_bin=2)
    assert len(rows) == 3
    assert [row["sequence_length"] for row in rows] == [2, 2, 1]


@pytest.mark.parametrize("drop_oversized", [None, True])
@pytest.mark.parametrize(
    "settings",
    [
        *({"algorithm": algorithm} for algorithm in ALGORITHMS),
        *({"algorithm": algorithm, "flush_strategy": "fullest"} for algorithm in ALGORITHMS),
        *({"algorithm": algorithm, "homogeneity": "full"} for algorithm in ALGORITHMS),
        {"algorithm": "best_fit", "candidate_pool_size": 0},
        {"algorithm": "first_fit", "candidate_pool_size": 16, "max_candidate_age": 8},
        {"algorithm": "best_fit_wrap", "max_sequences_per_bin": 3},
        {"algorithm": "wrap", "shuffle_strategy": "within_bin"},
        {"algorithm": "best_fit", "shuffle_strategy": "bins"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_case_F10_packing_loses_nothing_or_counts_it(settings: dict[str, Any], drop_oversized: bool | None) -> None:
    sizes = [number % 100 + 1 for number in range(1000)]
    sizes[500] = 10_000
    docs = [list(range(first, first + size)) for first, size in zip(np.cumsum([0, *sizes]).tolist(), sizes)]
    rows, accumulator = packed(docs, max_length=64, drop_oversized=drop_oversized, **settings)
    found, given_tokens = Counter(tokens_in(rows)), Counter(chain(*docs))
    assert not found - given_tokens
    missing = given_tokens - found
    assert accumulator.counters.get("dropped_tokens", 0) == sum(missing.values())
    assert bool(missing) == (drop_oversized is True)


def test_case_F11_positions_restart_at_each_boundary_and_none_is_empty() -> None:
    docs = [[number] * size for number, size in enumerate([16, 8, 8, 1, 15])]
    rows, _ = packed(docs, max_length=17, algorithm="wrap")
    starts = [[at for at, position in enumerate(row["positions"]) if position == 0] for row in rows]
    assert starts == [[0, 16], [0, 7, 15, 16], [0, 14]]
    assert [row["sequence_length"] for row in rows] == [17, 17, 14]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_case_F11_boundaries_for_training_increase_strictly_from_0_to_the_sequences_length(algorithm: str) -> None:
    docs = [[number + 1] * size for number, size in enumerate([16, 8, 8, 1, 15])]
    out = canonical(run(PackFlat(17, algorithm=algorithm).accumulator(KEY), [block_of(docs)]))
    for record in range(len(out)):
        made = to_training(
            out.slice(record, record + 1).copy(), output="numpy", return_labels=True, return_cu_seqlens=True
        )
        bounds = made["cu_seqlens"]
        assert (bounds[0], bounds[-1]) == (0, 16)
        assert (np.diff(bounds) > 0).all()
        assert set(np.flatnonzero(made["positions"][0] == 0)) == set(bounds[:-1].tolist())


def test_positions_can_be_left_out_and_padding_has_its_own_token() -> None:
    rows, _ = packed([[1, 2]], max_length=4, emit_positions=False, pad_token_id=9)
    assert rows == [{"input_ids": [1, 2, 9, 9], "sequence_length": 2}]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_length": 0}, "max_length=0"),
        ({"max_length": 2.5}, "max_length=2.5"),
        ({"algorithm": "magic"}, "algorithm='magic'"),
        ({"num_bins": 0}, "num_bins=0"),
        ({"flush_strategy": "lifo"}, "flush_strategy"),
        ({"pad_token_id": -1}, "pad_token_id=-1"),
        ({"drop_oversized": "yes"}, "drop_oversized"),
        ({"min_sequence_length": 0}, "min_sequence_length=0"),
        ({"max_sequences_per_bin": 0}, "max_sequences_per_bin=0"),
        ({"max_sequences_per_bin": 3, "algorithm": "wrap"}, "max_sequences_per_bin"),
        ({"homogeneity": "half"}, "homogeneity='half'"),
        ({"homogeneity": "group"}, "needs groups"),
        ({"homogeneity": "group", "groups": {"a": "web"}}, "groups: 'a'"),
        ({"homogeneity": "group", "groups": {"a": ["web"], "b": ["web"]}}, "'web' is in two groups"),
        ({"groups": ["web"]}, "groups"),
        ({"shuffle_strategy": "riffle"}, "shuffle_strategy='riffle'"),
        ({"shuffle_seed": 1.5}, "shuffle_seed=1.5"),
        ({"candidate_pool_size": -1}, "candidate_pool_size=-1"),
        ({"candidate_pool_size": 4, "algorithm": "wrap"}, "candidate_pool_size.*no bins"),
        ({"max_candidate_age": True}, "max_candidate_age=True"),
        ({"tokens_field": ""}, "tokens_field"),
    ],
)
def test_case_E14_settings_that_make_no_sense_are_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        PackFlat(**{"max_length": 8, **settings})


def test_case_K2_a_packer_that_drops_everything_at_length_one_says_what_it_dropped() -> None:
    docs = [[number + 1] * 2 for number in range(10)]
    for algorithm in ALGORITHMS:
        rows, accumulator = packed(docs, max_length=1, algorithm=algorithm, drop_oversized=True)
        assert rows == []
        assert accumulator.counters == {"dropped_records": 10, "dropped_tokens": 20}


def in_groups(groups: Any) -> Pipeline:
    names = ("web", "books", "code")
    rows = {name: [{"input_ids": [len(name)] * (row % 7 + 1)} for row in range(60)] for name in names}
    datasets = [Dataset.from_dict(name, {0: InMemoryShard(mine)}) for name, mine in rows.items()]
    source = StaticMixtureWorkSource(datasets, None, chunk_size=10)
    pack = Pipeline(source).pack_flat(16, algorithm="best_fit", homogeneity="group", groups=groups)
    return pack.batch(2).options(canonical_replicas=2)


def test_a_sequence_holds_datasets_of_one_group_and_one_that_is_in_no_group_stays_alone() -> None:
    plan = in_groups(DomainGroups({"text": ["web", "books"]})).plan()
    out = Block.concat(list(run_window(plan, 0, 0, 0)))
    held = {frozenset(sample[0] for sample in samples) for _, samples in plain(out)}
    assert held == {frozenset({0, 1}), frozenset({0}), frozenset({1}), frozenset({2})} & held
    assert {frozenset({0, 1}), frozenset({2})} <= held


def test_a_group_of_a_dataset_that_the_run_does_not_have_is_refused_when_it_is_planned() -> None:
    with pytest.raises(SettingError, match=r"groups: no dataset is called 'wbe'; there are \['books', 'code', 'web'\]"):
        in_groups({"text": ["wbe", "books"]}).plan()


def documents_like_the_benchmarks(count: int) -> list[list[int]]:
    """Log-normal lengths, as of the benchmark corpus."""
    mean = np.log(TOKENS_A_DOCUMENT) - SPREAD**2 / 2
    sizes = np.maximum(1, np.random.default_rng(SEED).lognormal(mean, SPREAD, count)).astype(int)
    return [[1] * size for size in sizes.tolist()]


def test_best_fit_fills_sequences_of_2049_to_99_5_percent_before_a_flush() -> None:
    block = block_of(documents_like_the_benchmarks(8192))
    filled = {}
    ways: dict[str, dict[str, Any]] = {
        "default": {}, "fullest": {"flush_strategy": "fullest"}, "no pool": {"candidate_pool_size": 0},
    }  # fmt: skip
    for name, settings in ways.items():
        accumulator = PackFlat(2049, algorithm="best_fit", num_bins=64, **settings).accumulator(KEY)
        slots, counted = len(run(accumulator, [block])) * 2049, accumulator.counters
        at_the_flush = counted["flush_padding_tokens"]
        filled[name] = 1 - (counted["padding_tokens"] - at_the_flush) / slots
        print(f"best_fit, {name}: {filled[name]:.2%} before the flush, which costs {at_the_flush / slots:.2%}")
    assert filled["default"] >= 0.995
    assert filled["fullest"] >= 0.995
    assert filled["no pool"] < filled["default"]


def test_wrap_and_best_fit_wrap_fill_all_sequences_but_the_last_and_best_fit_wrap_splits_fewer_documents() -> None:
    docs = documents_like_the_benchmarks(4096)
    block = block_of([[number] * len(doc) for number, doc in enumerate(docs, 1)])
    cut = {}
    for algorithm in SPLITTING:
        out = run(PackFlat(2049, algorithm=algorithm).accumulator(KEY), [block])
        used = out.fields["sequence_length"]
        assert isinstance(used, Fixed)
        assert np.count_nonzero(used.values < 2049) <= 1
        cut[algorithm] = len(out.samples) - len(docs)
    assert cut["best_fit_wrap"] < 0.8 * cut["wrap"]


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"algorithm": "wrap", "num_bins": 8}, "num_bins"),
        ({"algorithm": "wrap", "flush_strategy": "fullest"}, "flush_strategy"),
        ({"max_candidate_age": 3}, "max_candidate_age"),
        ({"shuffle_seed": 3}, "shuffle_seed"),
        ({"groups": {"all": ["web"]}}, "groups"),
    ],
)
def test_a_setting_that_the_others_leave_without_effect_is_named(settings, named):
    with pytest.warns(UserWarning, match=f"pack_flat has no use for {named}: ") as caught:
        PackFlat(8, **settings)
    assert len(caught) == 1
