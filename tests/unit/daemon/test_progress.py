"""The text of `zephon progress`: it names what limits a run, and does without what a report does not have."""
from __future__ import annotations

import os

import pytest

from zephon_daemon.progress import Rates, limit, memory_of, text

LANE = {
    "lane": 0, "epoch": 0, "produced": 40, "delivered": 32, "samples": 50, "skipped": 3, "in_work": 2, "ring_free": 1,
    "ring_slots": 4, "waits_for": "workers", "counters": {"dropped_tokens": 7},
}  # fmt: skip


@pytest.mark.parametrize(("reasons", "begins"), [
    (["the trainer", "the trainer", "workers"], "training: 2 of 3 lanes"),
    (["workers", "workers", "the trainer"], "data: 2 of 3 lanes"),
    (["its group to attach"], "ranks: 1 of 1 lane waits"),
    ([None, None], "data: 2 of 2 lanes wait for nothing"),
])  # fmt: skip
def test_what_limits_a_run_is_what_most_lanes_wait_for(reasons: list[str | None], begins: str) -> None:
    assert limit([{**LANE, "waits_for": reason} for reason in reasons]).startswith(begins)


def test_a_lane_that_has_little_ready_limits_a_run_however_many_others_have_batches_for_the_trainer() -> None:
    full = {**LANE, "waits_for": "the trainer", "ring_free": 0}
    empty = {**LANE, "lane": 5, "waits_for": "workers", "ring_free": 3}
    assert limit([full, full, full, empty]) == "data: 1 of 4 lanes waits for workers"
    done = {**empty, "waits_for": "nothing"}
    assert limit([full, done]).startswith("training: 1 of 2 lanes")


def test_what_limits_a_run_is_told_with_the_seconds_of_the_lane_that_waits_longest() -> None:
    lanes = [
        {"lane": lane, "cause": cause, "waits_for": f"{cause} on worker {lane}", "waits_seconds": float(lane)}
        for lane, cause in enumerate(["reading", "operator 'tokenize'", "reading", "operator 'tokenize'", "reading"])
    ]
    assert limit(lanes) == "data: 3 of 5 lanes wait for reading, lane 4 for 4 s"
    missing = [{"lane": 0, "cause": "ranks", "waits_for": "1 more rank of group 0 to attach", "waits_seconds": 9.4}]
    assert limit(missing) == "ranks: 1 of 1 lane waits for 1 more rank of group 0 to attach, lane 0 for 9 s"


def test_stalls_and_what_lanes_have_waited_for_are_shown() -> None:
    run = {"pipeline": "p", "lanes": [LANE], "waited": {"the trainer": 30.0, "reading": 90.0, "nothing": 0.0}}
    shown = text({
        "engine": {"runs": [run], "stalls": [{"text": "lane 3 is stalled: worker 2"}]},
        "engine_stall": "has not answered for 25 s",
    })  # fmt: skip
    assert "lanes waited so far for: reading 75%, the trainer 25%" in shown
    assert "stalled: lane 3 is stalled: worker 2" in shown
    assert "stalled: the engine has not answered for 25 s" in shown


def test_an_empty_report_is_told_without_an_error() -> None:
    assert "no clients" in text({})


def test_lanes_counters_errors_and_failures_are_shown() -> None:
    run = {"pipeline": "eval", "lanes": [LANE], "mixture": {"web": 0.7}, "failed": None}
    engine = {"runs": [run, {"failed": "an operator failed"}], "workers": [], "errors": ["bad record\nin shard 3"]}
    shown = text({"engine": engine, "workers_died": 2, "memory": {"daemon": 1 << 20, "worker 1": 3 << 20}})
    for part in ("eval: epoch", "dropped_tokens 7", '"web": 0.7', "failed: an operator failed", "2 died"):
        assert part in shown
    assert "error: bad record in shard 3" in shown
    assert "memory: 4 MiB (daemon 1 MiB, workers 3 MiB)" in shown


def test_both_shares_of_each_dataset_are_shown() -> None:
    drawn = {"a": {"samples": 900, "tokens": 36_000}, "b": {"samples": 100, "tokens": 40_000}}
    shown = text({"engine": {"runs": [{"pipeline": "p", "lanes": [LANE], "drawn": drawn}]}})
    assert "drawn from a: 900 samples (90.0%), 36000 tokens (47.4%)" in shown
    assert "drawn from b: 100 samples (10.0%), 40000 tokens (52.6%)" in shown
    without = {name: {**each, "tokens": 0} for name, each in drawn.items()}
    shown = text({"engine": {"runs": [{"pipeline": "p", "lanes": [LANE], "drawn": without}]}})
    assert "900 samples (90.0%)\n" in shown
    assert "tokens (" not in shown


def test_rates_are_of_the_time_between_two_reports() -> None:
    rates = Rates()
    first, second = ({"runs": [{"pipeline": "p", "lanes": [{"delivered": n}]}]} for n in (100, 160))
    rates.add(first, 10.0)
    rates.add(second, 12.0)
    assert "records_per_second" not in first["runs"][0]
    assert second["runs"][0]["records_per_second"] == 30.0


def test_memory_leaves_out_processes_that_have_ended() -> None:
    found = memory_of({"this": os.getpid(), "none": 2**22 + 1})
    assert list(found) == ["this"]
    assert found["this"] > 1 << 20
