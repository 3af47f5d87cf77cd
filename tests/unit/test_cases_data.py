"""Cases D9, E and F, embedded: bad input, tiny input, and what packing does with every token."""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.corpora import COUNT, row_of, write
from zephon import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
from zephon.errors import DatasetError, RecordError
from zephon.ops.base import Faults, WindowKey
from zephon.ops.pack_flat import PackFlat


def pipeline_of(folder: Path, lanes: int = 1, size: int = 1, drop_last: bool = True, **options: Any) -> Pipeline:
    source = StaticMixtureWorkSource([Dataset.from_path("count", folder)], None, shuffle_shards=False)
    return Pipeline(source).batch(size, drop_last=drop_last).options(canonical_replicas=lanes, **options)


def ids(batches: Any) -> list[int]:
    return [i for batch in batches for i in (batch["id"].tolist() if len(batch) else [])]


# D9


def test_case_D9_slow_workers_lose_no_row_and_the_end_comes_after_the_last_embedded(tmp_path, amount):
    COUNT(2000, 10, tmp_path / "many")
    COUNT(3, 1, tmp_path / "few")
    expected = {name: ids(_filtered(tmp_path / name, "inline")) for name in ("many", "few")}
    assert sorted(expected["many"]) == sorted(i for i in range(2000) if i % 3)
    for number in range(amount(1, 50)):
        for name, rows in expected.items():
            gate = threading.Barrier(2) if number == 0 and name == "many" else None
            assert ids(_filtered(tmp_path / name, "threads", gate, every=100 + number)) == rows


def _filtered(folder: Path, runner: str, gate: threading.Barrier | None = None, every: int = 0) -> Pipeline:
    met: list[int] = []

    def delayed(row: dict[str, Any]) -> dict[str, Any]:
        on_worker = threading.current_thread() is not threading.main_thread()  # the check of functions is not
        if gate is not None and on_worker and len(met) < 2:
            met.append(row["id"])
            gate.wait(20)  # the first worker does not go on until another has begun
        elif every and row["id"] % every == 0:
            time.sleep(0.002)
        return row

    source = StaticMixtureWorkSource([Dataset.from_path("count", folder)], None, chunk_size=40)
    pipeline = Pipeline(source).map_transform(delayed).map_transform(lambda row: row if row["id"] % 3 else None)
    return pipeline.batch(1, drop_last=False).options(canonical_replicas=1, runner=runner, max_workers=4)


# E. Bad input


def broken_at_500(folder: Path) -> Path:
    folder.mkdir()
    lines = [json.dumps(row_of(i)) for i in range(1000)]
    lines[500] = '{"id": 500, "te'
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_case_E1_one_bad_row_is_an_error_each_time_it_is_asked_for_and_never_an_end_embedded(tmp_path):
    folder = broken_at_500(tmp_path / "rows")
    offset = (folder / "rows.jsonl").read_bytes().index(b'{"id": 500')
    batches, got = iter(pipeline_of(folder)), []
    with pytest.raises(RecordError) as caught:
        for batch in batches:
            got += ids([batch])
    for fact in ("rows.jsonl", "line 501", f"byte {offset}"):
        assert fact in str(caught.value)
    assert got == list(range(len(got)))
    assert len(got) <= 500
    for _ in range(2):
        with pytest.raises(RecordError, match="line 501"):
            next(batches)


def test_case_E1_skipped_rows_are_counted_and_a_resume_keeps_the_count_embedded(tmp_path):
    folder = broken_at_500(tmp_path / "rows")
    whole = ids(pipeline_of(folder, on_error="skip"))
    assert whole == [i for i in range(1000) if i != 500]
    for stop in (100, 500, 501, 700, 998):
        pipeline = pipeline_of(folder, on_error="skip")
        before = ids(islice(iter(pipeline), stop))
        state = json.loads(json.dumps(pipeline.checkpoint()))
        resumed = pipeline_of(folder, on_error="skip").restore(state)
        batches = iter(resumed)
        after = ids(islice(batches, 999 - stop))
        assert before + after == whole
        producer = resumed._current()._runs[0].producer
        assert producer.skipped == 1
        for report in producer.reports:
            assert all(fact in report for fact in ("rows.jsonl", "line 501", "byte"))


