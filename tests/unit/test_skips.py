"""Bad records that are left out are counted by dataset and operator wherever somebody looks at a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
from zephon.inspection import left_out, step_of
from zephon.skips import LOGGED, FirstReports, add_skips, counter_of, in_words, skips_in, without_skips
from zephon.verify import verify

NAMES = st.text(st.characters(exclude_characters="\t"), max_size=8)
EXPECTED = {"code": {"map_transform": 3}, "web": {"map_transform": 5, "read": 2}}


def picky(folder: Path) -> Pipeline:
    """60 rows of which 10 are bad, on 2 lanes."""
    lines = [f'{{"id": {number}}}' for number in range(40)]
    lines[3], lines[30] = '{"id": ', "[3]"
    (folder / "web.jsonl").write_text("\n".join(lines))
    web = Dataset.from_path("web", folder / "web.jsonl")
    code = Dataset.from_dict("code", {"s": InMemoryShard([{"id": number} for number in range(20)])})

    def check(row: dict[str, int]) -> dict[str, int]:
        if row["id"] % 8 == 1:
            raise ValueError("it is one of those")
        return row

    source = StaticMixtureWorkSource([web, code], None, chunk_size=5)
    return Pipeline(source).map_transform(check).batch(2).options(canonical_replicas=2, on_error="skip")


@given(st.dictionaries(st.tuples(NAMES, NAMES), st.integers(1, 9)), st.dictionaries(NAMES, st.integers(1, 9)))
def test_counts_travel_among_others_and_come_apart_again(
    bad: Mapping[tuple[str, str], int], others: Mapping[str, int]
) -> None:
    counters = {**{counter_of(*names): count for names, count in bad.items()}, **others}
    assert without_skips(counters) == dict(others)
    found = skips_in([counters, counters])
    twice = skips_in([counters])
    add_skips(twice, skips_in([counters]))
    assert found == twice
    assert sum(sum(each.values()) for each in found.values()) == 2 * sum(bad.values())


def test_what_an_operator_says_of_itself_in_brackets_is_left_out() -> None:
    assert skips_in([{counter_of("web", "map_batch (lane 3, from record 5 on)"): 2}]) == {"web": {"map_batch": 2}}


def test_verify_counts_what_the_steps_left_out(tmp_path: Path) -> None:
    report = verify(picky(tmp_path), dp=[1, 2])
    assert report.ok
    assert report.skips == EXPECTED
    assert "code: 3 in map_transform; web: 5 in map_transform, 2 in read" in str(report)


def test_inspect_counts_and_names_what_was_left_out_on_the_way(tmp_path: Path) -> None:
    pipeline = picky(tmp_path)
    found = step_of(pipeline.plan(), 12)
    assert found.skips == EXPECTED
    told = "\n".join(left_out(found))
    assert in_words(EXPECTED) in told
    assert "web.jsonl, row 3: line 4" in told


def test_a_run_in_this_process_logs_the_first_ones_and_counts_the_rest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "zephon.embedded"), pytest.warns(UserWarning, match="10 bad records were"):
        list(picky(tmp_path))
    assert len(caplog.messages) == 10
    assert sum("it is one of those" in message for message in caplog.messages) == 8
    told: list[str] = []
    first = FirstReports(told.append)
    for number in range(LOGGED):
        first.say([f"{number}a", f"{number}b"])
    assert len(told) == LOGGED
    assert told[-1].endswith("; further ones are only counted")
