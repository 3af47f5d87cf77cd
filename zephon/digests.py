"""A digest of a batch: equal if and only if its fields hold the same values, wherever and however it was made.

BLAKE2b of 128 bits over the fields in the order of their names: name, kind, dtype, shape and bytes of each. Samples,
lane and place are no part of it. A batch without records has one digest, whatever columns it still shows: they come
from the machinery and not from records.

Python objects are walked by value, each container to a digest of its own, which is remembered: a list that is found in
a thousand places is walked once. A pickle of them would not do: it tells two references to one object from two equal
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
_NOWHERE = sys.maxsize
_TAGS: dict[type, bytes] = {dict: b"d", list: b"l", tuple: b"t"}


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
        _Walk().feed(out, column.to_list())
    return out.digest()


def _sized(out: blake2b, tag: bytes, data: bytes) -> None:
    out.update(tag + struct.pack("<q", len(data)))
    out.update(data)


def _array(out: blake2b, array: AnyArray) -> None:
    _sized(out, b"a", repr((array.dtype.str, array.shape)).encode())
    out.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


class _Walk:
    """One walk through Python objects. What holds itself is known by how far up it is found again."""

    def __init__(self) -> None:
        self._above: dict[int, int] = {}
        """Of each container around, by id, how many are around it."""
        self._known: dict[int, tuple[bytes, Any]] = {}
        """Digests of containers by id, with the container, whose id is nobody else's as long as it is kept."""
        self._reached = _NOWHERE
        """How many containers are around the outermost one that was found again in what is walked."""

    def feed(self, out: blake2b, value: Any) -> None:
        """Feeds one object."""
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
        elif kind is np.ndarray and _is_plain(value):
            _array(out, value)
        elif kind is np.ma.MaskedArray and _is_plain(value):
            _masked(out, value)
        elif id(value) in self._above:
            depth = self._above[id(value)]
            self._reached = min(self._reached, depth)
            out.update(b"^" + struct.pack("<q", len(self._above) - depth))
        else:
            out.update(b"h" + self._digest(value))

    def _digest(self, value: Any) -> bytes:
        """The digest of a container; known if it was met before, and nothing in it leads to one around it."""
        known = self._known.get(id(value))
        if known is not None:
            return known[0]
        depth, before, self._reached = len(self._above), self._reached, _NOWHERE
        self._above[id(value)] = depth
        own = blake2b(digest_size=_BYTES)
        self._container(own, value)
        del self._above[id(value)]
        digest = own.digest()
        if self._reached >= depth:
            self._known[id(value)] = digest, value
            self._reached = before
        else:
            self._reached = min(before, self._reached)
        return digest

    def _container(self, out: blake2b, value: Any) -> None:
        kind = type(value)
        torch = sys.modules.get("torch")
        if kind in _TAGS:  # no call more than it takes: what is deep takes many in one another
            items = [part for item in value.items() for part in item] if kind is dict else value
            out.update(_TAGS[kind] + struct.pack("<q", len(items)))
            for item in items:
                self.feed(out, item)
        elif kind is set or kind is frozenset:
            members = []
            for member in value:
                one = blake2b(digest_size=_BYTES)
                self.feed(one, member)
                members.append(one.digest())
            _sized(out, b"e" if kind is set else b"z", b"".join(sorted(members)))
        elif kind is np.ndarray:
            _sized(out, b"v", repr((np.lib.format.dtype_to_descr(value.dtype), value.shape)).encode())
            self.feed(out, value.tolist())
        elif torch is not None and isinstance(value, torch.Tensor):
            _sized(out, b"x", repr((str(value.dtype), tuple(value.shape))).encode())
            out.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        else:
            self._reduced(out, value)

    def _reduced(self, out: blake2b, value: Any) -> None:
        """Any other object, by what pickle would rebuild it from."""
        name = getattr(value, "__qualname__", None)
        reduced: str | tuple[Any, ...] = name if isinstance(name, str) else value.__reduce_ex__(4)
        if isinstance(reduced, str):
            _sized(out, b"q", reduced.encode())
            return
        parts: list[Any] = [*reduced, None, None, None]
        function, arguments, state, members, items = parts[:5]
        _sized(out, b"r", getattr(function, "__qualname__", type(function).__qualname__).encode())
        self.feed(out, arguments)
        self.feed(out, state)
        self.feed(out, None if members is None else list(members))
        self.feed(out, None if items is None else [list(item) for item in items])


def _is_plain(array: AnyArray) -> bool:
    """Whether its bytes say all."""
    return not array.dtype.hasobject and array.dtype.kind not in "VT"


def _masked(out: blake2b, array: np.ma.MaskedArray[Any, Any]) -> None:
    """A masked array: what its mask hides is no part of it."""
    mask = np.ma.getmaskarray(array)
    out.update(b"m")
    _array(out, np.asarray(array.fill_value, array.dtype))
    _array(out, mask)
    _array(out, np.where(mask, np.zeros((), array.dtype), array.data))