def odd_lines(folder: Path) -> Path:
    folder.mkdir()
    good = [json.dumps(row_of(i)).encode() for i in range(3)]
    lines = [b"\xef\xbb\xbf" + good[0], b"\xff\xfe", b"[]", b"42", b"null", b'"x"', b"", b"   ", good[1], good[2]]
    (folder / "odd.jsonl").write_bytes(b"\n".join(lines))
    return folder


def test_case_E4_lines_that_are_no_objects_are_skipped_by_physical_line_and_blank_ones_ignored_embedded(tmp_path):
    folder = odd_lines(tmp_path / "odd")
    pipeline = pipeline_of(folder, on_error="skip")
    batches = iter(pipeline)
    assert ids(islice(batches, 3)) == [0, 1, 2]
    producer = pipeline._current()._runs[0].producer
    assert producer.skipped == 5
    for line, report in zip((2, 3, 4, 5, 6), producer.reports, strict=True):
        assert f"line {line}" in report
    assert next(batches, None) is None
    with pytest.raises(RecordError, match=r"odd\.jsonl.*line 2"):
        ids(pipeline_of(folder))


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet"])
def test_case_E5_empty_files_change_nothing_embedded(tmp_path, suffix):
    plain, holes = tmp_path / "plain", tmp_path / "holes"
    for folder in (plain, holes):
        folder.mkdir()
    for number, rows in enumerate(([0, 1, 2], [3, 4])):
        for folder, place in ((plain, number), (holes, 1 + 2 * number)):
            write(folder / f"part-{place}{suffix}", [row_of(i) for i in rows])
    for place in (0, 2, 4):
        if suffix == ".parquet":
            write_empty_parquet(holes / f"part-{place}{suffix}")
        else:
            (holes / f"part-{place}{suffix}").write_bytes(b"")
    if suffix == ".jsonl":
        (holes / "part-5.jsonl").write_text("\n  \n\n")
    expected = [(batch.digest, batch.samples) for batch in pipeline_of(plain)]
    assert [(batch.digest, batch.samples) for batch in pipeline_of(holes)] == expected
    assert ids(pipeline_of(holes)) == [0, 1, 2, 3, 4]


