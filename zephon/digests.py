"""A digest of a batch: equal if and only if its fields hold the same values, wherever and however it was made.

BLAKE2b of 128 bits over the fields in the order of their names: name, kind, dtype, shape and bytes of each. Samples,
lane and place are no part of it. A batch without records has one digest, whatever columns it still shows: they come
from the machinery and not from records.

Python objects are walked by value. A pickle of them would not do: it tells two references to one object from two equal
objects, and one process's strings from another's. A class is known by its qualified name alone, since a recipe's module
has another name under a daemon than in a notebook.
"""

from __future__ import annotations

import struct
import sys
from hashlib import blake2b
from typing import Any

import numpy as np

from zephon.columns import AnyArray, Block, Bytes, Column, Fixed, Ragged, Text

_BYTES = 16


def block_digest(block: Block) -> bytes:
    """The digest of a canonical block: 16 bytes."""
    return combined({name: column_digest(column) for name, column in block.fields.items()}, len(block))


def combined(fields: dict[str, bytes], records: int) -> bytes:
    """The digest of a batch of `records` records from the digests of its fields."""
    whole = blake2b(struct.pack("<q", records), digest_size=_BYTES)
    for name in sorted(fields) if records else ():
        _sized(whole, b"n", name.encode("utf-8", "surrogatepass"))
        whole.update(fields[name])
    return whole.digest()


def column_digest(column: Column) -> bytes:
    """The digest of one field: 16 bytes."""
    out = blake2b(digest_size=_BYTES)
    if isinstance(column, Fixed):
        out.update(b"F")
        _array(out, column.values)
    elif isinstance(column, (Ragged, Bytes)):
        out.update(b"R" if isinstance(column, Ragged) else b"T" if isinstance(column, Text) else b"B")
        compact = column.compact()
        _array(out, compact.offsets)
        _array(out, compact.values)
    else:
        out.update(b"O")
        _value(out, column.to_list(), {})
    return out.digest()


def _sized(out: blake2b, tag: bytes, data: bytes) -> None:
    out.update(tag + struct.pack("<q", len(data)))
    out.update(data)


def _array(out: blake2b, array: AnyArray) -> None:
    _sized(out, b"a", repr((array.dtype.str, array.shape)).encode())
    out.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _value(out: blake2b, value: Any, above: dict[int, int]) -> None:
    """Feeds one Python object. `above` maps the id of each container around it to its depth."""
    kind = type(value)
    if value is None or kind is bool:
        out.update(repr(value)[:1].encode())
    elif kind is int:
        _sized(out, b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    elif kind is float:
        out.update(b"f" + struct.pack("<d", value))
    elif kind is str:
        _sized(out, b"s", value.encode("utf-8", "surrogatepass"))
    elif kind is bytes:
        _sized(out, b"b", value)
    elif isinstance(value, type):
        _sized(out, b"c", value.__qualname__.encode())
    elif isinstance(value, np.generic) and not value.dtype.hasobject and value.dtype.kind != "V":
        _sized(out, b"g", value.dtype.str.encode())
        out.update(value.tobytes())
    elif kind is np.ndarray and not value.dtype.hasobject and value.dtype.kind not in "VT":
        _array(out, value)
    elif id(value) in above:
        out.update(b"^" + struct.pack("<q", above[id(value)]))
    else:
        _container(out, value, {**above, id(value): len(above)})


def _container(out: blake2b, value: Any, above: dict[int, int]) -> None:
    kind = type(value)
    torch = sys.modules.get("torch")
    if kind is dict:
        _items(out, b"d", [part for item in value.items() for part in item], above)
    elif kind is list or kind is tuple:
        _items(out, b"l" if kind is list else b"t", value, above)
    elif kind is set or kind is frozenset:
        members = []
        for member in value:
            one = blake2b(digest_size=_BYTES)
            _value(one, member, above)
            members.append(one.digest())
        _items(out, b"e" if kind is set else b"z", sorted(members), above)
    elif kind is np.ndarray:
        _sized(out, b"v", repr((np.lib.format.dtype_to_descr(value.dtype), value.shape)).encode())
        _value(out, value.tolist(), above)
    elif torch is not None and isinstance(value, torch.Tensor):
        _sized(out, b"x", repr((str(value.dtype), tuple(value.shape))).encode())
        out.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    else:
        _reduced(out, value, above)


def _reduced(out: blake2b, value: Any, above: dict[int, int]) -> None:
    """Any other object, by what pickle would rebuild it from."""
    name = getattr(value, "__qualname__", None)
    reduced: str | tuple[Any, ...] = name if isinstance(name, str) else value.__reduce_ex__(4)
    if isinstance(reduced, str):
        _sized(out, b"q", reduced.encode())
        return
    parts: list[Any] = [*reduced, None, None, None]
    function, arguments, state, members, items = parts[:5]
    _sized(out, b"r", getattr(function, "__qualname__", type(function).__qualname__).encode())
    _value(out, arguments, above)
    _value(out, state, above)
    _value(out, None if members is None else list(members), above)
    _value(out, None if items is None else [list(item) for item in items], above)


def _items(out: blake2b, tag: bytes, values: Any, above: dict[int, int]) -> None:
    out.update(tag + struct.pack("<q", len(values)))
    for value in values:
        _value(out, value, above)
