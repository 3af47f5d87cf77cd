"""A function that asks for a field that its record does not have is told which there are, wherever it runs."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

from zephon import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
from zephon.errors import RecordError
from zephon.work import TokenEstimation

ROWS = [{"id": 0, "text": "a", "ids": [1]}, {"id": 1, "ids": [1, 2]}]
"""The second has no text."""


def process_many(records: Any) -> Any:
    for record in records:
        record.payload["n"] = len(record.payload["txt"])
    return records


def named(payload: Any) -> int:
    return len(payload["txt"])


ASKING: dict[str, Callable[[Pipeline], Any]] = {
    "map_transform": lambda p: p.map_transform(lambda row: {"n": len(row["txt"])}),
    "add_op": lambda p: p.add_op("mine", process_many=process_many),
    "add_op behind": lambda p: p.shuffle(4).add_op("mine", process_many=process_many),
    "pack_sequences": lambda p: p.pack_sequences(8, length_fn=named),
    "ensure_mixture": lambda p: p.ensure_mixture(weight_by=named),
    "token_estimation": lambda p: p,
}


def pipeline(add: Callable[[Pipeline], Any], rows: list[dict[str, Any]] = ROWS[:1], **options: Any) -> Pipeline:
    estimation = TokenEstimation(measure=named) if add is ASKING["token_estimation"] else None
    dataset = Dataset.from_dict("d", {"s": InMemoryShard(rows)})
    source = StaticMixtureWorkSource([dataset], {"d": 1.0}, shuffle_shards=False, token_estimation=estimation)
    made = Pipeline(source)
    add(made)
    return made.batch(1, drop_last=False).options(canonical_replicas=1, **options)


def refused(made: Pipeline) -> str:
    with pytest.raises(RecordError) as raised:
        list(made)
    again = [RecordError.from_parts(raised.value.parts), pickle.loads(pickle.dumps(raised.value))]
    assert {str(error) for error in again} == {str(raised.value)}, "as it reaches a rank"
    return str(raised.value)


@pytest.mark.parametrize("where", ASKING)
def test_a_field_that_the_record_lacks_is_told_with_those_that_it_has_and_the_nearest_name(where: str) -> None:
    said = refused(pipeline(ASKING[where]))
    fields = "id, ids, text"
    assert f"KeyError: 'txt': the record has no field 'txt' (it has: {fields}; did you mean 'text'?)" in said
    assert said.endswith(
        'Fix the function, or the record, or count and skip such records with options(on_error="skip").'
    )


def test_the_fields_told_are_those_of_the_very_record_as_the_function_was_given_it() -> None:
    def change(row: dict[str, Any]) -> dict[str, Any]:
        row["more"] = row.pop("id")
        return {"n": len(row["text"])}

    said = refused(pipeline(lambda p: p.map_transform(change), ROWS))
    assert "row 1" in said
    assert "no field 'text' (it has: id, ids)" in said


@pytest.mark.parametrize("fails", [lambda row: row.pop("id") or row["id"], lambda row: {}[3], lambda row: 1 // 0])
def test_errors_about_anything_else_are_told_as_they_are(fails: Any) -> None:
    said = refused(pipeline(lambda p: p.map_transform(fails)))
    assert "has no field" not in said
    assert "Fix the record, or count" in said


def test_a_setting_that_names_a_field_which_records_lack_is_what_is_to_be_put_right() -> None:
    said = refused(pipeline(lambda p: p.pack_flat(4, tokens_field="idss")))
    assert re.search(r"found no such field \(the sample has: .*; did you mean 'ids'\?\)", said)
    assert "Fix the name of the field, or the record, or count" in said


def test_records_that_are_skipped_are_counted_as_ever() -> None:
    made = pipeline(lambda p: p.map_transform(lambda row: {"n": len(row["text"])}), ROWS, on_error="skip")
    with pytest.warns(UserWarning, match="1 bad record was skipped"):
        assert [batch["n"].tolist() for batch in made] == [[1]]
