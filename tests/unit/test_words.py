"""One lane is no lanes: whatever is counted in what users read fits its number."""

from __future__ import annotations

import re
import warnings

import pytest

from tests.unit.small_recipes import dataset
from zephon import MixtureSpec, Pipeline, StaticMixtureWorkSource
from zephon.errors import TopologyError
from zephon.inspection import batches_of_step, described
from zephon.lanes import check_step, check_topology, epoch_end_report
from zephon.verify import verify
from zephon.words import many
from zephon_daemon.progress import text

WRONG = re.compile(
    r"(?<![\d.,/])1 (more |bad |global |full )?(lanes|samples|records|rows|shards|chunks|windows|rounds|steps|batches|"
    r"groups|ranks|clients|workers|tasks|tokens|slots|files|datasets|processes|engines|epochs|passes|fields)\b"
)


def one_lane() -> Pipeline:
    source = StaticMixtureWorkSource([dataset("web", 1, 1)], MixtureSpec({"web": 1}))
    return Pipeline(source).map_transform(dict).batch(1).options(canonical_replicas=1)


def test_counts_have_the_form_of_their_number() -> None:
    assert [many(n, "lane") for n in (0, 1, 2)] == ["0 lanes", "1 lane", "2 lanes"]
    assert [many(n, "batch", "batches") for n in (1, 2)] == ["1 batch", "2 batches"]


def test_plans_proofs_and_steps_of_one_of_everything() -> None:
    made = one_lane()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = made.plan()
        said = [made.explain(), str(verify(made, dp=[1, 2], steps=1)), str(made.validate())]
        said += described(plan, 1, 0, batches_of_step(plan, 1))
    assert "1 global step on 1 lane" in said[1]
    assert "1 lane serves at most 1 group" in said[1]
    for each in said:
        assert not WRONG.search(each), each


def test_reports_of_one_of_everything() -> None:
    lane = {
        "lane": 0, "epoch": 0, "delivered": 1, "produced": 1, "samples": 1, "skipped": 1, "waits_for": "the trainer",
        "cause": "the trainer", "waits_seconds": 1.0,
    }  # fmt: skip
    run = {
        "rounds": 1, "steps": 2, "rounds_of_epoch": 1, "lanes": [lane], "left_out": {"0": 1},
        "drawn": {"web": {"samples": 1, "tokens": 1}},
    }  # fmt: skip
    report = {
        "engine": {"runs": [run], "workers": [{"tasks": 1, "busy_seconds": 1.0}]}, "workers_died": 1,
        "clients": [{"group": 0, "pid": 1, "attached": True}],
        "engines": [{"engine": n, "state": "ready", "workers": 1} for n in range(2)],
    }  # fmt: skip
    shown = text(report)
    assert "1 of 1 round (2 since the run's beginning), 1 lane" in shown
    assert "training: 1 of 1 lane has batches ready and waits for the trainer" in shown
    assert "1 worker: 1 task, 1.0 s at work, 1 died and was replaced" in shown
    assert not WRONG.search(shown), shown


def test_warnings_and_errors_of_one_of_everything() -> None:
    said = [
        epoch_end_report(0, {0: 1}, 0, 1, 1, 1),
        epoch_end_report(0, {0: 2}, 1, 1, 1, 1),
        epoch_end_report(0, {0: 1}, 1, 1, 1, 1),
    ]
    for check in (lambda: check_topology(1, 2, 0, "contiguous"), lambda: check_step(0, [3])):
        with pytest.raises(TopologyError) as caught:
            check()
        said.append(str(caught.value))
    assert said[2] == "epoch 0 ended: 1 bad record was skipped."
    for each in said:
        assert each is not None
        assert not WRONG.search(each), each
