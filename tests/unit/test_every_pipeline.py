"""Every operator alone, every ordered pair and longer chains of them resume exactly, on several lanes, in each runner.
"""
from __future__ import annotations

import warnings
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.unit.every_operator import (
    NAMES,
    PIECES,
    Chain,
    chains,
    chains_of_all_pairs,
    completed,
    pipeline_of,
    surroundings,
)
from tests.unit.small_recipes import examples
from zephon.errors import RunFailed
from zephon.testing import assert_resumes_exactly
from zephon.toml_recipe import step_names


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def resumes(chain: Chain, runner: Any = None, batches: int = 8, follow: int = 3, **around: Any) -> None:
    try:
        assert_resumes_exactly(pipeline_of(chain, **around), batches=batches, follow=follow, runner=runner)
    except (AssertionError, RunFailed) as error:
        assume("delivers no batch" not in str(error))  # it has no full round
        assume("no record" not in str(error))  # all were filtered out
        raise


@pytest.mark.parametrize("name", NAMES)
@examples(2)
@given(st.data())
def test_every_operator_alone_resumes_exactly(name: str, data: st.DataObject) -> None:
    chain = data.draw(chains(completed([name])))
    resumes(chain, ("inline", "threads"), **data.draw(surroundings()))


#: Every second chain, and all of them in soak.
CHAINS = [pytest.param(c, marks=pytest.mark.soak if i % 2 else ()) for i, c in enumerate(chains_of_all_pairs(6))]


@pytest.mark.parametrize("names", CHAINS, ids="-".join)
@examples(1)
@given(st.data())
def test_every_ordered_pair_of_operators_resumes_exactly_in_a_chain(names: list[str], data: st.DataObject) -> None:
    resumes(data.draw(chains(names)), batches=4, follow=2, rows=(60, 42))


@examples(10)
@given(chains(), surroundings(), st.sampled_from(["inline", "threads"]))
def test_any_chain_of_operators_resumes_exactly(chain: Chain, around: dict[str, Any], runner: str) -> None:
    resumes(chain, runner, **around)


def test_the_table_has_every_step_of_a_pipeline() -> None:
    """A new operator has to be entered here."""
    hints = {"fetch", "prefetch", "batch", "map_batch"}
    assert set(step_names()) - hints == {piece.method for name, piece in PIECES.items() if name in NAMES}
