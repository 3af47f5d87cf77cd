"""Words that messages share. Counts: one lane, two lanes, through `many`. What a mistyped name was meant to be, through
`did_you_mean`, and `hinting` for functions that anybody may call, ranks too: what it needs is loaded with the first
mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def many(count: int, one: str, more: str | None = None) -> str:
    """So many of something: `many(1, "lane")` is "1 lane"; `more` is the plural where it is not `one` with an s."""
    return f"{count} {one if count == 1 else one + 's' if more is None else more}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint to append to a message: the known name that is nearest, or nothing where none is near."""
    import difflib

    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def hinting(function: Callable[P, R]) -> Callable[P, R]:
    """The function, whose `TypeError` for a keyword that it does not know tells the nearest one that it does."""

    @wraps(function)
    def called(*args: P.args, **given: P.kwargs) -> R:
        try:
            return function(*args, **given)
        except TypeError:
            import inspect

            known = [name for name in inspect.signature(function).parameters if name != "self"]
            for name in given:
                if name not in known:
                    hint = did_you_mean(name, known)
                    raise TypeError(f"{function.__name__}() has no argument {name!r}{hint}") from None
            raise

    return called
