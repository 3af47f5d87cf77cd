"""Lanes are shared out once each, turns are fair, rounds end for all groups alike, and windows tile a lane."""

from __future__ import annotations

from itertools import count, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zephon.errors import CheckpointError, SettingError, TopologyError
from zephon.lanes import (
    RoundRobin,
    batch_end,
    check_step,
    check_topology,
    owned_lanes,
    released_rounds,
    window_at,
    window_start,
)

STRATEGIES = st.sampled_from(["contiguous", "interleaved"])
TOPOLOGIES = st.integers(1, 64).flatmap(lambda lanes: st.tuples(st.just(lanes), st.integers(1, lanes)))

# Ownership


@given(TOPOLOGIES, STRATEGIES)
def test_every_lane_belongs_to_exactly_one_group_and_shares_differ_by_one_at_most(topology, strategy):
    lanes, groups = topology
    shares = [owned_lanes(lanes, groups, group, strategy) for group in range(groups)]
    assert sorted(lane for share in shares for lane in share) == list(range(lanes))
    assert all(share == sorted(share) for share in shares)
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_contiguous_gives_blocks_and_interleaved_deals():
    assert [owned_lanes(8, 3, g, "contiguous") for g in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [owned_lanes(8, 3, g, "interleaved") for g in range(3)] == [[0, 3, 6], [1, 4, 7], [2, 5]]


@given(TOPOLOGIES, STRATEGIES)
def test_an_uneven_split_is_a_warning_that_names_the_larger_groups(topology, strategy):
    lanes, groups = topology
    warning = check_topology(lanes, groups, 0, strategy)
    sizes = [len(owned_lanes(lanes, groups, g, strategy)) for g in range(groups)]
    assert (warning is None) == (len(set(sizes)) == 1)
    if warning:
        assert str([g for g in range(groups) if sizes[g] == max(sizes)]) in warning


@pytest.mark.parametrize(
    "arguments, error, named",
    [
        ((8, 9, 0), TopologyError, ["dp_degree=9", "8 lanes", "canonical_replicas"]),
        ((8, 4, 4), TopologyError, ["dp_group_id=4", "0..3"]),
        ((8, 4, -1), TopologyError, ["dp_group_id=-1", "0..3"]),
        ((8, 0, 0), SettingError, ["dp_degree=0", "at least 1"]),
        ((8, 2, 0, "random"), SettingError, ["mapping_strategy='random'", '"contiguous"', '"interleaved"']),
    ],
)
def test_groups_that_the_lanes_cannot_serve_are_refused_by_name(arguments, error, named):
    with pytest.raises(error) as caught:
        check_topology(*arguments)
    assert all(part in str(caught.value) for part in named)


@given(st.integers(1, 9), st.integers(-2, 40))
def test_a_step_is_a_positive_number_of_whole_rounds(owned, batches):
    if batches > 0 and batches % owned == 0:
        check_step(batches, range(owned))
    else:
        with pytest.raises(TopologyError, match=f"batches_per_step={batches}.*owns {owned} lanes?"):
            check_step(batches, range(owned))


# Windows


@given(st.integers(1, 40), st.integers(1, 20), st.data())
def test_windows_tile_a_lane_and_only_the_first_is_shorter(lanes, every, data):
    lane = data.draw(st.integers(0, lanes - 1))
    starts = [window_start(lane, lanes, every, number) for number in range(8)]
    lengths = [b - a for a, b in pairwise(starts)]
    assert starts[0] == 0
    assert 1 <= lengths[0] <= every
    assert lengths[1:] == [every] * 6
    assert [window_at(lane, lanes, every, chunk) for chunk in starts] == list(range(8))
    for chunk in set(range(starts[-1])) - set(starts):
        with pytest.raises(CheckpointError, match=f"lane {lane}: chunk {chunk}"):
            window_at(lane, lanes, every, chunk)


def test_lanes_do_not_flush_in_step():
    assert [window_start(lane, 8, 8, 1) for lane in range(8)] == list(range(1, 9))
    assert [window_start(0, 8, 8, number) for number in range(4)] == [0, 1, 9, 17]


# Turns and rounds


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 60))
def test_from_the_start_turns_are_strict_and_each_round_ends_with_the_last_lane(lanes, size, batches):
    turns = RoundRobin(dict.fromkeys(range(lanes), 0), 0, size)
    for number in range(batches):
        after = turns.lane_after()
        lane, stands, until, round_, ends = turns.turn()
        assert (lane, round_, ends) == (number % lanes, number // lanes + 1, lane == lanes - 1)
        assert (stands, until) == (number // lanes * size, number // lanes * size + size)
        assert turns.deliver(size) == ends
        assert turns.turn()[0] == after
        assert turns.at_round_end == (lane == lanes - 1)
    assert turns.rounds == batches // lanes


@given(st.dictionaries(st.integers(0, 9), st.integers(0, 30), min_size=1), st.integers(0, 9), st.integers(1, 7))
@example(stands={0: 12, 1: 5}, ahead=0, size=4)
def test_after_a_stop_inside_a_round_lanes_catch_up_first_and_then_every_round_is_whole(stands, ahead, size):
    """Whatever the group, round j ends where each of its lanes stands at `most + j * size`."""
    most = max(stands.values()) + ahead
    turns = RoundRobin(stands, most, size)
    last = -(10**9)
    for rounds in range(1, 4):
        while True:
            lane, begins, until, number, ends = turns.turn()
            assert begins == turns.stands[lane] == min(turns.stands.values())
            assert number >= last  # a client that waits for its turn never misses a round that is released
            last = number
            assert (number <= 0) == (begins < most)
            assert number == rounds or number <= 0
            assert begins < until <= begins + size
            assert begins >= most or until <= most
            after = turns.lane_after()
            assert turns.deliver(until - begins) == ends
            assert turns.turn()[0] == after
            if ends:
                break
        assert set(turns.stands.values()) == {most + rounds * size}
        assert turns.rounds == rounds
        assert turns.at_round_end


LANES = st.lists(st.integers(0, 40), min_size=1, max_size=6)


@given(LANES, st.integers(1, 6), st.booleans(), st.data())
def test_known_totals_say_how_many_rounds_there_are(totals, size, drop_last, data):
    produced = dict(enumerate(totals))
    rounds, final = released_rounds(produced, produced, 0, size, drop_last)
    assert final
    if drop_last:
        assert all(total >= rounds * size for total in totals)
        assert any(total < (rounds + 1) * size for total in totals)
    else:
        assert all(total <= rounds * size for total in totals)
        assert rounds == 0 or any(total > (rounds - 1) * size for total in totals)


@given(LANES, st.integers(1, 6), st.booleans(), st.data())
def test_rounds_are_released_in_order_and_never_taken_back(totals, size, drop_last, data):
    """As lanes produce, in any order, the released rounds grow to the number that the totals give, then are final."""
    produced = dict.fromkeys(range(len(totals)), 0)
    ended: set[int] = set()
    goal = released_rounds(dict(enumerate(totals)), range(len(totals)), 0, size, drop_last)[0]
    last, was_final = 0, False
    while len(ended) < len(totals):
        lane = data.draw(st.sampled_from([n for n in produced if n not in ended]))
        if produced[lane] == totals[lane]:
            ended.add(lane)
        else:
            produced[lane] += data.draw(st.integers(1, totals[lane] - produced[lane]))
        rounds, final = released_rounds(produced, ended, 0, size, drop_last)
        assert last <= rounds <= goal
        assert final >= was_final
        assert not final or rounds == goal
        last, was_final = rounds, final
    assert was_final


def deliver_all(groups: list[RoundRobin], totals: list[int], drop_last: bool, stop: int, pick) -> int:
    """Groups take their turns until nothing more may be delivered, or `stop` batches were. Returns how many were."""
    known = dict(enumerate(totals))
    for done in range(stop):
        able = []
        for turns in groups:
            lane, _, until, round_, _ = turns.turn()
            if round_ <= released_rounds(known, known, turns.most, turns.microbatch_size, drop_last)[0]:
                able.append((turns, lane, until))
        if not able:
            return done
        turns, lane, until = pick(able)
        turns.deliver(min(until, totals[lane]) - turns.records[lane])
    return stop


@given(LANES, st.integers(1, 4), st.booleans(), st.data())
def test_after_any_stops_each_lane_has_delivered_as_many_records_as_without_them(totals, size, drop_last, data):
    lanes = len(totals)
    rounds, _ = released_rounds(dict(enumerate(totals)), range(lanes), 0, size, drop_last)
    expected = {lane: min(total, rounds * size) for lane, total in enumerate(totals)}
    records = dict.fromkeys(range(lanes), 0)
    for stop in (data.draw(st.integers(0, 30)), data.draw(st.integers(0, 30)), 10**6):
        dp, strategy = data.draw(st.integers(1, lanes)), data.draw(STRATEGIES)
        most = max(records.values())
        shares = [owned_lanes(lanes, dp, group, strategy) for group in range(dp)]
        groups = [RoundRobin({lane: records[lane] for lane in share}, most, size) for share in shares]
        deliver_all(groups, totals, drop_last, stop, lambda able: data.draw(st.sampled_from(able)))
        for turns in groups:
            records.update(turns.records)
    assert records == expected


def test_a_lane_that_had_run_out_before_the_stop_has_no_batch_to_catch_up_with():
    turns = RoundRobin({0: 12, 1: 5}, 12, 4)
    assert turns.turn()[0] == 1
    assert turns.is_void(1, 0)
    assert not turns.is_void(1, 2)
    turns.deliver(0)
    turns.deliver(0)
    assert turns.stands == {0: 12, 1: 12}
    assert not turns.is_void(1, 0)  # from here on an empty batch takes its turn, as on every rank
    assert turns.records[1] == 5


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 9))
def test_batches_that_catch_up_stop_exactly_at_most(stands, most, size):
    at = stands
    for _ in count():
        if at >= most:
            break
        assert at < batch_end(at, most, size) <= most
        at = batch_end(at, most, size)
    assert at == max(stands, most)
    assert batch_end(at, most, size) == at + size
