"""The reference execution: what a pipeline means.

A lane is a sequence of windows, and the records of a window are a pure function of the plan, the epoch, the lane and
the window: read its samples in order, put them through the leading stateless operators, push the result through the
accumulators, and flush. `run_window` says so in a few lines, in one thread and with no process; every parallel
execution equals it byte for byte, because it runs the same parts: `Front` on the workers, a `Chain` for each window
in one thread, fed in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from zephon.columns import Block, IntArray
from zephon.custom_source import CustomSource
from zephon.datasets.fetch import read
from zephon.lane_windows import Window, window_of
from zephon.ops.base import Accumulator, Faults, Operator, Scope, Stateful, Stateless, WindowKey, add_counts
from zephon.ops.numbering import Numbered, told_apart
from zephon.ops.records import sendable
from zephon.plan import Plan
from zephon.pointers import packed, unpacked
from zephon.whereabouts import READING, Whereabouts

TASK_SAMPLES = 512
"""Samples handed to a worker at once, unless told otherwise. Not visible in the data."""

SMALL_SAMPLE = 256.0
"""Bytes under which a sample is less work than handing it over."""


class Task(NamedTuple):
    """Samples `low` to `high` of a lane, in the lane's own numbering: what one worker does at once.

    Of a work source that is pulled it carries their `pointers` (`zephon.pointers`); else the worker computes them.
    """

    epoch: int
    lane: int
    low: int
    high: int
    pointers: bytes = b""


class Outcome(NamedTuple):
    """What came of a task."""

    block: Block
    skipped: int
    reports: list[str]
    counters: dict[str, int]


def samples_a_task(chunk_size: int, sample_bytes: float = SMALL_SAMPLE) -> int:
    """About `TASK_SAMPLES`, or up to four times as many of small samples: whole chunks, or a whole part of one, so that
    few tasks read from the same row groups. `sample_bytes` is the mean size of a sample as it is stored.
    """
    if not chunk_size:  # chunks have lengths of their own
        return TASK_SAMPLES
    wanted = TASK_SAMPLES * min(4.0, max(1.0, SMALL_SAMPLE / max(sample_bytes, 1.0)))
    if chunk_size <= wanted:
        return chunk_size * round(wanted / chunk_size)
    return -(-chunk_size // round(chunk_size / wanted))


def tasks_of(
    window: Window, epoch: int, lane: int, samples: int = TASK_SAMPLES, grain: int = 1
) -> Iterator[Task]:
    """The window's samples in pieces of at most `samples`, cut at its multiples, which are the same in every lane.

    `samples` counts as the next multiple of the plan's `grain`.
    """
    samples = -(-samples // grain) * grain
    low = window.low
    while low < window.high:
        high = min((low // samples + 1) * samples, window.high)
        here = b"" if window.pointers is None else packed(window.pointers[low - window.low : high - window.low])
        yield Task(epoch, lane, low, high, here)
        low = high


def halved(task: Task, grain: int = 1) -> tuple[Task, Task] | None:
    """The task in two, cut at the multiple of `grain` that is nearest below its middle; None if none lies inside.

    What comes of both, end to end, is what comes of the whole.
    """
    first = (task.low // grain + 1) * grain
    if first >= task.high:
        return None
    cut = max(first, (task.low + task.high) // 2 // grain * grain)
    left = right = b""
    if task.pointers:
        pointers = unpacked(task.pointers)
        left, right = packed(pointers[: cut - task.low]), packed(pointers[cut - task.low :])
    return task._replace(high=cut, pointers=left), task._replace(low=cut, pointers=right)


def end_to_end(outcomes: Sequence[Outcome]) -> Outcome:
    """What came of a task from what came of its parts, in their order."""
    counters: dict[str, int] = {}
    for outcome in outcomes:
        add_counts(counters, outcome.counters)
    return Outcome(
        Block.concat([outcome.block for outcome in outcomes]),
        sum(outcome.skipped for outcome in outcomes),
        [report for outcome in outcomes for report in outcome.reports],
        counters,
    )


def pointers_of(plan: Plan, task: Task) -> IntArray:
    """A task's samples: int64 `[high - low, 3]` of (dataset, shard, row)."""
    if task.pointers:
        return unpacked(task.pointers)
    return plan.curriculum(task.epoch).lane_pointers(task.lane, task.low, task.high)


