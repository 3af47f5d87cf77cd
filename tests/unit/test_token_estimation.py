"""Weights that mean tokens: measured once with the pipeline's own operators, and never again for that run."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from tests.unit.small_recipes import tokenizer
from zephon import Dataset, InMemoryShard, MixtureSchedule, Pipeline, StaticMixtureWorkSource
from zephon.errors import RecordError, SettingError
from zephon.randomness import generator
from zephon.token_counts import DrawnCounts, tokens_of_records
from zephon.windows import Front
from zephon.work import TokenEstimation

EVEN = {"a": 1, "b": 1}


def texts(name, rows, words):
    return Dataset.from_dict(name, {"s": InMemoryShard([{"text": "w1 " * (words + i % 3 - 1)} for i in range(rows)])})


def two(rows=(1000, 100), words=(40, 400), mixture=EVEN, **settings):
    data = [texts("a", rows[0], words[0]), texts("b", rows[1], words[1])]
    settings = {"token_estimation": TokenEstimation(), "exhausted_policy": "repeat", **settings}
    return StaticMixtureWorkSource(data, mixture, **settings)


def tokenized(source, **options):
    pipeline = Pipeline(source).tokenize(tokenizer_id=tokenizer(), field="text", special_tokens="none")
    return pipeline.batch(4).options(canonical_replicas=4, **options)


def drawn(pipeline):
    """(samples, tokens) by dataset, as progress shows them."""
    counts = [run.producer.drawn for run in pipeline._current()._runs.values()]
    return sum(each.samples for each in counts), sum(each.tokens for each in counts)


def test_case_F5_weights_by_token_give_shares_of_tokens_also_after_a_resume():
    """10,000 documents of 40 tokens and 1,000 of 400, one to one."""
    source = two(rows=(10_000, 1000), shuffle_block_size="global")
    pipeline = tokenized(source)
    batches = iter(pipeline)
    state, before, all_tokens = None, np.zeros(2, np.int64), 0
    while all_tokens < 100_000:
        next(batches)
        samples, tokens = drawn(pipeline)
        all_tokens = int(tokens.sum())
    assert np.abs(tokens / tokens.sum() - 0.5).max() < 0.01
    assert np.abs(samples / samples.sum() - [10 / 11, 1 / 11]).max() < 0.005
    before, state = tokens, json.loads(json.dumps(pipeline.checkpoint()))
    assert state["identity"]["token_estimates"] == pytest.approx({"a": 40, "b": 400}, rel=0.01)
    again = tokenized(two(rows=(10_000, 1000), shuffle_block_size="global")).restore(state)
    batches = iter(again)
    while drawn(again)[1].sum() < 100_000:
        next(batches)
    both = before + drawn(again)[1]
    assert np.abs(drawn(again)[1] / drawn(again)[1].sum() - 0.5).max() < 0.01
    assert np.abs(both / both.sum() - 0.5).max() < 0.01


def test_case_F5_weights_by_record_give_a_twelfth_of_the_tokens():
    pipeline = tokenized(two(token_estimation=None))
    batches = iter(pipeline)
    for _ in range(100):
        next(batches)
    samples, tokens = drawn(pipeline)
    assert np.abs(samples / samples.sum() - 0.5).max() < 0.01
    assert np.abs(tokens / tokens.sum() - [1 / 11, 10 / 11]).max() < 0.005


def test_all_rows_are_measured_where_there_are_few_and_a_seeded_choice_of_many():
    means = {}
    for seed, most in ((1, 100), (1, 2000), (2, 100), (1, 100)):
        source = two(rows=(1500, 50), seed=seed, token_estimation=TokenEstimation(calibration_samples=most))
        found = tokenized(source).plan().estimates
        assert means.setdefault((seed, most), found) == found
    assert means[1, 2000] == {"a": 40 + sum(i % 3 - 1 for i in range(1500)) / 1500, "b": pytest.approx(400, rel=0.01)}
    assert means[1, 100]["b"] == means[2, 100]["b"] == sum(400 + i % 3 - 1 for i in range(50)) / 50
    assert means[1, 100]["a"] != means[2, 100]["a"]
    assert means[1, 100]["a"] == pytest.approx(40, rel=0.02)


def without(words):
    """A filter for texts of so many words."""
    return lambda row: None if len(row["text"].split()) == words else row


def test_what_operators_before_the_tokenizer_drop_counts_as_no_tokens():
    """Of texts of 39, 40 and 41 words those of 40 are dropped: two thirds of 40 tokens a sample drawn are left."""
    pipeline = Pipeline(two(rows=(900, 90))).map_transform(without(40))
    pipeline.tokenize(tokenizer_id=tokenizer(), field="text", special_tokens="none").batch(4)
    estimates = pipeline.options(canonical_replicas=4).plan().estimates
    assert estimates == {"a": pytest.approx(80 / 3, abs=1e-9), "b": 400.0}


def test_a_dataset_of_which_nothing_becomes_a_token_is_named():
    pipeline = Pipeline(two(words=(40, 1))).map_transform(lambda row: row if len(row["text"]) > 20 else None)
    pipeline.tokenize(tokenizer_id=tokenizer(), field="text").batch(4).options(canonical_replicas=4)
    with pytest.raises(SettingError, match=r"none of the 100 rows measured of dataset 'b' becomes a token"):
        pipeline.plan()


def test_a_resumed_run_takes_the_checkpoints_estimates_and_measures_nothing(tmp_path):
    calls = str(tmp_path / "calls")

    def measure(row):
        with open(calls, "ab") as file:
            file.write(b".")
        return 1 + len(row["text"])

    def pipeline(mixture=EVEN):
        source = two(mixture=mixture, token_estimation=TokenEstimation(measure=measure, calibration_samples=10))
        return Pipeline(source).batch(4).options(canonical_replicas=4)

    first = pipeline()
    state = json.loads(json.dumps(first.checkpoint()))
    assert os.path.getsize(calls) == 20
    state["identity"]["token_estimates"] = {"a": 3.5, "b": 7.0}
    again = pipeline().restore(state)
    assert again.checkpoint()["identity"]["token_estimates"] == {"a": 3.5, "b": 7.0}
    assert again._current().plan.curriculum(0).proportions.counts(300) == [200, 100]
    other = pipeline({"a": 1, "b": 4}).restore(state, allow_changed=["mixture"])
    assert other.checkpoint()["identity"]["token_estimates"] == {"a": 3.5, "b": 7.0}
    assert os.path.getsize(calls) == 20


def test_a_dataset_new_to_a_checkpoint_is_measured_and_the_others_are_not():
    only_a = StaticMixtureWorkSource([texts("a", 50, 40)], {"a": 1}, token_estimation=TokenEstimation())
    state = json.loads(json.dumps(tokenized(only_a).checkpoint()))
    state["identity"]["token_estimates"] = {"a": 1.25}
    source = two(exhausted_policy=None)
    plan = tokenized(source).restore(state, allow_changed=["mixture", "datasets"])._current().plan
    assert plan.estimates["a"] == 1.25
    assert plan.estimates["b"] == pytest.approx(400, rel=0.01)


def test_given_ratios_are_taken_as_they_are():
    for primer, share in (({"a": 10, "b": 90}, [90, 10]), (7.5, [50, 50])):
        plan = tokenized(two(token_estimation=TokenEstimation(primer))).plan()
        assert plan.curriculum(0).proportions.counts(100) == share


def test_a_schedule_by_tokens_is_in_tokens_too():
    points = [(0, {"a": 1, "b": 0}), (100, {"a": 1, "b": 1})]
    primer = TokenEstimation({"a": 40, "b": 400})
    plan = tokenized(two(mixture=MixtureSchedule(points), token_estimation=primer)).plan()
    assert plan.curriculum(0).proportions.counts(100) == [100, 0]
    assert plan.curriculum(0).proportions.counts(1200) == [1100, 100]


def test_data_that_are_tokenized_already_and_operators_that_only_reorder_are_measured_too():
    rows = {name: [{"input_ids": np.arange(length)}] * 9 for name, length in (("a", 5), ("b", 20))}
    data = [Dataset.from_dict(name, {"s": InMemoryShard(part)}) for name, part in rows.items()]
    source = StaticMixtureWorkSource(data, EVEN, token_estimation=TokenEstimation(), stop_after_passes=4)
    assert Pipeline(source).batch(1).options(canonical_replicas=1).plan().estimates == {"a": 5.0, "b": 20.0}
    late = Pipeline(two()).shuffle(4).tokenize(tokenizer_id=tokenizer(), field="text", special_tokens="none")
    late.pack_flat(16).batch(1).options(canonical_replicas=1)
    assert late.plan().estimates["a"] == pytest.approx(40, rel=0.01)


def test_without_tokens_it_says_what_would_make_some():
    with pytest.raises(SettingError, match="have none of the fields input_ids, tokens, token_ids after no operator"):
        Pipeline(two()).batch(1).options(canonical_replicas=1).plan()
    packed = Pipeline(two()).map_transform(lambda row: row).batch(1).options(canonical_replicas=1)
    with pytest.raises(SettingError, match=r"after map_transform.*measure=.*primer="):
        packed.plan()


def test_a_bad_row_is_named_or_counts_as_nothing_as_the_run_says():
    def measure(row):
        return "many" if len(row["text"]) < 120 else 100

    source = two(token_estimation=TokenEstimation(measure=measure))
    with pytest.raises(RecordError, match=r"measure: dataset 'a'.*row 0: returned 'many'"):
        Pipeline(source).batch(1).options(canonical_replicas=1).plan()
    skipping = Pipeline(source).batch(1).options(canonical_replicas=1, on_error="skip").plan()
    assert skipping.estimates["a"] == pytest.approx(200 / 3, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"primer": "guess"}, "primer is 'guess'"), ({"primer": 0}, "primer is 0"),
        ({"primer": True}, "primer is True"),
        ({"primer": {"a": -1}}, "primer is -1"), ({"primer": float("nan")}, "primer is nan"),
        ({"measure": 5}, "measure is 5"), ({"calibration_samples": 0}, "calibration_samples is 0"),
        ({"calibration_samples": True}, "calibration_samples is True"), ({"primer": 3, "measure": len}, "one of them"),
    ],
)  # fmt: skip
def test_case_E14_senseless_estimations_are_refused_by_name(arguments, words):
    with pytest.raises(SettingError, match=words):
        TokenEstimation(**arguments)


def test_case_E14_ratios_for_other_datasets_and_weights_by_rows_are_refused():
    with pytest.raises(SettingError, match=r"primer and datasets differ in \['b', 'c'\]"):
        two(token_estimation=TokenEstimation({"a": 1, "c": 1}))
    with pytest.raises(SettingError, match="mixture=None has none"):
        two(mixture=None)


def test_explain_shows_the_estimates():
    shown = tokenized(two(token_estimation=TokenEstimation({"a": 40, "b": 412.5}))).explain()
    assert "dataset a: 1000 rows in 1 shard, weight 1 by tokens, 40 tokens a sample" in shown
    assert "412.5 tokens a sample" in shown
    points = [(0, {"a": 1, "b": 0}), (100, {"a": 1, "b": 1}, "linear")]
    shown = tokenized(two(mixture=MixtureSchedule(points), token_estimation=None)).explain()
    assert "mixture from sample 0: a 1, b 0" in shown
    assert "mixture at sample 100, in a straight line: a 1, b 1" in shown


# Counting


@pytest.mark.parametrize("step", ["map_transform", "add_op"])
def test_functions_that_draw_random_numbers_draw_those_of_the_first_pass(step):
    def some(row):
        return row if generator().random() < 0.5 else None

    def some_records(records):
        return [record for record in records if generator(record.meta).random() < 0.5]

    def recipe():
        source = two(rows=(80, 40), words=(9, 2), exhausted_policy=None, max_repeats=0)
        pipeline = Pipeline(source).map_transform(lambda row: row)
        if step == "map_transform":
            pipeline.map_transform(some)
        else:
            pipeline.add_op("some", process_many=some_records)
        pipeline.tokenize(tokenizer_id=tokenizer(), field="text", special_tokens="none")
        return pipeline.batch(1).options(canonical_replicas=1)

    tokens = {"a": 0, "b": 0}
    for batch in recipe():
        tokens[batch.samples[0][0]] += len(batch["input_ids"][0])
    estimates = recipe().plan().identity["token_estimates"]
    assert {name: estimates[name] * rows for name, rows in (("a", 80), ("b", 40))} == pytest.approx(tokens)
    assert 0 < tokens["a"] < 80 * 9


def test_samples_cut_into_several_records_count_once_and_their_tokens_all():
    source = two(rows=(30, 30), words=(9, 2), token_estimation=None, exhausted_policy=None)
    pipeline = Pipeline(source).tokenize(
        tokenizer_id=tokenizer(), field="text", special_tokens="none", max_length=4, split_long_samples=True
    )
    plan = pipeline.batch(1).options(canonical_replicas=1).plan()
    front, counts = Front(plan), DrawnCounts(2)
    front.setup()
    from zephon.lane_windows import window_of
    from zephon.windows import tasks_of

    number = 0
    while (window := window_of(plan, 0, 0, number)) is not None:
        for task in tasks_of(window, 0, 0, 7):
            counts.add(front.run(task).block)
        number += 1
    assert counts.samples.tolist() == [30, 30]
    assert counts.tokens.tolist() == [sum(9 + i % 3 - 1 for i in range(30)), sum(2 + i % 3 - 1 for i in range(30))]


def test_tokens_are_counted_in_any_kind_of_column_and_in_none():
    from zephon.columns import Block

    samples = np.zeros((2, 3), np.int64)
    for rows, expected in (
        ([{"input_ids": np.arange(3)}, {"input_ids": np.arange(5)}], [3, 5]),
        ([{"tokens": [1, 2]}, {"tokens": [1]}], [2, 1]),
        ([{"token_ids": np.arange(3)}, {"other": 1}], [3, 0]),
    ):
        assert tokens_of_records(Block.from_rows(rows, samples)).tolist() == expected
    assert tokens_of_records(Block.from_rows([{"text": "x"}] * 2, samples)) is None


def test_a_recipe_without_code_gives_the_arguments_as_a_dict():
    source = two(token_estimation={"primer": {"a": 40, "b": 400}})
    assert source.describe() == two(token_estimation=TokenEstimation({"a": 40, "b": 400})).describe()
    with pytest.raises(SettingError, match=r"token_estimation is \{'prime': 3\}.*primer, measure, calibration_samples"):
        two(token_estimation={"prime": 3})
