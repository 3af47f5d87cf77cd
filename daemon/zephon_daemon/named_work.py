"""Samples in work, and those that cost workers, for people: dataset, shard, rows, operator."""

from __future__ import annotations

from typing import Any

import numpy as np

from zephon.columns import Block
from zephon.plan import Plan
from zephon.pointers import packed, unpacked
from zephon.windows import AnyTask, StageTask, pointers_of
from zephon.words import many
from zephon_daemon.lane import Lane
from zephon_daemon.scheduler import Work

SHARDS_NAMED = 3


def operators_of(plan: Plan) -> list[str]:
    """The names of the operators that run on workers, as a worker's notes number them from 1."""
    return [operator.name for operator in plan.on_workers]


def samples_of(plan: Plan, task: AnyTask) -> str:
    """A task's samples by shard: "dataset 'web', shard data/0.jsonl, 7 rows from 3 to 9"."""
    pointers = pointers_of(plan, task)
    found: dict[tuple[int, int], list[int]] = {}
    for dataset, shard, row in pointers.tolist():
        span = found.setdefault((dataset, shard), [row, row, 0])
        span[:] = min(span[0], row), max(span[1], row), span[2] + 1
    named = []
    for (dataset, shard), (low, high, count) in list(found.items())[:SHARDS_NAMED]:
        rows = f"row {low}" if low == high else f"{many(count, 'row')} from {low} to {high}"
        named.append(f"{_shard(plan, dataset, shard)}, {rows}")
    more = len(found) - SHARDS_NAMED
    return "; ".join(named) + (f"; and {many(more, 'more shard')}" if more > 0 else "")


def batch_of(plan: Plan, lane: Lane, block: Block, records: int) -> str:
    """The lane's next batch: its place in the lane, and the samples that it was made from."""
    made = ""
    if len(block.samples):
        dataset, shard, row = block.samples[0, :3].tolist()
        first = f"dataset {plan.dataset_names[dataset]!r}, shard {shard}, row {row}"
        made = f", made from {many(len(block.samples), 'sample')}, the first one {first},"
    return f"the batch of records {lane.written} to {lane.written + records - 1} of lane {lane.number}{made}"


def record_of(plan: Plan, task: AnyTask, place: int) -> str:
    """The sample at a place of the lane; empty if it is none of the task's, or not known.

    Of a record of a later stage it is the first that the record was made from.
    """
    if isinstance(task, StageTask):
        return _record_behind(plan, task, place)
    if not task.low <= place < task.high:
        return ""
    if task.pointers:
        one = packed(unpacked(task.pointers)[place - task.low : place - task.low + 1])
        return samples_of(plan, task._replace(low=place, high=place + 1, pointers=one))
    return samples_of(plan, task._replace(low=place, high=place + 1))


def _record_behind(plan: Plan, task: StageTask, place: int) -> str:
    samples: np.ndarray[Any, Any] = task.block.compact_samples().samples
    found = np.flatnonzero(samples[:, 3] == place) if samples.shape[1] == 4 else samples[:0, 0]
    if not len(found):
        return ""
    dataset, shard, row = samples[found[0], :3].tolist()
    return f"{_shard(plan, dataset, shard)}, row {row}"


def given_up(plan: Plan, work: Work, where: str) -> str:
    """Why a run ends with a task that cost too many workers. `where` is what the last one was at."""
    task = work.task
    one = task.high - task.low == 1
    name = "record" if isinstance(task, StageTask) else "sample"
    ends = list(dict.fromkeys(work.deaths[-work.tries :]))
    place = f"{name} {task.low}" if one else f"{name}s {task.low} to {task.high - 1}"
    if isinstance(task, StageTask):
        place += f" in front of {plan.later[task.stage - 1].operators[0].name!r}"
    return (
        f"{work.tries} workers died on the same {'record' if one else 'samples'} ({'; '.join(ends)}): "
        f"{samples_of(plan, task)} (lane {task.lane}, its {place}), last in {where}. "
        f"Look for {'what makes it' if one else 'a record that makes an operator'} crash or take too much memory."
    )


def _shard(plan: Plan, dataset: int, shard: int) -> str:
    source = plan.source.datasets[dataset]
    return f"dataset {plan.dataset_names[dataset]!r}, shard {source.shard_path(shard)}"
