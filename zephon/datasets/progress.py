"""One line on stderr while something long is counted: files, bytes, time left. Silent for the first second.

A terminal gets a bar that is drawn again in place, a log a line at least every five seconds.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import TextIO

_SILENT_S, _LINE_EVERY_S, _BAR_EVERY_S = 1.0, 4.5, 0.2
_BAR = 24


@cache
def signs_of_life() -> list[Callable[[], None]]:
    """What this process calls whenever something long has come a step further; an engine's daemon is told so."""
    return []


class Tally:
    """What is done so far; threads add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.files = self.bytes = 0
        self.stopped = False
        """Set when the caller gives up: threads leave at their next file."""

    def add(self, files: int = 0, size: int = 0) -> None:
        with self._lock:
            self.files += files
            self.bytes += size
        for tell in signs_of_life():
            tell()


class Progress:
    """Shows a `Tally` against its totals; `show` is called often and writes seldom."""

    def __init__(
        self,
        what: str,
        files: int,
        size: int,
        tally: Tally,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._files, self._bytes, self._tally = what, files, size, tally
        self._stream, self._clock = stream or sys.stderr, clock
        self._began = clock()
        self._next = self._began + _SILENT_S
        self._bar = bool(getattr(self._stream, "isatty", lambda: False)())
        self._shown = False

    def show(self) -> None:
        now = self._clock()
        if now < self._next:
            return
        self._next = now + (_BAR_EVERY_S if self._bar else _LINE_EVERY_S)
        self._shown = True
        done = max(self._share(), 1e-9)
        left = (now - self._began) * (1 - done) / done
        self._write(f"{_duration(left)} left" if done > 1e-3 else "estimating the time left")

    def finish(self) -> None:
        """The last line, if any was shown before."""
        if self._shown:
            self._write(f"done in {_duration(self._clock() - self._began)}", last=True)

    def _share(self) -> float:
        if self._bytes:
            return min(1.0, self._tally.bytes / self._bytes)
        return min(1.0, self._tally.files / max(1, self._files))

    def _write(self, end: str, last: bool = False) -> None:
        tally = self._tally
        files = f"{tally.files:,}/{self._files:,} file{'s' * (self._files != 1)}"
        text = f"{files}, {_size(tally.bytes)} of {_size(self._bytes)}, {end}"
        if self._bar:
            full = round(_BAR * self._share())
            text = f"\r\x1b[K{self._what} [{'#' * full}{'.' * (_BAR - full)}] {text}" + ("\n" if last else "")
        else:
            text = f"{self._what}: {text}\n"
        self._stream.write(text)
        self._stream.flush()


def _size(count: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 7200 else f"{whole // 3600} h {whole % 3600 // 60} min"
