"""Requests for progress that wait for what the engines have to say. No I/O.

A request is answered when every engine has answered, or has died, or after `REPORT_SECONDS` without those that have
not; so one engine that hangs hides nothing of the others.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

MOST_REPORTS = 64
"""Requests that wait; further ones are answered without the engines' part."""

REPORT_SECONDS = 2.0


@dataclass
class ReportRequest:
    """One request: which engines have yet to answer, what the others said, and why some never will."""

    ask: Hashable
    deadline: float
    missing: set[int]
    found: dict[int, dict[str, Any]] = field(default_factory=dict)
    silent: dict[int, str] = field(default_factory=dict)


class ReportRequests:
    """All that wait. `now` is a clock in seconds."""

    def __init__(self) -> None:
        self._numbers = 0
        self._open: dict[int, ReportRequest] = {}

    @property
    def full(self) -> bool:
        return len(self._open) >= MOST_REPORTS

    @property
    def deadlines(self) -> list[float]:
        return [request.deadline for request in self._open.values()]

    def open(self, ask: Hashable, engines: Iterable[int], now: float) -> int:
        """A request to some engines; its number."""
        self._numbers += 1
        self._open[self._numbers] = ReportRequest(ask, now + REPORT_SECONDS, set(engines))
        return self._numbers

    def answered(self, number: int, engine: int, report: dict[str, Any]) -> list[ReportRequest]:
        """An engine's answer; the request, if it was the last."""
        request = self._open.get(number)
        if request is None or engine not in request.missing:
            return []
        request.found[engine] = report
        request.missing.discard(engine)
        return self._complete()

    def died(self, engine: int, how: str) -> list[ReportRequest]:
        """An engine that answers nobody any more; the requests that waited for it alone."""
        for request in self._open.values():
            if engine in request.missing:
                request.missing.discard(engine)
                request.silent[engine] = f"died ({how}), a new one is started"
        return self._complete()

    def late(self, now: float) -> list[ReportRequest]:
        """The requests that have waited for long enough."""
        for request in self._open.values():
            if request.deadline <= now:
                request.silent |= dict.fromkeys(request.missing, f"gave no report within {REPORT_SECONDS:g} s")
                request.missing.clear()
        return self._complete()

    def _complete(self) -> list[ReportRequest]:
        done = [number for number, request in self._open.items() if not request.missing]
        return [self._open.pop(number) for number in done]
