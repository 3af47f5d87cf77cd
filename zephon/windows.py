"""The reference execution: what a pipeline means.

A lane is a sequence of windows, and the records of a window are a pure function of the plan, the epoch, the lane and
the window: read its samples in order, put them through the leading stateless operators, push the result through the
accumulators, and flush. `run_window` says so in a few lines, in one thread and with no process; every parallel
execution equals it byte for byte, because it runs the same parts: `Front` on the workers, a `Chain` for each window
in one thread, fed in order. Where stateless operators behind a stateful one run on workers too (`zephon.stages`), a
window has a chain in front of each of those stages and one behind the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from zephon.columns import Block, IntArray
from zephon.custom_source import CustomSource
from zephon.datasets.fetch import read
from zephon.datasets.open_files import resources
from zephon.lane_windows import Window, window_of
from zephon.ops.base import Accumulator, Faults, Operator, Scope, Stateful, Stateless, WindowKey, add_counts
from zephon.ops.divided import Divided
from zephon.ops.numbering import Numbered, told_apart
from zephon.ops.sending import sendable
from zephon.plan import Plan
from zephon.pointers import packed, unpacked
from zephon.stages import borders
from zephon.whereabouts import READING, Whereabouts

TASK_SAMPLES = 512
"""Samples handed to a worker at once, unless told otherwise. Not visible in the data."""

SMALL_SAMPLE = 1024.0
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

    @property
    def stage(self) -> int:
        """0: the front."""
        return 0


class StageTask(NamedTuple):
    """Records of a lane for a later stage, the first of which counts as 1: what one worker does at once.

    They are records `low` to `high` in the order in which they came to the stage.
    """

    epoch: int
    lane: int
    low: int
    high: int
    stage: int
    block: Block


AnyTask = Task | StageTask


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


def halved(task: AnyTask, grain: int = 1) -> tuple[AnyTask, AnyTask] | None:
    """The task in two, one of the front cut at the multiple of `grain` that is nearest below its middle; None if none
    lies inside.

    What comes of both, end to end, is what comes of the whole.
    """
    if isinstance(task, StageTask):
        return _halved_records(task)
    first = (task.low // grain + 1) * grain
    if first >= task.high:
        return None
    cut = max(first, (task.low + task.high) // 2 // grain * grain)
    left = right = b""
    if task.pointers:
        pointers = unpacked(task.pointers)
        left, right = packed(pointers[: cut - task.low]), packed(pointers[cut - task.low :])
    return task._replace(high=cut, pointers=left), task._replace(low=cut, pointers=right)


def _halved_records(task: StageTask) -> tuple[StageTask, StageTask] | None:
    possible, count = borders(task.block), task.high - task.low
    if not len(possible):
        return None
    at = int(possible[np.abs(possible - count / 2).argmin()])
    left, right = task.block.slice(0, at), task.block.slice(at, count)
    return task._replace(high=task.low + at, block=left), task._replace(low=task.low + at, block=right)


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


def pointers_of(plan: Plan, task: AnyTask) -> IntArray:
    """A task's samples: int64 `[n, 3]` of (dataset, shard, row)."""
    if isinstance(task, StageTask):
        return task.block.compact_samples().samples[:, :3]
    if task.pointers:
        return unpacked(task.pointers)
    return plan.curriculum(task.epoch).lane_pointers(task.lane, task.low, task.high)


class Front:
    """Reading and the leading stateless operators, and later stages where there are any: what runs on workers.
    Picklable; set up where it runs.
    """

    def __init__(self, plan: Plan) -> None:
        source = plan.source.for_reading() if isinstance(plan.source, CustomSource) else plan.source
        self.plan = replace(plan, source=source)  # with no curriculum kept, so that equal plans pickle to equal bytes
        self.operators, self.fields = plan.on_workers, plan.fields
        from_memory = any(dataset.format == "memory" for dataset in plan.source.datasets)
        self._last = next((op.name for op in reversed(plan.front) if op.users_code), "read" if from_memory else None)
        numbering = _before_users_code(plan)
        steps = [_Step(number + 1, op, id(op) in numbering) for number, op in enumerate(self.operators)]
        self._stages: list[list[_Step]] = []
        for operators in (plan.front, *(stage.operators for stage in plan.later)):
            self._stages.append(steps[: len(operators)])
            del steps[: len(operators)]

    def setup(self) -> None:
        resources().serve(self.plan.lanes)
        for operator in self.operators:
            operator.setup()

    def teardown(self) -> None:
        for operator in self.operators:
            operator.teardown()

    def run(self, task: AnyTask, at: Whereabouts | None = None) -> Outcome:
        """The records that a task's samples, or its records, become. Raises `RecordError` unless bad records are to be
        skipped.

        `at` is told of every step on the way.
        """
        faults = Faults(
            self.plan.settings.on_error, self.plan.source.datasets, Scope(self.plan, task.epoch, task.lane, at)
        )
        if isinstance(task, Task):
            if at is not None:
                at.enter(READING)
            pointers = np.column_stack((pointers_of(self.plan, task), np.arange(task.low, task.high)))
            block = read(self.plan.source.datasets, pointers, self.fields, faults)
        else:
            block = task.block
        for number, operator, numbering in self._stages[task.stage]:
            if len(block):
                if at is not None:
                    at.enter(number)
                block = operator.process(block, faults)
                block = told_apart(block) if numbering else block
                if task.stage:
                    block = sendable(block, _maker(operator), faults)
        if at is not None:
            at.enter(len(self.operators) + 1)
        if not task.stage:
            block = sendable(block, self._last, faults)
        return Outcome(block, faults.skipped, faults.reports, faults.counters)


