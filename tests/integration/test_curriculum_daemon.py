"""Curricula under the daemon: estimates travel in clients' checkpoints, shares are shown, nothing waits in vain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.corpora import COUNT, byte_tokenizer
from tests.running import Daemon, Ranks, plan_of, until, write_recipe, zephon
from zephon.errors import RunFailed

TOKENS = """
from zephon.work import TokenEstimation
data = [Dataset.from_path(name, HERE / name) for name in ("a", "b")]
source = StaticMixtureWorkSource(
    data, {"a": 1, "b": 1}, exhausted_policy="repeat", shuffle_block_size="global", token_estimation=TokenEstimation())
pipeline = Pipeline(source).tokenize(tokenizer_id=str(HERE / "tokenizer.json"), field="text", special_tokens="none")
pipeline.pack_flat(64, algorithm="first_fit", min_sequence_length=41).batch(4).options(
    canonical_replicas=4, flush_every_k_chunks=2)
"""


def shown_shares(daemon: Daemon) -> tuple[list[float], list[float]]:
    """Shares of samples and of tokens of datasets a and b."""
    drawn = daemon.engine()["runs"][0]["drawn"]
    counts = [[drawn[name][kind] for name in ("a", "b")] for kind in ("samples", "tokens")]
    return tuple([each / sum(kind) for each in kind] for kind in counts)  # type: ignore[return-value]


@pytest.mark.soak
def test_case_F5_shares_of_tokens_are_shown_and_kept_by_a_resume_on_other_ranks(runtime_folder: Path) -> None:
    for name, rows, length in (("a", 2000, 40), ("b", 200, 400)):
        COUNT(rows, 2, runtime_folder / name, row=lambda i, n=length: {"id": i, "text": "x" * (n + i % 3 - 1)})
    byte_tokenizer(runtime_folder / "tokenizer.json")
    recipe = write_recipe(runtime_folder, TOKENS)
    with Daemon(recipe) as daemon:
        with Ranks(daemon.socket, 2) as ranks:
            ranks.rounds(60)
            state = ranks.state()
            samples, tokens = shown_shares(daemon)
            with zephon(runtime_folder, "progress", "--socket", daemon.socket) as asked:
                assert asked.end() == 0, asked.errors
                text = asked.output
            with zephon(runtime_folder, "progress", "--socket", daemon.socket, "--json") as asked:
                assert asked.end() == 0, asked.errors
                lanes = json.loads(asked.output)["engine"]["runs"][0]["lanes"]
        assert state["identity"]["token_estimates"] == plan_of(recipe).estimates
        assert all(abs(share - 0.5) < 0.01 for share in tokens)
        assert abs(samples[0] - 10 / 11) < 0.01
        assert "drawn from a:" in text
        assert "drawn from b:" in text
        for name in ("dropped_records", "dropped_tokens", "padding_tokens"):
            assert f"{name} " in text
            assert sum(lane["counters"].get(name, 0) for lane in lanes) > 0
        until(lambda: not daemon.report()["clients"])
        state["identity"]["token_estimates"]["a"] *= 1.25
        with Ranks(daemon.socket, 1, state) as ranks:
            ranks.rounds(20)
            assert ranks.state()["identity"] == state["identity"]
            assert abs(shown_shares(daemon)[1][0] - 1 / 2.25) < 0.02


@pytest.mark.parametrize("ends", ["", "exhausted_policy='repeat'"])
@pytest.mark.parametrize(
    "step", [".map_transform(lambda row: None)", ".map_transform(tokens).pack_flat(1, drop_oversized=True)"]
)
def test_case_E12_a_run_of_which_nothing_comes_through_ends_in_an_error_for_every_rank(
    runtime_folder: Path, ends: str, step: str
) -> None:
    COUNT(100, 1, runtime_folder / "count")
    recipe = write_recipe(
        runtime_folder,
        "def tokens(row):\n    return {'input_ids': [1, 2, row['id']]}\n"
        "source = StaticMixtureWorkSource([Dataset.from_path('count', HERE / 'count')], None"
        f"{ends and ', ' + ends})\n"
        f"pipeline = Pipeline(source){step}.batch(4).options(canonical_replicas=8)\n",
    )
    with Daemon(recipe, workers=1) as daemon, Ranks(daemon.socket, 2) as ranks:
        for error in ranks.each(lambda rank: ranks.refused(rank, RunFailed)):
            assert "0 of 100 records passed " in str(error)
            assert ("pack_flat" if "pack" in step else "map_transform") in str(error)
