"""A run takes shape in an engine: the recipe's pipeline, with the checkpoint that it starts from, becomes a plan.

User code runs here (the functions that a recipe calls while it is resolved, operators' `setup`), so anything may be
raised; the engine refuses the run with it.
"""

from __future__ import annotations

import warnings

from zephon.budget import Budget
from zephon.explain import never_full
from zephon.frontiers import checkpoint_from_text
from zephon.lanes import check_topology
from zephon.recipe import Recipe
from zephon.transport.protocol import StartRun
from zephon_daemon.ports import LiveRun
from zephon_daemon.ring_memory import check_rings
from zephon_daemon.run import Run
from zephon_daemon.start_check import warnings_from_child


def resolved(recipe: Recipe, order: StartRun, checkpoint: bytes, budget: Budget) -> LiveRun:
    """The run that the daemon orders; nobody works for it yet."""
    pipeline = recipe.pipeline(order.pipeline)
    loaded = checkpoint_from_text(checkpoint) if checkpoint else None
    plan = pipeline.plan(dp_degree=order.dp_degree, checkpoint=loaded, allow_changed=order.allow_changed)
    strategy = pipeline.topology.mapping_strategy
    check_topology(plan.lanes, order.dp_degree, 0, strategy)
    for operator in plan.lane_by_lane:
        operator.setup()
    found = warnings_from_child(plan, [part.whole for part in plan.lane_by_lane])
    for text in found + never_full(plan, loaded.epoch if loaded else 0):
        warnings.warn(text, stacklevel=2)
    run = Run(
        plan,
        dp_degree=order.dp_degree,
        strategy=strategy,
        checkpoint=plan.beginning(loaded) if loaded else None,
        groups=tuple(order.groups),
        slots=pipeline.execution.prefetch_batches,
        ring_bytes=budget.lane_rings,
    )
    check_rings(run, budget)
    live = LiveRun(order.run, order.pipeline, pipeline, run)
    live.careful = order.careful
    live.through = ", ".join(operator.name for operator in plan.lane_by_lane) or "the making of batches"
    return live
