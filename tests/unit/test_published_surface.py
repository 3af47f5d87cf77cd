"""The published surface: every name, argument and default that recipes, trainers and dashboards are written against.

The tables here are the contract. A recipe of the published documentation must build as it stands: what steers
mechanisms that Zephon does not have is ignored with one warning, anything else unknown is a `TypeError` with the
nearest name.
"""
from __future__ import annotations

import importlib
import inspect
import warnings
from typing import Any

import pytest

from tests.unit.small_recipes import dataset, tokenizer
from zephon import Dataset, InMemoryShard, MixtureSpec, Pipeline, SampleBatch, StaticMixtureWorkSource

NAMES = {
    "zephon": [
        "Dataset", "InMemoryShard", "MixtureSpec", "Pipeline", "StaticMixtureWorkSource", "SampleBatch", "SampleMeta",
        "SampleRecord", "WorkSource", "__version__", "merge_checkpoints", "save_checkpoint", "load_checkpoint",
    ],
    "zephon.io": ["Dataset", "InMemoryShard"],
    "zephon.work": ["MixtureSpec", "StaticMixtureWorkSource", "WorkSource", "WorkChunk", "TokenEstimation"],
    "zephon.types": ["SampleBatch", "SampleMeta", "SampleRecord"],
    "zephon.ops": [
        "BaseOp", "OpTraits", "Accumulator", "CountingAccumulator", "PassthroughAccumulator", "DomainGroups",
        "spawn_child", "tombstones_for_record",
    ],
    "zephon.debug": ["DatasetInspector"],
    "zephon.testing": ["assert_resumes_exactly"],
}  # fmt: skip

REQUIRED = inspect.Parameter.empty
Arguments = dict[str, Any]
"""Names with their defaults, in order; those after "*" by keyword alone."""

PACKING: Arguments = {
    "algorithm": "first_fit", "num_bins": None, "max_sequences_per_bin": None, "tokens_field": "auto",
    "pad_token_id": None, "emit_positions": True, "drop_oversized": None, "min_sequence_length": 1,
    "shuffle_strategy": None, "shuffle_seed": None, "flush_strategy": "fifo", "candidate_pool_size": None,
    "max_candidate_age": None, "homogeneity": "none", "groups": None, "parallelism": None,
}  # fmt: skip

METHODS: dict[str, Arguments] = {
    "fetch": {"parallelism": None},
    "prefetch": {"buffer_size": 1024, "parallelism": None},
    "decode_text": {"parallelism": None},
    "map_transform": {"fn": REQUIRED, "*": None, "drop_none": True, "parallelism": None},
    "map_batch": {"fn": REQUIRED, "*": None, "drop_none": True, "parallelism": None},
    "stateful_transform": {
        "name": REQUIRED, "*": None, "init_state": REQUIRED, "push": REQUIRED, "flush": None, "should_flush": None,
        "transform": None, "parallelism": 1, "preserves_cursor_order": True,
    },
    "add_op": {"op": REQUIRED, "*": None, "process_many": None, "accumulator": None, "parallelism": 1},
    "tokenize": {
        "tokenizer": None, "tokenizer_id": None, "*": None, "field": REQUIRED, "missing_field": "error",
        "add_attention_mask": True, "max_length": None, "truncation": False, "split_long_samples": False,
        "preserve_upstream_payload": False, "special_tokens": "bos_eos", "bos_token_id": None, "eos_token_id": None,
        "parallelism": None,
    },
    "tokenize_chat": {
        "tokenizer": None, "tokenizer_id": None, "*": None, "field": "messages", "chat_template": None,
        "max_length": None, "loss_scope": "all_assistant", "tools_field": "tools", "chat_template_kwargs": None,
        "mask_field_out": "loss_mask", "preserve_upstream_payload": False, "parallelism": None,
    },
    "expand_chat": {"field": "messages"},
    "pack_flat": {"max_length": REQUIRED, "*": None, **PACKING},
    "pack_sequences": {
        "max_length": REQUIRED, "*": None, **PACKING, "length_fn": None, "pack_payloads": "keep_list",
    },
    "shuffle": {"buffer_size": 1024, "*": None, "seed": 0, "algorithm": "streaming"},
    "ensure_mixture": {
        "*": None, "max_buffer_size": 1000, "weight_by": "auto", "warn_tolerance": None, "mixture": None,
        "drain_target_ratio": 0.8,
    },
    "batch": {"microbatch_size": REQUIRED, "*": None, "drop_last": True},
    "explain": {},
    "validate": {"strict": False},
    "checkpoint": {},
    "restore": {"ckpt": REQUIRED},
    "to_torch_dataset": {"stateful": True},
}  # fmt: skip

