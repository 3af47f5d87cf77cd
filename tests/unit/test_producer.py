"""A lane's producer: outcomes come back in any order, the records come out as the reference has them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.small_recipes import Recipe, dataset, digest, examples, recipes, reference
from zephon import Pipeline, StaticMixtureWorkSource
from zephon.batching import LaneStream
from zephon.columns import Block
from zephon.errors import CheckpointError, RecordError, RunFailed
from zephon.frontiers import Announcement, Frontier, frontier_at
from zephon.lanes import window_at
from zephon.producer import LaneProducer
from zephon.windows import Front, run_window, window_of


def produce(producer: LaneProducer, data: st.DataObject | None = None, ahead: int = 1, most: int = 10**9) -> None:
    """Hand out up to `ahead` tasks at once; take one of the outcomes in any order."""
    front = Front(producer.plan)
    front.setup()
    in_work: list[tuple[int, object]] = []
    while producer.stream.produced < most:
        while len(in_work) < ahead and (handed := producer.next_task()) is not None:
            in_work.append(handed)
        if not in_work:
            break
        assert producer.outstanding >= len(in_work)
        place = data.draw(st.integers(0, len(in_work) - 1)) if data and ahead > 1 else 0
        number, task = in_work.pop(place)
        producer.accept(number, front.run(task))


@examples(20)
@given(recipes(), st.integers(0, 7), st.sampled_from([1, 2, 7, 100]), st.integers(1, 6), st.data())
def test_outcomes_accepted_in_any_order_give_the_reference(recipe, lane, task_samples, ahead, data):
    plan = recipe.plan()
    lane %= plan.lanes
    endless = plan.curriculum(0).total is None
    producer = LaneProducer(plan, 0, lane, Frontier(), task_samples)
    produce(producer, data, ahead, most=20 if endless else 10**9)
    produced = producer.stream.produced
    expected = reference(plan, lane, most=produced if endless else 10**9)
    assert produced == len(expected)
    assert digest(producer.stream.take(produced)) == digest(expected)
    if not endless:
        assert producer.ended
        assert producer.exhausted
        assert producer.outstanding == 0


@examples(20)
@given(recipes(), st.integers(0, 7), st.data())
def test_announcements_name_where_each_window_begins(recipe, lane, data):
    plan = recipe.plan()
    lane %= plan.lanes
    producer = LaneProducer(plan, 0, lane, Frontier(), 3)
    produce(producer, data, 3, most=40)
    begins = 0
    for number, found in enumerate(producer.announcements):
        window = window_of(plan, 0, lane, number)
        assert window is not None or number == 0
        assert found == Announcement(window.chunk if window else 0, begins, 0)
        begins += sum(map(len, run_window(plan, 0, lane, number)))


@examples(20)
@given(recipes(), st.integers(0, 7), st.integers(0, 40), st.integers(0, 20))
def test_from_any_frontier_stale_or_not_the_rest_is_the_same(recipe, lane, records, stale):
    """Any window that begins at or before the last delivered record will do."""
    plan = recipe.plan()
    lane %= plan.lanes
    whole = LaneProducer(plan, 0, lane, Frontier(), 5)
    produce(whole, most=60)
    stream = whole.stream.take(60)
    records = min(records, len(stream))
    announced = [a for a in whole.announcements if a.records <= records]
    chunk, begins, skipped, _ = announced[-1 - stale % len(announced)]
    again = LaneProducer(plan, 0, lane, Frontier(chunk, records - begins, records, skipped), 2)
    produce(again, most=60)
    assert again.stream.first == records
    assert again.stream.to_drop == 0
    assert digest(again.stream.take(60 - records)) == digest(stream.slice(records, len(stream)))


@examples(30)
@given(recipes(), st.integers(0, 7), st.lists(st.integers(0, 5), max_size=20))
def test_a_frontier_forgets_older_announcements_and_never_needs_them_again(recipe, lane, takes):
    plan = recipe.plan()
    producer = LaneProducer(plan, 0, lane % plan.lanes, Frontier(), 4)
    kept = LaneProducer(plan, 0, lane % plan.lanes, Frontier(), 4)
    for one in (producer, kept):
        produce(one, most=60)
    records = 0
    for take in takes:
        records = min(records + take, producer.stream.produced)
        frontier = producer.frontier(records, records)
        stands = None if plan.settings.drop_last else records
        assert frontier == frontier_at(kept.announcements, records, stands)
        assert window_at(lane % plan.lanes, plan.lanes, plan.flush_every, frontier.chunk) >= 0
        assert producer.announcements[0].records <= records


def broken(row):
    if row["id"] % 7 == 3:
        raise ValueError("no")
    return row


def skipping(on_error: str = "skip", steps: tuple[str, ...] = ("shuffle",)):
    pipeline = Recipe(rows=(60,), lanes=1).pipeline()
    pipeline._batched = False
    pipeline.map_transform(broken)
    return pipeline.batch(2).options(on_error=on_error).plan()


def test_what_is_skipped_is_counted_once_however_often_its_window_is_replayed():
    plan = skipping()
    whole = LaneProducer(plan, 0, 0, Frontier(), 4)
    produce(whole)
    assert whole.skipped == len([i for i in range(60) if i % 7 == 3])
    assert len(whole.reports) == whole.skipped
    for records in range(0, whole.stream.produced, 5):
        fresh = LaneProducer(plan, 0, 0, Frontier(), 4)
        produce(fresh)
        again = LaneProducer(plan, 0, 0, fresh.frontier(records, records), 4)
        produce(again)
        assert again.skipped == whole.skipped


def test_a_bad_record_is_raised_by_the_task_that_holds_it():
    producer = LaneProducer(skipping("raise"), 0, 0, Frontier(), 1)
    with pytest.raises(RecordError, match="map_transform.*row.*ValueError: no"):
        produce(producer)


def test_a_frontier_beyond_the_lanes_end_says_that_the_data_are_others():
    plan = Recipe(rows=(60,), lanes=1).plan()
    producer = LaneProducer(plan, 0, 0, Frontier())
    produce(producer)
    last = producer.announcements[-1]
    held = producer.stream.produced - last.records
    with pytest.raises(CheckpointError, match="lane 0 ends 2 records before"):
        produce(LaneProducer(plan, 0, 0, Frontier(last.chunk, held + 2, last.records + held + 2)))
    beyond = last.chunk + 10 * plan.flush_every
    with pytest.raises(CheckpointError, match="lane 0"):
        produce(LaneProducer(plan, 0, 0, Frontier(beyond, 3, last.records + 3)))
    windows_of_two = Recipe(rows=(60,), lanes=1, steps=("shuffle",), flush_every=2).plan()
    with pytest.raises(CheckpointError, match=r"lane 0: chunk 3 is not the first of a window"):
        LaneProducer(windows_of_two, 0, 0, Frontier(3, 0, 9))


# The stream of a lane


@given(st.lists(st.integers(0, 6), max_size=8), st.integers(0, 12), st.lists(st.integers(0, 6), max_size=12))
def test_a_stream_is_its_blocks_joined_less_what_a_replay_drops(lengths, drop, takes):
    rows = [{"n": i} for i in range(sum(lengths))]
    stream = LaneStream(first=drop, drop=drop)
    at = 0
    for length in lengths:
        samples = np.array([(0, 0, i) for i in range(at, at + length)], np.int64).reshape(-1, 3)
        stream.append(Block.from_rows(rows[at : at + length], samples))
        at += length
    assert stream.to_drop == max(0, drop - at)
    assert len(stream) == max(0, at - drop)
    assert stream.produced == drop + len(stream)
    got = []
    for take in takes:
        block = stream.take(take)
        assert len(block) == min(take, max(0, at - drop - len(got)))
        got += block.fields["n"].to_list() if len(block) else []
        assert stream.first == drop + len(got)
    assert got == list(range(drop, at))[: len(got)]


@pytest.mark.parametrize("steps", [(), ("shuffle",)])
def test_case_E12_an_endless_lane_of_which_nothing_passes_is_an_error_and_one_row_that_passes_is_enough(steps):
    def producer(keeps):
        source = StaticMixtureWorkSource([dataset("web", 30, 2)], None, exhausted_policy="repeat", chunk_size=3)
        pipeline = Pipeline(source).map_transform(lambda row: row if row["id"] in keeps else None)
        for _ in steps:
            pipeline.shuffle(4)
        return LaneProducer(pipeline.batch(1).options(canonical_replicas=2).plan(), 0, 1, Frontier())

    with pytest.raises(RunFailed, match=r"lane 1: 0 of \d+ records passed map_transform"):
        produce(producer(()), most=1)
    produce(one := producer((7,)), most=20)
    assert one.stream.produced >= 20
