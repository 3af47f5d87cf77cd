"""Lines of JSON to rows, many at once; one by one only where something is wrong with them.

A line holds one row, an object; UTF-8, and nothing but JSON (NaN is none). What `json` accepts is accepted and means
the same: `msgspec` decodes whole groups of lines, and a line that it refuses is judged by `json` alone. Only the needed
fields are made into objects, but the rest must be JSON in UTF-8 too.
"""

from __future__ import annotations

import functools
import json
import operator
from typing import Any

import msgspec
import numpy as np

from zephon.columns import MISSING, Column, IntArray, column_of
from zephon.datasets.source import in_words

_OPEN, _CLOSE = b"{}"
_SPACES = np.zeros(256, np.int64)
_SPACES[[9, 10, 13, 32]] = 1
REFUSALS = (ValueError, RecursionError)
"""What either decoder raises; msgspec's errors are ValueErrors."""


class Decoder:
    """Lines to values and values to columns, for all fields (`names` None, a value is a dict) or some (a struct)."""

    def __init__(self, names: tuple[str, ...] | None) -> None:
        self._names = names
        if names is None:
            self._type: Any = dict[str, Any]
        else:
            attributes = [f"f{i}" for i in range(len(names))]
            self._type = msgspec.defstruct(
                "Row",
                [(a, Any, MISSING) for a in attributes],
                rename=dict(zip(attributes, names, strict=True)),
                gc=False,
            )
            self._attributes = attributes
        self._decoder = msgspec.json.Decoder(self._type)

    def many(self, data: bytes) -> list[Any]:
        values: list[Any] = self._decoder.decode_lines(data)
        return values

    def one(self, line: bytes) -> Any:
        """The value of one line; raises one of `REFUSALS`."""
        text = line.decode("utf-8")
        try:
            return self._decoder.decode(line)
        except REFUSALS:
            row = json.loads(text, parse_constant=_refuse_constant)
        if not isinstance(row, dict):
            raise ValueError(f"not an object but {_JSON_NAMES[type(row)]}")
        if self._names is None:
            return row
        return self._type(**{a: row.get(n, MISSING) for a, n in zip(self._attributes, self._names, strict=True)})

    def columns(self, values: list[Any]) -> dict[str, Column]:
        if self._names is None:
            names = dict.fromkeys(name for row in values for name in row)
            return {n: column_of([row.get(n, MISSING) for row in values]) for n in names}
        attributes = zip(self._names, self._attributes, strict=True)
        return {n: column_of(list(map(operator.attrgetter(a), values))) for n, a in attributes}


_JSON_NAMES = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


@functools.lru_cache(maxsize=64)
def decoder(names: tuple[str, ...] | None) -> Decoder:
    return Decoder(names)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def decode_together(data: bytes, begins: IntArray, decoder: Decoder) -> list[Any] | None:
    """One value a line, or None where lines must be looked at one by one.

    The decoder ignores line ends, so a value might lie across two lines, or two in one. If every line begins with `{`
    and ends with `}`, none can go on past its line (`}` `{` is never JSON); then as many values as lines is one each.
    """
    chars = np.frombuffer(data, np.uint8)
    if not len(begins):
        return []
    ends = np.append(begins[1:], len(chars)) - 1
    for _ in range(4):  # a newline, a carriage return, a blank line or two
        ends -= _SPACES[chars[ends]]
    if not ((chars[begins] == _OPEN) & (chars[ends] == _CLOSE) & (begins < ends)).all():
        return None
    try:
        if not data.isascii():
            data.decode("utf-8")
        values = decoder.many(data)
    except REFUSALS:
        return None
    return values if len(values) == len(begins) else None


def why(error: BaseException) -> str:
    """What is wrong with a line, given what `Decoder.one` raised."""
    if isinstance(error, UnicodeDecodeError):
        return in_words(error)
    if isinstance(error, json.JSONDecodeError):
        return f"broken JSON: {error.msg.removesuffix(' at')} at its character {error.pos}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return str(error)
