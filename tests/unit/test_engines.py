"""The number of engines: what is chosen, what is refused, and what is said of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
from zephon.engines import WORKERS_AN_ENGINE, automatic_engines, check_engines, described_engines
from zephon.errors import SettingError


@given(st.integers(1, 512), st.integers(1, 512))
def test_the_automatic_number_is_one_on_small_machines_and_never_refused(workers: int, cores: int) -> None:
    engines = automatic_engines(workers, cores)
    check_engines(engines, workers)
    assert engines == 1 or engines * WORKERS_AN_ENGINE <= min(workers, cores)
    if min(workers, cores) < 2 * WORKERS_AN_ENGINE:
        assert engines == 1


@pytest.mark.parametrize("engines", [0, -1, 9, 65])
def test_numbers_of_engines_that_make_no_sense_are_refused_with_the_range(engines: int) -> None:
    with pytest.raises(SettingError, match=f"engines={engines}: must be in 1..8"):
        check_engines(engines, 8)


def test_explain_says_how_many_there_are_and_how_many_of_them_have_groups() -> None:
    assert described_engines(8, 8, 2) == "1 engine (--engines; more from 32 workers on)"
    assert described_engines(64, 64, 8) == "4 engines (--engines; one for every 16 workers)"
    assert described_engines(64, 64, 2).endswith("of which 2 groups use 2")
    data = Dataset.from_dict("d", {"0": InMemoryShard([{"id": i} for i in range(40)])})
    pipeline = Pipeline(StaticMixtureWorkSource([data], mixture=None, seed=1)).batch(2)
    assert "engines: under a daemon" in pipeline.options(canonical_replicas=4).explain()
