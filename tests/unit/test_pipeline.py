"""Building a pipeline: what is accepted, what is ignored with a word, and what is refused on the spot."""

from __future__ import annotations

import inspect
import re
import warnings
from pathlib import Path

import pytest

from tests.unit.small_recipes import Recipe, dataset, tokenizer
from zephon import Dataset, InMemoryShard, MixtureSpec, Pipeline, StaticMixtureWorkSource
from zephon.arguments import IGNORED
from zephon.cores import Cores
from zephon.errors import CheckpointError, SettingError, TopologyError, ZephonError
from zephon.explain import packed_batch_bytes
from zephon.options import IGNORED_OPTIONS
from zephon.transport import layout
from zephon.transport.rings import ring_shape


def source(**settings) -> StaticMixtureWorkSource:
    return StaticMixtureWorkSource([dataset("web", 60, 2)], None, chunk_size=4, **settings)


def pipeline() -> Pipeline:
    return Pipeline(source())


METHODS = {
    "decode_text": {},
    "map_transform": {"fn": len},
    "tokenize": {"field": "text", "special_tokens": "none"},
    "pack_flat": {"max_length": 8},
    "shuffle": {},
    "batch": {"microbatch_size": 2},
    "options": {"canonical_replicas": 2},
}


def call(method: str, **more):
    arguments = {**METHODS[method], **more}
    if method == "tokenize":
        arguments["tokenizer_id"] = tokenizer()
    return getattr(pipeline(), method)(**arguments)


# Building


def test_methods_change_the_pipeline_in_place_and_return_it():
    made = pipeline()
    for method, arguments in METHODS.items():
        if method != "tokenize":
            assert getattr(made, method)(**arguments) is made
    assert [operator.name for operator in made.operators] == ["decode_text", "map_transform", "pack_flat", "shuffle"]


def test_an_operator_after_batch_is_refused():
    with pytest.raises(SettingError, match=r"shuffle\(\) after batch\(\): batch comes last"):
        pipeline().batch(2).shuffle(4)


