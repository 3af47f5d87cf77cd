"""`Pipeline`: a recipe as its author writes it, and its iteration in this very process."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from zephon.builder import Builder
from zephon.cores import allowed_cores
from zephon.custom_source import WorkSource
from zephon.embedded import EmbeddedRun, EpochBatches
from zephon.errors import RecipeError, RunFailed, SettingError
from zephon.explain import explain, never_full
from zephon.extras import needing
from zephon.frontiers import Checkpoint, complete_checkpoint
from zephon.lanes import check_step, check_topology, owned_lanes, rounds_of_step
from zephon.plan import Plan, resolve
from zephon.runners import Pool, make_pool
from zephon.types import SampleBatch
from zephon.validation import ValidationReport, validate_operators
from zephon.windows import Front
from zephon.words import hinting
from zephon.work import StaticMixtureWorkSource

if TYPE_CHECKING:
    from zephon.torch_dataset import TorchDataset


class Pipeline(Builder):
    """A recipe: a work source and the operators that its samples go through. `Builder` has the methods that write it.

    Iterating runs it here, as group `dp_group_id` of `dp_degree`; the node daemon runs the same pipeline on workers,
    with the same bytes and checkpoints.
    """

    def __init__(self, work_source: StaticMixtureWorkSource | WorkSource) -> None:
        super().__init__(work_source)
        self._checkpoint: Checkpoint | None = None
        self._allow_changed: Collection[str] = ()
        self._run: EmbeddedRun | None = None

    def plan(
        self, *, dp_degree: int | None = None, checkpoint: Checkpoint | None = None, allow_changed: Collection[str] = ()
    ) -> Plan:
        """Resolve the run: from this recipe and, if there is one, a checkpoint. Counts the datasets' rows.

        Raises DatasetError, SettingError, or CheckpointMismatch with every difference that is not allowed.
        """
        groups = self.topology.dp_degree if dp_degree is None else dp_degree
        return resolve(
            self.source,
            tuple(self.operators),
            self.data,
            dp_degree=groups,
            checkpoint=checkpoint,
            allow_changed=allow_changed,
        )

    def __iter__(self) -> Iterator[SampleBatch]:
        """The batches of this epoch, or of what is left of it; iterating again starts the next epoch.

        Fields are numpy arrays; `to_training` makes torch tensors once torch is loaded.
        """
        self._running()
        return EpochBatches(self._current)

    def checkpoint(self) -> dict[str, Any]:
        """The state of this run: JSON, of all lanes or (one group of several) of this group's."""
        return self._running().checkpoint()

    @hinting
    def restore(self, ckpt: Mapping[str, Any], *, allow_changed: Collection[str] = ()) -> Pipeline:
        """Go on from a checkpoint, taken here or under the daemon. A run that has begun is left for it.

        One that is refused (`CheckpointError`, `CheckpointMismatch`) changes nothing.
        """
        checkpoint = complete_checkpoint(ckpt)
        run = self._start(checkpoint, allow_changed)
        self.close()
        self._run, self._checkpoint, self._allow_changed = run, checkpoint, allow_changed
        return self

    def close(self) -> None:
        """End the run and all that it started."""
        if self._run is not None:
            self._run.end()
            for operator in self._run.plan.back:
                operator.teardown()
            self._run = None

    def to_torch_dataset(self, stateful: bool = True) -> TorchDataset:
        """This pipeline as a `torch.utils.data.IterableDataset` of dicts of tensors, for `DataLoader(dataset,
        batch_size=None)`.

        With `stateful` it has `state_dict()` and `load_state_dict(state)`. `zephon.torch_dataset` says what an item
        has, and why more than one torch worker is refused (`SettingError`).
        """
        with needing("to_torch_dataset"):
            from zephon.torch_dataset import StatefulTorchDataset, TorchDataset

        return StatefulTorchDataset(self) if stateful else TorchDataset(self)

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._running().settle()

    @property
    def step(self) -> int:
        """Global training steps done since the run's beginning, over its epochs and resumes: rounds, or as many steps
        of `options(batches_per_step=…)` batches as they make.
        """
        run = self._running()
        return run.steps // rounds_of_step(self.topology.batches_per_step, run.lanes)

    def explain(self, dp_degree: int | None = None) -> str:
        """The resolved plan as text: stages, lanes, and what each group gets."""
        groups = dp_degree or self.topology.dp_degree
        return explain(self.plan(dp_degree=groups), self.execution, groups, self.topology.mapping_strategy)

    def validate(self, strict: bool = False) -> ValidationReport:
        """Check the operators that run functions of yours, on a few records of the data: the same input twice gives the
        same output, nothing depends on earlier calls or on other records, no random numbers but the run's own, a flush
        leaves nothing, and all of it can be sent to workers.

        Print the report. With `strict` a finding raises RecipeError.
        """
        report = validate_operators(self.plan())
        if self._run is None:
            for operator in self.operators:
                operator.teardown()
        if strict and not report.ok:
            raise RecipeError(str(report))
        return report

    def run(self, plan: Plan, *, dp_degree: int, group: int, checkpoint: Checkpoint | None = None) -> EmbeddedRun:
        """An embedded run of one group under a resolved plan."""
        strategy = self.topology.mapping_strategy
        warning = check_topology(plan.lanes, dp_degree, group, strategy)
        if warning:
            warnings.warn(warning, stacklevel=3)
        check_step(self.topology.batches_per_step, owned_lanes(plan.lanes, dp_degree, group, strategy))
        pool = self._pool(plan)
        try:
            return EmbeddedRun(plan, pool, dp_degree=dp_degree, group=group, strategy=strategy, checkpoint=checkpoint)
        except BaseException:
            pool.close()
            raise

    def _pool(self, plan: Plan) -> Pool:
        workers = self.execution.max_workers or allowed_cores().count
        return make_pool(self.execution.runner, Front(plan), workers)

    def _current(self) -> EmbeddedRun:
        """The run that an iterator goes on with."""
        if self._run is None:
            raise RunFailed("the pipeline was closed: iterate it anew, or restore() a checkpoint first")
        return self._run

    def _running(self) -> EmbeddedRun:
        if self._run is None:
            self._run = self._start(self._checkpoint, self._allow_changed)
        return self._run

    def _start(self, checkpoint: Checkpoint | None, allow_changed: Collection[str]) -> EmbeddedRun:
        plan, where = self.plan(checkpoint=checkpoint, allow_changed=allow_changed), self.topology
        run = self.run(plan, dp_degree=where.dp_degree, group=where.dp_group_id, checkpoint=checkpoint)
        run.end = end = weakref.finalize(run, _end, run.pool, os.getpid())  # also when it is dropped without `close`
        end.atexit = False
        for text in run.pool.check(plan) + never_full(plan, run.epoch):
            warnings.warn(text, stacklevel=4)
        return run

    def _change(self) -> None:
        if self._run is not None:
            raise SettingError("the pipeline is running: build it first, or close() it before a change")


def _end(pool: Pool, owner: int) -> None:
    """End a run's pool, but never that of the process which this one was forked from."""
    if os.getpid() == owner:
        pool.close()