class _Step(NamedTuple):
    """`number`: of all operators that run on workers, from 1. `numbering`: its records are told apart."""

    number: int
    operator: Stateless
    numbering: bool


def _before_users_code(plan: Plan) -> set[int]:
    """The `id`s of the operators behind which there is one that runs a user's code, and so may ask for random numbers.

    Parts that work on lists are left out, as the operators are that they are parts of.
    """
    operators = [*plan.front, *plan.back, *plan.on_batches]
    last = max((number for number, op in enumerate(operators) if op.users_code), default=0)
    return {id(op) for op in operators[:last] if not (isinstance(op, Stateless) and op.of_lists)}


def _maker(operator: Operator) -> str | None:
    """The operator's name if values of a user's making may be in its records."""
    makes = operator.users_code and (isinstance(operator, Stateless) or isinstance(operator.whole, Divided))
    return operator.name if makes else None


class Chain:
    """Operators behind the front, for one window of one lane: all of the plan's, or those between two stages."""

    def __init__(self, plan: Plan, key: WindowKey, operators: tuple[Operator, ...] | None = None) -> None:
        self.steps: list[Accumulator | Stateless] = []
        self._numbering: list[bool] = []
        self._makers: list[str | None] = []
        before = _before_users_code(plan)
        for op in plan.back if operators is None else operators:
            numbering = id(op) in before
            if isinstance(op, Stateful):
                held = op.accumulator(key)
                self.steps.append(Numbered(held, key.chunk) if numbering and op.joins_samples else held)
                self._numbering.append(False)
            elif isinstance(op, Stateless):
                self.steps.append(op)
                self._numbering.append(numbering)
            self._makers.append(_maker(op))

    def push(self, block: Block, faults: Faults) -> list[Block]:
        """Put records in; get those that have come out at the end."""
        return self._from(0, [block], faults)

    def flush(self, faults: Faults) -> list[Block]:
        """End the window: everything that is held comes out."""
        out: list[Block] = []
        for at, step in enumerate(self.steps):
            if isinstance(step, Accumulator):
                out += self._from(at + 1, self._sendable(at, step.flush(faults), faults), faults)
        return out

    def counters(self) -> dict[str, int]:
        """What the accumulators dropped or padded."""
        total: dict[str, int] = {}
        for step in self.steps:
            if isinstance(step, Accumulator):
                add_counts(total, step.counters)
        return total

    def _from(self, at: int, blocks: list[Block], faults: Faults) -> list[Block]:
        for number in range(at, len(self.steps)):
            step, done = self.steps[number], list[Block]()
            for block in blocks:
                if len(block) and isinstance(step, Accumulator):
                    done += step.push(block, faults)
                elif len(block) and isinstance(step, Stateless):
                    made = step.process(block, faults)
                    done.append(told_apart(made) if self._numbering[number] else made)
            blocks = self._sendable(number, done, faults)
        return [block for block in blocks if len(block)]

    def _sendable(self, at: int, blocks: list[Block], faults: Faults) -> list[Block]:
        maker = self._makers[at]
        return blocks if maker is None else [sendable(block, maker, faults) for block in blocks]


def run_window(
    plan: Plan, epoch: int, lane: int, number: int, faults: Faults | None = None, task_samples: int = TASK_SAMPLES
) -> Iterator[Block]:
    """The records of one window, in order. This is the definition that every other execution must equal."""
    window = window_of(plan, epoch, lane, number)
    if window is None:
        return
    faults = faults or Faults(plan.settings.on_error, plan.source.datasets, Scope(plan, epoch, lane))
    front, chain = Front(plan), Chain(plan, WindowKey(plan.seed, epoch, lane, window.chunk))
    front.setup()
    for task in tasks_of(window, epoch, lane, task_samples, plan.grain):
        yield from chain.push(front.run(task).block, faults)
    yield from chain.flush(faults)