def test_a_running_pipeline_is_not_changed():
    made = pipeline().batch(2).options(canonical_replicas=2)
    next(iter(made))
    for change in (lambda: made.batch(4), lambda: made.options(canonical_replicas=4)):
        with pytest.raises(SettingError, match="running.*close"):
            change()
    made.close()
    made.batch(4)
    assert len(next(iter(made))) == 4


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", sorted(IGNORED))
def test_an_ignored_argument_is_accepted_and_named_once_in_a_warning(method, name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(method, **{name: object()})
    ignored = [warning for warning in caught if "ignored" in str(warning.message)]
    assert [str(warning.message) for warning in ignored] == [
        f"{method}(): ignored, this design has no such mechanism: {name}"
    ]
    assert ignored[0].filename == __file__


def test_ignored_options_are_named_together_in_one_warning():
    names = [*sorted(IGNORED_OPTIONS), "shm_size", "shm_anything_at_all"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipeline().options(canonical_replicas=2, **dict.fromkeys(names, 1))
    assert len(caught) == 1
    assert all(re.search(rf"\b{name}\b", str(caught[0].message)) for name in names)
    assert "canonical_replicas" not in str(caught[0].message)


@pytest.mark.parametrize(
    "method, wrong, near",
    [
        ("tokenize", "special_token", "special_tokens"),
        ("tokenize", "max_len", "max_length"),
        ("pack_flat", "algoritm", "algorithm"),
        ("pack_flat", "num_bin", "num_bins"),
        ("shuffle", "buffersize", "buffer_size"),
        ("shuffle", "seeds", "seed"),
        ("map_transform", "drop_nones", "drop_none"),
        ("decode_text", "paralelism", "parallelism"),
        ("batch", "drop_lst", "drop_last"),
        ("options", "canonical_replica", "canonical_replicas"),
        ("options", "flush_every_chunks", "flush_every_k_chunks"),
        ("options", "worldsize", "world_size"),
        ("options", "max_worker", "max_workers"),
        ("options", "mtp_mod", "mtp_mode"),
    ],
)
def test_an_unknown_keyword_is_a_type_error_with_the_nearest_name(method, wrong, near):
    with pytest.raises(TypeError, match=rf"{method}\(\) has no argument '{wrong}'; did you mean '{near}'\?"):
        call(method, **{wrong: 1})


@pytest.mark.parametrize(
    "method, given, near",
    [
        ("tokenize", {"tokenizer_id": "t.json", "feild": "text"}, "field"),
        ("pack_flat", {"max_len": 16}, "max_length"),
        ("pack_flat", {"algoritm": "wrap"}, "algorithm"),
        ("pack_sequences", {"length_function": len}, "length_fn"),
        ("batch", {"microbach_size": 4}, "microbatch_size"),
        ("stateful_transform", {"name": "s", "initstate": dict, "push": len}, "init_state"),
        ("map_transform", {"fun": len}, "fn"),
    ],
)
def test_a_mistyped_argument_that_is_needed_is_told_with_the_nearest_name(method, given, near):
    with pytest.raises(TypeError, match=rf"{method}\(\) has no argument '\w+'; did you mean '{near}'\?"):
        getattr(pipeline(), method)(**given)


def test_an_argument_that_is_missing_is_named():
    with pytest.raises(TypeError, match=r"^tokenize\(\): missing a required argument: 'field'$"):
        pipeline().tokenize(tokenizer_id="t.json")


def test_warnings_name_the_line_of_the_recipe():
    for method, given in (("pack_flat", {"max_length": 8, "placement": 1}), ("shuffle", {"placement": 1})):
        with pytest.warns(UserWarning, match="no such mechanism: placement") as caught:
            getattr(pipeline(), method)(**given)
        assert caught[0].filename == __file__


@pytest.mark.parametrize("method", METHODS)
def test_a_keyword_that_is_like_no_other_is_a_type_error_without_a_guess(method):
    with pytest.raises(TypeError, match=rf"{method}\(\) has no argument 'qqqqqqqqq'$"):
        call(method, qqqqqqqqq=1)


def test_deterministic_false_is_accepted_with_a_warning_and_changes_nothing():
    with pytest.warns(UserWarning, match="deterministic=False changes nothing") as caught:
        made = pipeline().batch(2).options(canonical_replicas=4, deterministic=False)
    assert [warning.filename for warning in caught] == [__file__]
    strict = pipeline().batch(2).options(canonical_replicas=4)
    assert [batch.digest for batch in made] == [batch.digest for batch in strict]
    assert made.restore(strict.checkpoint()).checkpoint() == strict.checkpoint()


def test_settings_of_batch_are_no_options():
    with pytest.raises(TypeError, match="no argument 'microbatch_size'$"):
        pipeline().options(microbatch_size=4)


def test_every_documented_argument_has_its_documented_default():
    defaults = {
        "tokenize": {
            "tokenizer": None, "tokenizer_id": None, "missing_field": "error", "add_attention_mask": True,
            "max_length": None, "truncation": False, "split_long_samples": False, "preserve_upstream_payload": False,
            "bos_token_id": None, "eos_token_id": None, "parallelism": None,
        },
        "map_transform": {"drop_none": True, "parallelism": None},
        "shuffle": {"buffer_size": 1024, "seed": 0, "algorithm": "streaming"},
        "batch": {"drop_last": True},
        "decode_text": {"parallelism": None},
    }  # fmt: skip
    for method, expected in defaults.items():
        parameters = inspect.signature(getattr(Pipeline, method)).parameters
        assert {name: parameters[name].default for name in expected} == expected


# Senseless settings (E14)


WEB = dataset("web", 9, 1)
SENSELESS = [
    ("canonical_replicas", lambda v: pipeline().options(canonical_replicas=v), [0, -1, 1.5, True, "8"], "from 1"),
    ("max_workers", lambda v: pipeline().options(max_workers=v), [0, -1, 2.0, "2"], "from 1"),
    ("prefetch_batches", lambda v: pipeline().options(prefetch_batches=v), [0, -1], "from 1"),
    ("batches_per_step", lambda v: pipeline().options(batches_per_step=v), [0, -8], "from 1"),
    ("dp_degree", lambda v: pipeline().options(dp_degree=v), [0, -1, None], "from 1"),
    ("dp_degree", lambda v: pipeline().options(world_size=v), [0, -1], "from 1"),
    ("dp_group_id", lambda v: pipeline().options(dp_group_id=v), [-1, 0.5], "from 0"),
    ("flush_every_k_chunks", lambda v: pipeline().options(flush_every_k_chunks=v), [-1, 0.5, "all"], "auto.*from 0"),
    ("mapping_strategy", lambda v: pipeline().options(mapping_strategy=v), ["random", None], "contiguous.*interleaved"),
    ("runner", lambda v: pipeline().options(runner=v), ["fork", None], "process.*threads.*inline"),
    ("on_error", lambda v: pipeline().options(on_error=v), ["ignore", None], "raise.*skip"),
    ("even_ends", lambda v: pipeline().options(even_ends=v), ["no", None], "True or False"),
    ("microbatch_size", lambda v: pipeline().batch(v), [0, -1, 1.5, None, True], "from 1"),
    ("drop_last", lambda v: pipeline().batch(2, drop_last=v), ["no", None], "True or False"),
    ("parallelism", lambda v: pipeline().map_transform(len, parallelism=v), [0, -1, "2"], "from 1"),
    ("parallelism", lambda v: pipeline().decode_text(parallelism=v), [0, -1], "from 1"),
    ("parallelism", lambda v: pipeline().pack_flat(8, parallelism=v), [0, -1], "from 1"),
    ("parallelism", lambda v: call("tokenize", parallelism=v), [0, -1], "from 1"),
    ("max_length", lambda v: pipeline().pack_flat(v), [0, -1, 1.5, None], "from 1"),
    ("num_bins", lambda v: pipeline().pack_flat(8, num_bins=v), [0, -1], "from 1"),
    ("algorithm", lambda v: pipeline().pack_flat(8, algorithm=v), ["tetris", None], "first_fit.*best_fit.*wrap"),
    ("max_length", lambda v: call("tokenize", max_length=v, truncation=True), [0, -1], "from|at least"),
    ("special_tokens", lambda v: call("tokenize", special_tokens=v), ["all", None], "bos_eos.*none"),
    ("buffer_size", lambda v: pipeline().shuffle(v), [0, -1, 1.5, None], "from 1"),
    ("algorithm", lambda v: pipeline().shuffle(4, algorithm=v), ["bubble"], "streaming"),
    ("chunk_size", lambda v: StaticMixtureWorkSource([WEB], None, chunk_size=v), [0, -1, 1.5], "at least 1"),
    ("stop_after_passes", lambda v: source(stop_after_passes=v), [0, -1], "at least 1"),
    ("exhausted_policy", lambda v: source(exhausted_policy=v), ["never"], "stop.*repeat"),
    ("seed", lambda v: source(seed=v), [1.5, "x", None], "whole number"),
    ("mixture", MixtureSpec, [{"a": 0, "b": 0}, {"a": -1, "b": 2}, {"a": float("nan")}, {}, 3], "[Aa]llowed"),
]  # fmt: skip


@pytest.mark.parametrize(
    "name, build, value, allowed",
    [(name, build, value, allowed) for name, build, values, allowed in SENSELESS for value in values],
)
def test_case_E14_a_senseless_setting_is_refused_at_build_with_its_name_and_range_embedded(name, build, value, allowed):
    with pytest.raises((SettingError, TypeError)) as caught:
        build(value)
    assert isinstance(caught.value, SettingError), f"{type(caught.value).__name__}: {caught.value}"
    text = str(caught.value)
    assert name in text
    assert "\n" not in text
    assert re.search(allowed, text), text


def test_a_topology_that_the_lanes_cannot_serve_is_refused_before_the_first_batch():
    for options, named in (
        ({"dp_degree": 9}, "dp_degree=9.*8 lanes"),
        ({"dp_degree": 2, "dp_group_id": 2}, "dp_group_id=2.*0..1"),
        ({"dp_degree": 2, "batches_per_step": 6}, "batches_per_step=6.*4"),
    ):
        made = pipeline().batch(1).options(canonical_replicas=8, **options)
        with pytest.raises(TopologyError, match=named):
            iter(made)


def test_world_size_and_global_rank_stand_for_the_groups_unless_those_are_given():
    made = pipeline().options(world_size=4, global_rank=3)
    assert (made.topology.dp_degree, made.topology.dp_group_id) == (4, 3)
    made = pipeline().options(world_size=8, global_rank=5, dp_degree=4, dp_group_id=2)
    assert (made.topology.dp_degree, made.topology.dp_group_id) == (4, 2)


# Running


def test_restore_returns_the_pipeline_and_refuses_what_is_no_checkpoint():
    made = pipeline().batch(2).options(canonical_replicas=2)
    state = made.checkpoint()
    assert made.restore(state) is made
    for wrong in ({}, {"format": 9}, [], None):
        with pytest.raises(CheckpointError):
            made.restore(wrong)
    assert next(iter(made)).first_record == 0


@pytest.mark.parametrize(
    "wrong, told",
    [
        ("ckpt/loader.json", r"a path: load what zephon.load_checkpoint\('ckpt/loader.json'\) returns"),
        (Path("a.json"), r"a path: load what zephon.load_checkpoint\('a.json'\) returns"),
        ('{"format": 1}', "json.loads"),
        ([{"format": 1}], "zephon.merge_checkpoints"),
        (None, "NoneType: load what"),
    ],
)
def test_what_is_given_instead_of_a_state_is_told_with_how_to_make_one_of_it(wrong, told):
    with pytest.raises(CheckpointError, match=f"a checkpoint is a mapping, not .*{told}"):
        pipeline().batch(2).restore(wrong)


def test_a_mistyped_argument_of_restore_is_told_with_the_nearest_name():
    made = pipeline().batch(2).options(canonical_replicas=2)
    with pytest.raises(TypeError, match=r"restore\(\) has no argument 'allow_change'; did you mean 'allow_changed'\?"):
        made.restore(made.checkpoint(), allow_change=["mixture"])


def test_a_restore_that_is_refused_leaves_the_run_where_it_was():
    made = pipeline().batch(2).options(canonical_replicas=2)
    batches = iter(made)
    first, other = next(batches), Recipe(rows=(50,), lanes=2).pipeline().checkpoint()
    with pytest.raises(ZephonError):
        made.restore(other)
    second = next(batches)
    assert (first.lane, first.first_record, second.lane, second.first_record) == (0, 0, 1, 0)


def test_explain_says_stages_windows_lanes_and_ends():
    made = pipeline().map_transform(len).shuffle(4).batch(2).options(canonical_replicas=8, flush_every_k_chunks=2)
    text = made.explain(dp_degree=3)
    for part in (
        "8 lanes", "dataset web: 60 rows in 2 shards", "map_transform [workers]", "shuffle [engine]",
        "2 chunks of 4 samples", "group 0 of 3: lanes [0, 1, 2]", "group 2 of 3: lanes [6, 7]", "evenly", "warning",
    ):  # fmt: skip
        assert part in text
    assert "after 3 rounds" in pipeline().batch(2).options(canonical_replicas=8).explain()


def test_explain_says_what_a_daemon_would_take_here(monkeypatch):
    monkeypatch.setattr("zephon.explain.allowed_cores", lambda: Cores(40, "the quota of the cpu cgroup /job"))
    text = pipeline().batch(2).options(canonical_replicas=8, max_workers=3).explain(dp_degree=4)
    for part in (
        "runner auto, 3 workers\n", "under a daemon: 40 workers (--workers; ",
        "limited by the quota of the cpu cgroup /job",
        "for each of 40 workers", "under a daemon 2 engines",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize("emit_positions", [True, False])
def test_rings_are_as_large_as_explain_says(emit_positions):
    data = Dataset.from_dict("d", {"0": InMemoryShard([{"input_ids": list(range(100))} for _ in range(400)])})
    made = Pipeline(StaticMixtureWorkSource([data], None, seed=1)).options(canonical_replicas=1)
    made = made.pack_flat(max_length=512, algorithm="wrap", emit_positions=emit_positions).batch(8)
    said = packed_batch_bytes(made.plan())
    batch = next(iter(made))
    assert ("positions" in batch.block.fields) == emit_positions
    assert ring_shape(said) == ring_shape(layout.measure(batch.block).nbytes)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (10, ["(3), so each epoch is one window", "sample: after 1 round on", "leaving out 2 records"]),
        (1, ["(1), so each epoch is one window", "before its first round, which takes 2 records of each lane: lane"]),
    ],
)
def test_explain_says_what_little_data_comes_to(rows, said):
    made = Pipeline(StaticMixtureWorkSource([dataset("few", rows, 1)], None, seed=1)).map_transform(dict)
    text = made.shuffle(4).batch(2).options(canonical_replicas=4).explain(dp_degree=1)
    for words in said:
        assert words in text


@pytest.mark.parametrize("rows", [1, 3, 8, 10, 23])
@pytest.mark.parametrize("drop_last", [True, False])
def test_explain_ends_where_the_run_ends(rows, drop_last):
    source = StaticMixtureWorkSource([dataset("few", rows, 1)], None, seed=1)
    made = Pipeline(source).batch(2, drop_last=drop_last).options(canonical_replicas=4)
    text = made.explain(dp_degree=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = list(made)
    rounds = sum(batch.ends_round for batch in batches)
    left = rows - sum(map(len, batches))
    end = text.partition("ends: ")[2].splitlines()[0]
    assert end.startswith(f"after {rounds} round" if rounds else "before its first round")
    assert not rounds or not left or f"leaving out {left} record" in end


@pytest.mark.parametrize("even_ends", [True, False])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("rows", [4, 7, 8])
def test_a_run_that_can_have_no_batch_is_warned_of_by_explain_and_at_its_start(rows, drop_last, on_error, even_ends):
    source = StaticMixtureWorkSource([dataset("few", rows, 1)], None, seed=1)
    made = Pipeline(source).batch(2, drop_last=drop_last)
    made.options(canonical_replicas=4, on_error=on_error, even_ends=even_ends, dp_degree=4, dp_group_id=3)
    explained = made.explain()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.checkpoint()
    told = [str(each.message) for each in caught if "no rank gets a batch" in str(each.message)]
    certain = drop_last and (rows < 8 if even_ends else rows < 5)
    assert told == ([told[0]] if certain else [])
    assert [line for line in explained.splitlines() if "no rank gets" in line] == [f"warning: {text}" for text in told]
    if certain:
        assert "a round takes 2 records of each lane, and lane" in told[0]
        assert "of 4 has 1 sample in epoch 0" in told[0]


def test_no_warning_of_rounds_that_are_never_full_where_operators_change_counts():
    source = StaticMixtureWorkSource([dataset("few", 7, 1)], None, seed=1)
    assert "no rank gets" not in Pipeline(source).map_transform(dict).batch(2).options(canonical_replicas=4).explain()
    assert "no rank gets" in Pipeline(source).shuffle(4).batch(2).options(canonical_replicas=4).explain()


def test_explain_counts_in_words_that_fit_the_number():
    source = StaticMixtureWorkSource([dataset("one", 1, 1)], MixtureSpec({"one": 1}))
    made = Pipeline(source).batch(1).options(canonical_replicas=1, flush_every_k_chunks=1)
    text = made.explain(dp_degree=1)
    for words in ("1 lane,", "1 row in 1 shard,", "1 sample an epoch", "batch of 1 record", "1 chunk of", "1 round on"):
        assert words in text
