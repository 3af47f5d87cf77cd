"""Messages: frozen dataclasses that travel as msgpack and are checked on both sides.

    @message("slot_returned")
    @dataclass(frozen=True, slots=True)
    class SlotReturned:
        lane: int
        generation: int
        index: int

On the wire a message is `[protocol, name, {field: value}]`. Every field is checked against its annotation when it is
encoded and when it is decoded, by checks compiled once a class: int (within 64 bits, signed), float, str, bytes, bool,
`Literal`, `X | None`, `list`, `tuple`, `dict` with str or int keys, nested dataclasses, and `Any` for plain data
(what JSON has, and bytes). A field that is missing, surplus or of another type, an unknown message and another protocol
version are a ProtocolError that names them. Arrays do not travel here: they belong into a segment.

A class may check more in `__post_init__`, raising ValueError.
"""

from __future__ import annotations

import dataclasses
import numbers
import operator
import types
import typing
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeVar, overload

import msgpack

from zephon.errors import ProtocolError

PROTOCOL = 1
"""Version of the wire format. Two sides of different versions do not talk."""

MAX_MESSAGE = 16 << 20
"""Bytes of the largest message, unless a caller says otherwise."""

_MAX_DEPTH = 64
_INT_LOW, _INT_HIGH = -(1 << 63), (1 << 63) - 1
_INT_ALONE = {int}

M = TypeVar("M")
Check = Callable[[Any], Any]


class _Refused(Exception):
    """A value that a check refuses; the text says where inside the field and why."""


class _Codec(NamedTuple):
    """How values of one annotation go to the wire and come back. Both refuse what does not fit."""

    pack: Check
    unpack: Check


@dataclasses.dataclass(frozen=True)
class _Spec:
    """One message class, compiled: for each field its name, its way out and its way in."""

    name: str
    cls: type
    fields: tuple[tuple[str, Check, Check], ...]
    names: tuple[str, ...] = ()
    """Of the fields, where every one is an int: such messages are many, and are checked in one go."""

    def pack(self, value: Any) -> dict[str, Any]:
        if self.names:
            numbers = [getattr(value, name) for name in self.names]
            if _are_ints(numbers):
                return dict(zip(self.names, numbers))
        try:
            return {name: pack(getattr(value, name)) for name, pack, _ in self.fields}
        except _Refused:
            return self._explain_pack(value)

    def _explain_pack(self, value: Any) -> dict[str, Any]:
        for name, pack, _ in self.fields:
            try:
                pack(getattr(value, name))
            except _Refused as refused:
                raise _Refused(f"field {name!r}: {refused}") from None
        raise AssertionError("a check refused a value and then took it")

    def unpack(self, values: Any) -> Any:
        if type(values) is not dict:
            raise _Refused(f"expected fields, got {_kind(values)}")
        if self.names and tuple(values) == self.names and _are_ints(values.values()):
            return self.cls(*values.values())
        found: dict[str, Any] = {}
        name = ""
        try:
            for name, _, unpack in self.fields:
                found[name] = unpack(values[name])
        except KeyError:
            raise _Refused(f"field {name!r} is missing") from None
        except _Refused as refused:
            raise _Refused(f"field {name!r}: {refused}") from None
        if len(values) != len(found):
            surplus = next(key for key in values if key not in found)
            raise _Refused(f"field {_shown(surplus)} is unknown")
        try:
            return self.cls(**found)
        except ValueError as error:
            raise _Refused(str(error)) from error


# Filled by `message` while modules are imported, and only read afterwards.
_by_name: dict[str, _Spec] = {}
_by_class: dict[type, _Spec] = {}


def message(name: str) -> Callable[[type[M]], type[M]]:
    """Declares a frozen dataclass as the message `name`. Raises TypeError for annotations that cannot travel."""

    def declare(cls: type[M]) -> type[M]:
        spec = _compile(cls, name)
        known = _by_name.get(name)
        if known is not None and (known.cls.__module__, known.cls.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"message {name!r} is declared by both {known.cls.__qualname__} and {cls.__qualname__}")
        _by_name[name] = _by_class[cls] = spec
        return cls

    return declare


