"""The operators between two stages of one lane, or behind the last: window after window, a chain for each."""

from __future__ import annotations

from zephon.columns import Block
from zephon.lane_windows import Window
from zephon.ops.base import Faults, Operator, Scope, WindowKey, add_counts
from zephon.plan import Plan
from zephon.windows import Chain


class Stretch:
    """`operators` for one window at a time; the chain of the next one begins empty."""

    def __init__(self, plan: Plan, epoch: int, lane: int, operators: tuple[Operator, ...]) -> None:
        self._plan, self._epoch, self._lane, self._operators = plan, epoch, lane, operators
        self._chain: Chain | None = None
        self.faults = self._fresh_faults()
        self.ended = 0
        """Windows that have gone through."""

    @property
    def counters(self) -> dict[str, int]:
        """What the accumulators of its window have dropped and padded so far."""
        return {} if self._chain is None else self._chain.counters()

    def push(self, block: Block, window: Window) -> list[Block]:
        return self._of(window).push(block, self.faults)

    def flush(self, window: Window) -> list[Block]:
        return self._of(window).flush(self.faults)

    def end_window(self) -> tuple[dict[str, int], Faults]:
        """On to the next one. Gives what was counted, and the faults."""
        counted, faults = self.counters, self.faults
        add_counts(counted, faults.counters)
        self._chain, self.faults = None, self._fresh_faults()
        self.ended += 1
        return counted, faults

    def _of(self, window: Window) -> Chain:
        if self._chain is None:
            key = WindowKey(self._plan.seed, self._epoch, self._lane, window.chunk)
            self._chain = Chain(self._plan, key, self._operators)
        return self._chain

    def _fresh_faults(self) -> Faults:
        plan = self._plan
        return Faults(plan.settings.on_error, plan.source.datasets, Scope(plan, self._epoch, self._lane))
