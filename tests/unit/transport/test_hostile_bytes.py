"""Whatever bytes arrive, a message is decoded or refused with a ProtocolError; nothing else ever comes out."""

from __future__ import annotations

import random
import typing
from collections.abc import Callable
from typing import Any

import msgpack
from hypothesis import given
from hypothesis import strategies as st

from zephon.errors import ProtocolError
from zephon.transport import protocol as p
from zephon.transport import worker_protocol as w
from zephon.transport.messages import PROTOCOL, decode, encode

EXAMPLES = (
    p.Hello(7, 4, 1, 1, "pipeline", "job", None),
    p.Attach(b"t" * 16, 3, '{"format": 1}', ["mixture"]),
    p.Join(b"t" * 16, 3),
    p.Begin(0),
    p.Returned.of([0, 0, 1, 1, 0, 2], 0, 3),
    p.Hungry(2, 0, 4),
    p.BatchesReady.of([p.BatchReady(0, 0, 0, 1, 100, 0, 4), p.BatchReady(0, 0, 0, 2, 100, 4, 4)]),
    p.Announced(0, 0, 8, 100, 0),
    w.TaskFailed(9, "RunFailed", "text", [], "trace"),
    p.EngineReport(1, {"runs": [{"lanes": [1, 2.5, None, True, "x"]}]}),
)

plain = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=8),
        st.binary(max_size=8), st.just("\ud800"),
    ),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=6) | st.integers(0, 9), inner, max_size=4),
    max_leaves=12,
)


def taken_or_refused(data: bytes, limit: int = 1 << 20) -> Any:
    try:
        return decode(data, limit=limit)
    except ProtocolError:
        return None


def damaged(chance: random.Random, data: bytes) -> bytes:
    """The same bytes with some of them changed, left out, doubled or cut off."""
    out = bytearray(data)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(out) + 1)
        kind = chance.randrange(5)
        if kind == 0 and at < len(out):
            out[at] = chance.randrange(256)
        elif kind == 1:
            del out[at:]
        elif kind == 2:
            del out[at : at + chance.randrange(1, 9)]
        elif kind == 3:
            out[at:at] = chance.randbytes(chance.randrange(1, 9))
        else:
            out += out[at : at + 64]
    return bytes(out)


def test_damaged_messages_are_taken_or_refused(amount: Callable[[int, int], int]) -> None:
    chance = random.Random(1)
    refused = 0
    for number in range(amount(20_000, 1_000_000)):
        data = encode(EXAMPLES[number % len(EXAMPLES)])
        refused += taken_or_refused(damaged(chance, data)) is None
    assert refused > amount(10_000, 500_000)


@given(st.binary(max_size=200))
def test_any_bytes_are_taken_or_refused(data: bytes) -> None:
    taken_or_refused(data)


@given(st.sampled_from(EXAMPLES), st.dictionaries(st.text(max_size=8), plain, max_size=4), plain)
def test_a_message_whose_fields_hold_anything_is_taken_with_fields_of_its_types_or_refused(
    example: Any, more: dict[str, Any], value: Any
) -> None:
    _, name, fields = msgpack.unpackb(encode(example), strict_map_key=False)
    for key in [*fields, *more]:
        wild = {**fields, **more, key: value}
        found = taken_or_refused(msgpack.packb([PROTOCOL, name, wild], unicode_errors="surrogatepass"))
        if found is not None:
            hints = typing.get_type_hints(type(found))
            assert all(type(getattr(found, each)) is hint for each, hint in hints.items() if isinstance(hint, type))
            assert taken_or_refused(encode(found)) is not None


def test_bytes_that_promise_far_more_than_they_hold_are_refused_without_taking_the_memory() -> None:
    for head in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"):
        assert taken_or_refused(head) is None
        assert taken_or_refused(b"\x93\x01\xa5hello" + head) is None
    for deep in (b"\x91" * 100_000, b"\x81\xa1a" * 100_000, b"\x93\x01\xa5hello\x81\xa3job" + b"\x91" * 5000 + b"\xc0"):
        assert taken_or_refused(deep) is None
    assert taken_or_refused(b"\xc0" * 101, limit=100) is None
