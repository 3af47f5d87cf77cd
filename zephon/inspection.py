"""`zephon inspect`: what one global step holds, past or future, without running up to it where that can be helped.

Every lane is started at the nearest window that is known to begin at or before the step: by arithmetic where each
sample becomes one record, else the window that a checkpoint names, else the beginning. What lies between is produced
and dropped, as on a resume. The step itself is then one round of an embedded run.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from zephon.embedded import EmbeddedRun
from zephon.errors import CheckpointError, SettingError
from zephon.frontiers import Announcement, Checkpoint, Frontier
from zephon.lanes import window_containing, window_start
from zephon.ops.token_fields import AUTO
from zephon.ops.tokenize import Tokenize
from zephon.ops.tokenize_chat import TokenizeChat
from zephon.plan import Plan
from zephon.runners import InlinePool
from zephon.skips import Skips, in_words
from zephon.types import SampleBatch
from zephon.windows import Front
from zephon.words import many

TEXT_SHOWN, SAMPLES_SHOWN = 240, 6


class Step(NamedTuple):
    """What a global step holds: a batch of each lane, and the bad records left out on the way to it."""

    batches: list[SampleBatch]
    skips: Skips
    reports: list[str]
    """The first bad records, a line each."""


def step_of(plan: Plan, step: int, epoch: int = 0, checkpoint: Checkpoint | None = None) -> Step:
    """Step `step` (from 1) of an epoch. SettingError if the epoch ends before it."""
    if type(step) is not int or step < 1:
        raise SettingError(f"step={step!r}: must be a whole number from 1")
    records = (step - 1) * plan.microbatch_size
    totals = plan.lane_totals(epoch)
    if totals is not None:
        size, counts = plan.microbatch_size, totals.values()
        steps = min(counts) // size if plan.settings.drop_last else -(-max(counts) // size)
        if step > steps:
            raise SettingError(f"epoch {epoch} has {many(steps, 'step')}, not {step}")
    starts = {lane: _start(plan, lane, epoch, records, checkpoint) for lane in range(plan.lanes)}
    try:
        found = _round(plan, epoch, starts, 1)
    except CheckpointError:  # a lane has fewer records than the steps before this one take
        found = Step([], {}, [])
        if not plan.settings.drop_last:  # in its last steps it has an empty batch, so this may be one of them
            found = _round(plan, epoch, {lane: Frontier() for lane in range(plan.lanes)}, step)
    if not found.batches:
        raise SettingError(f"epoch {epoch} ends before step {step}")
    return found


def batches_of_step(plan: Plan, step: int, epoch: int = 0, checkpoint: Checkpoint | None = None) -> list[SampleBatch]:
    """The batches of a step, one of each lane, as `step_of` finds them."""
    return step_of(plan, step, epoch, checkpoint).batches


def _round(plan: Plan, epoch: int, starts: dict[int, Frontier], number: int) -> Step:
    """Round `number`, from 1, of a run that starts there; no batches if it ends before."""
    reports: list[str] = []
    origin = Checkpoint(plan.identity, epoch, starts)
    run = EmbeddedRun(plan, InlinePool(Front(plan)), checkpoint=origin, tell=reports.append)
    found: list[SampleBatch] = []
    while number and (batch := run.next_batch()) is not None:
        found.append(batch)
        if batch.ends_round:
            number -= 1
            if number:
                found.clear()
    whole = found if number <= 1 else []  # without even ends the last one may be without some lanes
    return Step(whole, run.skips, reports)


def _start(plan: Plan, lane: int, epoch: int, records: int, checkpoint: Checkpoint | None) -> Frontier:
    """The lane's frontier at that record, by the nearest window known."""
    known = Announcement(0, 0, 0)
    if plan.counts_are_arithmetic:
        window = window_containing(lane, plan.lanes, plan.flush_every, records // plan.chunk_size)
        chunk = window_start(lane, plan.lanes, plan.flush_every, window)
        known = Announcement(chunk, chunk * plan.chunk_size, 0)
    elif checkpoint is not None and checkpoint.epoch == epoch:
        begins = checkpoint.lanes[lane].announcement
        known = begins if begins.records <= records else known
    return Frontier(known.chunk, records - known.records, records, known.skipped, known.source)


def described(plan: Plan, step: int, epoch: int, batches: list[SampleBatch]) -> Iterator[str]:
    """The step for people, line by line: of each record the samples that it was made from, and its text."""
    count = sum(map(len, batches))
    yield f"step {step} of epoch {epoch}: {many(count, 'record')} of {many(len(batches), 'lane')}"
    decode = _decoder(plan)
    for batch in batches:
        for number, record in enumerate(batch.records):
            names = batch.samples[number]
            samples = names if isinstance(names, list) else [names]
            more = f" and {len(samples) - SAMPLES_SHOWN} more" if len(samples) > SAMPLES_SHOWN else ""
            where = ", ".join(f"{name}:{shard}:{row}" for name, shard, row in samples[:SAMPLES_SHOWN])
            yield f"lane {batch.lane}, record {batch.first_record + number}: {where}{more}"
            yield textwrap.indent(_text(record.payload, decode), "    ")


def left_out(found: Step) -> Iterator[str]:
    """The bad records for people, if there are any, line by line."""
    if found.skips:
        yield f"bad records left out in the windows that these come from: {in_words(found.skips)}"
        yield from (textwrap.indent(report, "    ") for report in found.reports)


def _text(payload: dict[str, Any], decode: Callable[[list[int]], str] | None) -> str:
    tokens = next((payload[name] for name in AUTO if name in payload), None)
    if tokens is not None and decode is not None:
        used = int(payload.get("sequence_length", len(tokens)))
        return f"{many(used, 'token')}: {_short(repr(decode([int(token) for token in tokens[:used]])))}"
    return "\n".join(f"{name}: {_short(repr(value))}" for name, value in payload.items())


def _short(text: str) -> str:
    return text if len(text) <= TEXT_SHOWN else f"{text[:TEXT_SHOWN]}…"


def _decoder(plan: Plan) -> Callable[[list[int]], str] | None:
    """What makes text of the run's token ids: the last tokenizer of the pipeline, if it can."""
    for operator in reversed(plan.operators):
        if isinstance(operator, (Tokenize, TokenizeChat)):
            return operator.tokenizer_source.decoder()
    return None
