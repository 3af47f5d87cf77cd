"""Turns, rounds and states of a rank equal a plain model's over random histories of stops and resumes."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.errors import ProtocolError
from zephon.frontiers import Frontier, complete_checkpoint, merge_checkpoints
from zephon.lanes import owned_lanes
from zephon.transport.protocol import Announced, Attached, LaneTotal, Released
from zephon_client.ready import Ready
from zephon_client.run import Run


class PlainClient:
    """A group's turns in plain Python: the lane with the fewest delivered records, ties to the lowest."""

    def __init__(self, own: list[int], microbatch: int, frontiers: dict[int, Frontier]) -> None:
        self.microbatch, self.rounds = microbatch, 0
        self.most = max(frontier.records for frontier in frontiers.values())
        self.delivered = {lane: frontiers[lane].records for lane in own}

    def next(self) -> tuple[int, int, bool]:
        """(lane, records, whether that ends a round)."""
        lane = min(self.delivered, key=lambda l: (self.delivered[l], l))
        behind = self.most - self.delivered[lane]
        size = min(self.microbatch, behind) if behind > 0 else self.microbatch
        self.delivered[lane] += size
        ends = set(self.delivered.values()) == {self.most + (self.rounds + 1) * self.microbatch}
        self.rounds += ends
        return lane, size, ends


class Windows:
    """Windows of random lengths, also empty ones, of every lane."""

    def __init__(self, lanes: int, rng: random.Random) -> None:
        self.begins = []
        for _ in range(lanes):
            begins = [0]
            while begins[-1] < 400:
                begins.append(begins[-1] + rng.choice([0, 0, 1, 3, 8, 20]))
            self.begins.append(begins)

    def announced(self, lane: int) -> Iterator[tuple[int, int]]:
        return iter(enumerate(self.begins[lane]))

    def agrees(self, lane: int, frontier: Frontier) -> bool:
        """Whether the frontier names a real window at or before the record at which the lane stands."""
        return frontier.offset >= 0 and self.begins[lane][frontier.chunk] == frontier.records - frontier.offset


def attached(lanes: int, own: list[int], microbatch: int, starts: dict[int, Frontier], **changes: Any) -> Attached:
    plan = {
        "identity": json.dumps({"canonical_replicas": lanes}), "lanes": lanes, "owned": own,
        "microbatch_size": microbatch, "drop_last": True, "even_ends": True, "packed": False,
        "dataset_names": ["web"], "epoch": 0, "warnings": [],
        "starts": [[f.chunk, f.offset, f.records, f.skipped] for _, f in sorted(starts.items())],
    }  # fmt: skip
    return Attached(**{**plan, **changes})


class Rank:
    """A run with an engine that sends its messages in bits, at random moments."""

    def __init__(self, plan: Attached, windows: Windows, rng: random.Random) -> None:
        self.run, self.rng = Run(plan), rng
        starts = {lane: Frontier(*start) for lane, start in enumerate(plan.starts)}
        plain = PlainClient(list(plan.owned), plan.microbatch_size, starts)
        self.to_come: list[Any] = []
        records = dict(plain.delivered)
        for _ in range(60):
            lane, size, _ = plain.next()
            self.to_come.append(Ready(lane, 0, 0, 0, 1, records[lane], size))
            records[lane] += size
        rng.shuffle(self.to_come)
        self.to_come.sort(key=lambda ready: ready.first_record)  # each lane in order, lanes in any
        for lane in range(plan.lanes):
            for chunk, begins in windows.announced(lane):
                if chunk and rng.random() < 0.6:
                    self.to_come.insert(rng.randrange(len(self.to_come)), Announced(lane, 0, chunk, begins, 0))
        self.to_come = _in_order(self.to_come)
        self.to_come.insert(rng.randrange(20), Released(0, 2**62, False))

    def next(self) -> tuple[int, int, bool]:
        epoch = self.run.epoch
        while (ready := epoch.due()) is None:
            assert not epoch.over
            some = self.rng.randint(1, 5)
            arrived, self.to_come = deque(self.to_come[:some]), self.to_come[some:]
            assert arrived, "the engine has sent everything and the next batch is still not there"
            assert self.run.take(arrived) == []
        rounds = epoch.turns.rounds
        for _ in range(self.rng.randint(1, 2)):  # whoever is interrupted does it again
            epoch.deliver(ready)
        assert epoch.turns.rounds == rounds + ready.ends_round
        return ready.lane, ready.records, ready.ends_round


def _in_order(messages: list[Any]) -> list[Any]:
    """Announcements of a lane in the order of their windows."""
    ordered: dict[int, list[Announced]] = {}
    for message in messages:
        if isinstance(message, Announced):
            ordered.setdefault(message.lane, []).append(message)
    queues = {lane: iter(sorted(each, key=lambda a: a.chunk)) for lane, each in ordered.items()}
    return [next(queues[m.lane]) if isinstance(m, Announced) else m for m in messages]


