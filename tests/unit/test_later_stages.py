"""Stateless operators behind a stateful one, on workers: whatever order their tasks come back in, cut or repeated, the
lane is the reference's.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import zephon.stages
from tests.unit.every_operator import Chain, chains, pipeline_of, surroundings
from tests.unit.small_recipes import dataset, digest, examples, reference
from zephon import Pipeline, StaticMixtureWorkSource
from zephon.columns import Block, Fixed
from zephon.errors import RecordError, RunFailed
from zephon.frontiers import Frontier
from zephon.in_order import AHEAD, WAITING
from zephon.plan import Plan
from zephon.producer import LaneProducer
from zephon.windows import AnyTask, Front, Outcome, StageTask, end_to_end, halved


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def done(front: Front, task: AnyTask, chance: random.Random, grain: int) -> Outcome:
    """What comes of a task; now and then its worker dies, and it is done in parts by others."""
    parts = halved(task, grain) if chance.random() < 0.2 else None
    return front.run(task) if parts is None else end_to_end([done(front, part, chance, grain) for part in parts])


def produce(producer: LaneProducer, seed: int, ahead: int, most: int = 10**9) -> None:
    """Hand out up to `ahead` tasks at once; one of them comes back at a time, in any order."""
    front, chance = Front(producer.plan), random.Random(seed)
    front.setup()
    in_work: list[tuple[int, AnyTask]] = []
    while producer.stream.produced < most and not producer.ended:
        while len(in_work) < ahead and (handed := producer.next_task()) is not None:
            in_work.append(handed)
        for line in producer._lines:
            assert line.in_work <= line.stage.parallelism
            assert line.outstanding <= AHEAD * line.stage.parallelism
        assert producer.outstanding >= len(in_work) > 0
        number, task = in_work.pop(chance.randrange(len(in_work)))
        assert producer.head is not None
        lent = producer.is_next(number)
        outcome = done(front, task, chance, producer.plan.grain)
        producer.accept(number, outcome._replace(block=outcome.block.copy()) if lent else outcome)


@examples(10)
@given(chains(most=6), surroundings(), st.integers(0, 3), st.sampled_from([1, 5, 64]), st.integers(1, 7),
       st.sampled_from([1, 2, 5, 128]), st.integers(0, 10**6))  # fmt: skip
def test_any_chain_with_stages_anywhere_gives_the_reference(
    chain: Chain, around: dict[str, Any], lane: int, task_samples: int, ahead: int, records: int, seed: int
) -> None:
    plan = pipeline_of(chain, **around).plan()
    lane %= plan.lanes
    endless = plan.ends(0) is False
    most = 20 if endless else 10**9
    producer = LaneProducer(plan, 0, lane, Frontier(), task_samples)
    with small_tasks(records):
        produce(producer, seed, ahead, most)
    produced = producer.stream.produced
    expected = reference(plan, lane, most=produced if endless else 10**9)
    assert produced == len(expected)
    assert digest(producer.stream.take(produced)) == digest(expected)
    if not endless:
        assert producer.exhausted
        assert producer.outstanding == producer.early == producer.in_later == 0
        whole = in_one_piece(chain, around, lane)
        told(producer, whole)
        if "sized" not in dict(chain):  # it tells of its traits in an attribute
            assert plan.identity == whole.plan.identity


def in_one_piece(chain: Chain, around: dict[str, Any], lane: int) -> LaneProducer:
    """The lane of the same chain with nothing of it in later stages."""
    plain = [(name, {k: v for k, v in drawn.items() if k != "parallelism"}) for name, drawn in chain]
    producer = LaneProducer(pipeline_of(plain, **around).plan(), 0, lane, Frontier(), 7)
    front = Front(producer.plan)
    while (handed := producer.next_task()) is not None:
        producer.accept(handed[0], front.run(handed[1]))
    return producer


def told(one: LaneProducer, other: LaneProducer) -> None:
    """What two producers of a lane say of it is the same."""
    assert one.ended
    assert other.ended
    assert one.announcements == other.announcements
    assert one.counters == other.counters
    assert one.skipped == other.skipped
    assert one.samples == other.samples
    assert sorted(one.reports) == sorted(other.reports)


@contextmanager
def small_tasks(records: int) -> Iterator[None]:
    """Tasks of later stages hold so many records at most. A run of which no record comes is none to look at."""
    with mock.patch.object(zephon.stages, "STAGE_RECORDS", records):
        try:
            yield
        except RunFailed as error:
            assume("records passed" not in str(error))
            raise


def divides(drops: int, row: dict[str, Any]) -> dict[str, Any] | None:
    return {**row, "part": 12 // (row["id"] % 5)} if row["id"] % drops else None


@examples(8)
@given(st.integers(0, 2), st.integers(1, 6), st.sampled_from([1, 128]), st.sampled_from([1, 4]), st.integers(0, 10**6))
def test_bad_records_of_every_stage_are_counted_in_the_window_that_they_are_of(
    lane: int, ahead: int, records: int, task_samples: int, seed: int
) -> None:
    def plan(first: int | None, second: int | None) -> Plan:
        pipeline = Pipeline(StaticMixtureWorkSource([dataset("d", 70, 2)], None, chunk_size=4)).shuffle(5)
        pipeline.map_transform(partial(divides, 3), parallelism=first).shuffle(3)
        pipeline.map_transform(lambda row: {**row, "rest": 6 // (row["id"] % 7 - 2)}, parallelism=second)
        return pipeline.batch(2).options(canonical_replicas=3, flush_every_k_chunks=2, on_error="skip").plan()

    one = LaneProducer(plan(2, 1), 0, lane, Frontier(), task_samples)
    with small_tasks(records):
        produce(one, seed, ahead)
    other = LaneProducer(plan(None, None), 0, lane, Frontier(), task_samples)
    produce(other, seed, 1)
    assert one.skipped > 0
    told(one, other)
    assert digest(one.stream.take(10**6)) == digest(other.stream.take(10**6))
    for announcement in one.announcements[1:]:  # from each of them on, the rest and its counts are the same
        again = LaneProducer(one.plan, 0, lane, Frontier(announcement.chunk, 0, *announcement[1:3]), task_samples)
        produce(again, seed, ahead)
        assert again.skipped == one.skipped


def test_an_error_in_a_later_stage_names_the_record_and_what_is_in_work_is_bounded() -> None:
    pipeline = Pipeline(StaticMixtureWorkSource([dataset("d", 400, 2)], None, chunk_size=50)).shuffle(30)
    pipeline.map_transform(lambda row: {**row, "part": 1 / (row["id"] - 33)}, parallelism=2)
    plan = pipeline.batch(2).options(canonical_replicas=1).plan()
    producer, front = LaneProducer(plan, 0, 0, Frontier(), 10), Front(plan)
    held: list[tuple[int, AnyTask]] = []
    with small_tasks(4), pytest.raises(RecordError, match=r"map_transform.*row 33.*ZeroDivisionError"):
        while (handed := producer.next_task()) is not None:
            if isinstance(handed[1], StageTask):
                held.append(handed)
                assert len(held) <= plan.later[0].parallelism
            else:
                producer.accept(handed[0], front.run(handed[1]))
                assert producer.in_later <= 4 * (2 + WAITING) + 30 + 10
        assert producer.full
        for number, task in held:
            producer.accept(number, front.run(task))
        produce(producer, 0, 1)


def test_a_run_goes_on_with_other_stages_than_it_was_stopped_with_and_explain_shows_them() -> None:
    def made(first: int | None, second: int) -> Pipeline:
        pipeline = Pipeline(StaticMixtureWorkSource([dataset("d", 120, 2)], None, chunk_size=10)).shuffle(5)
        pipeline.map_transform(dict, parallelism=first).decode_text()
        pipeline.stateful_transform(
            "all", init_state=int, push=lambda state, records: (state, records), transform=list, parallelism=second
        )
        return pipeline.batch(2).options(canonical_replicas=2, runner="threads", max_workers=2)

    alone, later = made(None, 1), made(4, 3)
    assert [line.split("[")[1].split("]")[0] for line in later.explain().splitlines() if " {" in line] == [
        "engine", "workers, stage 2, 4 at once", "engine", "engine; workers, stage 3, 3 at once",
    ]  # fmt: skip
    assert alone.explain().count("[engine]") == 4
    expected, found = [batch.digest for batch in alone], []
    for number, batch in enumerate(later):
        found.append(batch.digest)
        if number == 20:
            break
    state = later.checkpoint()
    later.close()
    for stages in ((None, 1), (1, 2)):
        rest = made(*stages).restore(state)
        assert found + [batch.digest for batch in rest] == expected
        rest.close()


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), max_size=6), st.integers(1, 4), st.booleans())
def test_blocks_are_cut_for_tasks_where_nobody_can_tell(places: list[list[int]], most: int, packed: bool) -> None:
    """Neighbours of one sample stay together, and what did not lie in one block is never brought together."""
    blocks = []
    for block in places:
        samples = np.zeros((len(block), 4), np.int64)
        samples[:, 3] = sorted(block)
        offsets = np.arange(len(block) + 1) if packed else None
        blocks.append(Block({"at": Fixed(samples[:, 3])}, samples, offsets))
    with mock.patch.object(zephon.stages, "STAGE_RECORDS", most):
        cut = zephon.stages.pieces(blocks)
    assert [value for piece in cut for value in piece.fields["at"].to_list()] == [v for b in places for v in sorted(b)]
    ends = set(np.cumsum([len(piece) for piece in cut]).tolist())
    at = 0
    for block in places:
        for here, after in pairwise(sorted(block)):
            at += 1
            assert packed or here != after or at not in ends
        at += 1
    if packed:
        assert all(len(piece) <= most for piece in cut)
    else:
        assert all(len(piece) <= most or len(set(piece.fields["at"].to_list())) < len(piece) for piece in cut)
