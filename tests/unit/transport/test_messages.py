"""Messages survive the trip unchanged, and whatever is wrong with one is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Optional

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.errors import ProtocolError
from zephon.transport.messages import PROTOCOL, decode, encode, message


@dataclass(frozen=True)
class Inner:
    name: str
    sizes: tuple[int, ...]


@message("test_everything")
@dataclass(frozen=True)
class Everything:
    number: int
    ratio: float
    text: str
    raw: bytes
    flag: bool
    kind: Literal["a", "b"]
    maybe: int | None
    numbers: list[int]
    pair: tuple[int, str]
    table: dict[str, list[float]]
    by_lane: dict[int, Inner]
    inner: Inner
    inners: list[Inner]
    perhaps: Optional[Inner]  # noqa: UP045  both spellings are taken
    plain: Any
    later: str = "default"
    rest: tuple[str, ...] = field(default=())


@message("test_small")
@dataclass(frozen=True)
class Small:
    lane: int

    def __post_init__(self) -> None:
        if self.lane == 666:
            raise ValueError("lane 666 is taken")


@message("test_place")
@dataclass(frozen=True)
class Place:
    """Of ints alone, as the messages are of which there are many."""

    lane: int
    record: int


ints = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(allow_nan=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
inners = st.builds(Inner, texts, st.lists(ints, max_size=3).map(tuple))
plain = st.recursive(
    st.none() | st.booleans() | ints | floats | texts | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
everything = st.builds(
    Everything,
    number=ints,
    ratio=floats,
    text=texts,
    raw=st.binary(max_size=20),
    flag=st.booleans(),
    kind=st.sampled_from(["a", "b"]),
    maybe=st.none() | ints,
    numbers=st.lists(ints, max_size=4),
    pair=st.tuples(ints, texts),
    table=st.dictionaries(texts, st.lists(floats, max_size=3), max_size=3),
    by_lane=st.dictionaries(ints, inners, max_size=3),
    inner=inners,
    inners=st.lists(inners, max_size=3),
    perhaps=st.none() | inners,
    plain=plain,
    later=texts,
    rest=st.lists(texts, max_size=3).map(tuple),
)

EXAMPLE = Everything(
    1, 0.5, "t", b"r", True, "a", None, [1], (2, "p"), {"k": [1.0]}, {3: Inner("i", (4,))}, Inner("j", ()), [], None, {}
)


def wire(**changes: Any) -> bytes:
    """EXAMPLE on the wire with some fields replaced; a field given as `...` is left out."""
    protocol, name, fields = msgpack.unpackb(encode(EXAMPLE), strict_map_key=False)
    fields.update(changes)
    return bytes(msgpack.packb([protocol, name, {key: value for key, value in fields.items() if value is not ...}]))


@given(everything)
def test_a_message_comes_out_as_it_went_in(value: Everything) -> None:
    assert decode(encode(value), expect=Everything) == value


@given(st.binary(max_size=60))
def test_noise_is_a_protocol_error_and_nothing_else(noise: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(noise)


@given(everything, st.data())
def test_a_damaged_message_is_a_message_or_a_protocol_error(value: Everything, data: st.DataObject) -> None:
    damaged = bytearray(encode(value))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        decoded = decode(bytes(damaged))
    except ProtocolError:
        return
    assert isinstance(decoded, (Everything, Small))
    encode(decoded)


WRONG: list[tuple[str, Any]] = [
    ("number", "1"),
    ("number", True),
    ("number", 1.0),
    ("number", 2**63),
    ("number", None),
    ("ratio", "x"),
    ("ratio", True),
    ("text", b"t"),
    ("text", 1),
    ("raw", "r"),
    ("flag", 1),
    ("kind", "c"),
    ("maybe", "x"),
    ("numbers", [1, "x"]),
    ("numbers", {}),
    ("table", {"k": [None]}),
    ("table", []),
    ("by_lane", {"x": None}),
    ("inner", None),
    ("inners", [None]),
    ("perhaps", 3),
]


@pytest.mark.parametrize("name, value", [*WRONG, ("pair", [1]), ("inner", {"name": "x"}), ("plain", [2**63])])
def test_a_wrongly_typed_field_that_comes_in_is_named(name: str, value: Any) -> None:
    with pytest.raises(ProtocolError, match=f"message 'test_everything', field '{name}'"):
        decode(wire(**{name: value}))


@pytest.mark.parametrize("name, value", [*WRONG, ("pair", (1,)), ("plain", {"a": object()}), ("numbers", (1,))])
def test_a_wrongly_typed_field_is_named_before_it_is_sent(name: str, value: Any) -> None:
    with pytest.raises(ProtocolError, match=f"message 'test_everything', field '{name}'"):
        encode(replace(EXAMPLE, **{name: value}))


def test_the_path_into_a_nested_field_is_named() -> None:
    with pytest.raises(ProtocolError, match="field 'inner': field 'sizes': expected int, got str"):
        decode(wire(inner={"name": "x", "sizes": ["y"]}))


def test_missing_and_surplus_fields_are_named_even_those_with_a_default() -> None:
    with pytest.raises(ProtocolError, match="field 'text' is missing"):
        decode(wire(text=...))
    with pytest.raises(ProtocolError, match="field 'later' is missing"):
        decode(wire(later=...))
    with pytest.raises(ProtocolError, match="field 'colour' is unknown"):
        decode(wire(colour=1))


@given(ints, ints)
def test_a_message_of_ints_alone_comes_out_as_it_went_in(lane: int, record: int) -> None:
    assert decode(encode(Place(lane, record)), expect=Place) == Place(lane, record)
    swapped = msgpack.packb((PROTOCOL, "test_place", {"record": record, "lane": lane}))
    assert decode(swapped, expect=Place) == Place(lane, record)


@pytest.mark.parametrize("wrong", [True, 1.0, "1", None, 2**63, -(2**63) - 1])
def test_a_message_of_ints_alone_takes_nothing_else(wrong: Any) -> None:
    with pytest.raises(ProtocolError, match="field 'record'"):
        encode(Place(0, wrong))
    if wrong != -(2**63) - 1:  # msgpack has no such number
        with pytest.raises(ProtocolError, match="field 'record'"):
            decode(msgpack.packb((PROTOCOL, "test_place", {"lane": 0, "record": wrong})))


@pytest.mark.parametrize("fields", [{"lane": 0}, {"lane": 0, "record": 1, "more": 2}, {}])
def test_a_message_of_ints_alone_has_all_its_fields_and_no_others(fields: dict[str, int]) -> None:
    with pytest.raises(ProtocolError, match="record|more|lane"):
        decode(msgpack.packb((PROTOCOL, "test_place", fields)))


def test_another_protocol_version_is_refused_with_both_versions() -> None:
    data = msgpack.packb([PROTOCOL + 1, "a name of the future", {}, "more"])
    with pytest.raises(ProtocolError, match=f"protocol {PROTOCOL}, the other protocol {PROTOCOL + 1}"):
        decode(data)


def test_unknown_and_unexpected_messages_are_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match="'test_unheard_of' is unknown"):
        decode(msgpack.packb([PROTOCOL, "test_unheard_of", {}]))
    data = encode(Small(1))
    assert decode(data, expect=(Small, Everything)) == Small(1)
    with pytest.raises(ProtocolError, match="'test_small' came in where 'test_everything' is expected"):
        decode(data, expect=Everything)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        msgpack.packb({}),
        msgpack.packb([]),
        msgpack.packb([PROTOCOL]),
        msgpack.packb([PROTOCOL, 3, {}]),
        msgpack.packb([PROTOCOL, "test_small", [1]]),
        msgpack.packb([PROTOCOL, "test_small", {"lane": msgpack.ExtType(4, b"x")}]),
        msgpack.packb([True, "test_small", {"lane": 1}]),
        encode(Small(1)) + b"\0",
        encode(Small(1))[:-1],
        b"\x91" * 100_000,
    ],
)
def test_malformed_envelopes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


def test_size_is_bounded_on_both_sides() -> None:
    data = encode(EXAMPLE)
    assert decode(data, limit=len(data)) == EXAMPLE
    with pytest.raises(ProtocolError, match="bytes"):
        decode(data, limit=len(data) - 1)
    with pytest.raises(ProtocolError, match="bytes"):
        encode(EXAMPLE, limit=len(data) - 1)


def test_a_class_may_check_its_own_values() -> None:
    data = msgpack.packb([PROTOCOL, "test_small", {"lane": 666}])
    with pytest.raises(ProtocolError, match="lane 666 is taken"):
        decode(data)


def test_numpy_scalars_become_plain_numbers_and_arrays_are_refused() -> None:
    scalars: dict[str, Any] = {"number": np.int64(7), "ratio": np.float32(0.25)}
    decoded = decode(encode(replace(EXAMPLE, **scalars)), expect=Everything)
    assert (decoded.number, decoded.ratio) == (7, 0.25)
    assert (type(decoded.number), type(decoded.ratio)) == (int, float)
    array: dict[str, Any] = {"number": np.zeros(3, dtype=np.int64)}
    with pytest.raises(ProtocolError, match="field 'number'"):
        encode(replace(EXAMPLE, **array))


def test_a_whole_number_does_for_a_float() -> None:
    assert decode(wire(ratio=2), expect=Everything).ratio == 2.0


def test_what_is_not_declared_cannot_be_sent() -> None:
    with pytest.raises(ProtocolError, match="Inner is not declared"):
        encode(Inner("x", ()))


def test_text_that_utf8_does_not_have_arrives_escaped_rather_than_not_at_all() -> None:
    assert decode(encode(replace(EXAMPLE, text="a\ud800b"))).text == "a\\ud800b"


def _thawed() -> type:
    @dataclass
    class Thawed:
        lane: int

    return Thawed


def _set_field() -> type:
    @dataclass(frozen=True)
    class WithSet:
        lanes: set[int]

    return WithSet


def _array_field() -> type:
    @dataclass(frozen=True)
    class WithArray:
        tokens: np.ndarray

    return WithArray


@pytest.mark.parametrize("make", [_thawed, _set_field, _array_field])
def test_a_class_that_cannot_travel_is_refused_when_it_is_declared(make: Callable[[], type]) -> None:
    with pytest.raises(TypeError):
        message("test_refused")(make())


def test_two_classes_cannot_share_a_name() -> None:
    @dataclass(frozen=True)
    class Other:
        lane: int

    with pytest.raises(TypeError, match="both Small and"):
        message("test_small")(Other)
    assert type(decode(encode(Small(1)))) is Small
