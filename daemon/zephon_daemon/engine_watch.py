"""The engine under its daemon's eye: whether it still goes round its loop, and where it stands when it does not.

An engine that is in a user's function, or stopped, answers nobody; its black box, in memory that both have, does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from zephon_daemon.black_box import BlackBox
from zephon_daemon.stacks import Stack, calls
from zephon_daemon.watchdog import Act, Patience, Watchdog

SILENT_SECONDS = 1.5
"""An engine goes round its loop once a second at least; its stack is asked for when it has not for so long, or for the
limit, if that is shorter."""

_ENGINE = "engine"
_log = logging.getLogger("zephon.daemon")


class EngineWatch:
    """Watches one engine after the other. `clock` is the time."""

    def __init__(self, patience: Patience, clock: Callable[[], float]) -> None:
        self._patience, self._clock = patience, clock
        self._box: BlackBox | None = None
        self._seen = -1
        self._silent = min(SILENT_SECONDS, patience.limit or SILENT_SECONDS)
        self._stack: Stack | None = None
        self._dog, self._asked, self._why = Watchdog(patience), False, ""

    @property
    def look_seconds(self) -> float:
        """Seconds between two looks."""
        return self._patience.look

    def met(self, box: BlackBox, stack: Stack) -> None:
        """An engine is ready. The box stays the caller's; the stack is closed by `gone`."""
        self.gone()
        self._box, self._stack = box, stack

    def gone(self) -> str:
        """The engine has ended: why, if it was ended from here."""
        if self._stack is not None:
            self._stack.close()
        self._box = self._stack = None
        self._dog, self._asked = Watchdog(self._patience), False
        why, self._why = self._why, ""
        return why

    def look(self) -> bool:
        """Look after the engine; whether it is to be ended now."""
        if self._box is None or self._stack is None:
            return False
        now, self._seen = self._clock(), self._box.beats
        acts = self._dog.look({_ENGINE: self._seen}, now)
        seconds = self._dog.seconds(_ENGINE, now)
        if seconds < self._silent:
            self._asked = False
        elif not self._asked:
            self._asked = True
            self._stack.ask()
        for _, act, _ in acts:
            if act is Act.GOES_ON:
                _log.warning("the engine goes on")
            elif act is Act.ASK:  # the stack that is reported is not of when the silence began
                self._stack.ask()
            elif act is Act.REPORT:
                trace = self._stack.read()
                _log.warning("the engine %s%s", self.state(), f"\n{trace}" if calls(trace) else "")
            elif act is Act.END:
                self._why = f"ended by the watchdog: it {self.state()}"
                _log.error("the engine is %s", self._why)
                return True
        return False

    def state(self) -> str:
        """What it does instead of answering; empty if it goes round its loop."""
        if self._box is None or self._stack is None:
            return ""
        seconds = self._dog.seconds(_ENGINE, self._clock()) if self._box.beats == self._seen else 0.0
        if seconds < self._silent:
            return ""
        work = str(self._box)
        where = f", {work}" if work else ""
        return f"has not answered for {seconds:.0f} s{where}; it stands in {self._stack.described()}"
