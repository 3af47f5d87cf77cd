"""Chains of operators in a process pool, and through a real daemon with a stop and a resume on other ranks."""
from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.running import Daemon, Ranks, run_to_the_end
from tests.unit.every_operator import NAMES, PIECES, PLAIN_TEMPLATE, pipeline_of
from zephon.recipe import load_recipe
from zephon.testing import assert_resumes_exactly

BINS = {"max_length": 16, "num_bins": 3, "flush_strategy": "fullest", "candidate_pool_size": 2}
CHAINS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "packed": [
        ("decode_text", {}),
        ("filter", {"every": 3}),
        ("random", {}),
        ("tokenize", {"special_tokens": "eos"}),
        ("shuffle", {"buffer_size": 7, "seed": 5, "algorithm": "streaming"}),
        ("pack_flat", {"algorithm": "best_fit_wrap", **BINS}),
        ("groups", {"count": 3}),
    ],
    "wrapped": [
        ("ensure_mixture", {"max_buffer_size": 8}),
        ("split", {"max_length": 4, "special_tokens": "none", "parallelism": 2}),
        ("wrap", {"max_length": 9, "shuffle_strategy": "bins"}),
        ("shuffle", {"buffer_size": 3, "algorithm": "block"}),
        ("filter", {"every": 2, "parallelism": 1}),
    ],
    "chats": [
        ("expand_chat", {}),
        ("tokenize_chat", {"loss_scope": "last_span", "chat_template": PLAIN_TEMPLATE}),
        ("pack_sequences", {"algorithm": "first_fit", **BINS}),
    ],
    "custom": [
        ("sized", {}),
        ("stateful_transform", {"count": 5}),
        ("children", {"most": 2}),
        ("shuffle", {"buffer_size": 7}),
        ("random", {"parallelism": 3}),
    ],
}  # fmt: skip
MORE = {"packed": {}, "wrapped": {"map_batch": True}, "chats": {"flush_every": 1}, "custom": {}}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def arguments(name: str) -> dict[str, Any]:
    return {"rows": (120, 60), "drop_last": True, **MORE[name]}


def test_the_chains_have_every_operator() -> None:
    assert {step for chain in CHAINS.values() for step, _ in chain} == set(PIECES) == set(NAMES)


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_resumes_exactly_in_a_pool_of_processes(name: str, amount: Callable[[int, int], int]) -> None:
    pipeline = pipeline_of(CHAINS[name], **arguments(name), max_workers=2)
    assert_resumes_exactly(pipeline, batches=amount(4, 20), follow=amount(2, 20), runner="process")


def test_every_chain_is_the_same_through_a_daemon_also_stopped_and_resumed_on_other_ranks(runtime_folder: Path) -> None:
    recipe = runtime_folder / "recipe.py"
    recipe.write_text("from tests.unit.every_operator import pipeline_of\npipeline = pipeline_of([])\n")
    with recipe.open("a") as file:
        file.writelines(f"{name} = pipeline_of({CHAINS[name]!r}, **{arguments(name)!r})\n" for name in CHAINS)
    made = load_recipe(str(recipe))
    with Daemon(str(recipe), workers=2) as daemon:
        for name in CHAINS:
            pipeline = made.pipeline(name)
            expected = {(batch.lane, batch.first_record): batch.digest for batch in pipeline}
            pipeline.close()
            assert len(expected) >= 12, name
            assert run_to_the_end(daemon.socket, 1, name) == expected, name
            found = {}
            state = None
            for ranks_now, rounds in ((3, 2), (2, 10**9)):
                with Ranks(daemon.socket, ranks_now, state, pipeline=name) as ranks:
                    ranks.rounds(rounds)
                    state = json.loads(json.dumps(ranks.state()))
                    found.update({(b.lane, b.first_record): b.digest for each in ranks.batches for b in each})
            assert found == expected, name
