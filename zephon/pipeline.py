"""`Pipeline`: a recipe as its author writes it, and its iteration in this very process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from zephon.arguments import drop_ignored
from zephon.embedded import EmbeddedRun, EpochBatches
from zephon.errors import RunFailed, SettingError
from zephon.explain import explain
from zephon.frontiers import Checkpoint, complete_checkpoint
from zephon.lanes import check_step, check_topology, owned_lanes
from zephon.ops.base import Operator
from zephon.ops.decode_text import DecodeText
from zephon.ops.map_transform import MapTransform
from zephon.ops.pack_flat import PackFlat
from zephon.ops.shuffle import Shuffle
from zephon.ops.tokenize import Tokenize
from zephon.options import Execution, Topology, apply_options
from zephon.plan import DataSettings, Plan, resolve
from zephon.runners import Pool, make_pool
from zephon.types import SampleBatch
from zephon.windows import Front
from zephon.work import StaticMixtureWorkSource


class Pipeline:
    """A work source and the operators that its samples go through. Builder methods change it in place and return it.

    Iterating runs it here, as group `dp_group_id` of `dp_degree`; the node daemon runs the same pipeline on workers,
    with the same bytes and checkpoints.
    """

    def __init__(self, work_source: StaticMixtureWorkSource) -> None:
        self.source = work_source
        self.operators: list[Operator] = []
        self.data = DataSettings()
        self.topology = Topology()
        self.execution = Execution()
        self._batched = False
        self._checkpoint: Checkpoint | None = None
        self._allow_changed: Collection[str] = ()
        self._run: EmbeddedRun | None = None

    # Building

    def fetch(self, parallelism: int | None = None, **ignored: Any) -> Pipeline:
        """An execution hint: reading is implicit, and first."""
        drop_ignored("fetch", ignored, ("parallelism",))
        return self._hint("fetch", parallelism)

    def prefetch(self, buffer_size: int = 1024, parallelism: int | None = None, **ignored: Any) -> Pipeline:
        """An execution hint: lanes are produced ahead of the ranks; see `options(prefetch_batches=...)`."""
        drop_ignored("prefetch", ignored, ("buffer_size", "parallelism"))
        if type(buffer_size) is not int or buffer_size < 1:
            raise SettingError(f"prefetch: buffer_size={buffer_size!r}: must be a whole number from 1")
        return self._hint("prefetch", parallelism)

    def decode_text(self, parallelism: int | None = None, **ignored: Any) -> Pipeline:
        """Fields that hold bytes become str. A record whose bytes are no UTF-8 is a bad one."""
        drop_ignored("decode_text", ignored, ("parallelism",))
        return self._add(DecodeText(), parallelism)

    def map_transform(
        self,
        fn: Callable[[dict[str, Any]], dict[str, Any] | None],
        *,
        drop_none: bool = True,
        parallelism: int | None = None,
        **ignored: Any,
    ) -> Pipeline:
        """`fn(payload) -> payload or None` for each record; None drops it.

        `payload` is a dict of the function's own. An exception, another type, or None with `drop_none=False` makes the
        record a bad one. The function's code and the values that it reaches are part of the run's identity.
        """
        drop_ignored("map_transform", ignored, ("fn", "drop_none", "parallelism"))
        return self._add(MapTransform(fn, drop_none=drop_none), parallelism)

    def tokenize(
        self,
        tokenizer: Any = None,
        tokenizer_id: str | os.PathLike[str] | None = None,
        *,
        field: str,
        missing_field: Literal["error", "skip"] = "error",
        add_attention_mask: bool = True,
        max_length: int | None = None,
        truncation: bool = False,
        split_long_samples: bool = False,
        preserve_upstream_payload: bool = False,
        special_tokens: str = "bos_eos",
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        parallelism: int | None = None,
        **ignored: Any,
    ) -> Pipeline:
        """Text in `field` to token ids in `input_ids`, int32 of varying length.

        `tokenizer_id` is a `tokenizer.json`, a folder that holds one, or a hub name; `tokenizer` an object with
        `encode`. `special_tokens`, `max_length` and the other settings: `zephon.ops.tokenize.Tokenize`. Raises
        SettingError, or TokenizerError where the tokenizer cannot be read or does not tell its end token.
        """
        drop_ignored("tokenize", ignored, Tokenize.__init__.__annotations__)
        return self._add(
            Tokenize(
                tokenizer,
                tokenizer_id,
                field=field,
                missing_field=missing_field,
                add_attention_mask=add_attention_mask,
                max_length=max_length,
                truncation=truncation,
                split_long_samples=split_long_samples,
                preserve_upstream_payload=preserve_upstream_payload,
                special_tokens=special_tokens,
                bos_token_id=bos_token_id,
                eos_token_id=eos_token_id,
            ),
            parallelism,
        )

    def pack_flat(self, max_length: int, *, parallelism: int | None = None, **settings: Any) -> Pipeline:
        """Token sequences into sequences of exactly `max_length`: `input_ids` and `positions`, int32 `[max_length]`,
        and `sequence_length`. `zephon.ops.pack_flat.PackFlat` has the settings.
        """
        known = PackFlat.__init__.__annotations__
        ignored = {name: value for name, value in settings.items() if name not in known}
        drop_ignored("pack_flat", ignored, known)
        for operator in self.operators:
            if isinstance(operator, Tokenize):
                operator.add_attention_mask = False  # packing reads tokens only
        return self._add(PackFlat(max_length, **{n: v for n, v in settings.items() if n in known}), parallelism)

    def shuffle(
        self, buffer_size: int = 1024, *, seed: int = 0, algorithm: str = "streaming", **ignored: Any
    ) -> Pipeline:
        """Shuffle the records of each lane: one moves at most about `buffer_size` places, within its window."""
        drop_ignored("shuffle", ignored, ("buffer_size", "seed", "algorithm"))
        return self._add(Shuffle(buffer_size, seed=seed, algorithm=algorithm))

    def batch(self, microbatch_size: int, *, drop_last: bool = True, **ignored: Any) -> Pipeline:
        """Cut each lane into batches of `microbatch_size` records. Comes last.

        With `drop_last=False` the incomplete last round of a finite run comes too: short and empty batches, equally
        many on every rank.
        """
        drop_ignored("batch", ignored, ("microbatch_size", "drop_last"))
        if type(microbatch_size) is not int or microbatch_size < 1:
            raise SettingError(f"microbatch_size={microbatch_size!r}: must be a whole number from 1")
        if type(drop_last) is not bool:
            raise SettingError(f"drop_last={drop_last!r}: must be True or False")
        self._change()
        self.data = replace(self.data, microbatch_size=microbatch_size, drop_last=drop_last)
        self._batched = True
        return self

    def options(self, **options: Any) -> Pipeline:
        """Data settings, topology and execution settings, each by name.

        - Data: `canonical_replicas`, `flush_every_k_chunks` (a number or "auto"), `on_error`, `even_ends`.
        - Topology: `dp_degree`, `dp_group_id`, `world_size`, `global_rank` and `batches_per_step` of an embedded run;
          `mapping_strategy`.
        - Execution: `runner`, `max_workers`, `prefetch_batches`, `deterministic`.

        Raises SettingError for a value that makes no sense, TypeError for an unknown name.
        """
        self._change()
        self.data, self.topology, self.execution = apply_options(self.data, self.topology, self.execution, options)
        return self

    # Running here

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
            self._run.pool.close()
            self._run = None

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._running().settle()

    def explain(self, dp_degree: int | None = None) -> str:
        """The resolved plan as text: stages, lanes, and what each group gets."""
        groups = dp_degree or self.topology.dp_degree
        return explain(self.plan(dp_degree=groups), self.execution, groups, self.topology.mapping_strategy)

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
        workers = self.execution.max_workers or len(os.sched_getaffinity(0))
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
        return self.run(plan, dp_degree=where.dp_degree, group=where.dp_group_id, checkpoint=checkpoint)

    def _add(self, operator: Operator, parallelism: int | None = None) -> Pipeline:
        self._hint(operator.name, parallelism)
        self.operators.append(operator)
        return self

    def _hint(self, name: str, parallelism: int | None) -> Pipeline:
        """Check a step's place and its hint. All workers run all of the front, so there is nothing to keep of it."""
        self._change()
        if parallelism is not None and (type(parallelism) is not int or parallelism < 1):
            raise SettingError(f"{name}: parallelism={parallelism!r}: must be None or a whole number from 1")
        if self._batched:
            raise SettingError(f"{name}() after batch(): batch comes last")
        return self

    def _change(self) -> None:
        if self._run is not None:
            raise SettingError("the pipeline is running: build it first, or close() it before a change")
