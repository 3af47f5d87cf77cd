"""What reaches a worker of a recipe's functions."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from zephon.columns import Block
from zephon.errors import RecordError
from zephon.function_pickling import pickled
from zephon.ops.base import Faults
from zephon.recipe import load_recipe
from zephon.windows import Front

RECIPE = """
from zephon import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource

class Lengths:
    def __init__(self, field):
        self.field = field

    def of(self, row):
        return len(row[self.field])  # in a method

def plain(row):
    return {"n": len(row["text"])}  # in a function

def outer():
    def inner(row):
        return [row["text"] for _ in range(1)]  # in a function inside
    return lambda row: {"n": len(inner(row))}

lengths = Lengths("text")
rows = Dataset.from_dict("d", {"s": InMemoryShard([{"tekst": "a"}])})

def of(fn):
    return Pipeline(StaticMixtureWorkSource([rows], None)).map_transform(fn).batch(1).options(canonical_replicas=1)

functions, methods, nested = of(plain), of(lambda row: {"n": lengths.of(row)}), of(outer())
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    return path


def rebuilt(recipe: Path, name: str) -> tuple[Front, Front]:
    """The front of a pipeline, and the same as a worker gets it."""
    plan = load_recipe(f"{recipe}:{name}").pipeline().plan()
    front = Front(plan)
    return front, cloudpickle.loads(pickled(front))


@pytest.mark.parametrize(
    ("name", "said"), [("functions", "in a function"), ("methods", "in a method"), ("nested", "in a function inside")]
)
def test_a_traceback_of_a_worker_names_the_recipes_path_line_and_source(recipe: Path, name: str, said: str) -> None:
    operator: Any = rebuilt(recipe, name)[1].operators[0]
    with pytest.raises(RecordError) as raised:
        operator.process(Block.from_rows([{"tekst": "a"}], np.zeros((1, 3), np.int64)), Faults())
    told = "".join(traceback.format_exception(raised.value))
    line = next(n for n, text in enumerate(RECIPE.splitlines(), 1) if text.endswith(f"# {said}"))
    assert f'File "{recipe}", line {line}, in' in told
    assert RECIPE.splitlines()[line - 1].strip() in told
    assert "<dynamic-code>" not in told


def test_functions_that_came_to_a_worker_have_the_digests_that_they_had(recipe: Path) -> None:
    for name in ("functions", "methods", "nested"):
        here, there = rebuilt(recipe, name)
        assert [op.describe() for op in here.operators] == [op.describe() for op in there.operators]


def test_one_front_is_the_same_bytes_whenever_it_is_pickled(recipe: Path) -> None:
    front = rebuilt(recipe, "nested")[0]
    assert pickled(front) == pickled(front)
