"""Keyword arguments of mechanisms that this design does not have: ignored, and named once in a warning."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

IGNORED = frozenset(
    {
        "placement", "use_fast", "padding", "return_tensors", "warmup_growth", "obsolete_drain_rate", "span_source",
        "indexable", "calibration_replayable",
    }
)  # fmt: skip


def drop_ignored(
    method: str,
    given: Mapping[str, Any],
    known: Iterable[str],
    ignored: frozenset[str] = frozenset(),
    stacklevel: int = 3,
) -> None:
    """Warn once about arguments of mechanisms that this design does not have; `TypeError` for unknown ones."""
    ignored = ignored | IGNORED
    for name in given:
        if name not in ignored and not (method == "options" and name.startswith("shm_")):
            near = difflib.get_close_matches(name, [*known, *ignored], 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{method}() has no argument {name!r}{hint}")
    if given:
        names = ", ".join(given)
        warnings.warn(f"{method}(): ignored, this design has no such mechanism: {names}", stacklevel=stacklevel)


def known_settings(method: str, given: Mapping[str, Any], *classes: type, stacklevel: int = 4) -> dict[str, Any]:
    """Those of the keyword arguments that one of the classes takes; the rest is for `drop_ignored`."""
    known = {name for each in classes for name in each.__init__.__annotations__}  # type: ignore[misc]
    others = {n: v for n, v in given.items() if n not in known}
    drop_ignored(method, others, [*known, "parallelism"], stacklevel=stacklevel)
    return {n: v for n, v in given.items() if n in known}
