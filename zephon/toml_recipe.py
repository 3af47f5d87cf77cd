"""Recipes in TOML: the words of a Python recipe as tables, so that a recipe can be read without running any code.

`[[sources]]` are the datasets, with a `weight` each for the mixture; `[work_source]` has the other arguments of
`StaticMixtureWorkSource`; then comes one table for each step, named as the method of `Pipeline`, **in the order of the
file**; a step that occurs twice is written `[[shuffle]]`, each where it stands. `[batch]` and `[options]` end it.
`[pipelines.eval.…]` holds the same tables for a further pipeline called `eval`. Relative paths start at the file.

Nothing here knows any operator: tables call the methods, and what a method takes is read from its signature. So a
pipeline means the same, and has the same identity, in both languages. Every mistake becomes one `RecipeError` with the
file, the line and, where there is one, the nearest name.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
import sys
import types
import typing
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from zephon.builder import Builder
from zephon.datasets import Dataset
from zephon.errors import RecipeError, ZephonError
from zephon.ops.chat_source import is_template_file
from zephon.options import OPTIONS
from zephon.toml_lines import Lines, TomlPath
from zephon.work import StaticMixtureWorkSource

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from zephon.pipeline import Pipeline

SOURCES, WORK_SOURCE, OPTIONS_TABLE, PIPELINES = "sources", "work_source", "options", "pipelines"
NEED_CODE = ("map_transform", "map_batch", "stateful_transform", "add_op")
"""Steps that take functions or objects."""


def pipelines_of(path: str, source: bytes, default: str) -> dict[str, Pipeline]:
    """The pipelines that a TOML recipe defines, by name. Raises `RecipeError`."""
    try:
        text = source.decode()
        document = tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}:{_line(source, error.start)}: not UTF-8: {error.reason}") from error
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"^(.*?) \(at (?:line (\d+), column \d+|end of document)\)$", str(error), re.DOTALL)
        end = _line(source.rstrip(), len(source))
        what, line = (place[1], place[2] or end) if place else (str(error), end)
        if what.endswith(" twice"):
            what += "; a step that comes twice has double brackets each time: [[shuffle]]"
        raise RecipeError(f"{path}:{line}: {what}") from error
    file = _File(path, Lines(text))
    named = document.pop(PIPELINES, {})
    if not isinstance(named, dict):
        raise file.error((PIPELINES,), "[pipelines] holds tables: [pipelines.eval.batch]")
    made = {default: file.pipeline((), document)} if document or not named else {}
    for name, tables in named.items():
        at = (PIPELINES, name)
        if not isinstance(tables, dict) or not name.isidentifier() or name in made:
            raise file.error(at, f"[pipelines.{name}]: pipelines are tables, each with a name of its own like `eval`")
        made[name] = file.pipeline(at, tables)
    return made


def _line(source: bytes, at: int) -> int:
    return source.count(b"\n", 0, at) + 1


def step_names() -> list[str]:
    """The methods that add a step: those that return the pipeline."""
    found = []
    for name, method in inspect.getmembers(Builder, inspect.isfunction):
        signature = inspect.signature(method)
        returns = signature.return_annotation
        if not name.startswith("_") and returns == next(iter(signature.parameters.values())).annotation:
            found.append(name)
    return [name for name in found if name != OPTIONS_TABLE]


class _File:
    """A TOML recipe's path and lines, for its errors."""

    def __init__(self, path: str, lines: Lines) -> None:
        self.path, self.folder, self.lines = path, os.path.dirname(path), lines

    def error(self, at: TomlPath, text: str) -> RecipeError:
        return RecipeError(f"{self.path}:{self.lines.of(at)}: {text}")

    def pipeline(self, at: TomlPath, tables: dict[str, Any]) -> Pipeline:
        """The pipeline that the tables below `at` write."""
        from zephon.pipeline import Pipeline

        steps = self._steps(at, tables)
        pipeline = Pipeline(self._work_source(at, tables))
        for _, name, place, arguments in sorted(steps, key=lambda step: step[0]):
            self._call(getattr(pipeline, name), name, place, arguments)
        if OPTIONS_TABLE in tables:
            place = (*at, OPTIONS_TABLE)
            self._call(pipeline.options, OPTIONS_TABLE, place, self._table(place, tables[OPTIONS_TABLE]))
        return pipeline

    def _steps(self, at: TomlPath, tables: dict[str, Any]) -> list[tuple[int, str, TomlPath, dict[str, Any]]]:
        """Every step with its line."""
        known = step_names()
        steps = []
        for name, value in tables.items():
            place = (*at, name)
            if name in (SOURCES, WORK_SOURCE, OPTIONS_TABLE):
                continue
            if name in NEED_CODE:
                raise self.error(
                    place, f"[{name}] needs a function or an object, and a TOML recipe runs no code: write it in Python"
                )
            if name not in known:
                raise self.error(place, self._unknown(name, [SOURCES, WORK_SOURCE, *known, OPTIONS_TABLE]))
            if isinstance(value, list) and name == "batch":
                raise self.error((*place, 1), "[batch] comes once, and last")
            for number, table in enumerate(value if isinstance(value, list) else [value]):
                one = (*place, number) if isinstance(value, list) else place
                steps.append((self.lines.of(one), name, one, self._table(one, table)))
        return steps

    def _unknown(self, name: str, known: Collection[str]) -> str:
        if name in inspect.signature(StaticMixtureWorkSource).parameters:
            where = "`weight` of each of [[sources]], or in [work_source]" if name == "mixture" else "[work_source]"
            return f"{name} does not stand here: it belongs into {where}"
        if name in OPTIONS:
            return f"{name} does not stand here: it belongs into [options]"
        near = difflib.get_close_matches(name, [*known, *NEED_CODE], 1)
        hint = f"; did you mean [{near[0]}]?" if near else f"; there are {', '.join(known)}"
        return f"no table is called [{name}]{hint}"

    def _table(self, at: TomlPath, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            name = next(part for part in reversed(at) if isinstance(part, str))
            raise self.error(at, f"{name} must be a table: [{name}], with a line for each argument")
        return value

    def _work_source(self, at: TomlPath, tables: dict[str, Any]) -> StaticMixtureWorkSource:
        sources, place = tables.get(SOURCES), (*at, SOURCES)
        if not isinstance(sources, list) or not sources:
            raise self.error(place, "a recipe needs [[sources]], one for each dataset, each with `name` and `path`")
        datasets: list[Dataset] = []
        weights: dict[str, Any] = {}
        named: dict[str, int] = {}
        for number, source in enumerate(sources):
            one = (*place, number)
            arguments = dict(self._table(one, source))
            weighted = "weight" in arguments
            weight = arguments.pop("weight", None)
            unknown = [key for key in arguments if key not in inspect.signature(Dataset.from_path).parameters]
            if not weighted and (near := difflib.get_close_matches("weight", unknown, 1)):
                raise self.error((*one, near[0]), f"[sources] has no {near[0]!r}; did you mean 'weight'?")
            if weighted and (isinstance(weight, bool) or not isinstance(weight, (int, float))):
                raise self.error((*one, "weight"), f"weight = {weight!r}: must be a number from 0")
            if number and weighted != bool(weights):
                raise self.error(one, "give a `weight` to each of [[sources]], or to none (then: by their rows)")
            dataset = self._call(Dataset.from_path, SOURCES, one, arguments)
            datasets.append(dataset)
            named[f"'{dataset.name}'"] = self.lines.of((*one, "weight"))
            if weighted:
                weights[dataset.name] = weight
        place = (*at, WORK_SOURCE)
        arguments = self._table(place, tables.get(WORK_SOURCE, {}))
        if "datasets" in arguments:
            raise self.error((*place, "datasets"), "datasets are written as [[sources]]")
        if weights and "mixture" in arguments:
            raise self.error((*place, "mixture"), "give weights either here or as `weight` of each of [[sources]]")
        extra = {"datasets": datasets} if "mixture" in arguments else {"datasets": datasets, "mixture": weights or None}
        made = self._call(StaticMixtureWorkSource, WORK_SOURCE, place, arguments, extra, named)
        return typing.cast(StaticMixtureWorkSource, made)

    def _call(
        self,
        function: Callable[..., Any],
        table: str,
        at: TomlPath,
        arguments: Mapping[str, Any],
        extra: Mapping[str, Any] | None = None,
        words: Mapping[str, int] | None = None,
    ) -> Any:
        """Call a method with a table's keys. `words` are further words of its errors, with the lines they mean."""
        parameters = inspect.signature(function).parameters
        given = {**arguments, **(extra or {})}
        for name, parameter in parameters.items():
            needed = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
            if needed and name not in given:
                near = difflib.get_close_matches(name, [key for key in arguments if key not in parameters], 1)
                if near:
                    raise self.error((*at, near[0]), f"[{table}] has no {near[0]!r}; did you mean {name!r}?")
                raise self.error(at, f"[{table}] lacks {name!r}")
        for name, value in arguments.items():
            hint = _annotation(function, parameters[name]) if name in parameters else Any
            if not fits(value, hint):
                wanted = " or ".join(dict.fromkeys(_words(hint)))
                text = f"must be {wanted}" if wanted else "takes an object or a function: write the recipe in Python"
                raise self.error((*at, name), f"[{table}] {name} = {value!r}: {text}")
            given[name] = self._beside(name, value) if _is_path(name, hint) else value
        lines = {**(words or {}), **{name: self.lines.of((*at, name)) for name in arguments}}
        with self._told(table, at, lines, arguments):
            return function(**given)

    def _beside(self, name: str, value: Any) -> Any:
        """A path as seen from the file's folder. A tokenizer that is no file there may be a name on the hub, and a chat
        template may be written out.
        """
        if not isinstance(value, str) or "://" in value or value.startswith("~") or os.path.isabs(value):
            return value
        if name == "chat_template" and not is_template_file(value):
            return value
        beside = os.path.join(self.folder, value)
        hub = name.startswith("tokenizer") and not value.startswith(".") and not value.endswith(".json")
        return value if hub and not os.path.exists(beside) else beside

    @contextmanager
    def _told(self, table: str, at: TomlPath, lines: Mapping[str, int], arguments: Mapping[str, Any]) -> Iterator[None]:
        """Errors and warnings of a call, told with the line of the key that they name, else of the table."""

        def line_of(text: str) -> int:
            found = [(match.start(), line) for word, line in lines.items() if (match := _word(word).search(text))]
            found += [(len(text), lines[k]) for k, v in arguments.items() if isinstance(v, str) and v and v in text]
            return min(found)[1] if found else self.lines.of(at)

        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                yield
        except (ZephonError, TypeError, ValueError) as error:
            text = " ".join(str(error).split())
            raise RecipeError(f"{self.path}:{line_of(text)}: {text}") from error
        for warning in caught:
            warnings.warn_explicit(
                str(warning.message), warning.category, self.path, line_of(str(warning.message).partition(":")[2])
            )


def _word(word: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(word)}(?!\w)")


def _annotation(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """What a parameter is annotated with; `Any` where that cannot be told."""
    annotation = parameter.annotation
    if not isinstance(annotation, str):
        return annotation
    inner = function.__init__ if isinstance(function, type) else inspect.unwrap(function)  # type: ignore[misc]
    try:
        return eval(annotation, getattr(inner, "__globals__", {}))
    except NameError:  # imported for type checkers alone
        return Any


def _alternatives(hint: Any) -> list[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [part for each in typing.get_args(hint) for part in _alternatives(each)]
    return [hint]


_KINDS: dict[Any, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    str: ("text", (str,)),
    os.PathLike: ("text", (str,)),
    list: ("a list", (list,)),
    dict: ("a table", (dict,)),
}


def _kind(hint: Any) -> tuple[str, tuple[type, ...]] | None:
    """What may stand in TOML for an annotation, in words and as types; None if nothing may."""
    origin = typing.get_origin(hint) or hint
    if origin in _KINDS:
        return _KINDS[origin]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _KINDS[dict]
    return _KINDS[list] if isinstance(origin, type) and issubclass(origin, Collection) else None


def fits(value: Any, hint: Any) -> bool:
    """Whether a TOML value is of a type that the annotation allows. What it may be within the type is not asked."""
    for each in _alternatives(hint):
        if each in (Any, object, inspect.Parameter.empty) or isinstance(each, typing.TypeVar):
            return True
        if typing.get_origin(each) is typing.Literal:
            if type(value) in {type(choice) for choice in typing.get_args(each)}:
                return True
        elif (kind := _kind(each)) is not None and type(value) in kind[1]:
            return True
    return False


def _words(hint: Any) -> Iterator[str]:
    for each in _alternatives(hint):
        if typing.get_origin(each) is typing.Literal:
            for choice in typing.get_args(each):
                yield f'"{choice}"' if isinstance(choice, str) else str(choice).lower()
        elif (kind := _kind(each)) is not None:
            yield kind[0]


def _is_path(name: str, hint: Any) -> bool:
    return name == "tokenizer" or any((typing.get_origin(each) or each) is os.PathLike for each in _alternatives(hint))
