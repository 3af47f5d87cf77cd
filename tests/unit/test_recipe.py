"""Recipes: what a file may define, how it is named, and one line for everything that is wrong with it."""
from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from zephon.errors import RecipeError
from zephon.recipe import load_recipe, split_name

HEAD = """\
from zephon import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
source = StaticMixtureWorkSource([Dataset.from_dict("d", {"0": InMemoryShard([{"id": 1}])})], mixture=None, seed=0)
"""
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(text: str, name: str = "recipe.py", head: str = HEAD) -> str:
        (tmp_path / name).write_text(head + text)
        return str(tmp_path / name)

    return make


def test_top_level_pipelines_are_found_by_name_the_default_one_first(write: Write) -> None:
    recipe = load_recipe(write("held_out = Pipeline(source).batch(1)\npipeline = Pipeline(source).batch(2)\nx = 3\n"))
    assert recipe.names == ["pipeline", "held_out"]
    assert recipe.pipeline().data.microbatch_size == 2
    assert recipe.pipeline("held_out").data.microbatch_size == 1


def test_a_named_pipeline_takes_the_place_of_the_default_one(write: Write) -> None:
    recipe = load_recipe(write("small = Pipeline(source).batch(1)\npipeline = Pipeline(source).batch(2)\n") + ":small")
    assert recipe.pipeline("pipeline").data.microbatch_size == 1
    assert recipe.names[0] == "pipeline"


def test_a_function_is_called_once_and_only_if_it_is_asked_for(write: Write) -> None:
    text = "calls = []\ndef pipeline():\n    calls.append(1)\n    return Pipeline(source).batch(3)\n"
    recipe = load_recipe(write(text + "def never():\n    raise SystemExit(1)\n"))
    assert recipe.module.calls == []
    assert recipe.pipeline() is recipe.pipeline()
    assert recipe.module.calls == [1]


def test_a_recipe_is_no_main_and_imports_what_lies_beside_it(write: Write) -> None:
    write("value = 5\n", "beside_the_recipe.py", head="")
    text = "import beside_the_recipe as other\nassert __name__ != '__main__'\n"
    path, before = write(text + "pipeline = Pipeline(source).batch(other.value)\n"), list(sys.path)
    recipe = load_recipe(path)
    assert recipe.pipeline().data.microbatch_size == 5
    assert sys.path == before


def test_its_functions_have_source_and_can_be_pickled_and_its_folder_stays_clean(write: Write, tmp_path: Path) -> None:
    recipe = load_recipe(write("def double(x):\n    return 2 * x\npipeline = Pipeline(source).batch(1)\n"))
    assert "2 * x" in inspect.getsource(recipe.module.double)
    assert pickle.loads(pickle.dumps(recipe.module.double)) is recipe.module.double
    assert [each.name for each in tmp_path.iterdir()] == ["recipe.py"]


def test_two_loads_of_one_recipe_do_not_touch_each_other(write: Write) -> None:
    path = write("pipeline = Pipeline(source).batch(1)\n")
    first = load_recipe(path)
    write("pipeline = Pipeline(source).batch(9)\n")
    assert load_recipe(path).pipeline().data.microbatch_size == 9
    assert first.pipeline().data.microbatch_size == 1


@pytest.mark.parametrize(("text", "said"), [
    ("x = 1\n", "defines no pipeline 'pipeline'"),
    ("train = Pipeline(source).batch(1)\n", "it defines train: use"),
    ("pipeline = 7\n", "defines no pipeline 'pipeline'"),
    ("\n1 / 0\n", "recipe.py:4: ZeroDivisionError: division by zero"),
    ("import nowhere_to_be_found\n", "recipe.py:3: ModuleNotFoundError"),
    ("def f(:\n", "recipe.py:3: SyntaxError"),
    ("raise SystemExit(4)\n", "recipe.py:3: SystemExit: 4"),
    ("pipeline = Pipeline(source).batch(0)\n", "recipe.py:3: SettingError: microbatch_size=0"),
    ("pipeline = Pipeline(source).map_transfrom(len)\n", "no attribute 'map_transfrom'; did you mean 'map_transform'?"),
    ("raise ValueError('two\\nlines')\n", "two lines"),
])  # fmt: skip
def test_what_is_wrong_is_one_line_that_names_the_place(write: Write, text: str, said: str) -> None:
    before = set(sys.modules)
    with pytest.raises(RecipeError) as found:
        load_recipe(write(text))
    assert said in str(found.value)
    assert len(str(found.value).splitlines()) == 1
    assert not [name for name in set(sys.modules) - before if name.startswith("zephon_recipe")]


def test_missing_files_and_unknown_names_are_refused(write: Write, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="No such file"):
        load_recipe(str(tmp_path / "absent.py"))
    with pytest.raises(RecipeError, match="Did you mean 'held_out'"):
        load_recipe(write("held_out = pipeline = Pipeline(source).batch(1)\n")).pipeline("heldout")
    functions = write("pipeline = Pipeline(source).batch(1)\ndef small():\n    return Pipeline(source).batch(2)\n")
    with pytest.raises(RecipeError, match=r"no pipeline 'small'; it has pipeline. Of functions .*recipe.py:small"):
        load_recipe(functions).pipeline("small")
    assert load_recipe(functions + ":small").pipeline().data.microbatch_size == 2
    with pytest.raises(RecipeError, match=r"pipeline\(\) returned int"):
        load_recipe(write("def pipeline():\n    return 1\n")).pipeline()


def test_a_file_whose_name_has_a_colon_wins_over_a_pipelines_name(write: Write) -> None:
    path = write("pipeline = Pipeline(source).batch(4)\n", "a:b")
    assert split_name(path) == (path, "pipeline")
    assert load_recipe(path).pipeline().data.microbatch_size == 4
    assert split_name("x.py:eval") == ("x.py", "eval")
    assert split_name("dir:x/y.py") == ("dir:x/y.py", "pipeline")
