"""Stateless operators behind a stateful one, on workers: whatever order their tasks come back in, cut or repeated, the
lane is the reference's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import zephon.stages
from tests.unit.every_operator import Chain, chains, pipeline_of, surroundings
from tests.unit.small_recipes import digest, examples, reference
from zephon.errors import RunFailed
from zephon.frontiers import Frontier
from zephon.in_order import AHEAD
from zephon.producer import LaneProducer
from zephon.windows import AnyTask, Front, Outcome, end_to_end, halved


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def done(front: Front, task: AnyTask, data: st.DataObject, grain: int) -> Outcome:
    """What comes of a task; now and then its worker dies, and it is done in parts by others."""
    parts = halved(task, grain) if data.draw(st.integers(0, 4)) == 0 else None
    return front.run(task) if parts is None else end_to_end([done(front, part, data, grain) for part in parts])


def produce(producer: LaneProducer, data: st.DataObject, ahead: int, most: int = 10**9) -> None:
    """Hand out up to `ahead` tasks at once; one of them comes back at a time, in any order."""
    front = Front(producer.plan)
    front.setup()
    in_work: list[tuple[int, AnyTask]] = []
    while producer.stream.produced < most and not producer.ended:
        while len(in_work) < ahead and (handed := producer.next_task()) is not None:
            in_work.append(handed)
        for line in producer._lines:
            assert line.in_work <= line.stage.parallelism
            assert line.outstanding <= AHEAD * line.stage.parallelism
        assert producer.outstanding >= len(in_work) > 0
        number, task = in_work.pop(data.draw(st.integers(0, len(in_work) - 1)) if len(in_work) > 1 else 0)
        assert producer.head is not None
        lent = producer.is_next(number)
        outcome = done(front, task, data, producer.plan.grain)
        producer.accept(number, outcome._replace(block=outcome.block.copy()) if lent else outcome)


@examples(24)
@given(chains(most=6), surroundings(), st.integers(0, 3), st.sampled_from([1, 5, 64]), st.integers(1, 7),
       st.sampled_from([1, 2, 5, 128]), st.data())  # fmt: skip
def test_any_chain_with_stages_anywhere_gives_the_reference(
    chain: Chain, around: dict[str, Any], lane: int, task_samples: int, ahead: int, records: int, data: st.DataObject
) -> None:
    plan = pipeline_of(chain, **around).plan()
    lane %= plan.lanes
    endless = plan.ends(0) is False
    most = 20 if endless else 10**9
    with mock.patch.object(zephon.stages, "STAGE_RECORDS", records):
        producer = LaneProducer(plan, 0, lane, Frontier(), task_samples)
        try:
            produce(producer, data, ahead, most)
        except RunFailed as error:
            assume("records passed" not in str(error))
            raise
    produced = producer.stream.produced
    expected = reference(plan, lane, most=produced if endless else 10**9)
    assert produced == len(expected)
    assert digest(producer.stream.take(produced)) == digest(expected)
    if not endless:
        assert producer.exhausted
        assert producer.outstanding == producer.early == producer.in_later == 0