SETTINGS_OF = {
    "pack_flat": ["zephon.ops.pack_flat.PackFlat", "zephon.ops.packing_settings.Packer"],
    "pack_sequences": ["zephon.ops.pack_sequences.PackSequences", "zephon.ops.packing_settings.Packer"],
}
"""Where the settings are that a method hands on by name."""

OTHERS: dict[str, Arguments] = {
    "zephon.Dataset.from_path": {"name": REQUIRED, "path": REQUIRED, "*": None, "fmt": None},
    "zephon.Dataset.from_dict": {"name": REQUIRED, "shards": REQUIRED},
    "zephon.StaticMixtureWorkSource": {
        "datasets": REQUIRED, "mixture": REQUIRED, "chunk_size": "auto", "seed": 0, "shuffle_shards": True,
        "shuffle_within_shard": False, "shuffle_block_size": None, "exhausted_policy": None,
        "reshuffle_on_repeat": True, "max_repeats": None, "stop_after_passes": 1, "lane_assignment": "permute",
        "token_estimation": None,
    },
    "zephon.work.TokenEstimation": {"primer": "measure", "measure": None, "calibration_samples": 2048},
    "zephon.work.WorkChunk": {"components": REQUIRED, "seed": None},
    "zephon.ops.OpTraits": {
        "preserves_cursor_order": REQUIRED, "parallelism": 1, "batch_shape_sensitive": False,
        "requires_serial_state": False,
    },
    "zephon.ops.CountingAccumulator": {"max_batch": REQUIRED},
    "zephon.ops.PassthroughAccumulator": {},
    "zephon.ops.DomainGroups": {"groups": REQUIRED},
    "zephon.ops.spawn_child": {"meta": REQUIRED, "index": REQUIRED},
    "zephon.Pipeline": {"work_source": REQUIRED},
    "zephon.work.WorkSource.next_chunk": {},
    "zephon.work.WorkSource.clone_for_lane": {"lane_id": REQUIRED, "canonical_replicas": REQUIRED},
    "zephon.work.WorkSource.state_dict": {},
    "zephon.work.WorkSource.load_state_dict": {"state": REQUIRED},
    "zephon.ops.BaseOp.setup": {"ctx": REQUIRED},
    "zephon.ops.BaseOp.teardown": {},
    "zephon.ops.BaseOp.traits": {},
    "zephon.ops.BaseOp.accumulator": {"*": None, "deterministic": REQUIRED, "ctx": REQUIRED},
    "zephon.ops.BaseOp.process_many": {"records": REQUIRED},
    "zephon.ops.BaseOp.process_one": {"record": REQUIRED},
    "zephon.ops.BaseOp.validation_samples": {},
    "zephon.ops.Accumulator.push_many": {"records": REQUIRED},
    "zephon.ops.Accumulator.flush": {"*": None, "reset": False},
    "zephon.ops.Accumulator.has_pending_data": {},
}  # fmt: skip

TO_TRAINING: Arguments = {
    "*": None, "return_labels": False, "dtype": "auto", "ignore_index": -100, "rename_fields": None,
    "exclude_fields": (), "extra_fields": (), "flatten": False, "return_num_valid_tokens": False,
    "return_loss_mask": False, "return_cu_seqlens": False, "return_padding_mask": False, "eos_mask_loss": False,
    "eos_token_id": None, "position_mode": "preserve", "tokens_field": "auto",
}  # fmt: skip

OPTIONS = {
    "canonical_replicas": [4], "flush_every_k_chunks": ["auto", 2], "dp_degree": [2], "dp_group_id": [0],
    "world_size": [2], "global_rank": [0], "mapping_strategy": ["contiguous", "interleaved"], "batches_per_step": [4],
    "runner": ["auto", "process", "threads", "inline"], "max_workers": [2], "prefetch_batches": [3],
    "deterministic": [True], "on_error": ["raise", "skip"], "even_ends": [True, False],
}  # fmt: skip

IGNORED = [
    "placement", "use_fast", "padding", "return_tensors", "warmup_growth", "obsolete_drain_rate", "span_source",
    "indexable", "calibration_replayable",
]  # fmt: skip
IGNORED_OPTIONS = [
    "run_id", "aggregate_dir", "aggregate_store", "aggregate_timeout_s", "aggregate_serializer",
    "aggregate_compressor", "mtp_mode", "mtp_buffer", "mtp_prefetch", "mtp_buffer_bytes", "mtp_auto_checkpoint",
    "per_stage_runner", "per_stage_prefetch", "default_stage_prefetch", "op_queue_capacity", "worker_allocation",
    "mp_context", "ipc_transport", "ipc_buffer_bytes", "shutdown_mode", "auto_validation",
    "allow_latency_flush_in_deterministic", "io_options", "mixture_config", "execution_tracking",
    "metrics_sink_config", "max_worker_retries", "shm_size", "shm_prefix", "shm_anything",
]  # fmt: skip

