"""Which records can go from process to process: asked wherever a user's function may have made values that cannot.

    front                     at its end, of all of its operators at once, since they run in one process
    every operator behind     of its own records at once: `parallelism`, an execution setting, may send them elsewhere
    the front of memory       where no function is: rows held in memory may be anything

It is asked in every runner, also where nothing is sent, so that the same records are bad in all of them. A value passes
if a pickle of it can be made and undone, and if no other process would look in vain for its class: one that a recipe
itself, or a notebook, defines is known there alone.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Iterator
from types import FunctionType
from typing import Any, NoReturn

import numpy as np

from zephon.columns import HIDDEN, MISSING, Block, Objects
from zephon.ops.base import Faults, said
from zephon.recipe import is_recipe_module

_SCALARS = {bool, int, float, str, bytes, type(None), type(MISSING)}
_ARRAYS = {np.ndarray, *_SCALARS}


def sendable(block: Block, operator: str | None, faults: Faults) -> Block:
    """The records that can be sent to another process; `operator` is the one whose function made the others.

    None: nobody was there who could make any.
    """
    if operator is None:
        return block
    bad: dict[int, str] = {}
    for record, cause in sorted(unsendable(block)):
        bad.setdefault(record, cause)
    if not bad:
        return block
    for record, cause in bad.items():
        faults.bad(block.sample_of(record), operator, cause)
    return block.take(np.array([record for record in range(len(block)) if record not in bad], np.int64))


def unsendable(block: Block) -> Iterator[tuple[int, str]]:
    """The records that cannot be sent, field by field, with what is wrong with each."""
    for name, column in block.fields.items():
        if isinstance(column, Objects) and not _plain(column.values) and why_not_sent(column.values) is not None:
            for record, value in enumerate(column.values):
                error = why_not_sent(value)
                if error is not None:
                    yield record, _cause(name, value, error)


def _plain(values: list[Any]) -> bool:
    """Whether they are arrays and scalars alone, which can be sent without a look inside: images, say."""
    kinds = set(map(type, values))
    if np.ndarray in kinds:
        return kinds <= _ARRAYS and not any(type(v) is np.ndarray and v.dtype.hasobject for v in values)
    return kinds <= _SCALARS


def why_not_sent(value: Any) -> BaseException | None:
    """Why a value cannot be sent to another process; None if it can."""
    made = io.BytesIO()
    try:
        pickler = _Pickler(made)
        pickler.dump(value)
        if pickler.rebuilds:
            pickle.loads(made.getbuffer())
    except Exception as error:
        return error
    return None


def _cause(name: str, value: Any, error: BaseException) -> str:
    """What is wrong with a field's value, in words. The only hidden field with values of a user's is that of tags."""
    field, held = f"field {name!r} holds", value
    if name.startswith(HIDDEN):
        field = "its meta's tags hold"
        for key, tag in value.items() if isinstance(value, dict) else ():
            why = why_not_sent(tag)
            if why is not None:
                field, held, error = f"its meta's tags hold, as {key!r},", tag, why
                break
    kind = type(held).__qualname__
    return (
        f"{field} {'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind} that cannot be sent to another process "
        f"({said(error)}): return arrays, numbers, str, bytes or objects that can be pickled"
    )


class _Pickler(pickle.Pickler):
    """A pickler that refuses what only this process knows. `rebuilds`: whether undoing its pickle calls anything."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, 5)
        self.rebuilds = False

    def reducer_override(self, value: Any) -> Any:
        if type(value) is np.ndarray and not value.dtype.hasobject:
            return NotImplemented
        self.rebuilds = True
        if isinstance(value, (type, FunctionType)):
            if "<" not in value.__qualname__ and _is_own(value.__module__):
                _refuse("class" if isinstance(value, type) else "function", value.__qualname__)
            return NotImplemented
        return reduced_elsewhere(value)


def reduced_elsewhere(value: Any) -> Any:
    """For a pickler's `reducer_override`, of an object that is no class and no function. Refuses one of which pickle
    notes nothing but a name in a recipe, or in the running script.
    """
    if not _is_own(getattr(type(value), "__module__", None)) or type(value) in copyreg.dispatch_table:
        return NotImplemented
    reduced = value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    if isinstance(reduced, str):
        _refuse("object", reduced)
    return reduced


def _is_own(module: str | None) -> bool:
    """Whether no other process would find what a module of that name defines."""
    return module == "__main__" or is_recipe_module(module)


def _refuse(what: str, name: str) -> NoReturn:
    raise pickle.PicklingError(
        f"the {what} {name} is the recipe's own, which ranks do not import: define it in a module that both import"
    )
