"""Arguments as a recipe's author types them: mistyped ones are told with the nearest name, and keyword arguments of
mechanisms that this design does not have are ignored, and named once in a warning.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from zephon.words import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")

IGNORED = frozenset(
    {
        "placement", "use_fast", "padding", "return_tensors", "warmup_growth", "obsolete_drain_rate", "span_source",
        "indexable", "calibration_replayable",
    }
)  # fmt: skip


def recipe_level() -> int:
    """The `stacklevel` with which a warning of the calling function names the recipe's line, not one in here."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "zephon":
        frame, level = frame.f_back, level + 1
    return level


def drop_ignored(
    method: str, given: Mapping[str, Any], known: Iterable[str], ignored: frozenset[str] = frozenset()
) -> None:
    """Warn once about arguments of mechanisms that this design does not have; `TypeError` for unknown ones."""
    ignored = ignored | IGNORED
    for name in given:
        if name not in ignored and not (method == "options" and name.startswith("shm_")):
            raise TypeError(f"{method}() has no argument {name!r}{did_you_mean(name, [*known, *ignored])}")
    if given:
        names = ", ".join(given)
        warnings.warn(f"{method}(): ignored, this design has no such mechanism: {names}", stacklevel=recipe_level())


def known_settings(method: str, given: Mapping[str, Any], *classes: type) -> dict[str, Any]:
    """Those of the keyword arguments that one of the classes takes; the rest is for `drop_ignored`."""
    known = _settings_of(classes)
    others = {n: v for n, v in given.items() if n not in known}
    drop_ignored(method, others, [*known, "parallelism"])
    return {n: v for n, v in given.items() if n in known}


def spelled(*classes: type) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """For a method that needs an argument by name: where it is missing because it is mistyped, tell the nearest name.

    `classes` take the arguments that the method itself does not name.
    """

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        signature, name = inspect.signature(method), method.__name__

        @wraps(method)
        def called(*args: P.args, **given: P.kwargs) -> R:
            try:
                signature.bind(*args, **given)
            except TypeError as error:
                known = {*signature.parameters, *_settings_of(classes)} - {"self"}
                drop_ignored(name, {n: v for n, v in given.items() if n not in known}, sorted(known))
                raise TypeError(f"{name}(): {error}") from None
            return method(*args, **given)

        return called

    return decorate


def _settings_of(classes: Iterable[type]) -> set[str]:
    return {name for each in classes for name in each.__init__.__annotations__}  # type: ignore[misc]
