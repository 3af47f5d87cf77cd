"""The check of operators that run a user's code: on a few records of the run's own data, before it starts.

It looks for what breaks the promise that a window is a function of its samples: another result for the same records,
a result that depends on earlier calls or on the order or company of records, random numbers that no seed decides, and
a flush that leaves something behind. It finds what shows on sixteen records in a moment, no more; `zephon verify` is
the proof.

At a run's start it costs some tens of milliseconds, gives up after `AT_START_SECONDS` of work or `AT_START_WAIT` of
waiting and work, calls no `setup` that the process would not have called, warns, and never breaks the run: what a
function raises on a sample is left to the run.
Global random generators are put back as they were.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from zephon.columns import Block, IntArray, canonical
from zephon.datasets.fetch import read
from zephon.digests import column_digest
from zephon.errors import ZephonError
from zephon.lane_windows import window_of
from zephon.ops.base import Faults, Operator, Scope, Stateful, Stateless, WindowKey, said
from zephon.ops.custom import Driven
from zephon.ops.grouping import GroupedAccumulator
from zephon.ops.interrupts import is_interrupt
from zephon.ops.map_batch import MapBatch
from zephon.ops.records import block_of
from zephon.plan import Plan
from zephon.types import SampleRecord
from zephon.words import many

RECORDS = 16
LOOKED_THROUGH = 1024
"""Samples among which records of every dataset are looked for."""
AT_START_SECONDS, AT_START_WAIT = 0.2, 0.6

Print = tuple[tuple[str, bytes], ...]
"""A record as digests of its fields."""


@dataclass(frozen=True)
class Finding:
    """What is wrong with an operator."""

    operator: str
    text: str

    def __str__(self) -> str:
        return f"{self.operator}: {self.text}"


@dataclass(frozen=True)
class ValidationReport:
    """What was found. `checked` and `left_out` name the operators that run a user's code."""

    findings: tuple[Finding, ...]
    checked: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    """Each with the reason."""
    records: int = field(default=0)

    @property
    def ok(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        checked = ", ".join(self.checked) or "no operator runs code of yours"
        lines = [f"checked on {many(self.records, 'record')}: {checked}"]
        lines += [f"not checked: {text}" for text in self.left_out]
        lines += [str(finding) for finding in self.findings]
        if self.checked and self.ok:
            lines.append("nothing was found; `zephon verify` proves it on more of the data")
        return "\n".join(lines)


def has_users_code(plan: Plan) -> bool:
    """Whether there is anything to check."""
    return any(map(_runs_users_code, plan.operators))


def validate_operators(plan: Plan) -> ValidationReport:
    """The whole check, with every operator set up."""
    return _Check(plan, None, None).run()


def warnings_at_start(plan: Plan, ready: Callable[[Operator], bool]) -> list[str]:
    """What to warn of when a run starts. `ready` says of an operator whether this process has called its `setup`."""
    if not has_users_code(plan):
        return []
    try:
        deadline = time.thread_time() + AT_START_SECONDS, time.monotonic() + AT_START_WAIT
        report = _Check(plan, ready, deadline).run()
    except Exception:  # whatever it is, the run meets it too, and says where
        return []
    advice = "pipeline.validate() shows more, `zephon verify` is the proof."
    return [f"{finding}. {advice}" for finding in report.findings]


class _Check:
    """One pass over the operators of a plan."""

    def __init__(
        self, plan: Plan, ready: Callable[[Operator], bool] | None, deadline: tuple[float, float] | None
    ) -> None:
        """`deadline`: of this thread's processor time, and of the clock."""
        self._plan, self._ready, self._deadline = plan, ready, deadline
        self._findings: list[Finding] = []
        self._checked: list[str] = []
        self._left_out: list[str] = []
        self._lane = 0
        self._batches: list[int] | None = None  # lengths of the batches that a `map_batch` has made of the records

    @property
    def _at_start(self) -> bool:
        return self._ready is not None

    @property
    def _late(self) -> bool:
        return self._deadline is not None and (
            time.thread_time() > self._deadline[0] or time.monotonic() > self._deadline[1]
        )

    def run(self) -> ValidationReport:
        operators = list(self._plan.operators)
        last = max((i for i, op in enumerate(operators) if _runs_users_code(op)), default=-1)
        block = self._sample() if last >= 0 else Block.empty()
        records = len(block)
        for number, operator in enumerate(operators[: last + 1]):
            stopped = self._stopped(operator, block)
            if stopped is None:
                try:
                    block = self._one(operator, block)
                    continue
                except BaseException as error:
                    if is_interrupt(error):
                        raise
                    stopped = f"{operator.name} failed on them: {said(error)}"
                    if not self._at_start:
                        self._findings.append(Finding(operator.name, f"fails on a sample: {said(error)}"))
            self._left_out += [f"{op.name} ({stopped})" for op in operators[number : last + 1] if _runs_users_code(op)]
            break
        return ValidationReport(tuple(self._findings), tuple(self._checked), tuple(self._left_out), records)

    def _stopped(self, operator: Operator, block: Block) -> str | None:
        """Why the check ends before this operator, if it does."""
        if not len(block):
            return "no record came to it"
        if self._late:
            return "no time was left"
        if self._ready is not None and needs_setup(operator) and not self._ready(operator):
            return f"{operator.name} is not set up in this process"
        return None

    def _one(self, operator: Operator, block: Block) -> Block:
        """Check an operator that runs a user's code; what comes of the block in any case."""
        operator.setup()
        if not _runs_users_code(operator):
            return self._results(operator, block)
        self._checked.append(operator.name)
        if not self._at_start:
            from zephon.function_pickling import why_not_sent

            error = why_not_sent(operator)
            if error is not None:
                self._findings.append(Finding(operator.name, error))
        given = block
        if isinstance(operator, Driven):
            given = self._own_samples(operator) or block
        out = self._compared(operator, given)
        if isinstance(operator, MapBatch):
            batches = self._on_batches(operator, block)
            self._batches = list(map(len, batches))
            return Block.concat(batches)
        return out if given is block else self._results(operator, block)

    def _compared(self, operator: Operator, block: Block) -> Block:
        with kept_generators() as drawn:
            first = self._results(operator, block)
            after_first = drawn()
            second = self._results(operator, block)
            unseeded = [name for name, state in drawn().items() if state != after_first.get(name)]
            alone = self._alone(operator, block) if isinstance(operator, Stateless) else None
        prints = _prints(first)
        differs = _difference(prints, _prints(second))
        if unseeded:
            self._find(
                operator,
                f"draws from {' and '.join(unseeded)}, which no seed of the run decides: another worker or a resume "
                "gives other numbers. Use zephon.generator()",
            )
        elif differs is not None:
            again = "a second window" if isinstance(operator, Stateful) else "a second call"
            self._find(
                operator,
                f"gives another result for the same records in {again}: {self._where(differs, first)}. Look for a "
                "counter, a clock, a state that outlives a window, or random numbers",
            )
        elif alone is not None and not _sensitive(operator):
            differs = _difference(prints, _prints(alone))
            if differs is not None:
                self._find(
                    operator,
                    "gives another result for records one by one, the last first, than together: "
                    f"{self._where(differs, first)}. It depends on earlier calls or on the others in its list (which "
                    "batch_shape_sensitive=True says)",
                )
        return first

    def _results(self, operator: Operator, block: Block) -> Block:
        if isinstance(operator, Stateless):
            return operator.process(block, self._faults())
        if isinstance(operator, MapBatch):
            return Block.concat(self._on_batches(operator, block))
        assert isinstance(operator, Stateful)
        holding = operator.accumulator(WindowKey(self._plan.seed, 0, self._lane, 0))
        out = Block.concat([*holding.push(block, self._faults()), *holding.flush(self._faults())])
        if isinstance(holding, GroupedAccumulator) and (left := holding.left_behind()):
            self._find(operator, f"flush leaves {many(left, 'record')} behind: what it does not give out is lost")
        return out

    def _on_batches(self, operator: MapBatch, block: Block) -> list[Block]:
        """What comes of each batch: of those that the `map_batch` before left, or of the first to be cut."""
        size, names = self._plan.microbatch_size, self._plan.dataset_names
        cuts = [*range(0, len(block), size), len(block)] if self._batches is None else [0, *accumulate(self._batches)]
        batches = [canonical(block.slice(low, high)) for low, high in pairwise(cuts)]
        return [
            operator.apply(batch, self._lane, number * size, names, self._faults())
            for number, batch in enumerate(batches)
        ]

    def _alone(self, operator: Stateless, block: Block) -> Block | None:
        """Each record on its own, the last one first; in the block's order. None if there is no time for it."""
        parts: list[Block] = []
        for record in range(len(block) - 1, -1, -1):
            if self._late:
                return None
            parts.append(operator.process(block.slice(record, record + 1), self._faults()))
        return Block.concat(parts[::-1])

    def _find(self, operator: Operator, text: str) -> None:
        finding = Finding(operator.name, text)
        if finding not in self._findings:
            self._findings.append(finding)

    def _where(self, differs: tuple[int, str], block: Block) -> str:
        record, name = differs
        if record >= len(block):
            return name
        dataset, shard, row = block.sample_of(record)
        return f"{name} of the record made from dataset {self._plan.dataset_names[dataset]!r}, shard {shard}, row {row}"

    def _faults(self) -> Faults:
        return Faults("skip", self._plan.source.datasets, Scope(self._plan, 0, self._lane))

    def _sample(self) -> Block:
        """A few of the first records of a lane, of every dataset among them."""
        for lane in range(self._plan.lanes):
            window = window_of(self._plan, 0, lane, 0)
            if window is not None:
                self._lane = lane
                high = min(window.high, window.low + LOOKED_THROUGH)
                pointers = window.pointers
                if pointers is None:
                    pointers = self._plan.curriculum(0).lane_pointers(lane, window.low, high)
                chosen = _chosen(pointers[:LOOKED_THROUGH])
                places = np.column_stack((pointers[chosen], chosen + window.low))
                return read(self._plan.source.datasets, places, self._plan.fields, self._faults())
        return Block.empty()

    def _own_samples(self, operator: Driven) -> Block | None:
        """The records that the operator wants to be checked with."""
        records = list(operator.live().validation_samples())
        if not records:
            return None
        if not all(isinstance(record, SampleRecord) for record in records):
            raise ZephonError(f"{operator.name}: validation_samples() must return SampleRecords")
        like = Block({}, np.zeros((len(records), 4), np.int64))
        like.samples[:, 3] = np.arange(len(records))
        return block_of(
            [
                SampleRecord(replace(record.meta, _origin=(tuple(sample),)), record.payload)
                for record, sample in zip(records, like.samples.tolist())
            ],
            like,
        )


def _runs_users_code(operator: Operator) -> bool:
    return operator.users_code or isinstance(operator, MapBatch)


def needs_setup(operator: Operator) -> bool:
    """Whether an operator's `setup` does anything."""
    if isinstance(operator, Driven):
        return operator.has_setup
    return type(operator).setup is not Operator.setup


def _sensitive(operator: Operator) -> bool:
    return isinstance(operator, Driven) and operator.traits.batch_shape_sensitive


def _chosen(pointers: IntArray) -> IntArray:
    """Which of these samples to take: the first ones of each dataset, `RECORDS` in all."""
    datasets = np.unique(pointers[:, 0])
    each = max(1, RECORDS // max(1, len(datasets)))
    first = [np.flatnonzero(pointers[:, 0] == dataset)[:each] for dataset in datasets.tolist()]
    return np.sort(np.concatenate(first))[:RECORDS] if first else np.empty(0, np.int64)


def _prints(block: Block) -> list[Print]:
    """Each record's fields as digests."""
    found = []
    for record in range(len(block)):
        alone = canonical(block.slice(record, record + 1))
        found.append(tuple((name, column_digest(column)) for name, column in alone.fields.items()))
    return found


def _difference(one: list[Print], other: list[Print]) -> tuple[int, str] | None:
    """The first record in which two results differ, and how."""
    for number, (a, b) in enumerate(zip(one, other)):
        if a != b:
            names = [name for name, digest in {**dict(a), **dict(b)}.items() if dict(a).get(name) != dict(b).get(name)]
            return number, f"field {names[0]!r}" if names else "the fields"
    if len(one) != len(other):
        return min(len(one), len(other)), f"{many(len(one), 'record')} and then {len(other)}"
    return None


@contextmanager
def kept_generators() -> Iterator[Callable[[], dict[str, Any]]]:
    """Inside, the global generators may be used; afterwards they are as before. Gives a function of their states."""
    before = _generators()
    try:
        yield _generators
    finally:
        random.setstate(before["random"])
        name, keys, *rest = before["numpy.random"]
        np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))
        torch = sys.modules.get("torch")
        if torch is not None and "torch" in before:
            torch.set_rng_state(torch.tensor(list(before["torch"]), dtype=torch.uint8))


def _generators() -> dict[str, Any]:
    """The states of the global generators of Python, numpy and, where it is loaded, torch, in a form to compare."""
    numpys: Any = np.random.get_state()
    name, keys, *rest = numpys
    states: dict[str, Any] = {"random": random.getstate(), "numpy.random": (name, keys.tobytes(), *rest)}
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_rng_state"):
        states["torch"] = bytes(torch.get_rng_state().tolist())
    return states
