"""What `Pipeline.options` takes, sorted by what it may touch.

Data settings decide the data and form the run's identity (`zephon.plan.DataSettings`). Topology and execution settings
live here and cannot reach the data path.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zephon.arguments import drop_ignored, recipe_level
from zephon.errors import SettingError
from zephon.lanes import CONTIGUOUS, INTERLEAVED
from zephon.plan import DataSettings
from zephon.runners import RUNNERS

IGNORED_OPTIONS = frozenset(
    [
        "run_id",
        "aggregate_dir",
        "aggregate_store",
        "aggregate_timeout_s",
        "aggregate_serializer",
        "aggregate_compressor",
        "mtp_mode",
        "mtp_buffer",
        "mtp_prefetch",
        "mtp_buffer_bytes",
        "mtp_auto_checkpoint",
        "per_stage_runner",
        "per_stage_prefetch",
        "default_stage_prefetch",
        "op_queue_capacity",
        "worker_allocation",
        "mp_context",
        "ipc_transport",
        "ipc_buffer_bytes",
        "shutdown_mode",
        "auto_validation",
        "allow_latency_flush_in_deterministic",
        "io_options",
        "mixture_config",
        "execution_tracking",
        "metrics_sink_config",
        "max_worker_retries",
    ]
)


@dataclass(frozen=True)
class Topology:
    """Where an embedded run stands among the data-parallel groups. Under a daemon the clients say it."""

    dp_degree: int = 1
    dp_group_id: int = 0
    mapping_strategy: str = CONTIGUOUS
    batches_per_step: int | None = None


@dataclass(frozen=True)
class Execution:
    """How a pipeline is executed. Never visible in the data."""

    runner: str = "auto"
    max_workers: int | None = None
    prefetch_batches: int | None = None
    deterministic: bool = True


_TAKEN = (
    ("canonical_replicas", "flush_every_k_chunks", "on_error", "even_ends"),
    ("dp_degree", "dp_group_id", "mapping_strategy", "batches_per_step"),
    ("runner", "max_workers", "prefetch_batches", "deterministic"),
)
OPTIONS = (*(name for names in _TAKEN for name in names), "world_size", "global_rank")
"""All that `options` takes and does not ignore."""


def apply_options(
    data: DataSettings, topology: Topology, execution: Execution, given: Mapping[str, Any]
) -> tuple[DataSettings, Topology, Execution]:
    """The three kinds of settings with the given options in place, checked."""
    left = dict(given)
    if left.get("flush_every_k_chunks") == "auto":
        left["flush_every_k_chunks"] = None
    data_given, topology_given, execution_given = (
        {name: left.pop(name) for name in names if name in left} for names in _TAKEN
    )
    data, topology = replace(data, **data_given), replace(topology, **topology_given)
    execution = replace(execution, **execution_given)
    topology = _ranks_as_groups(topology, left, given)
    drop_ignored("options", left, OPTIONS, IGNORED_OPTIONS)
    _check(data, topology, execution)
    if execution_given.get("deterministic") is False:
        warnings.warn(
            "options(): deterministic=False changes nothing: every way to execute a pipeline keeps the order, at no "
            "cost that giving it up would save",
            stacklevel=recipe_level(),
        )
    return data, topology, execution


def _ranks_as_groups(topology: Topology, left: dict[str, Any], given: Mapping[str, Any]) -> Topology:
    """`world_size` and `global_rank` stand for the groups where those are not given."""
    size, rank = left.pop("world_size", None), left.pop("global_rank", None)
    if size is not None and "dp_degree" not in given:
        topology = replace(topology, dp_degree=size)
    if rank is not None and "dp_group_id" not in given:
        topology = replace(topology, dp_group_id=rank)
    return topology


def _check(data: DataSettings, topology: Topology, execution: Execution) -> None:
    whole_from_1 = {
        "canonical_replicas": data.canonical_replicas,
        "max_workers": execution.max_workers,
        "prefetch_batches": execution.prefetch_batches,
        "batches_per_step": topology.batches_per_step,
    }
    for name, value in whole_from_1.items():
        if value is not None and (type(value) is not int or value < 1):
            raise SettingError(f"{name}={value!r}: must be a whole number from 1")
    for name, value, least in (("dp_degree", topology.dp_degree, 1), ("dp_group_id", topology.dp_group_id, 0)):
        if type(value) is not int or value < least:
            raise SettingError(f"{name}={value!r}: must be a whole number from {least}")
    every = data.flush_every_k_chunks
    if every is not None and (type(every) is not int or every < 0):
        raise SettingError(f'flush_every_k_chunks={every!r}: must be "auto" or a whole number from 0')
    for name, flag in (("even_ends", data.even_ends), ("deterministic", execution.deterministic)):
        if type(flag) is not bool:
            raise SettingError(f"{name}={flag!r}: must be True or False")
    choices = {
        "on_error": (data.on_error, ("raise", "skip")),
        "runner": (execution.runner, RUNNERS),
        "mapping_strategy": (topology.mapping_strategy, (CONTIGUOUS, INTERLEAVED)),
    }
    for name, (choice, allowed) in choices.items():
        if choice not in allowed:
            raise SettingError(f"{name}={choice!r}: must be one of {', '.join(allowed)}")