def write_empty_parquet(path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(
        pyarrow.table({"id": pyarrow.array([], "int64"), "text": pyarrow.array([], "str")}), path
    )


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 7, 21, 31, 32, 33])
def test_case_E10_tiny_datasets_have_the_steps_that_arithmetic_says_embedded(tmp_path, rows, drop_last):
    folder = COUNT(rows, 1, tmp_path / "rows")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = list(pipeline_of(folder, lanes=8, size=4, drop_last=drop_last))
    steps = sum(batch.ends_round for batch in batches)
    assert steps == (rows // 32 if drop_last else -(-rows // 32))
    assert len(batches) == steps * 8
    got = ids(batches)
    assert len(got) == len(set(got)) == (steps * 32 if drop_last else rows)
    assert any("no full round" in str(warning.message) for warning in caught) == (steps == 0)


def test_case_E10_no_rows_at_all_is_an_error_at_start_that_names_the_path_embedded(tmp_path):
    folder = COUNT(0, 1, tmp_path / "rows")
    with pytest.raises(DatasetError, match=str(folder)):
        iter(pipeline_of(folder, lanes=8, size=4))


# F. Packing

MODES = {
    "wrap": {"algorithm": "wrap"},
    "first_fit": {"algorithm": "first_fit"},
    "best_fit": {"algorithm": "best_fit"},
    "first_fit_dropping": {"algorithm": "first_fit", "drop_oversized": True},
    "best_fit_dropping": {"algorithm": "best_fit", "drop_oversized": True, "num_bins": 3, "flush_strategy": "fullest"},
    "wrap_dropping": {"algorithm": "wrap", "drop_oversized": True},
    "best_fit_short": {"algorithm": "best_fit", "min_sequence_length": 5},
}
PAD = 0


def documents() -> list[dict[str, Any]]:
    """1,000 documents of 1 to 100 tokens and one of 10,000; every token names its document and its place in it."""
    lengths = [i % 100 + 1 for i in range(1000)]
    lengths.insert(500, 10_000)
    return [{"input_ids": np.arange(length) + 1 + document * 10_001} for document, length in enumerate(lengths)]


@pytest.mark.parametrize("mode", MODES)
def test_case_F10_packing_loses_no_token_that_it_does_not_count_embedded(mode):
    rows = documents()
    source = StaticMixtureWorkSource([Dataset.from_dict("docs", {"a": InMemoryShard(rows)})], None, chunk_size=50)
    pipeline = Pipeline(source).pack_flat(64, pad_token_id=PAD, **MODES[mode])
    pipeline.batch(1, drop_last=False).options(canonical_replicas=3, flush_every_k_chunks=4)
    run = pipeline._running()
    out: list[int] = []
    padding = 0
    while (batch := run.next_batch()) is not None:
        for tokens in batch["input_ids"] if len(batch) else []:
            out += tokens[tokens != PAD].tolist()
            padding += int((tokens == PAD).sum())
    counters: Counter[str] = Counter()
    for lane in run._runs.values():
        counters.update(lane.producer.counters)
    given = [token for row in rows for token in row["input_ids"].tolist()]
    lost = Counter(given) - Counter(out)
    assert not Counter(out) - Counter(given)
    assert counters["dropped_tokens"] == sum(lost.values())
    assert counters["padding_tokens"] == padding
    assert bool(lost) == ("dropping" in mode or "short" in mode)


@pytest.mark.parametrize("algorithm", ["wrap", "first_fit", "best_fit"])
def test_case_F11_boundaries_rise_strictly_and_positions_restart_at_each_embedded(algorithm):
    lengths = [17, 8, 9, 1, 16] if algorithm != "wrap" else [16, 8, 8, 1, 15]
    rows = [{"input_ids": np.full(length, document + 1)} for document, length in enumerate(lengths)]
    source = StaticMixtureWorkSource([Dataset.from_dict("docs", {"a": InMemoryShard(rows)})], None, chunk_size=8)
    pipeline = Pipeline(source).pack_flat(17, algorithm=algorithm, pad_token_id=0)
    pipeline.batch(1, drop_last=False).options(canonical_replicas=1, flush_every_k_chunks=1)
    seen = 0
    for batch in pipeline:
        bounds = np.asarray(batch.to_training(return_cu_seqlens=True, return_labels=True)["cu_seqlens"])
        assert bounds[0] == 0
        assert bounds[-1] == 16
        assert (np.diff(bounds) > 0).all()
        positions, tokens = batch["positions"][0], batch["input_ids"][0]
        starts = np.flatnonzero(np.diff(tokens, prepend=-1))
        assert (positions[starts] == 0).all()
        assert set(starts[starts < 16].tolist()) == set(np.flatnonzero(positions[:16] == 0).tolist())
        assert set(bounds[:-1].tolist()) == set(np.flatnonzero(positions[:16] == 0).tolist())
        seen += int((tokens != 0).sum())
    assert seen == sum(lengths)


def test_what_an_accumulator_dropped_is_counted_in_its_window_alone():
    """Counters belong to a window, so that a replay counts again what it drops again."""
    operator = PackFlat(4, drop_oversized=True)
    totals = []
    for chunk in (0, 8):
        accumulator = operator.accumulator(WindowKey(0, 0, 0, chunk))
        rows = [{"input_ids": np.arange(n)} for n in (2, 9, 3)]
        block = Dataset.from_dict("d", {"a": InMemoryShard(rows)}).fetch(0, np.arange(3), None, Faults())
        accumulator.push(block, Faults())
        accumulator.flush(Faults())
        totals.append(accumulator.counters["dropped_tokens"])
    assert totals == [9, 9]
