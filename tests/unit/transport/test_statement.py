"""Resume statements: what is stated is what is read, and what is malformed is refused as such."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.errors import ProtocolError
from zephon.frontiers import Checkpoint, Frontier
from zephon.transport.protocol import LaneTotal, Released
from zephon.transport.statement import Statement, decode_statement

COUNTS = st.integers(0, 2**40)


@st.composite
def statements(draw: st.DrawFn) -> Statement:
    lanes = draw(st.integers(1, 6))
    identity = {"canonical_replicas": lanes, "seed": draw(COUNTS)}
    epoch = draw(st.integers(0, 5))

    def frontier() -> Frontier:
        offset = draw(COUNTS)
        return Frontier(draw(COUNTS), offset, offset + draw(COUNTS), draw(COUNTS))

    own = draw(st.sets(st.integers(0, lanes - 1), min_size=1))
    at = {lane: frontier() for lane in range(lanes)}
    releases = st.builds(Released, COUNTS, st.integers(-9, 2**62), st.booleans(), st.booleans())
    return Statement(
        origin=Checkpoint(identity, epoch, {lane: frontier() for lane in range(lanes)}),
        at=Checkpoint(identity, epoch + draw(st.integers(0, 3)), at),
        stands={lane: at[lane].records + draw(st.integers(0, 9)) for lane in own},
        rounds=draw(COUNTS),
        readers=draw(st.integers(1, 8)),
        released=tuple(draw(st.lists(releases))),
        totals=tuple(draw(st.lists(st.builds(LaneTotal, st.integers(0, lanes - 1), COUNTS, COUNTS, COUNTS)))),
    )


@given(statements())
def test_a_statement_is_read_as_it_was_stated(statement: Statement) -> None:
    assert decode_statement(statement.encode()) == statement


@given(statements(), st.data())
def test_a_statement_with_any_part_missing_or_of_another_kind_is_refused(
    statement: Statement, data: st.DataObject
) -> None:
    given = json.loads(statement.encode())
    name = data.draw(st.sampled_from(sorted(given)))
    wrong = data.draw(st.sampled_from([None, "x", -1, 1.5, [1], {"a": 1}, [["x"]]]))
    if data.draw(st.booleans()):
        del given[name]
    else:
        given[name] = wrong
    with pytest.raises(ProtocolError):
        decode_statement(json.dumps(given))


@given(st.text() | st.recursive(st.none() | st.integers(), lambda each: st.lists(each)).map(json.dumps))
def test_no_other_text_is_a_statement(text: str) -> None:
    with pytest.raises(ProtocolError):
        decode_statement(text)


def test_a_statement_that_contradicts_itself_is_refused() -> None:
    identity = {"canonical_replicas": 2}
    origin = Checkpoint(identity, 1, {0: Frontier(), 1: Frontier()})
    at = Checkpoint(identity, 1, {0: Frontier(0, 4, 4), 1: Frontier(0, 0, 3)})
    good = Statement(origin, at, {0: 4}, 2, 1)
    for wrong in (
        Statement(origin, at, {2: 4}, 2, 1),
        Statement(origin, at, {0: 3}, 2, 1),
        Statement(origin, Checkpoint(identity, 1, {0: Frontier(0, 4, 4)}), {0: 4}, 2, 1),
        Statement(origin, Checkpoint(identity, 0, at.lanes), {0: 4}, 2, 1),
        Statement(origin, at, {0: 4}, 2, 1, totals=(LaneTotal(2, 1, 4, 0),)),
    ):
        with pytest.raises(ProtocolError):
            decode_statement(wrong.encode())
    assert decode_statement(good.encode()).delivered == (1, 4)


def test_a_text_nested_too_deep_to_be_read_is_refused_like_any_other() -> None:
    with pytest.raises(ProtocolError, match="malformed resume statement"):
        decode_statement("[" * 200_000)
