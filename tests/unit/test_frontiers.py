"""Frontiers survive JSON, any earlier window will do, and parts of one run join whatever point each was taken at."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon import merge_checkpoints
from zephon.errors import CheckpointError
from zephon.frontiers import Announcement, Checkpoint, Frontier, complete_checkpoint, frontier_at, parse_checkpoint

NUMBERS = st.integers(0, 2**40)
FRONTIERS = st.builds(
    lambda chunk, offset, more, skipped, turns: Frontier(
        chunk, offset, offset + more, skipped, stands=None if turns is None else offset + more + turns
    ),
    NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.none() | NUMBERS,
)  # fmt: skip


@st.composite
def checkpoints(draw: st.DrawFn) -> Checkpoint:
    lanes = draw(st.integers(1, 8))
    return Checkpoint(
        {"canonical_replicas": lanes, "seed": 7}, draw(st.integers(0, 9)), {n: draw(FRONTIERS) for n in range(lanes)}
    )


def announcements_of(lengths: list[int]) -> list[Announcement]:
    return [Announcement(number, sum(lengths[:number]), number % 3) for number in range(len(lengths) + 1)]


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(0, 80))
def test_a_frontier_names_the_last_window_that_begins_at_or_before_its_record(lengths, records):
    found = announcements_of(lengths)
    frontier = frontier_at(found, records)
    assert frontier.announcement in found
    assert frontier.records == records
    assert frontier.offset >= 0
    assert all(a.records > records for a in found if a.chunk > frontier.chunk)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 80))
def test_an_older_window_names_the_same_record(lengths, records):
    for known in range(1, len(lengths) + 2):
        stale = frontier_at(announcements_of(lengths)[:known], records)
        assert stale.announcement.records + stale.offset == records


def test_a_record_before_every_known_window_has_no_frontier():
    with pytest.raises(CheckpointError, match="record 4"):
        frontier_at([Announcement(3, 5, 0)], 4)


@given(checkpoints())
def test_a_checkpoint_survives_json(checkpoint):
    state = json.loads(json.dumps(checkpoint.to_json()))
    assert state["complete"] is True
    assert complete_checkpoint(state) == checkpoint
    assert parse_checkpoint(state).to_json() == checkpoint.to_json()


@given(checkpoints(), st.data())
def test_a_checkpoint_that_lacks_a_lane_says_so_and_is_refused_by_that_lane(checkpoint, data):
    gone = data.draw(st.integers(0, checkpoint.canonical_replicas - 1))
    part = Checkpoint(checkpoint.identity, checkpoint.epoch, {k: f for k, f in checkpoint.lanes.items() if k != gone})
    if not part.lanes:
        return
    assert part.to_json()["complete"] is False
    with pytest.raises(CheckpointError, match=rf"no entry for lanes \[{gone}\].*merge_checkpoints"):
        complete_checkpoint(part.to_json())
    with pytest.raises(CheckpointError, match=rf"no entry for lanes \[{gone}\]"):
        complete_checkpoint({**part.to_json(), "complete": True})


@given(checkpoints(), st.data())
def test_parts_join_to_the_whole_in_any_order(checkpoint, data):
    lanes = list(checkpoint.lanes)
    shares = data.draw(st.lists(st.sets(st.sampled_from(lanes), min_size=1), max_size=4)) + [{lane} for lane in lanes]
    parts = [
        Checkpoint(checkpoint.identity, checkpoint.epoch, {n: checkpoint.lanes[n] for n in share}).to_json()
        for share in data.draw(st.permutations(shares))
    ]
    assert merge_checkpoints(parts) == checkpoint.to_json()


@given(checkpoints(), st.data())
def test_a_partial_part_speaks_for_its_lanes_and_a_complete_one_for_the_rest(checkpoint, data):
    """Groups are stopped at one moment; one of them may have just ended a round that the other is still inside."""
    own = data.draw(st.sets(st.sampled_from(list(checkpoint.lanes)), min_size=1))
    if len(own) == len(checkpoint.lanes):
        return
    moved = {n: Frontier(0, f.records + 3, f.records + 3) for n, f in checkpoint.lanes.items() if n in own}
    partial = Checkpoint(checkpoint.identity, checkpoint.epoch, moved).to_json()
    merged = merge_checkpoints(data.draw(st.permutations([checkpoint.to_json(), partial, checkpoint.to_json()])))
    assert complete_checkpoint(merged).lanes == {**checkpoint.lanes, **moved}


def test_what_earlier_epochs_came_to_is_kept_and_stated_only_where_there_were_any():
    lanes = {0: Frontier(), 1: Frontier()}
    first = Checkpoint({"canonical_replicas": 2}, 0, lanes)
    later = Checkpoint({"canonical_replicas": 2}, 1, lanes, past=40)
    assert "past" not in first.to_json()
    assert complete_checkpoint(json.loads(json.dumps(later.to_json()))) == later
    assert merge_checkpoints([{**later.to_json(), "past": 36}, later.to_json()])["past"] == 40


@given(checkpoints(), st.booleans())
def test_parts_that_contradict_each_other_are_refused(checkpoint, whole):
    lanes = dict(checkpoint.lanes) if whole else {0: checkpoint.lanes[0]}
    one = Checkpoint(checkpoint.identity, checkpoint.epoch, lanes).to_json()
    moved = Frontier(0, 0, lanes[0].records + 1)
    other = Checkpoint(checkpoint.identity, checkpoint.epoch, {**lanes, 0: moved}).to_json()
    with pytest.raises(CheckpointError, match="lane 0 stands at record.*part 0.*part 1"):
        merge_checkpoints([one, other])
    with pytest.raises(CheckpointError, match="part 1 is of epoch"):
        merge_checkpoints([one, {**one, "epoch": checkpoint.epoch + 1}])
    with pytest.raises(CheckpointError, match="part 1 belongs to another run"):
        merge_checkpoints([one, {**one, "identity": {**checkpoint.identity, "seed": 8}}])
    with pytest.raises(CheckpointError, match="at least one"):
        merge_checkpoints([])


GOOD = Checkpoint({"canonical_replicas": 2}, 0, {0: Frontier(), 1: Frontier(1, 2, 3)}).to_json()


@pytest.mark.parametrize(
    "change, named",
    [
        ({"format": 2}, "format 2"),
        ({"format": None}, "format None"),
        ({"identity": None}, "identity"),
        ({"identity": {"canonical_replicas": "8"}}, "canonical_replicas"),
        ({"identity": {"canonical_replicas": True}}, "canonical_replicas"),
        ({"epoch": -1}, "epoch"),
        ({"epoch": 1.0}, "epoch"),
        ({"past": -1}, "past"),
        ({"past": None}, "past"),
        ({"lanes": []}, "lanes"),
        ({"lanes": {}}, "lanes"),
        ({"lanes": {"2": GOOD["lanes"]["0"]}}, "lane '2' of 2"),
        ({"lanes": {"-1": GOOD["lanes"]["0"]}}, "lane '-1' of 2"),
        ({"lanes": {"x": GOOD["lanes"]["0"]}}, "lane 'x' of 2"),
        ({"lanes": {"²": GOOD["lanes"]["0"]}}, "lane '²' of 2"),
        ({"lanes": {"0": 7}}, "lane '0' of 2"),
        ({"lanes": {"0": {"chunk": 0, "offset": 0}}}, "lane 0: records"),
        ({"lanes": {"0": {"chunk": 0, "offset": 0, "records": 2.5}}}, "lane 0: records"),
        ({"lanes": {"0": {"chunk": 0, "offset": -1, "records": 2}}}, "lane 0: offset"),
        ({"lanes": {"0": {"chunk": 0, "offset": 3, "records": 2}}}, "lane 0: offset"),
        ({"lanes": {"0": {"chunk": 0, "offset": 2, "records": 2, "stands": 1}}}, "lane 0: it stands before"),
        ({"lanes": {"0": {"chunk": 0, "offset": 2, "records": 2, "stands": None}}}, "lane 0: stands"),
    ],
)
def test_a_malformed_checkpoint_is_refused_by_what_is_wrong_with_it(change, named):
    with pytest.raises(CheckpointError) as caught:
        complete_checkpoint({**GOOD, **change})
    assert named in str(caught.value)


@pytest.mark.parametrize("state", [None, [], "{}", 7])
def test_what_is_no_mapping_is_no_checkpoint(state):
    with pytest.raises(CheckpointError, match="mapping"):
        parse_checkpoint(state)