class Front:
    """Reading and the leading stateless operators: what runs on workers. Picklable; set up where it runs."""

    def __init__(self, plan: Plan) -> None:
        source = plan.source.for_reading() if isinstance(plan.source, CustomSource) else plan.source
        self.plan = replace(plan, source=source)  # with no curriculum kept, so that equal plans pickle to equal bytes
        self.operators, self.fields = plan.front, plan.fields
        self._last = next((op.name for op in reversed(self.operators) if op.users_code), None)
        self._numbering = _before_users_code(plan.operators)[: len(self.operators)]

    def setup(self) -> None:
        for operator in self.operators:
            operator.setup()

    def teardown(self) -> None:
        for operator in self.operators:
            operator.teardown()

    def run(self, task: Task, at: Whereabouts | None = None) -> Outcome:
        """The records that a task's samples become. Raises `RecordError` unless bad records are to be skipped.

        `at` is told of every step on the way.
        """
        datasets = self.plan.source.datasets
        faults = Faults(self.plan.settings.on_error, datasets, Scope(self.plan, task.epoch, task.lane, at))
        if at is not None:
            at.enter(READING)
        pointers = np.column_stack((pointers_of(self.plan, task), np.arange(task.low, task.high)))
        block = read(datasets, pointers, self.fields, faults)
        for number, (operator, numbering) in enumerate(zip(self.operators, self._numbering)):
            if len(block):
                if at is not None:
                    at.enter(number + 1)
                block = operator.process(block, faults)
                block = told_apart(block) if numbering else block
        if at is not None:
            at.enter(len(self.operators) + 1)
        block = sendable(block, self._last, faults)
        return Outcome(block, faults.skipped, faults.reports, faults.counters)


def _before_users_code(operators: tuple[Operator, ...]) -> list[bool]:
    """For each operator whether one that runs a user's code comes later."""
    return [any(op.users_code for op in operators[number + 1 :]) for number in range(len(operators))]


class Chain:
    """The operators from the first stateful one on, for one window of one lane."""

    def __init__(self, operators: tuple[Operator, ...], key: WindowKey) -> None:
        self.steps: list[Accumulator | Stateless] = []
        self._numbering: list[bool] = []
        for op, numbering in zip(operators, _before_users_code(operators)):
            if isinstance(op, Stateful):
                held = op.accumulator(key)
                self.steps.append(Numbered(held, key.chunk) if numbering and op.joins_samples else held)
                self._numbering.append(False)
            elif isinstance(op, Stateless):
                self.steps.append(op)
                self._numbering.append(numbering)

    def push(self, block: Block, faults: Faults) -> list[Block]:
        """Put records in; get those that have come out at the end."""
        return self._from(0, [block], faults)

    def flush(self, faults: Faults) -> list[Block]:
        """End the window: everything that is held comes out."""
        out: list[Block] = []
        for at, step in enumerate(self.steps):
            if isinstance(step, Accumulator):
                out += self._from(at + 1, step.flush(faults), faults)
        return out

    def counters(self) -> dict[str, int]:
        """What the accumulators dropped or padded."""
        total: dict[str, int] = {}
        for step in self.steps:
            if isinstance(step, Accumulator):
                add_counts(total, step.counters)
        return total

    def _from(self, at: int, blocks: list[Block], faults: Faults) -> list[Block]:
        for step, numbering in zip(self.steps[at:], self._numbering[at:]):
            done: list[Block] = []
            for block in blocks:
                if len(block) and isinstance(step, Accumulator):
                    done += step.push(block, faults)
                elif len(block) and isinstance(step, Stateless):
                    made = step.process(block, faults)
                    done.append(told_apart(made) if numbering else made)
            blocks = done
        return [block for block in blocks if len(block)]


def run_window(
    plan: Plan, epoch: int, lane: int, number: int, faults: Faults | None = None, task_samples: int = TASK_SAMPLES
) -> Iterator[Block]:
    """The records of one window, in order. This is the definition that every other execution must equal."""
    window = window_of(plan, epoch, lane, number)
    if window is None:
        return
    faults = faults or Faults(plan.settings.on_error, plan.source.datasets, Scope(plan, epoch, lane))
    front, chain = Front(plan), Chain(plan.back, WindowKey(plan.seed, epoch, lane, window.chunk))
    front.setup()
    for task in tasks_of(window, epoch, lane, task_samples, plan.grain):
        yield from chain.push(front.run(task).block, faults)
    yield from chain.flush(faults)
