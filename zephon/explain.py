"""A resolved plan as text for people."""

from __future__ import annotations

import json
from collections.abc import Mapping

from zephon.budget import Budget
from zephon.cores import allowed_cores
from zephon.custom_source import CustomSource
from zephon.engines import described_engines
from zephon.first_rows import looked_at
from zephon.lanes import check_topology, owned_lanes
from zephon.ops.base import Operator
from zephon.ops.pack_flat import PackFlat
from zephon.options import Execution
from zephon.plan import Plan
from zephon.schedules import MixtureSchedule
from zephon.transport.rings import ring_shape
from zephon.words import many

REPLAY = "a resume works through at most one window of each lane again, and delivers nothing twice"


def explain(plan: Plan, execution: Execution, groups: int, strategy: str) -> str:
    """What the run is: sources, stages and where they run, windows, and the lanes of each group."""
    warning = check_topology(plan.lanes, groups, 0, strategy)
    lines = [f"run: seed {plan.seed}, {many(plan.lanes, 'lane')}, {_total(plan)}"]
    if isinstance(plan.source, CustomSource):
        lines.append(f"  work source {plan.source.name}, asked for chunks where the lanes are produced")
    held, wrong = looked_at(plan)
    for dataset in plan.source.datasets:
        about = f"{many(dataset.total, 'row')} in {many(dataset.shard_count, 'shard')}{_weight(plan, dataset.name)}"
        lines += [f"  dataset {dataset.name}: {about}", f"    fields of its first rows: {held[dataset.name]}"]
    lines += _schedule(plan)
    fields = "all fields" if plan.fields is None else ", ".join(sorted(plan.fields))
    lines.append(f"stages: read ({fields})")
    for operator in plan.operators:
        settings = {k: v for k, v in operator.describe().items() if v is not None}
        said = json.dumps(settings, sort_keys=True, default=str)
        lines.append(f"  {operator.name} [{_where(plan, operator)}] {said}")
    tail = "" if plan.settings.drop_last else ", last ones short"
    lines.append(f"  batch of {many(plan.microbatch_size, 'record')} of one lane{tail}")
    lines.append(f"windows: {_windows(plan)}")
    cores = allowed_cores()
    lines.append(f"execution: runner {execution.runner}, {many(execution.max_workers or cores.count, 'worker')}")
    bound = f"as many as cores allowed, limited by {cores.limited_by}"
    lines.append(f"  under a daemon: {many(cores.count, 'worker')} (--workers; {bound})")
    budget = Budget.of(None, cores.count)
    lines.append(f"memory: {_memory(plan, execution, budget)}")
    lines.append(f"  under a daemon: {budget.describe()}")
    lines.append(f"engines: under a daemon {described_engines(cores.count, cores.count, groups)}")
    for group in range(groups):
        lines.append(f"  group {group} of {groups}: lanes {owned_lanes(plan.lanes, groups, group, strategy)}")
    lines.append(_ends(plan))
    lines += [f"warning: {text}" for text in (warning, *never_full(plan, 0), *wrong) if text]
    return "\n".join(lines)


def never_full(plan: Plan, epoch: int) -> list[str]:
    """What to warn of where the rows alone say that no rank gets a batch in the epoch; nothing where they do not.

    With `on_error="skip"` lanes may have fewer records than samples, never more.
    """
    if not plan.settings.drop_last or any(operator.changes_counts for operator in plan.operators):
        return []
    samples, size = _samples(plan, epoch), plan.microbatch_size
    if samples is None or (min if plan.settings.even_ends else max)(samples.values()) >= size:
        return []
    lane = min(samples, key=samples.__getitem__)
    text = (
        f"no rank gets a batch: a round takes {many(size, 'record')} of each lane, and lane {lane} of {plan.lanes} has "
        f"{many(samples[lane], 'sample')} in epoch {epoch}. Use fewer lanes, a smaller microbatch_size, or "
        "batch(..., drop_last=False)."
    )
    return [text]


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
    """About how many bytes a batch will have, where packing says so beforehand: its token ids, and little besides.

    Of positions the documents' lengths travel, and of its samples the names; how many there are is not known before.
    """
    packs = [op for op in plan.operators if isinstance(op, PackFlat)]
    return plan.microbatch_size * (packs[-1].max_length * 4 + 4) if packs else None


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
    return share if tokens is None else f"{share}, {tokens:g} token{'s' * (tokens != 1)} a sample"


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


def _samples(plan: Plan, epoch: int = 0) -> dict[int, int] | None:
    """The samples of each lane in an epoch; None if that is not known, or there is no end to them."""
    if isinstance(plan.source, CustomSource):
        return None
    curriculum = plan.curriculum(epoch)
    samples = {lane: curriculum.lane_samples(lane) for lane in range(plan.lanes)}
    return None if None in samples.values() else {lane: count or 0 for lane, count in samples.items()}


def _windows(plan: Plan) -> str:
    """How long windows are, and what a resume does again."""
    if not plan.chunk_size:
        return f"{many(plan.flush_every, 'chunk')}, each as long as the source makes it; {REPLAY}"
    length = f"{many(plan.flush_every, 'chunk')} of {many(plan.chunk_size, 'sample')}"
    samples = _samples(plan)
    if samples is None or plan.flush_every == 1 or max(samples.values()) > plan.chunk_size * plan.flush_every:
        return f"{length}; {REPLAY}"
    most = max(samples.values())
    return f"{length}, more than a lane has in an epoch ({most}), so each epoch is one window; {REPLAY}"


def _ends(plan: Plan) -> str:
    if plan.ends(0) is False:
        return "ends: never"
    how = "evenly on all ranks" if plan.settings.even_ends else "each rank with its own lanes"
    if isinstance(plan.source, CustomSource):
        return f"ends: {how}, at a step known only when the source of a lane comes to its end"
    samples = _samples(plan)
    if plan.lane_totals(0) is not None and samples is not None:
        return f"ends: {_rounds(plan, samples)}"
    why = "operators change counts" if any(op.changes_counts for op in plan.operators) else "bad records are skipped"
    about = "" if plan.packed or samples is None else f". With one record a sample: {_rounds(plan, samples)}"
    return f"ends: {how}; {why}, so at a step known only when a lane runs out{about}"


def _rounds(plan: Plan, totals: Mapping[int, int]) -> str:
    """After how many rounds an epoch ends whose lanes have so many records, and what it leaves out."""
    size, whole = plan.microbatch_size, sum(totals.values())
    if not plan.settings.even_ends:
        few, most = min(totals.values()), max(totals.values())
        return f"each rank with its own lanes, which have {few} to {many(most, 'record')} each"
    if not plan.settings.drop_last:
        rounds = max(-(-total // size) for total in totals.values())
        short = rounds * size * plan.lanes - whole
        rest = f", batches of the last ones {many(short, 'record')} short in all" if short else ""
        return f"after {many(rounds, 'round')} on every rank{rest}"
    lane = min(totals, key=totals.__getitem__)
    rounds = totals[lane] // size
    if not rounds:
        return (
            f"before its first round, which takes {many(size, 'record')} of each lane: lane {lane} has {totals[lane]}. "
            "Use fewer lanes, a smaller microbatch_size, or batch(..., drop_last=False)"
        )
    left = whole - rounds * size * plan.lanes
    rest = f", leaving out {many(left, 'record')} of the incomplete last round" if left else ""
    return f"after {many(rounds, 'round')} on every rank{rest}"