def encode(value: object, *, limit: int = MAX_MESSAGE) -> bytes:
    """The bytes of a message, at most `limit`. Raises ProtocolError for a field that does not match its annotation."""
    spec = _by_class.get(type(value))
    if spec is None:
        raise ProtocolError(f"{type(value).__qualname__} is not declared as a message")
    try:
        # Text from elsewhere (a path, an exception) may hold what UTF-8 does not: that must not keep an error away.
        data: bytes = msgpack.packb((PROTOCOL, spec.name, spec.pack(value)), unicode_errors="backslashreplace")
    except _Refused as refused:
        raise ProtocolError(f"message {spec.name!r}, {refused}") from None
    except (ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(f"message {spec.name!r} cannot be encoded: {error}") from error
    if len(data) > limit:
        raise ProtocolError(f"message {spec.name!r} has {len(data)} bytes, more than the {limit} allowed")
    return data


@overload
def decode(data: bytes, *, expect: type[M], limit: int = MAX_MESSAGE) -> M: ...
@overload
def decode(data: bytes, *, expect: tuple[type, ...] | None = None, limit: int = MAX_MESSAGE) -> Any: ...
def decode(data: bytes, *, expect: type | tuple[type, ...] | None = None, limit: int = MAX_MESSAGE) -> Any:
    """The message in `data`, of one of the classes `expect` (None: of any). Raises ProtocolError for all else."""
    if len(data) > limit:
        raise ProtocolError(f"a message of {len(data)} bytes came in, more than the {limit} allowed")
    try:
        envelope = msgpack.unpackb(data, strict_map_key=False, ext_hook=_refuse_extension)
    except Exception as error:  # msgpack raises a handful of unrelated types for malformed bytes.
        raise ProtocolError(f"a message came in that is no msgpack: {error!r}") from error
    if type(envelope) is not list or not envelope:
        raise ProtocolError(f"a message came in without an envelope, as {_kind(envelope)}")
    if envelope[0] != PROTOCOL or type(envelope[0]) is not int:
        raise ProtocolError(
            f"this side speaks protocol {PROTOCOL}, the other protocol {_shown(envelope[0])}. "
            "Use the same version of zephon on both sides."
        )
    if len(envelope) != 3 or type(envelope[1]) is not str:
        raise ProtocolError("a message came in with a malformed envelope")
    spec = _by_name.get(envelope[1])
    if spec is None:
        raise ProtocolError(f"message {_shown(envelope[1])} is unknown to this side")
    if expect is not None:
        wanted = expect if isinstance(expect, tuple) else (expect,)
        if spec.cls not in wanted:
            names = ", ".join(repr(_by_class[cls].name) for cls in wanted)
            raise ProtocolError(f"message {spec.name!r} came in where {names} is expected")
    try:
        return spec.unpack(envelope[2])
    except _Refused as refused:
        raise ProtocolError(f"message {spec.name!r}, {refused}") from None


def _compile(cls: type, name: str) -> _Spec:
    # `__dataclass_params__` is how a class says that it is frozen; there is no public way to ask.
    parameters = vars(cls).get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        raise TypeError(f"{cls.__qualname__}: a message must be a frozen dataclass")
    hints = typing.get_type_hints(cls)
    fields = []
    for each in dataclasses.fields(cls):
        if not each.init:
            raise TypeError(f"{cls.__qualname__}.{each.name}: a field that __init__ does not take cannot travel")
        codec = _codec(hints[each.name], f"{cls.__qualname__}.{each.name}")
        fields.append((each.name, codec.pack, codec.unpack))
    plain = not any(each.kw_only for each in dataclasses.fields(cls)) and not hasattr(cls, "__post_init__")
    names = tuple(each[0] for each in fields) if plain and all(each[1] is _int for each in fields) else ()
    return _Spec(name, cls, tuple(fields), names)


def _codec(hint: Any, where: str) -> _Codec:
    if hint in _SCALARS:
        check = _SCALARS[hint]
        return _Codec(check, check)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _nested(hint)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return _literal(inner)
    if origin in (typing.Union, types.UnionType) and len(inner) == 2 and type(None) in inner:
        (other,) = (each for each in inner if each is not type(None))
        return _optional(_codec(other, where))
    if origin is list:
        return _sequence(_codec(inner[0], where), list)
    if origin is tuple and len(inner) == 2 and inner[1] is Ellipsis:
        return _sequence(_codec(inner[0], where), tuple)
    if origin is tuple and inner:
        return _row(tuple(_codec(each, where) for each in inner))
    if origin is dict and inner[0] in (str, int):
        return _mapping(_codec(inner[0], where), _codec(inner[1], where))
    raise TypeError(f"{where}: values of {hint!r} cannot travel in a message")


def _shown(value: Any) -> str:
    """A value of the other side's for an error: what it sends large must not come back large."""
    text = repr(value[:100]) if isinstance(value, (str, bytes)) else repr(value) if _is_number(value) else _kind(value)
    return text[:100]


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__


def _are_ints(values: Collection[Any]) -> bool:
    """Whether all are ints proper, of 64 bits. If not, they are to be looked at one by one."""
    return set(map(type, values)) == _INT_ALONE and min(values) >= _INT_LOW and max(values) <= _INT_HIGH


def _int(value: Any) -> int:
    if type(value) is not int:
        if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__index__"):
            raise _Refused(f"expected int, got {_kind(value)}")
        try:
            value = operator.index(value)  # A numpy integer.
        except TypeError:
            raise _Refused(f"expected int, got {_kind(value)}") from None
    if not _INT_LOW <= value <= _INT_HIGH:
        raise _Refused(f"{value} does not fit 64 bits")
    return int(value)


def _float(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is not bool and isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:
            raise _Refused("the number is too large for a float") from None
    raise _Refused(f"expected float, got {_kind(value)}")


def _exact(kind: type) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise _Refused(f"expected {kind.__name__}, got {_kind(value)}")
        return value

    return check


def _plain(value: Any, depth: int = 0) -> Any:
    kind = type(value)
    if depth > _MAX_DEPTH:
        raise _Refused(f"nested deeper than {_MAX_DEPTH} levels")
    if kind is int:
        return _int(value)
    if value is None or kind in (str, bytes, bool, float):
        return value
    if kind in (list, tuple):
        return [_plain(each, depth + 1) for each in value]
    if kind is dict:
        if not all(type(key) in (str, int) for key in value):
            raise _Refused("the keys of a dict must be str or int")
        return {key: _plain(each, depth + 1) for key, each in value.items()}
    raise _Refused(f"expected plain data, got {_kind(value)}")


_SCALARS: dict[Any, Check] = {
    int: _int,
    float: _float,
    str: _exact(str),
    bytes: _exact(bytes),
    bool: _exact(bool),
    type(None): _exact(type(None)),
    Any: _plain,
}


def _literal(allowed: tuple[Any, ...]) -> _Codec:
    def check(value: Any) -> Any:
        if not any(type(value) is type(each) and value == each for each in allowed):
            raise _Refused(f"expected one of {', '.join(map(repr, allowed))}, got {_shown(value)}")
        return value

    return _Codec(check, check)


def _optional(inner: _Codec) -> _Codec:
    def through(check: Check) -> Check:
        return lambda value: None if value is None else check(value)

    return _Codec(through(inner.pack), through(inner.unpack))


def _sequence(inner: _Codec, kind: type[Any]) -> _Codec:
    def through(check: Check, came_as: type[Any], goes_as: type[Any]) -> Check:
        def run(value: Any) -> Any:
            if not isinstance(value, came_as):
                raise _Refused(f"expected {came_as.__name__}, got {_kind(value)}")
            if check is _int and _are_ints(value):
                return goes_as(value)
            return goes_as([check(each) for each in value])

        return run

    return _Codec(through(inner.pack, kind, list), through(inner.unpack, list, kind))


def _row(inner: tuple[_Codec, ...]) -> _Codec:
    def through(checks: tuple[Check, ...], came_as: type[Any], goes_as: type[Any]) -> Check:
        def run(value: Any) -> Any:
            if not isinstance(value, came_as) or len(value) != len(checks):
                raise _Refused(f"expected {len(checks)} values, got {_kind(value)}")
            return goes_as(check(each) for check, each in zip(checks, value, strict=True))

        return run

    return _Codec(
        through(tuple(each.pack for each in inner), tuple, list),
        through(tuple(each.unpack for each in inner), list, tuple),
    )


def _mapping(keys: _Codec, values: _Codec) -> _Codec:
    def through(key_check: Check, check: Check) -> Check:
        def run(value: Any) -> Any:
            if type(value) is not dict:
                raise _Refused(f"expected dict, got {_kind(value)}")
            return {key_check(key): check(each) for key, each in value.items()}

        return run

    return _Codec(through(keys.pack, values.pack), through(keys.unpack, values.unpack))


def _nested(cls: type) -> _Codec:
    spec = _compile(cls, cls.__qualname__)

    def pack(value: Any) -> Any:
        if type(value) is not cls:
            raise _Refused(f"expected {cls.__name__}, got {_kind(value)}")
        return spec.pack(value)

    return _Codec(pack, spec.unpack)


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code} is not allowed")
