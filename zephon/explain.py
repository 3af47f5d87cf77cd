"""A resolved plan as text for people."""

from __future__ import annotations

import json
import os

from zephon.budget import Budget
from zephon.custom_source import CustomSource
from zephon.engines import described_engines
from zephon.lanes import check_topology, owned_lanes
from zephon.ops.base import Operator
from zephon.ops.pack_flat import PackFlat
from zephon.options import Execution
from zephon.plan import Plan
from zephon.schedules import MixtureSchedule
from zephon.transport.rings import ring_shape
from zephon.words import many


def explain(plan: Plan, execution: Execution, groups: int, strategy: str) -> str:
    """What the run is: sources, stages and where they run, windows, and the lanes of each group."""
    warning = check_topology(plan.lanes, groups, 0, strategy)
    lines = [f"run: seed {plan.seed}, {many(plan.lanes, 'lane')}, {_total(plan)}"]
    if isinstance(plan.source, CustomSource):
        lines.append(f"  work source {plan.source.name}, asked for chunks where the lanes are produced")
    for dataset in plan.source.datasets:
        about = f"{many(dataset.total, 'row')} in {many(dataset.shard_count, 'shard')}{_weight(plan, dataset.name)}"
        lines.append(f"  dataset {dataset.name}: {about}")
    lines += _schedule(plan)
    fields = "all fields" if plan.fields is None else ", ".join(sorted(plan.fields))
    lines.append(f"stages: read ({fields})")
    for operator in plan.operators:
        settings = {k: v for k, v in operator.describe().items() if v is not None}
        said = json.dumps(settings, sort_keys=True, default=str)
        lines.append(f"  {operator.name} [{_where(plan, operator)}] {said}")
    tail = "" if plan.settings.drop_last else ", last ones short"
    lines.append(f"  batch of {many(plan.microbatch_size, 'record')} of one lane{tail}")
    length = f" of {many(plan.chunk_size, 'sample')}" if plan.chunk_size else ", each as long as the source makes it"
    lines.append(f"windows: {many(plan.flush_every, 'chunk')}{length}; a resume repeats at most one window a lane")
    lines.append(f"execution: runner {execution.runner}, workers {execution.max_workers or 'as many as cores'}")
    cores = len(os.sched_getaffinity(0))
    budget = Budget.of(None, execution.max_workers or cores)
    lines.append(f"memory: {_memory(plan, execution, budget)}")
    lines.append(f"  under a daemon: {budget.describe()}")
    lines.append(f"engines: under a daemon {described_engines(cores, cores, groups)}")
    for group in range(groups):
        lines.append(f"  group {group} of {groups}: lanes {owned_lanes(plan.lanes, groups, group, strategy)}")
    lines.append(_ends(plan))
    if warning:
        lines.append(f"warning: {warning}")
    return "\n".join(lines)


def _where(plan: Plan, operator: Operator) -> str:
    """Where an operator, or each part of it, runs."""
    if operator in plan.front:
        return "workers"
    places = []
    for part in operator.parts:
        stages = [number for number, stage in enumerate(plan.later, 2) if part in stage.operators]
        workers = [f"workers, stage {number}, {plan.later[number - 2].parallelism} at once" for number in stages]
        places += workers or ["engine"]
    return "; ".join(places)


def packed_batch_bytes(plan: Plan) -> int | None:
    """About how many bytes a batch will have, where packing says so beforehand."""
    packs = [op for op in plan.operators if isinstance(op, PackFlat)]
    if not packs:
        return None
    columns = 2 if packs[-1].emit_positions else 1
    return plan.microbatch_size * (packs[-1].max_length * 4 * columns + 4)


def _memory(plan: Plan, execution: Execution, budget: Budget) -> str:
    """What the lanes' rings will take under a daemon."""
    batch = packed_batch_bytes(plan)
    if batch is None:
        return "a ring for each lane, sized by its first batch"
    slot_bytes, slots = ring_shape(batch, execution.prefetch_batches, budget.lane_rings // (2 * plan.lanes))
    total = slot_bytes * slots * plan.lanes / 2**20
    rings = f"{many(plan.lanes, 'lane')}, {many(slots, 'slot')} of {slot_bytes >> 10} KiB each"
    return f"rings of about {total:.1f} MiB in all: {rings}"


def _weight(plan: Plan, name: str) -> str:
    """A dataset's weight, and what is known of its tokens."""
    weight, tokens = (plan.identity["mixture"] or {}).get(name), (plan.estimates or {}).get(name)
    share = f", weight {weight:g}" if isinstance(weight, (int, float)) else ""
    if plan.estimates is not None and share:
        share += " by tokens"
    return share if tokens is None else f"{share}, {tokens:g} tokens a sample"


def _schedule(plan: Plan) -> list[str]:
    """The points of a mixture that changes along the epoch."""
    mixture = None if isinstance(plan.source, CustomSource) else plan.source.mixture
    if not isinstance(mixture, MixtureSchedule):
        return []
    kind = " by tokens" if plan.estimates is not None else ""
    lines = []
    for position, weights, *how in mixture.given:
        where = f"{position:.4g} of the epoch" if isinstance(position, float) else f"sample {position}"
        what = f"at {where}, in a straight line" if how else f"from {where}"
        shares = ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
        lines.append(f"  mixture{kind} {what}: {shares}")
    return lines


def _total(plan: Plan) -> str:
    if plan.ends(0) is False:
        return "endless"
    if isinstance(plan.source, CustomSource):
        return "as many samples an epoch as the work source hands out"
    return f"{many(plan.curriculum(0).total or 0, 'sample')} an epoch"


def _ends(plan: Plan) -> str:
    if plan.ends(0) is False:
        return "ends: never"
    if isinstance(plan.source, CustomSource):
        return "ends: evenly on all ranks, at a step known only when the source of a lane comes to its end"
    totals = plan.lane_totals(0)
    if totals is None:
        return "ends: evenly on all ranks; operators change counts, so at a step known only when a lane runs out"
    each = [total // plan.microbatch_size for total in totals.values()]
    rounds = min(each) if plan.settings.drop_last else max(-(-t // plan.microbatch_size) for t in totals.values())
    left = sum(totals.values()) - rounds * plan.microbatch_size * plan.lanes
    out = plan.settings.drop_last and left > 0
    rest = f", leaving out {many(left, 'record')} of the incomplete last round" if out else ""
    return f"ends: after {many(rounds, 'round')} on every rank{rest}"