@given(st.integers(0, 2**32))
def test_over_any_history_of_stops_and_resumes_turns_and_states_are_those_of_the_plain_model(seed: int) -> None:
    rng = random.Random(seed)
    lanes = rng.choice([1, 4, 6])
    windows = Windows(lanes, rng)
    starts = {lane: Frontier() for lane in range(lanes)}
    delivered = dict.fromkeys(range(lanes), 0)
    for _ in range(4):
        groups = rng.randint(1, lanes)
        strategy, microbatch = rng.choice(["contiguous", "interleaved"]), rng.choice([2, 3, 4])
        owned = [owned_lanes(lanes, groups, group, strategy) for group in range(groups)]
        ranks = [Rank(attached(lanes, own, microbatch, starts), windows, rng) for own in owned]
        plains = [PlainClient(own, microbatch, starts) for own in owned]
        rounds, inside = rng.randint(0, 3), rng.random() < 0.4
        for rank, plain in zip(ranks, plains):
            extra = rng.randrange(2 * len(plain.delivered)) if inside else 0
            while plain.rounds < rounds or extra:
                extra -= plain.rounds >= rounds
                lane, size, ends = plain.next()
                assert rank.next() == (lane, size, ends)
                delivered[lane] += size
                assert rank.run.rounds == plain.rounds
        states = [rank.run.checkpoint().to_json() for rank in ranks]
        parts = [only(state, own) for state, own in zip(states, owned)]
        merged = merge_checkpoints(parts)
        assert {int(lane): entry["records"] for lane, entry in merged["lanes"].items()} == delivered
        if rounds and not inside:
            for state in states:  # each rank speaks for the whole run
                assert {lane: f.records for lane, f in complete_checkpoint(state).lanes.items()} == delivered
            merged = rng.choice(states)
        starts = complete_checkpoint(merged).lanes
        assert all(windows.agrees(lane, frontier) for lane, frontier in starts.items())


def only(state: dict[str, Any], lanes: list[int]) -> dict[str, Any]:
    """The part of a state that a rank knows from its own deliveries."""
    return {**state, "complete": False, "lanes": {str(lane): state["lanes"][str(lane)] for lane in lanes}}


def told(run: Run, *messages: Any) -> None:
    assert run.take(deque(messages)) == []


def deliver_all(run: Run) -> None:
    """Hands over whatever may be handed over."""
    while (ready := run.epoch.due()) is not None:
        run.epoch.deliver(ready)


def ready(lane: int, first: int, records: int = 2, epoch: int = 0) -> Ready:
    return Ready(lane, epoch, 0, 0, 1, first, records)


NEW = {lane: Frontier() for lane in range(4)}


def test_a_state_inside_the_first_round_of_a_resumed_run_never_speaks_for_lanes_of_others() -> None:
    starts = {0: Frontier(0, 4, 4), 1: Frontier(0, 2, 2), 2: Frontier(0, 1, 1), 3: Frontier(0, 3, 3)}
    run = Run(attached(4, [0, 1], 2, starts))
    told(run, Released(0, 2**62, False), ready(1, 2))
    assert run.checkpoint().lanes == starts
    deliver_all(run)
    assert run.epoch.turns.at_round_end  # all of this rank's lanes stand at M, while lanes 2 and 3 need not
    assert sorted(run.checkpoint().lanes) == [0, 1]
    told(run, ready(0, 4), ready(1, 4))
    deliver_all(run)
    assert {lane: f.records for lane, f in run.checkpoint().lanes.items()} == dict.fromkeys(range(4), 6)


def test_a_lane_that_has_ended_stands_at_its_total_in_a_state_of_the_whole_run() -> None:
    run = Run(attached(4, [0, 1], 2, NEW, drop_last=False))
    told(run, Released(0, 4, True), LaneTotal(1, 0, 3, 0), LaneTotal(2, 0, 1, 0))
    told(run, *(ready(lane, first, min(2, max(0, (8, 3)[lane] - first))) for lane in (0, 1) for first in (0, 2)))
    deliver_all(run)
    assert {lane: f.records for lane, f in run.checkpoint().lanes.items()} == {0: 4, 1: 3, 2: 1, 3: 4}


def test_the_newest_window_at_or_before_the_last_delivered_record_is_named_and_older_ones_are_forgotten() -> None:
    run = Run(attached(1, [0], 2, {0: Frontier()}))
    told(run, Released(0, 2**62, False))
    for number in range(300):
        told(run, ready(0, 2 * number), Announced(0, 0, number + 1, 2 * number + 3, 1))
        deliver_all(run)
    assert run.checkpoint().lanes[0] == Frontier(299, 600 - 599, 600, 1)
    assert len(run.epoch._windows[0]) < 200


def test_announcements_that_come_again_change_nothing() -> None:
    run = Run(attached(1, [0], 2, {0: Frontier()}))
    told(run, Released(0, 2**62, False), *(ready(0, first) for first in range(0, 10, 2)))
    told(run, Announced(0, 0, 3, 4, 0), Announced(0, 0, 7, 8, 0), Announced(0, 0, 3, 4, 0))
    deliver_all(run)
    assert run.checkpoint().lanes[0] == Frontier(7, 2, 10, 0)


def test_messages_of_the_next_epoch_wait_for_it_and_those_of_a_past_one_are_handed_back() -> None:
    run = Run(attached(1, [0], 2, {0: Frontier()}))
    told(run, Released(1, 2, True), Announced(0, 1, 1, 2, 0), ready(0, 0, epoch=1), early := ready(0, 0))
    assert not run.epoch.final
    assert run.advance() == [early]
    assert run.epoch.number == 1
    deliver_all(run)
    assert run.checkpoint().lanes[0] == Frontier(1, 0, 2)
    late = ready(0, 2)
    assert run.take(deque([late, Announced(0, 0, 9, 9, 0)])) == [late]


@pytest.mark.parametrize("wrong", [ready(0, 2), ready(0, 0, 1), ready(0, 0, 3), ready(3, 0)])
def test_a_batch_that_is_not_the_one_due_is_a_protocol_error(wrong: Ready) -> None:
    run = Run(attached(4, [0, 1], 2, NEW))
    with pytest.raises(ProtocolError):
        told(run, Released(0, 9, False), wrong)
        run.epoch.due()
