"""How long a rank waits for a batch, and what it says when it gives up.

After a second the engine is told that this rank is hungry; from then on it gives signs of life, each saying whether
anything moves and what the lane waits for. As long as something moves the wait goes on. Where it gives none, the daemon
is asked: while its engine is known to be in a user's function, the wait goes on as if nothing moved. Time in which this
very process was stopped (SIGSTOP, a suspended machine) does not count: each sleep counts for no more than it was meant
to take.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from zephon.errors import DaemonUnavailable, RunFailed, TopologyError, ZephonError
from zephon_client.feed import Feed

_OTHER_RANKS = re.compile(r"to attach|\bgroups? \[?\d")
"""How the engine's reasons name groups or ranks that are missing."""

_LEFT = "have left the run"
"""How they say that those were here."""

_ELSEWHERE = "of another group"
"""How they name a lane that this rank does not read."""


@dataclass(frozen=True)
class Limits:
    """Seconds. `stalled`: nothing has moved; `silent`: a hungry rank has heard nothing at all."""

    stalled: float
    silent: float = 10.0
    hungry: float = 1.0
    look: float = 1.0
    told: float = 10.0


class Waiting:
    """One wait of one rank for one lane: call `step` until the batch is there."""

    def __init__(
        self,
        feed: Feed,
        limits: Limits,
        path: str,
        lane: int,
        epoch: int,
        stands: int,
        ask: Callable[[], str] = lambda: "",
    ) -> None:
        """`stands` is where the lane does in turn-taking.

        `ask` asks the daemon what its engine does instead of answering; empty if nothing is known.
        """
        self._feed, self._limits, self._path = feed, limits, path
        self._lane, self._place, self._ask = lane, (lane, epoch, stands), ask
        self._stall_told = self._engine = ""
        self._heard, self._moved = feed.heard, feed.moved
        self._waited = self._silent = self._stalled = 0.0
        self._answered = self._told = False

    def step(self) -> None:
        """Sleeps until something arrives, for a second at most. Raises when the wait has no prospect."""
        feed, limits = self._feed, self._limits
        if feed.heard != self._heard:
            self._heard, self._silent, self._answered = feed.heard, 0.0, self._waited >= limits.hungry
            self._engine = ""
        if feed.moved != self._moved:
            self._moved, self._stalled = feed.moved, 0.0
        if self._waited >= limits.told and not self._told and feed.reason:
            self._told = True
            warnings.warn(f"no batch for {self._waited:.0f} s: {feed.reason}", stacklevel=3)
        if self._answered and feed.stall and not self._stall_told:
            self._stall_told = feed.stall
            warnings.warn(f"no batch for {self._waited:.0f} s: {feed.stall}", stacklevel=3)
        if self._waited >= limits.hungry:
            if self._silent >= min(limits.silent, limits.stalled):
                self._ask_for_engine()
            if self._stalled >= limits.stalled:
                if self._silent > 2 * limits.hungry:
                    self._ask_for_engine()
                raise self._stall() if self._answered or self._engine else self._no_sign()
            if feed.waits_for != self._place:
                feed.hungry(*self._place)
        began = time.monotonic()
        sleep = min(limits.look, limits.hungry)
        feed.sleep(sleep)
        slept = min(time.monotonic() - began, sleep)
        if self._waited >= limits.hungry:
            self._silent += slept
        self._waited += slept
        self._stalled += slept

    def _ask_for_engine(self) -> None:
        """The engine is silent: raises unless the daemon knows why."""
        told = self._ask()
        if not told:
            raise self._no_sign()
        if not self._engine and self._stalled < self._limits.stalled:
            warnings.warn(f"no batch for {self._waited:.0f} s: {told}", stacklevel=4)
        self._engine, self._silent = told, 0.0

    def _no_sign(self) -> ZephonError:
        return DaemonUnavailable(
            f"the daemon on {self._path} has given no sign of life for {self._silent:.0f} s while this rank waited for "
            f"lane {self._lane}. Its engine may be stopped or starved of CPU: see `zephon progress --socket "
            f"{self._path}`, and restart it, and the job from its last checkpoint, if it does not come back."
        )

    def _stall(self) -> ZephonError:
        reason = self._engine or self._feed.reason or f"lane {self._lane} waits for its next batch"
        if self._feed.stall and not self._engine:
            reason += f". {self._feed.stall}"
        elif _ELSEWHERE in reason and (told := self._ask()):  # which may be in another engine
            reason += f". {told[0].upper()}{told[1:]}"
        text = f"nothing has moved for {self._stalled:.0f} s: {reason}"
        if _LEFT in reason:
            return TopologyError(
                f"{text}. A finite run ends on all ranks at the same step, so it needs every rank of every group, and "
                "one that has left cannot come back to it: end all ranks and start them together from the last "
                "checkpoint, or set options(even_ends=False) to let each rank go to the end of its own lanes."
            )
        if _OTHER_RANKS.search(reason):
            return TopologyError(
                f"{text}. A finite run ends on all ranks at the same step, so it needs every rank of every group: "
                "start the missing ones with the same dp_degree and group_readers, or set options(even_ends=False) to "
                "let each rank go to the end of its own lanes."
            )
        return RunFailed(
            f"stalled: {text}. See `zephon progress --socket {self._path}` for what each lane and worker is doing; a "
            "larger `timeout` of connect waits longer."
        )
