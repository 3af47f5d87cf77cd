"""Recipes: Python or TOML files that define pipelines, named as `recipe.py` or `recipe.py:name`.

A recipe in Python is executed once, as a module of a name of its own and never as `__main__`. Its folder is on the path
while its code runs, so that it may import what lies beside it. Nothing is written into that folder. One in TOML is read
by `zephon.toml_recipe` and runs no code.
"""

from __future__ import annotations

import difflib
import linecache
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from itertools import count
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING

from zephon.errors import RecipeError, whence
from zephon.extras import needing
from zephon.words import did_you_mean

if TYPE_CHECKING:
    from zephon.pipeline import Pipeline

DEFAULT = "pipeline"
"""The pipeline that is meant where none is named."""

_MODULES = "zephon_recipe_"
_numbers = count(1)


class Recipe:
    """An executed recipe. Pipelines are those of its module's top level, and what functions return that are asked for.

    With `recipe.py:name`, the pipeline called "pipeline" is the one of that name.
    """

    def __init__(self, path: str, module: ModuleType, chosen: str) -> None:
        from zephon.pipeline import Pipeline

        self.path, self.module, self.chosen = path, module, chosen
        found = [name for name, value in vars(module).items() if isinstance(value, Pipeline)]
        self._made: dict[str, Pipeline] = {}
        self.names: list[str] = [DEFAULT, *(name for name in found if name not in (DEFAULT, chosen))]
        """The pipelines by name, the default one first."""
        if not isinstance(vars(module).get(chosen), (Pipeline, FunctionType)):
            others = ", ".join(found)
            hint = f"; it defines {others}: use {path}:{found[0]}" if found else ""
            how = "Assign it a zephon.Pipeline at top level"
            if path.endswith(".toml"):
                how = f"Write its tables as [pipelines.{chosen}.…]"
            raise RecipeError(f"{path} defines no pipeline {chosen!r}{hint}. {how}.")

    def pipeline(self, name: str = DEFAULT) -> Pipeline:
        """A pipeline by name; a function that makes one is called, once. `RecipeError` if there is none.

        Which functions make pipelines only a call would tell, so only the default one may be a function.
        """
        if name not in self.names:
            near = difflib.get_close_matches(name, self.names, 1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            if isinstance(vars(self.module).get(name), FunctionType):
                hint = f". Of functions that return one, name it as {self.path}:{name}, or assign what it returns"
            raise RecipeError(f"{self.path} has no pipeline {name!r}; it has {', '.join(self.names)}{hint}")
        if name not in self._made:
            self._made[name] = self._make(self.chosen if name == DEFAULT else name)
        return self._made[name]

    def _make(self, name: str) -> Pipeline:
        from zephon.pipeline import Pipeline

        value = vars(self.module).get(name)
        if isinstance(value, FunctionType):
            with _folder_on_path(self.path), _errors_of(self.path):
                value = value()
            if not isinstance(value, Pipeline):
                raise RecipeError(f"{self.path}: {name}() returned {type(value).__name__}, not a zephon.Pipeline")
        assert isinstance(value, Pipeline)
        return value


def recipe_modules() -> list[ModuleType]:
    """The modules as which recipes were executed in this process. No other process can import them."""
    return [module for name, module in list(sys.modules.items()) if is_recipe_module(name)]


def is_recipe_module(name: str | None) -> bool:
    """Whether a module of that name is one as which a recipe was executed, here or where it came from."""
    return name is not None and name.startswith(_MODULES)


def recipe_folders() -> list[str]:
    """The folders of those recipes: modules that they import lie there."""
    return list(dict.fromkeys(os.path.dirname(module.__file__ or ".") for module in recipe_modules()))


def split_name(recipe: str) -> tuple[str, str]:
    """`path` and the pipeline's name of `path` or `path:name`. A file whose own name has a colon wins."""
    path, colon, name = recipe.rpartition(":")
    if colon and name.isidentifier() and not os.path.exists(recipe):
        return path, name
    return recipe, DEFAULT


def load_recipe(recipe: str) -> Recipe:
    """Execute the recipe `path` or `path:name`, or read it, if it is TOML. `RecipeError` says in one line what is wrong
    with it, and where.
    """
    given, chosen = split_name(recipe)
    path = os.path.abspath(os.path.expanduser(given))
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        raise RecipeError(f"{given}{whence(given)}: cannot read the recipe: {error.strerror}") from error
    name = f"{_MODULES}{sha256(os.fsencode(path)).hexdigest()[:12]}_{next(_numbers)}"
    module = ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module  # pickle and inspect look functions up by their module's name
    linecache.checkcache(path)
    try:
        if path.endswith(".toml"):
            with needing("a recipe in TOML"):
                from zephon.toml_recipe import pipelines_of

            vars(module).update(pipelines_of(path, source, DEFAULT))
            return Recipe(path, module, chosen)
        with _folder_on_path(path), _errors_of(path):
            exec(compile(source, path, "exec"), module.__dict__)
        return Recipe(path, module, chosen)
    except BaseException:
        del sys.modules[name]
        raise


@contextmanager
def _folder_on_path(path: str) -> Iterator[None]:
    folder = os.path.dirname(path)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


@contextmanager
def _errors_of(path: str) -> Iterator[None]:
    """Whatever the recipe raises becomes one line that names the recipe's own line."""
    try:
        yield
    except SyntaxError as error:
        where = error.filename or path
        raise RecipeError(f"{where}:{error.lineno or 0}: {type(error).__name__}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        calls = traceback.extract_tb(error.__traceback__)
        if isinstance(error, ModuleNotFoundError) and calls[-1].filename.startswith(os.path.dirname(__file__)):
            raise  # a library that zephon itself needs is missing: nothing is wrong with the recipe
        frames = [frame for frame in calls if frame.filename == path]
        line = f":{frames[-1].lineno}" if frames else ""
        text = " ".join(str(error).split()) or "raised"
        if isinstance(error, AttributeError) and error.name and error.obj is not None:
            text += did_you_mean(error.name, dir(error.obj))
        raise RecipeError(f"{path}{line}: {type(error).__name__}: {text}") from error
