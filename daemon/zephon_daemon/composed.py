"""One report out of those of several engines: a run is one run, in however many engines its lanes are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from zephon.skips import Skips, add_skips

LANES_REPORTED = 128
"""Lanes of all runs in one report, which has to fit a message."""


def bounded(report: dict[str, Any]) -> dict[str, Any]:
    """The report with no more lanes than a message holds; how many were left out is in it."""
    for run in report["runs"]:
        share = LANES_REPORTED // len(report["runs"])
        run["lanes_left_out"] = run.get("lanes_left_out", 0) + max(0, len(run["lanes"]) - share)
        run["lanes"] = run["lanes"][:share]
    return report


def composed(reports: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """The report of all engines, by number; lanes, workers and stalls say which one is theirs (`engine`)."""
    runs: dict[str, list[dict[str, Any]]] = {}
    memory: Counter[str] = Counter()
    whole: dict[str, Any] = {"runs": [], "workers": [], "stalls": [], "errors": []}
    for engine, report in sorted(reports.items()):
        for run in report.get("runs", ()):
            runs.setdefault(run["pipeline"], []).append(run)
            for lane in run["lanes"]:
                lane["engine"] = engine
        for part in ("workers", "stalls"):
            whole[part] += [{**each, "engine": engine} for each in report.get(part, ())]
        memory.update(report.get("memory", {}))
        whole["errors"] += report.get("errors", ())
        whole |= {name: value for name, value in report.items() if name not in whole}
    whole["runs"] = [_run(parts) for parts in runs.values()]
    whole["memory"] = dict(memory)
    return bounded(whole)


def slowest(readers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rounds that every reader has delivered: of the epoch that the slowest is in (`rounds`), and since the run's
    beginning (`steps`). Besides, how many that epoch has, where one of them knows.
    """
    if not readers:
        return {"rounds": 0, "steps": 0, "rounds_of_epoch": None}
    last = min(readers, key=lambda each: (each["epoch"], each["rounds"]))
    known = (r["rounds_of_epoch"] for r in (last, *readers) if r["epoch"] == last["epoch"])
    of_epoch = next((rounds for rounds in known if rounds is not None), None)
    return {"rounds": last["rounds"], "steps": last["steps"], "rounds_of_epoch": of_epoch}


def _left_out(parts: list[dict[str, Any]]) -> dict[str, int]:
    """Records left out, by epoch.

    Where ends are even an engine that knows an epoch's end knows it of all lanes; else each counts its own groups'.
    """
    found: Counter[str] = Counter()
    for part in parts:
        of_its_own = not part.get("even_ends", True)
        for epoch, records in part.get("left_out", {}).items():
            found[epoch] = found[epoch] + records if of_its_own else max(found[epoch], records)
    return dict(found)


def _run(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One run from its parts in each engine."""
    readers = [reader for part in parts for reader in part["readers"]]
    waited: Counter[str] = Counter()
    drawn: dict[str, Counter[str]] = {}
    skips: Skips = {}
    for part in parts:
        waited.update(part["waited"])
        add_skips(skips, part.get("skips", {}))
        for name, counts in part["drawn"].items():
            drawn.setdefault(name, Counter()).update(counts)
    return {
        **parts[0],
        **slowest(readers),
        "left_out": _left_out(parts),
        "lanes": sorted((lane for part in parts for lane in part["lanes"]), key=lambda lane: lane["lane"]),
        "lanes_left_out": sum(part.get("lanes_left_out", 0) for part in parts),
        "drawn": {name: dict(counts) for name, counts in drawn.items()},
        "skips": skips,
        "readers": readers,
        "rings_bytes": sum(part["rings_bytes"] for part in parts),
        "failed": next((part["failed"] for part in parts if part["failed"]), None),
        "waited": dict(waited),
    }
