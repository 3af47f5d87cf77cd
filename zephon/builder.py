"""How a recipe is written: the methods that add a step to a pipeline, each changing it in place and returning it.

A step is checked when it is added, where the author's line is known; nothing of the data is read here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

from zephon.arguments import drop_ignored, known_settings, spelled
from zephon.custom_source import CustomSource, WorkSource
from zephon.errors import SettingError
from zephon.ops.authoring import Accumulator, BaseOp, OpTraits
from zephon.ops.base import Operator, Stateful
from zephon.ops.custom import FunctionOp, custom
from zephon.ops.decode_text import DecodeText
from zephon.ops.ensure_mixture import EnsureMixture
from zephon.ops.expand_chat import ExpandChat
from zephon.ops.flat_documents import FlatPacker
from zephon.ops.map_batch import MapBatch
from zephon.ops.map_transform import MapTransform
from zephon.ops.pack_flat import PackFlat
from zephon.ops.pack_sequences import PackSequences
from zephon.ops.packing_settings import Packer
from zephon.ops.shuffle import Shuffle
from zephon.ops.stateful_transform import StatefulTransform
from zephon.ops.tokenize import Tokenize
from zephon.ops.tokenize_chat import TokenizeChat
from zephon.options import Execution, Topology, apply_options
from zephon.plan import DataSettings
from zephon.schedules import MixtureSpec
from zephon.types import SampleBatch, SampleRecord
from zephon.work import StaticMixtureWorkSource

B = TypeVar("B", bound="Builder")


class Builder:
    """A work source, the operators that its samples go through, and the settings, as far as they are written."""

    def __init__(self, work_source: StaticMixtureWorkSource | WorkSource) -> None:
        self.source = _adopted(work_source)
        self.operators: list[Operator] = []
        self.data = DataSettings()
        self.topology = Topology()
        self.execution = Execution()
        self._batched = False

    def fetch(self: B, parallelism: int | None = None, **ignored: Any) -> B:
        """An execution hint: reading is implicit, and first."""
        drop_ignored("fetch", ignored, ("parallelism",))
        return self._hint("fetch", parallelism)

    def prefetch(self: B, buffer_size: int = 1024, parallelism: int | None = None, **ignored: Any) -> B:
        """An execution hint: lanes are produced ahead of the ranks; see `options(prefetch_batches=...)`."""
        drop_ignored("prefetch", ignored, ("buffer_size", "parallelism"))
        if type(buffer_size) is not int or buffer_size < 1:
            raise SettingError(f"prefetch: buffer_size={buffer_size!r}: must be a whole number from 1")
        return self._hint("prefetch", parallelism)

    def decode_text(self: B, parallelism: int | None = None, **ignored: Any) -> B:
        """Fields that hold bytes become str. A record whose bytes are no UTF-8 is a bad one."""
        drop_ignored("decode_text", ignored, ("parallelism",))
        return self._add(DecodeText(), parallelism)

    @spelled()
    def map_transform(
        self: B,
        fn: Callable[[dict[str, Any]], dict[str, Any] | None],
        *,
        drop_none: bool = True,
        parallelism: int | None = None,
        **ignored: Any,
    ) -> B:
        """`fn(payload) -> payload or None` for each record; None drops it.

        `payload` is a dict of the function's own. An exception, another type, or None with `drop_none=False` makes the
        record a bad one. The function's code and the values that it reaches are part of the run's identity.
        """
        drop_ignored("map_transform", ignored, ("fn", "drop_none", "parallelism"))
        return self._add(MapTransform(fn, drop_none=drop_none), parallelism)

    @spelled()
    def stateful_transform(
        self: B,
        name: str,
        *,
        init_state: Any,
        push: Callable[[Any, list[SampleRecord]], tuple[Any, list[SampleRecord]]],
        flush: Callable[[Any], list[SampleRecord]] | None = None,
        should_flush: Callable[[Any], bool] | None = None,
        transform: Callable[[list[SampleRecord]], list[SampleRecord]] | None = None,
        parallelism: int = 1,
        preserves_cursor_order: bool = True,
        **ignored: Any,
    ) -> B:
        """Functions with a state, one for each window of each lane.

        `push(state, records) -> (state, records)` takes every 64 records of the window; `flush(state) -> records` gives
        the rest at its end, and after any push of which `should_flush(state)` says so; `transform(records) -> records`
        works on what comes out. `init_state` is a function that makes a state, or a value to copy. See
        `zephon.ops.stateful_transform`. With `parallelism` from 2 on `transform` runs on workers. Raises SettingError.
        """
        drop_ignored("stateful_transform", ignored, (*StatefulTransform.__init__.__annotations__, "parallelism"))
        self._ask_for_token_counts()
        return self._add(
            StatefulTransform(
                name,
                init_state=init_state,
                push=push,
                flush=flush,
                should_flush=should_flush,
                transform=transform,
                preserves_cursor_order=preserves_cursor_order,
            ),
            parallelism,
        )

    @spelled()
    def add_op(
        self: B,
        op: BaseOp | str,
        *,
        process_many: Callable[[list[SampleRecord]], list[SampleRecord]] | None = None,
        process_one: Callable[[SampleRecord], list[SampleRecord]] | None = None,
        preserves_cursor_order: bool = True,
        accumulator: Accumulator | Callable[[], Accumulator] | None = None,
        parallelism: int = 1,
        batch_shape_sensitive: bool = False,
        requires_serial_state: bool = False,
        setup: Callable[[Any], None] | None = None,
        teardown: Callable[[], None] | None = None,
        validation_samples: Callable[[], Sequence[SampleRecord]] | None = None,
        **ignored: Any,
    ) -> B:
        """A custom operator: an instance of a `zephon.ops.BaseOp`, or a name with functions.

        `process_many(records) -> records` works on groups whose borders the lane's records alone decide (at most 64, or
        what the accumulator gives); `process_one(record) -> records` on each alone. They run on workers; behind an
        operator that holds records with `parallelism` from 2 on. `zephon.ops.OpTraits` has the other settings. Raises
        SettingError.
        """
        functions = {
            "process_many": process_many, "process_one": process_one, "accumulator": accumulator, "setup": setup,
            "teardown": teardown, "validation_samples": validation_samples,
        }  # fmt: skip
        drop_ignored("add_op", ignored, Builder.add_op.__annotations__)
        if isinstance(op, str):
            traits = OpTraits(preserves_cursor_order, parallelism, batch_shape_sensitive, requires_serial_state)
            op = FunctionOp(op, traits=traits, **functions)  # type: ignore[arg-type]
        elif given := [name for name, function in functions.items() if function is not None]:
            raise SettingError(f"add_op: {given[0]} belongs to add_op(name, ...); an operator has methods of its own")
        self._ask_for_token_counts()
        operator = custom(op, behind=any(isinstance(other, Stateful) for other in self.operators))
        return self._add(operator, operator.parallelism)

    @spelled()
    def tokenize(
        self: B,
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
    ) -> B:
        """Text in `field` to token ids in `input_ids`, int32 of varying length.

        `tokenizer_id` is a `tokenizer.json`, a folder that holds one, or a hub name; `tokenizer` an object with
        `encode`. `special_tokens`, `max_length` and the other settings: `zephon.ops.tokenize.Tokenize`. Raises
        SettingError, or TokenizerError where the tokenizer cannot be read or does not tell its end token.
        """
        drop_ignored("tokenize", ignored, (*Tokenize.__init__.__annotations__, "parallelism"))
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

    def tokenize_chat(
        self: B,
        tokenizer: Any = None,
        tokenizer_id: str | os.PathLike[str] | None = None,
        *,
        field: str = "messages",
        chat_template: str | os.PathLike[str] | None = None,
        max_length: int | None = None,
        loss_scope: Literal["all_assistant", "last_span", "after_last_user"] = "all_assistant",
        tools_field: str | None = "tools",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mask_field_out: str = "loss_mask",
        preserve_upstream_payload: bool = False,
        parallelism: int | None = None,
        **ignored: Any,
    ) -> B:
        """Conversations in `field` to token ids in `input_ids`, int32 of varying length, and a mask as long in
        `mask_field_out`, float32: 1 for the tokens that are learnt.

        `chat_template` is a Jinja template, the path of a `.jinja` file, or the name of one of the tokenizer's; None is
        the tokenizer's own. The settings: `zephon.ops.tokenize_chat.TokenizeChat`. Raises SettingError, or
        TokenizerError where the tokenizer cannot be read.
        """
        drop_ignored("tokenize_chat", ignored, (*TokenizeChat.__init__.__annotations__, "parallelism"))
        return self._add(
            TokenizeChat(
                tokenizer,
                tokenizer_id,
                field=field,
                chat_template=chat_template,
                max_length=max_length,
                loss_scope=loss_scope,
                tools_field=tools_field,
                chat_template_kwargs=chat_template_kwargs,
                mask_field_out=mask_field_out,
                preserve_upstream_payload=preserve_upstream_payload,
            ),
            parallelism,
        )

    def expand_chat(self: B, field: str = "messages", **ignored: Any) -> B:
        """Each conversation in `field` to one record for each turn of the assistant: the messages through that turn."""
        drop_ignored("expand_chat", ignored, ("field",))
        return self._add(ExpandChat(field))

    @spelled(PackFlat, Packer)
    def pack_flat(self: B, max_length: int, *, parallelism: int | None = None, **settings: Any) -> B:
        """Token sequences into sequences of exactly `max_length`: `input_ids` and `positions`, int32 `[max_length]`,
        and `sequence_length`. Settings: `zephon.ops.packing_settings.Packer`, and `pad_token_id`, `emit_positions`.
        Raises SettingError.
        """
        settings = known_settings("pack_flat", settings, PackFlat, Packer)
        for operator in self.operators:
            if isinstance(operator, Tokenize):
                operator.add_attention_mask = False  # packing reads tokens only
        return self._add(PackFlat(max_length, **settings), parallelism)

    @spelled(PackSequences, Packer)
    def pack_sequences(self: B, max_length: int, *, parallelism: int | None = None, **settings: Any) -> B:
        """Records into sequences of at most `max_length`, each record kept whole: `packed_samples`, a list of payloads,
        and `sequence_length`. Settings: `zephon.ops.packing_settings.Packer`, and `length_fn`. Raises SettingError.
        """
        settings = known_settings("pack_sequences", settings, PackSequences, Packer)
        return self._add(PackSequences(max_length, **settings), parallelism)

    def ensure_mixture(
        self: B,
        *,
        max_buffer_size: int | None = 1000,
        weight_by: str | Callable[[dict[str, Any]], float] = "auto",
        warn_tolerance: float | None = None,
        mixture: MixtureSpec | Mapping[str, int | float] | None = None,
        drain_target_ratio: float = 0.8,
        **ignored: Any,
    ) -> B:
        """Reorder the records of each lane so that the output keeps the mixture, within a buffer of `max_buffer_size`;
        None: drop what there is too much of instead. Settings: `zephon.ops.ensure_mixture.EnsureMixture`. Raises
        SettingError.
        """
        drop_ignored("ensure_mixture", ignored, EnsureMixture.__init__.__annotations__)
        self._ask_for_token_counts()
        return self._add(
            EnsureMixture(
                max_buffer_size=max_buffer_size,
                weight_by=weight_by,
                warn_tolerance=warn_tolerance,
                mixture=mixture,
                drain_target_ratio=drain_target_ratio,
            )
        )

    def shuffle(
        self: B, buffer_size: int = 1024, *, seed: int = 0, algorithm: str = "streaming", **ignored: Any
    ) -> B:
        """Shuffle the records of each lane: one moves at most about `buffer_size` places, within its window."""
        drop_ignored("shuffle", ignored, ("buffer_size", "seed", "algorithm"))
        return self._add(Shuffle(buffer_size, seed=seed, algorithm=algorithm))

    @spelled()
    def batch(self: B, microbatch_size: int, *, drop_last: bool = True, **ignored: Any) -> B:
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

    @spelled()
    def map_batch(
        self: B,
        fn: Callable[[SampleBatch], Any],
        *,
        drop_none: bool = True,
        parallelism: int | None = None,
        **ignored: Any,
    ) -> B:
        """`fn(batch) -> batch`, a mapping from field to array, or None, on each batch; after `batch()`.

        `batch` is a `SampleBatch` in memory of its own. None makes the batch empty; it still takes its turn, and lanes
        are counted in the records that went in. The microbatch size becomes part of the run's identity.
        """
        drop_ignored("map_batch", ignored, ("fn", "drop_none", "parallelism"))
        if not self._batched:
            raise SettingError("map_batch() before batch(): it works on batches, so call batch(...) first")
        self._change()
        _check_hint("map_batch", parallelism)
        self.operators.append(MapBatch(fn, drop_none=drop_none))
        return self

    def options(self: B, **options: Any) -> B:
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

    def _ask_for_token_counts(self) -> None:
        """What is added next may look at the tokens of each dataset in a packed sequence."""
        for operator in self.operators:
            if isinstance(operator, FlatPacker):
                operator.counts_tokens = True

    def _add(self: B, operator: Operator, parallelism: int | None = None) -> B:
        self._hint(operator.name, parallelism)
        operator.parallelism = parallelism
        self.operators.append(operator)
        return self

    def _hint(self: B, name: str, parallelism: int | None) -> B:
        """Check a step's place and its hint."""
        self._change()
        _check_hint(name, parallelism)
        if self._batched:
            raise SettingError(f"{name}() after batch(): batch comes last")
        return self

    def _change(self) -> None:
        """Called before every change; whoever cannot be changed any more raises."""


def _check_hint(name: str, parallelism: int | None) -> None:
    if parallelism is not None and (type(parallelism) is not int or parallelism < 1):
        raise SettingError(f"{name}: parallelism={parallelism!r}: must be None or a whole number from 1")


def _adopted(work_source: Any) -> StaticMixtureWorkSource | CustomSource:
    """A recipe's work source as a plan holds it."""
    if isinstance(work_source, StaticMixtureWorkSource):
        return work_source
    if isinstance(work_source, WorkSource):
        return CustomSource(work_source)
    raise SettingError(
        f"Pipeline(work_source) is {work_source!r:.200}. Allowed: a StaticMixtureWorkSource, or an instance of a "
        "subclass of zephon.WorkSource."
    )
