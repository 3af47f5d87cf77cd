"""Whether a user's functions can be sent to workers, and if not, which object in them cannot.

Functions and classes of a recipe travel by value, with what they close over and the globals that they read. An open
file, a connection or a lock among those cannot travel; the error of a pickler names its type at best, so the way to
it is walked again here.

A function keeps the name of the file that it was written in, which cloudpickle leaves out, so that a traceback of a
worker names the recipe's path and line.
"""

from __future__ import annotations

import functools
import io
import types
from collections import ChainMap
from collections.abc import Iterator
from typing import Any, ClassVar

import cloudpickle

from zephon.errors import SettingError
from zephon.ops.base import Operator, said
from zephon.ops.custom import FunctionOp
from zephon.recipe import recipe_modules
from zephon.windows import Front

_DEPTH = 12
_FILELESS = "<dynamic-code>"
_TABLE: Any = cloudpickle.CloudPickler.dispatch_table


def _with_file(code: types.CodeType) -> tuple[Any, ...]:
    made, parts = _TABLE[types.CodeType](code)
    return made, tuple(code.co_filename if part == _FILELESS else part for part in parts)


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    dispatch_table: ClassVar[Any] = ChainMap({types.CodeType: _with_file}, _TABLE)


def pickled(front: Front) -> bytes:
    """A front for workers. SettingError names the operator and the object that cannot be sent."""
    try:
        return _dumps(front)
    except Exception as error:
        for operator in front.operators:
            why = why_not_sent(operator)
            if why is not None:
                raise SettingError(f"{operator.name}: {why}") from error
        raise SettingError(f"the pipeline cannot be sent to worker processes: {said(error)}") from error


def _dumps(value: Any) -> bytes:
    """Pickled, with everything of recipes by value."""
    ours = [module for module in recipe_modules() if module.__name__ not in cloudpickle.list_registry_pickle_by_value()]
    for module in ours:
        cloudpickle.register_pickle_by_value(module)
    try:
        file = io.BytesIO()
        _Pickler(file, protocol=5).dump(value)
        return file.getvalue()
    finally:
        for module in ours:
            cloudpickle.unregister_pickle_by_value(module)


def why_not_sent(operator: Operator) -> str | None:
    """Why an operator cannot be sent to another process; None if it can."""
    if _error(operator) is None:
        return None
    for name, value in _parts(operator):
        error = _error(value)
        if error is not None:
            return _said(*_culprit(name, value, error, 0))
    return f"it cannot be sent to worker processes: {said(_error(operator) or TypeError())}"


def _said(path: str, value: Any, error: BaseException) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return (
        f"{path}, {'an' if name[:1].lower() in 'aeiou' else 'a'} {name}, which cannot be sent to worker processes "
        f"({said(error)}). Open it in setup(), or inside the function, or at the top level of a module that it imports"
    )


def _culprit(path: str, value: Any, error: BaseException, depth: int) -> tuple[str, Any, BaseException]:
    """The innermost object that cannot be pickled, with the way to it."""
    for step, part in _inside(value) if depth < _DEPTH else ():
        wrong = _error(part)
        if wrong is not None:
            return _culprit(f"{path} {step}", part, wrong, depth + 1)
    return (path if depth else f"{path} is"), value, error


def _error(value: Any) -> BaseException | None:
    try:
        _dumps(value)
    except Exception as error:
        return error
    return None


def _parts(operator: Operator) -> Iterator[tuple[str, Any]]:
    """What an operator holds, by the names that its author knows."""
    for name, value in _state(operator):
        if isinstance(value, FunctionOp):
            yield from {**value.functions, "accumulator": value.made_by}.items()
        else:
            yield name, value


def _state(value: Any) -> Iterator[tuple[str, Any]]:
    get = getattr(type(value), "__getstate__", None)
    state = get(value) if isinstance(get, types.FunctionType) else getattr(value, "__dict__", {})
    if isinstance(state, dict):
        yield from state.items()


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, each with the words that lead to it."""
    if isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
            try:
                yield f"closes over {name!r}", cell.cell_contents
            except ValueError:
                continue
        for number, default in enumerate(value.__defaults__ or ()):
            yield f"has default number {number}", default
        for name, default in (value.__kwdefaults__ or {}).items():
            yield f"has the default {name}=", default
        for name in _names(value.__code__):
            if name in value.__globals__:
                yield f"reads the global {name!r}", value.__globals__[name]
    elif isinstance(value, types.MethodType):
        yield "is a method of", value.__self__
        yield "is", value.__func__
    elif isinstance(value, functools.partial):
        yield "is a partial of", value.func
        for number, argument in enumerate(value.args):
            yield f"has argument {number}", argument
        for name, argument in value.keywords.items():
            yield f"has the argument {name}=", argument
    elif isinstance(value, dict):
        for key, item in value.items():
            yield f"holds under {key!r}", item
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield "holds", item
    elif not isinstance(value, (type, types.ModuleType)):
        for name, item in _state(value):
            yield f"has the attribute {name!r}", item


def _names(code: types.CodeType) -> set[str]:
    """The globals that a function and those inside it may read."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names
