"""`zephon verify`: proof by experiment that a recipe delivers the same global steps on any number of groups.

An uninterrupted run with one group is the measure. Then each topology of a list runs for half of the steps and some
batches of the next, is stopped, and is resumed on the next topology of the list, with samples handed out in pieces of
another size; every batch of every step is compared by digest. Nothing is kept between these runs, so that a function
which is not a function of its record alone (random numbers, the clock, a counter) shows.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zephon.batches import Batch
from zephon.custom_source import CustomSource
from zephon.embedded import EmbeddedRun
from zephon.errors import SettingError, ZephonError
from zephon.frontiers import complete_checkpoint, merge_checkpoints
from zephon.pipeline import Pipeline
from zephon.plan import Plan
from zephon.recipe import load_recipe
from zephon.runners import InlinePool, Pool
from zephon.skips import Skips, add_skips, in_words
from zephon.windows import TASK_SAMPLES, Front
from zephon.words import many

TOPOLOGIES = (8, 4, 2, 1)
STEPS = 32
TASK_SIZES = (TASK_SAMPLES, 96, 31)
COARSE_CLOCK_S = 1.05
"""Waited once where the recipe has functions of its own: longer than a clock read in whole seconds takes to move on."""

SAMPLES = "samples"
Fingerprint = Mapping[str, str]
Steps = dict[tuple[int, int], "Seen"]
"""By step and lane."""


@dataclass(frozen=True)
class Seen:
    """What was delivered at one step of one lane."""

    fields: Fingerprint
    first_record: int
    samples: tuple[Any, ...]


@dataclass(frozen=True)
class Difference:
    """The first place at which a run left the measure."""

    step: int
    """Numbered from 1, as a training loop counts."""
    lane: int
    field: str
    groups: tuple[int, int]
    """Before and after the stop."""
    text: str


@dataclass(frozen=True)
class Leg:
    """One topology, stopped and resumed on another."""

    groups: tuple[int, int]
    steps: int
    difference: Difference | None


@dataclass(frozen=True)
class Report:
    """What was compared, and the first difference if there is one."""

    lanes: int
    steps: int
    legs: tuple[Leg, ...]
    notes: tuple[str, ...] = field(default=())
    skips: Skips = field(default_factory=dict)
    """Bad records that the uninterrupted run left out, by dataset and operator, in the windows that it produced."""

    @property
    def ok(self) -> bool:
        return self.difference is None

    @property
    def difference(self) -> Difference | None:
        found = [leg.difference for leg in self.legs if leg.difference is not None]
        return min(found, key=lambda d: (d.step, d.lane), default=None)

    def __str__(self) -> str:
        compared = f"{many(self.steps, 'global step')} on {many(self.lanes, 'lane')}"
        lines = [f"{compared}, against an uninterrupted run with 1 group"]
        lines += [f"{'groups':>8}  {'resumed on':>10}  {'steps':>5}  same"]
        for leg in self.legs:
            same = "yes" if leg.difference is None else f"no, from step {leg.difference.step}"
            lines.append(f"{leg.groups[0]:>8}  {leg.groups[1]:>10}  {leg.steps:>5}  {same}")
        lines += [f"note: {note}" for note in self.notes]
        if self.skips:
            lines.append(f"bad records left out in these steps' windows: {in_words(self.skips)}")
        lines.append("every global step is the same" if self.difference is None else self.difference.text)
        return "\n".join(lines)


def fingerprint(batch: Batch) -> Fingerprint:
    """Digests of a batch by field, and of the samples that it was made from."""
    prints = {name: batch.field_digest(name) for name in batch}
    block = batch.block.compact_samples()
    whole = hashlib.blake2b(block.samples.tobytes(), digest_size=16)
    if block.sample_offsets is not None:
        whole.update(block.sample_offsets.tobytes())
    return {**prints, SAMPLES: whole.hexdigest()}


def differing_field(one: Fingerprint, other: Fingerprint) -> str | None:
    """The first field in which two batches differ; the samples if those differ, since all else follows from them."""
    names = [SAMPLES, *dict.fromkeys([*one, *other])]
    return next((name for name in names if one.get(name) != other.get(name)), None)


def verify(
    recipe: Pipeline | str,
    dp: Sequence[int] | None = None,
    steps: int | None = None,
) -> Report:
    """Run a recipe (a pipeline, or `recipe.py[:name]`) under each topology and compare every global step."""
    pipeline = load_recipe(recipe).pipeline() if isinstance(recipe, str) else recipe
    for name, value in (("steps", 1 if steps is None else steps), *(("dp", groups) for groups in dp or ())):
        if type(value) is not int or value < 1:
            raise SettingError(f"verify: {name}={value!r}: must be a whole number from 1")
    wanted = list(dict.fromkeys(TOPOLOGIES if dp is None else dp))
    plan = pipeline.plan(dp_degree=max(wanted))
    possible = [groups for groups in wanted if groups <= plan.lanes]
    verb = "serves" if plan.lanes == 1 else "serve"
    most = f"{many(plan.lanes, 'lane')} {verb} at most {many(plan.lanes, 'group')}"
    notes = [
        f"dp {g} left out: {most}" for g in wanted if g not in possible
    ]
    if not possible:
        raise SettingError(f"verify: dp={wanted}: {most}")
    strategy = pipeline.topology.mapping_strategy
    measure = _run(plan, 1, strategy, TASK_SIZES[0], None)
    expected: Steps = dict(_steps(plan, measure, steps or STEPS))
    count = len({step for step, _ in expected})
    if not count:
        raise SettingError("verify: the run has no full step to compare; use fewer lanes or a smaller microbatch_size")
    if isinstance(plan.source, CustomSource) or any(op.users_code or op in plan.on_batches for op in plan.operators):
        time.sleep(COARSE_CLOCK_S)
    skips: Skips = {}
    for run in measure:
        add_skips(skips, run.skips)
    legs = []
    for number, groups in enumerate(possible):
        then = possible[(number + 1) % len(possible)]
        size = TASK_SIZES[(number + 1) % len(TASK_SIZES)]
        legs.append(_leg(plan, strategy, (groups, then), size, count, expected))
    return Report(plan.lanes, count, tuple(legs), tuple(notes), skips)


def main(recipe: str, dp: list[int] | None = None, steps: int | None = None) -> int:
    """The command: prints the report; 0 if every step is the same, else 1."""
    report = verify(recipe, dp, steps)
    sys.stdout.write(f"{report}\n")
    return 0 if report.ok else 1


def _leg(plan: Plan, strategy: str, groups: tuple[int, int], task_samples: int, count: int, expected: Steps) -> Leg:
    """One stop and resume. Ends at the first difference."""
    state: dict[str, Any] | None = None
    seen: Steps = {}
    half = count // 2

    def missing() -> list[tuple[int, int]]:
        """Empty ones do not count: a group by itself ends with its own lanes."""
        return [at for at, batch in expected.items() if at not in seen and batch.samples]

    try:
        for dp, goal, extra in ((groups[0], half, 1), (groups[1], count, 0)):
            run = _run(plan, dp, strategy, task_samples, state)
            for at, batch in _steps(plan, run, goal, extra):
                seen[at] = batch
                difference = _difference(groups, at, expected.get(at), batch)
                if difference is not None:
                    return Leg(groups, count, difference)
            state = json.loads(json.dumps(merge_checkpoints([group.checkpoint() for group in run])))
    except ZephonError as error:
        step, lane = min(missing(), default=(count - 1, 0))
        text = f"step {step + 1}, lane {lane}: {_where(groups)} failed, the uninterrupted run did not: {error}"
        return Leg(groups, count, Difference(step + 1, lane, "", groups, text))
    gone = min(missing(), default=None)
    return Leg(groups, count, None if gone is None else _difference(groups, gone, expected[gone], None))


def _run(plan: Plan, dp: int, strategy: str, task_samples: int, state: dict[str, Any] | None) -> list[EmbeddedRun]:
    """All groups of a run, in this process."""
    checkpoint = None if state is None else complete_checkpoint(state)
    pool: Pool = InlinePool(Front(plan))
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # that a group ends with its own lanes: no run goes to the end here
        return [
            EmbeddedRun(
                plan,
                pool,
                dp_degree=dp,
                group=group,
                strategy=strategy,
                checkpoint=checkpoint,
                task_samples=task_samples,
                tell=lambda _: None,
            )
            for group in range(dp)
        ]


def _steps(plan: Plan, groups: list[EmbeddedRun], goal: int, extra: int = 0) -> Iterator[tuple[tuple[int, int], Seen]]:
    """The batches of all groups up to the end of step `goal`, by step and lane; then `extra` of the first group."""
    size = plan.microbatch_size
    for end in range(size, goal * size + 1, size):
        for run in groups:
            while min(run.turns.stands.values()) < end and (batch := run.next_batch()) is not None:
                yield (run.turns.stands[batch.lane] // size - 1, batch.lane), _seen(batch)
    for _ in range(extra):
        if (batch := groups[0].next_batch()) is not None:
            yield (groups[0].turns.stands[batch.lane] // size - 1, batch.lane), _seen(batch)


def _seen(batch: Batch) -> Seen:
    return Seen(fingerprint(batch), batch.first_record, tuple(map(str, batch.samples)))


def _difference(
    groups: tuple[int, int], at: tuple[int, int], one: Seen | None, other: Seen | None
) -> Difference | None:
    name = differing_field(one.fields if one else {}, other.fields if other else {})
    if name is None:
        return None
    what = (
        f"field {name!r} differs" if one and other else "the batch is missing" if one else "the batch is one too many"
    )
    known = one or other
    where = f"record {known.first_record} of the lane on" if known else ""
    made_from = f", made from {known.samples[0]}" if known and known.samples else ""
    return Difference(
        at[0] + 1,
        at[1],
        name,
        groups,
        f"first difference: step {at[0] + 1}, lane {at[1]}, {what} (from {where}{made_from}), {_where(groups)}. Look "
        "for a function that is not one of its record alone: random numbers, the clock, a counter, or what it kept",
    )


def _where(groups: tuple[int, int]) -> str:
    return f"with {many(groups[0], 'group')} resumed on {groups[1]}"
