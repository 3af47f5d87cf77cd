"""The state of a work source as a frontier carries it: JSON, small, and exactly what the source gave.

It is taken at the beginning of a window, before any of the window's chunks. A checkpoint has it as the lane's
"source":

    {"samples": 40960, "window": "9f2c…", "state": {…}}

`samples` is the lane's number of the window's first sample, `window` a digest of the window's pointers, by which a
source that is not a function of its state is found out, and `state` what `state_dict()` returned. In memory it is the
JSON text, so that nothing can change it. Without text there is no state: a lane that begins an epoch starts from a
fresh source.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

STATE_LIMIT = 16 << 10
"""Bytes of the largest state as JSON: every window of every lane announces one, and a checkpoint holds one a lane."""


@dataclass(frozen=True)
class SourceState:
    """See the module."""

    samples: int
    window: str
    state: Any

    def to_text(self) -> str:
        return as_text({"samples": self.samples, "window": self.window, "state": self.state})


def parse_state(text: str) -> SourceState:
    """Reads the text of a state. ValueError says what is wrong with it."""
    given = json.loads(text)
    if not isinstance(given, dict) or given.keys() != {"samples", "window", "state"}:
        raise ValueError("it must have 'samples', 'window' and 'state'")
    samples, window = given["samples"], given["window"]
    if type(samples) is not int or samples < 0 or not isinstance(window, str):
        raise ValueError("'samples' must be a whole number from 0 and 'window' a str")
    return SourceState(samples, window, given["state"])


def as_text(value: Any) -> str:
    """Compact JSON. The order of keys is kept, so that a state that was loaded and saved is the same text."""
    return json.dumps(value, separators=(",", ":"))


def unlike_json(value: Any, where: str = "") -> str | None:
    """What JSON would not give back as it is, with its place: "['rng'] is a tuple, …"; None if there is nothing."""
    here = where or "it"
    if value is None or type(value) in (bool, int, str):
        return None
    if type(value) is float:
        return None if math.isfinite(value) else f"{here} is {value!r}, which JSON does not have"
    if type(value) is list:
        parts = [(f"{where}[{number}]", each) for number, each in enumerate(value)]
    elif type(value) is dict:
        keys = [key for key in value if type(key) is not str]
        if keys:
            return f"{here} has the key {keys[0]!r}, which JSON would give back as a str"
        parts = [(f"{where}[{key!r}]", each) for key, each in value.items()]
    else:
        kind = type(value).__name__
        use = {"tuple": "a list", "set": "a sorted list", "ndarray": "tolist()"}.get(kind, "plain JSON values")
        if type(value).__module__ == "numpy" and kind != "ndarray":
            use = "item()"
        return f"{here} is of type {kind}: use {use}"
    return next((found for name, each in parts if (found := unlike_json(each, name)) is not None), None)