def found(path: str) -> Any:
    """What a dotted path names, the longest part of it being a module."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            value = getattr(value, part)
        return value
    raise AssertionError(path)


def parameters(function: Any, further: list[str] = ()) -> dict[str, inspect.Parameter]:  # type: ignore[assignment]
    known = dict(inspect.signature(function).parameters)
    known.pop("self", None)
    for path in further:
        for name, parameter in inspect.signature(found(path)).parameters.items():
            known.setdefault(name, parameter)
    return known


def assert_takes(known: dict[str, inspect.Parameter], expected: Arguments) -> None:
    positional = True
    order = [name for name in known if name in expected]
    for name, default in expected.items():
        if name == "*":
            positional = False
            continue
        assert name in known, f"has no argument {name!r}"
        assert default is REQUIRED or known[name].default == default, name
        if positional:
            assert known[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD, name
    first = list(expected)[: list(expected).index("*") if "*" in expected else None]
    assert order[: len(first)] == first


@pytest.mark.parametrize("name", [f"{module}.{name}" for module, names in NAMES.items() for name in names])
def test_every_name_can_be_imported_from_where_it_is_published(name):
    module, _, attribute = name.rpartition(".")
    assert getattr(importlib.import_module(module), attribute) is not None


@pytest.mark.parametrize("name", METHODS)
def test_every_method_of_a_pipeline_takes_every_published_argument_with_its_default(name):
    assert_takes(parameters(getattr(Pipeline, name), SETTINGS_OF.get(name, [])), METHODS[name])


@pytest.mark.parametrize("name", OTHERS)
def test_everything_else_takes_every_published_argument_with_its_default(name):
    assert_takes(parameters(found(name)), OTHERS[name])


def test_to_training_takes_every_published_argument_by_keyword_with_its_default():
    known = parameters(SampleBatch.to_training)
    assert list(known) == [name for name in TO_TRAINING if name != "*"]
    assert_takes(known, TO_TRAINING)
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in known.values())


# What is called


def source() -> StaticMixtureWorkSource:
    return StaticMixtureWorkSource([dataset("web", 60, 2)], None, chunk_size=4)


CALLS: dict[str, Arguments] = {
    "fetch": {},
    "prefetch": {},
    "decode_text": {},
    "map_transform": {"fn": len},
    "map_batch": {"fn": dict},
    "stateful_transform": {"name": "keep", "init_state": list, "push": lambda state, records: (state, records)},
    "add_op": {"op": "same", "process_many": list},
    "tokenize": {"tokenizer_id": tokenizer(), "field": "text", "special_tokens": "none"},
    "tokenize_chat": {"tokenizer_id": tokenizer(), "chat_template": "{{ messages[0].content }}"},
    "expand_chat": {},
    "pack_flat": {"max_length": 8},
    "pack_sequences": {"max_length": 8},
    "shuffle": {},
    "ensure_mixture": {},
    "batch": {"microbatch_size": 2},
    "options": {"canonical_replicas": 2},
}


def call(method: str, **more: Any) -> Pipeline:
    pipeline = Pipeline(source())
    if method == "map_batch":
        pipeline.batch(2)
    return getattr(pipeline, method)(**CALLS[method], **more)


def ignored(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(warning.message) for warning in caught if "ignored" in str(warning.message)]


@pytest.mark.parametrize("method", CALLS)
def test_an_ignored_argument_is_accepted_on_every_method_and_named_once(method):
    for name in IGNORED:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = call(method, **{name: object()})
        assert isinstance(made, Pipeline)
        assert ignored(caught) == [f"{method}(): ignored, this design has no such mechanism: {name}"]
        assert [each.filename for each in caught if "ignored" in str(each.message)] == [__file__]


def test_ignored_options_are_accepted_together_and_each_named_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call("options", **dict.fromkeys(IGNORED_OPTIONS, 1))
    (text,) = ignored(caught)
    assert text.partition(": ignored, this design has no such mechanism: ")[2].split(", ") == IGNORED_OPTIONS


@pytest.mark.parametrize("make", [
    lambda **more: StaticMixtureWorkSource([dataset("web", 6, 1)], None, **more),
    lambda **more: Dataset.from_path("here", __file__, fmt="jsonl", **more),
])  # fmt: skip
def test_ignored_arguments_come_on_the_work_source_and_on_datasets_too(make):
    with pytest.warns(UserWarning, match="ignored.*: indexable"):
        make(indexable=True)
    with pytest.raises(TypeError, match="has no argument 'indexabel'; did you mean 'indexable'"):
        make(indexabel=True)


@pytest.mark.parametrize("method", CALLS)
def test_any_other_unknown_keyword_is_a_type_error_with_the_nearest_name(method):
    with pytest.raises(TypeError, match=rf"{method}\(\) has no argument 'placemnt'; did you mean 'placement'\?"):
        call(method, placemnt=1)
    expected = METHODS.get(method, dict.fromkeys(OPTIONS))
    for name in expected:
        if name not in CALLS[method] and name != "*" and method != "add_op":
            with pytest.raises(TypeError, match=rf"{method}\(\) has no argument '{name}x'; did you mean '{name}'\?"):
                call(method, **{f"{name}x": 1})


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in OPTIONS.items() for value in values])
def test_every_option_is_accepted(name, value):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Pipeline(source()).options(**{name: value})


CHOICES = {
    "tokenize": {
        "missing_field": ["error", "skip"],
        "special_tokens": ["bos_eos", "bos", "eos", "none", "tokenizer_default"],
    },
    "tokenize_chat": {"loss_scope": ["all_assistant", "last_span", "after_last_user"]},
    "pack_flat": {
        "algorithm": ["first_fit", "best_fit", "wrap", "best_fit_wrap"],
        "flush_strategy": ["fifo", "fullest"],
    },
    "shuffle": {"algorithm": ["streaming", "block"]},
    "ensure_mixture": {"weight_by": ["auto", "samples", "text", len], "max_buffer_size": [1000, None]},
}
WORK_SOURCE = {
    "shuffle_block_size": [None, 7, "auto", "global"],
    "exhausted_policy": [None, "stop", "repeat", {"web": "repeat"}],
    "reshuffle_on_repeat": [True, False, {"web": False}],
    "max_repeats": [3, {"web": 2}],
    "lane_assignment": ["permute", "modulo"],
    "chunk_size": ["auto", 5],
}


EVERY_CHOICE = [
    (method, name, value) for method, each in CHOICES.items() for name, values in each.items() for value in values
]


@pytest.mark.parametrize("row", EVERY_CHOICE, ids=str)
def test_every_choice_of_a_setting_is_accepted(row):
    method, name, value = row
    more = {"bos_token_id": 1, "eos_token_id": 2} if name == "special_tokens" else {}
    pipeline = Pipeline(source())
    getattr(pipeline, method)(**{**CALLS[method], **more, name: value})


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, each in WORK_SOURCE.items() for value in each])
def test_every_choice_of_the_work_source_is_accepted(name, value):
    StaticMixtureWorkSource([dataset("web", 60, 2)], MixtureSpec({"web": 1.0}), **{name: value})


def test_a_dataset_and_a_batch_know_what_is_published():
    data = Dataset.from_dict("web", {"a": InMemoryShard([{"id": 1}, {"id": 2}]), "b": InMemoryShard([{"id": 3}])})
    assert (data.total, data.shard_count, data.counts.tolist()) == (3, 2, [2, 1])
    assert data.raw_bytes > 0
    pipeline = Pipeline(StaticMixtureWorkSource([data], None)).batch(1).options(canonical_replicas=1)
    batch = next(iter(pipeline))
    assert batch.records[0].meta.sample_id == batch.samples[0]
    assert batch.records[0].payload == {"id": int(batch["id"][0])}
    assert (batch.lane_ids, batch.lane, batch.first_record, batch.ends_round) == ([0], 0, 0, True)
    assert len(batch.digest) == 32
    meta = batch.records[0].meta
    for name in ("lane_id", "chunk_id", "chunk_offset", "lineage", "tags"):
        assert hasattr(meta, name)
    assert meta.component_sample_counts == {"web": 1}
    assert meta.component_token_counts == {}


def test_the_published_recipe_builds_and_runs():
    """The one of the documentation, with rows in memory."""
    web, code = dataset("web", 120, 3), dataset("code", 60, 1)
    source = StaticMixtureWorkSource(datasets=[web, code], mixture=MixtureSpec({"web": 0.7, "code": 0.3}), seed=42)
    pipeline = (
        Pipeline(source)
        .fetch(parallelism=2)
        .prefetch(buffer_size=64)
        .tokenize(tokenizer_id=tokenizer(), field="text", special_tokens="eos")
        .pack_flat(max_length=17, algorithm="wrap")
        .shuffle(buffer_size=16)
        .batch(microbatch_size=2)
        .options(canonical_replicas=2, flush_every_k_chunks=8)
    )
    batch = next(iter(pipeline))
    assert batch["input_ids"].shape == (2, 17)
    assert batch.to_training(return_labels=True)["labels"].shape == (2, 16)
    assert pipeline.explain()
