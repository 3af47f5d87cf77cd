"""Reports of several engines as one, and requests for them that some engines never answer."""

from __future__ import annotations

from typing import Any

from zephon_daemon.composed import LANES_REPORTED, composed
from zephon_daemon.progress import Rates, text
from zephon_daemon.report_requests import REPORT_SECONDS, ReportRequests


def report(lanes: range, *, epoch: int = 0, rounds: int = 3, cause: str = "workers", failed: str | None = None) -> Any:
    """What an engine says that has these lanes."""
    run = {
        "pipeline": "pipeline", "rounds": rounds, "steps": rounds, "rounds_of_epoch": None, "mixture": None,
        "rings_bytes": 10,
        "lanes": [{"lane": lane, "delivered": 2, "waits_for": cause, "cause": cause} for lane in lanes],
        "drawn": {"web": {"samples": 5, "tokens": 50}}, "failed": failed, "waited": {cause: 1.5},
        "readers": [
            {"client": 1, "group": 0, "epoch": epoch, "rounds": rounds, "steps": rounds + 10, "rounds_of_epoch": None}
        ],
    }  # fmt: skip
    return {"runs": [run], "workers": [{"worker": 1, "tasks": 4, "busy_seconds": 1.0}], "stalls": [],
            "memory": {"budget": 100, "lane_rings": 10}, "errors": ["bad"]}  # fmt: skip


def test_one_engines_report_is_the_report() -> None:
    single = report(range(2))
    whole = composed({0: report(range(2))})
    assert whole["memory"] == single["memory"]
    assert [lane["lane"] for lane in whole["runs"][0]["lanes"]] == [0, 1]
    for name in ("rounds", "rounds_of_epoch", "drawn", "readers", "rings_bytes", "failed", "waited"):
        assert whole["runs"][0][name] == single["runs"][0][name]


def test_a_run_in_several_engines_is_one_run_as_far_as_its_slowest_rank() -> None:
    whole = composed({1: report(range(2, 4), rounds=5), 0: report(range(2), rounds=7, failed="it broke")})
    (run,) = whole["runs"]
    assert [(lane["lane"], lane["engine"]) for lane in run["lanes"]] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert (run["rounds"], run["rings_bytes"], run["failed"]) == (5, 20, "it broke")
    assert run["drawn"] == {"web": {"samples": 10, "tokens": 100}}
    assert whole["memory"] == {"budget": 200, "lane_rings": 20}
    assert [worker["engine"] for worker in whole["workers"]] == [0, 1]
    ahead = composed({0: report(range(2), epoch=1, rounds=1), 1: report(range(2, 4), rounds=9)})
    assert ahead["runs"][0]["rounds"] == 9, "of the epoch that the slowest is in"


def test_records_left_out_are_summed_where_each_engine_counts_its_own_and_said_once_where_ends_are_even() -> None:
    for even, expected in ((True, {"0": 7, "1": 2}), (False, {"0": 12, "1": 2})):
        parts = {0: report(range(2)), 1: report(range(2, 4)), 2: report(range(4, 6))}
        for engine, left in ((0, {"0": 5}), (1, {"0": 7, "1": 2})):
            parts[engine]["runs"][0].update(left_out=left, even_ends=even)
        assert composed(parts)["runs"][0]["left_out"] == expected


def test_no_more_lanes_are_reported_than_a_message_holds() -> None:
    half = LANES_REPORTED // 2 + 10
    run = composed({0: report(range(half)), 1: report(range(half, 2 * half))})["runs"][0]
    assert (len(run["lanes"]), run["lanes_left_out"]) == (LANES_REPORTED, 20)


def test_a_request_is_answered_when_every_engine_has_answered_or_died_or_after_a_while() -> None:
    requests = ReportRequests()
    number = requests.open("ask", [0, 1, 2], 0.0)
    assert requests.answered(number, 0, {"runs": []}) == []
    assert requests.died(1, "exit code 1") == []
    (done,) = requests.answered(number, 2, {"runs": []})
    assert (sorted(done.found), done.silent) == ([0, 2], {1: "died (exit code 1), a new one is started"})
    assert requests.answered(number, 2, {"runs": []}) == [], "it was answered"
    requests.open("late", [0, 1], 0.0)
    assert requests.late(REPORT_SECONDS / 2) == []
    (late,) = requests.late(REPORT_SECONDS)
    assert late.ask == "late"
    assert set(late.silent) == {0, 1}


def test_progress_tells_engines_apart_only_where_there_are_several_and_names_one_that_is_full() -> None:
    def engines(count: int, seconds: float) -> list[dict[str, Any]]:
        return [
            {"engine": n, "pid": 100 + n, "state": "running", "workers": 2, "cpu_seconds": seconds * (n == 0)}
            for n in range(count)
        ]

    def shown(count: int, causes: list[str], busy: float) -> str:
        rates = Rates()
        rates.add({}, 0.0, engines(count, 0.0))
        now = engines(count, busy * 2.0)
        parts = {n: report(range(2 * n, 2 * n + 2), cause=causes[n]) for n in range(count)}
        rates.add({}, 2.0, now)
        return text({"engine": composed(parts), "engines": now})

    assert "engine 0" not in shown(1, ["reading"], 0.2)
    assert "its engine is full (98% of a core)" in shown(1, ["reading"], 0.98)
    alike = shown(2, ["reading", "reading"], 0.2)
    assert "engine 0: running, 2 workers, 20% busy" in alike
    assert "engine 1: data" not in alike
    apart = shown(2, ["reading", "the trainer"], 0.2)
    assert "engine 0: data: 2 of 2 lanes wait for reading" in apart
    assert "engine 1: training: 2 of 2 lanes" in apart
    assert "the engine is full (95% of a core)" in shown(2, ["reading", "reading"], 0.95)
