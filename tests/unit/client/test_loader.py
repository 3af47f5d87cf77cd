"""A loader against a made-up engine: order, rounds, ends, epochs, states."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.client.peer import Peer, ids
from zephon.errors import CheckpointError, SettingError, TopologyError, ZephonError
from zephon.frontiers import merge_checkpoints
from zephon.transport import protocol as p
from zephon_client.waiting import Limits

Make = Callable[..., Peer]
Join = Callable[..., Any]


def pulled(loader: Any, count: int) -> list[tuple[int, list[int], bool]]:
    """(lane, ids, ends the round) of the next batches."""
    got = []
    for _ in range(count):
        batch = next(loader)
        assert batch.first_record == int(batch["id"][0]) % 100_000
        got.append((batch.lane, batch["id"].tolist(), batch.ends_round))
    return got


def records(state: dict[str, Any]) -> dict[int, int]:
    return {int(lane): entry["records"] for lane, entry in state["lanes"].items()}


def test_batches_come_lane_by_lane_and_the_last_of_each_round_says_so(make_peer: Make, join: Join) -> None:
    loader = join(make_peer(lanes=4, microbatch=2), dp_degree=2, dp_group_id=1)
    assert loader.lanes == [2, 3]
    assert pulled(loader, 4) == [
        (2, ids(2, 0, 2), False), (3, ids(3, 0, 2), True), (2, ids(2, 2, 4), False), (3, ids(3, 2, 4), True),
    ]  # fmt: skip
    assert (loader.rounds, loader.epoch) == (2, 0)


def test_a_batch_shows_every_kind_of_field_its_samples_and_its_place(make_peer: Make, join: Join) -> None:
    batch = next(join(make_peer(lanes=2, microbatch=3, width=4)))
    assert len(batch) == 3
    assert batch["input_ids"].shape == (3, 4)
    assert list(batch["text"]) == ["record 0", "record 1", "record 2"]
    assert list(batch["raw"]) == [b"", b"x", b"xx"]
    assert batch.samples == [("web", 0, 0), ("code", 0, 1), ("web", 0, 2)]
    assert (batch.lane, batch.first_record, batch.ends_round) == (0, 0, False)
    assert batch.digest == batch.copy().digest


def test_all_records_of_a_finite_run_come_once_and_every_rank_ends_at_the_same_round(
    make_peer: Make, join: Join
) -> None:
    peer = make_peer(lanes=4, microbatch=2, totals=[11, 9, 14, 10])
    loaders = [join(peer, dp_degree=2, dp_group_id=group) for group in range(2)]
    rounds = []
    for loader in loaders:
        batches = [(batch.lane, batch["id"].tolist(), batch.ends_round) for batch in loader]
        for lane in loader.lanes:
            assert [number for at, got, _ in batches if at == lane for number in got] == ids(lane, 0, 8)
        assert [ends for _, _, ends in batches] == [False, True] * 4
        rounds.append(loader.rounds)
    assert rounds == [4, 4]


def test_without_drop_last_short_and_empty_batches_keep_ranks_in_step(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=4, microbatch=2, totals=[5, 0, 3, 1], drop_last=False)
    for group in range(2):
        loader = join(peer, dp_degree=2, dp_group_id=group)
        sizes: dict[int, list[int]] = {lane: [] for lane in loader.lanes}
        for batch in loader:
            sizes[batch.lane].append(len(batch))
        expected = {0: [2, 2, 1], 1: [0, 0, 0], 2: [2, 1, 0], 3: [1, 0, 0]}
        assert sizes == {lane: expected[lane] for lane in loader.lanes}
        assert loader.state_dict()["epoch"] == 1


def test_rounds_are_delivered_only_once_released_and_the_last_release_ends_the_epoch(
    make_peer: Make, join: Join
) -> None:
    peer = make_peer(lanes=2, microbatch=2, by_hand=True)
    loader = join(peer)
    loader._limits = Limits(stalled=0.8, hungry=0.4)
    with pytest.raises(ZephonError, match="nothing has moved"):
        next(loader)
    peer.release(1)
    assert [lane for lane, _, _ in pulled(loader, 2)] == [0, 1]
    peer.release(1, final=True)
    with pytest.raises(StopIteration):
        next(loader)
    assert (loader.epoch, loader.rounds) == (1, 1)


def test_iterating_again_goes_on_within_an_epoch_and_then_starts_the_next(make_peer: Make, join: Join) -> None:
    loader = join(make_peer(lanes=2, microbatch=2, totals=[4, 4]))
    first = [next(iter(loader))["id"].tolist()]
    passed = iter(loader)
    first += [batch["id"].tolist() for batch in passed]
    assert first == [ids(0, 0, 2), ids(1, 0, 2), ids(0, 2, 4), ids(1, 2, 4)]
    assert next(passed, None) is None  # a pass that has ended stays ended
    assert loader.epoch == 1
    assert [batch["id"].tolist() for batch in loader][:2] == [ids(0, 0, 2, epoch=1), ids(1, 0, 2, epoch=1)]
    assert (loader.epoch, loader.rounds) == (2, 4)


def test_steps_are_counted_from_the_runs_beginning_over_epochs_resumes_and_deaths(make_peer: Make, join: Join) -> None:
    first = join(make_peer(lanes=4, microbatch=2, totals=[6, 6, 6, 6]), dp_degree=2)
    assert (first.step, len(list(first)), first.step) == (0, 6, 3)
    pulled(first, 2)
    state = first.state_dict()
    assert (first.step, state["past"]) == (4, 6)
    peer = make_peer(lanes=4, microbatch=2, totals=[6, 6, 6, 6])
    for rank, per_step, step in ((0, None, 4), (1, 4, 2)):
        then = join(peer, dp_degree=2, dp_group_id=rank, batches_per_step=per_step)
        then.load_state_dict(state)
        assert (then.step, then.rounds) == (step, 0)
        assert then.state_dict() == state
        list(then)
        assert (then.rounds, then.step) == (2, 6 if per_step is None else 3)
        assert then.state_dict()["past"] == 12
    begun = [message for message in peer.heard(p.Begin) if message.epoch == 1]
    assert [message.past for message in begun] == [6, 6]


def test_case_K2_an_epoch_without_a_full_round_ends_at_once_with_a_warning(make_peer: Make, join: Join) -> None:
    loader = join(make_peer(lanes=2, microbatch=2, totals=[1, 5]))
    with pytest.warns(UserWarning, match="epoch 0 has no full round"):
        assert list(loader) == []
    assert loader.state_dict()["epoch"] == 1


def test_undelivered_batches_of_an_epoch_are_given_back_at_its_end(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=1, microbatch=2, by_hand=True)
    loader = join(peer)
    loader.lanes
    loader._begun()
    peer.until(lambda: peer.rings and not peer.rings[0].writer.free)
    peer.release(1, final=True)
    assert len(list(loader)) == 1
    loader.progress()
    peer.until(lambda: peer.rings[0].writer.in_flight == 0 or peer.rings[0].writer.free == 0)
    returned = [slot for message in peer.heard(p.Returned) for slot in message.slots]
    assert sorted(returned[:4]) == [(0, 0, index) for index in range(4)]


# States


def test_before_anything_is_delivered_a_state_is_the_loaded_one_exactly(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=2, microbatch=2)
    fresh = join(peer, dp_degree=1).state_dict()
    assert fresh == {
        "format": 1, "identity": peer.shape.identity, "epoch": 0, "complete": True,
        "lanes": {str(lane): {"chunk": 0, "offset": 0, "records": 0, "skipped": 0} for lane in range(2)},
    }  # fmt: skip
    other = make_peer(lanes=2, microbatch=2)
    loaded = {**fresh, "epoch": 3}
    loaded["lanes"] = {"0": {"chunk": 1, "offset": 2, "records": 7, "skipped": 4}, "1": fresh["lanes"]["1"]}
    loader = join(other)
    loader.load_state_dict(json.loads(json.dumps(loaded)))
    assert loader.epoch == 3
    assert loader.state_dict() == loaded
    assert loader.state_dict() is not loader.state_dict()


def test_at_a_rounds_end_any_one_rank_gives_the_whole_runs_state_and_without_a_warning(
    make_peer: Make, join: Join
) -> None:
    peer = make_peer(lanes=4, microbatch=2)
    loaders = [join(peer, dp_degree=2, dp_group_id=group) for group in range(2)]
    for loader in loaders:
        pulled(loader, 6)
    peer.announce_all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        states = [loader.state_dict() for loader in loaders]
    for state in states:
        assert state["complete"]
        assert records(state) == dict.fromkeys(range(4), 6)
        assert state["lanes"]["3"] == {"chunk": 1, "offset": 1, "records": 6, "skipped": 0}


def test_inside_a_round_a_state_holds_the_ranks_own_lanes_and_says_so_once(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=4, microbatch=2)
    loader = join(peer, dp_degree=2, dp_group_id=1)
    pulled(loader, 3)
    with pytest.warns(UserWarning, match=r"inside a round.*\[2, 3\]"):
        state = loader.state_dict()
    assert (state["complete"], records(state)) == (False, {2: 4, 3: 2})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loader.state_dict() == state


def test_a_rank_that_owns_every_lane_has_complete_states_at_any_point(make_peer: Make, join: Join) -> None:
    loader = join(make_peer(lanes=3, microbatch=2))
    pulled(loader, 4)
    state = loader.state_dict()
    assert (state["complete"], records(state)) == (True, {0: 4, 1: 2, 2: 2})


def test_at_the_last_rounds_end_a_state_starts_the_next_epoch(make_peer: Make, join: Join) -> None:
    loader = join(make_peer(lanes=2, microbatch=2, totals=[4, 5]))
    pulled(loader, 4)
    state = loader.state_dict()
    assert (state["epoch"], records(state)) == (1, {0: 0, 1: 0})
    assert list(loader) == []
    assert loader.state_dict() == state


def test_a_run_resumed_at_its_epochs_end_starts_the_next_epoch_at_once(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=2, microbatch=2, totals=[4, 5])
    loader = join(peer)
    state = loader.state_dict()
    for lane in ("0", "1"):
        state["lanes"][lane].update(chunk=0, offset=4, records=4)
    loader.close()
    again = join(make_peer(lanes=2, microbatch=2, totals=[4, 5]))
    again.load_state_dict(state)
    assert [batch["id"].tolist() for batch in again] == [
        ids(0, 0, 2, 1), ids(1, 0, 2, 1), ids(0, 2, 4, 1), ids(1, 2, 4, 1),
    ]  # fmt: skip
    assert again.epoch == 2


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_was_delivered_before_a_stop_is_neither_repeated_nor_skipped_after_it(
    make_peer: Make, data: st.DataObject
) -> None:
    from zephon_client import connect

    got: dict[int, list[int]] = {lane: [] for lane in range(4)}
    state: dict[str, Any] | None = None
    for _ in range(3):
        groups = data.draw(st.sampled_from([1, 2, 4]))
        chosen = data.draw(st.integers(0, 2**16))
        peer = make_peer(
            lanes=4, microbatch=data.draw(st.sampled_from([2, 3])), window=data.draw(st.sampled_from([1, 4])),
            announce=lambda lane, window, chosen=chosen: bool(chosen >> (lane + 3 * window) % 16 & 1),
            strategy=data.draw(st.sampled_from(["contiguous", "interleaved"])),
        )  # fmt: skip
        parts = []
        for group in range(groups):
            with connect(peer.path, dp_degree=groups, dp_group_id=group, output="numpy", timeout=10) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                for _ in range(data.draw(st.integers(0, 6))):
                    batch = next(loader)
                    got[batch.lane] += batch["id"].tolist()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    part = loader.state_dict()
                own = {str(lane): part["lanes"][str(lane)] for lane in loader.lanes}
                parts.append({**part, "complete": False, "lanes": own})
        peer.close()
        state = merge_checkpoints(parts)
        assert records(state) == {lane: len(each) for lane, each in got.items()}
    assert got == {lane: ids(lane, 0, len(each)) for lane, each in got.items()}


# Loading


def test_lanes_behind_catch_up_within_the_first_round_in_one_shorter_batch(make_peer: Make, join: Join) -> None:
    state = join(make_peer(lanes=3, microbatch=2)).state_dict()
    for lane, count in (("0", 3), ("1", 5), ("2", 2)):
        state["lanes"][lane].update(chunk=0, offset=count, records=count)
    loader = join(make_peer(lanes=3, microbatch=2))
    loader.load_state_dict(state)
    assert pulled(loader, 6) == [
        (2, ids(2, 2, 4), False), (0, ids(0, 3, 5), False), (2, ids(2, 4, 5), False), (0, ids(0, 5, 7), False),
        (1, ids(1, 5, 7), False), (2, ids(2, 5, 7), True),
    ]  # fmt: skip
    assert loader.rounds == 1


def test_a_state_is_sent_with_the_attach_and_may_be_loaded_after_iter_but_not_after_a_batch(
    make_peer: Make, join: Join
) -> None:
    peer = make_peer(lanes=2)
    state = join(make_peer(lanes=2)).state_dict()
    loader = join(peer)
    passed = iter(loader)
    loader.load_state_dict(state, allow_changed=["mixture"])
    next(passed)
    attach = peer.heard(p.Attach)[-1]
    assert (json.loads(attach.checkpoint), attach.allow_changed) == (state, ["mixture"])
    with pytest.raises(CheckpointError, match="before iterating"):
        loader.load_state_dict(state)


def test_a_state_may_be_loaded_after_one_was_taken_while_nothing_is_delivered(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=2, microbatch=2)
    loader = join(peer)
    template = loader.state_dict()  # as frameworks do that load into the shape of a present state
    template["lanes"]["0"].update(offset=4, records=4)
    template["lanes"]["1"].update(offset=4, records=4)
    loader.load_state_dict(template)
    assert pulled(loader, 1) == [(0, ids(0, 4, 6), False)]
    assert loader.state_dict()["lanes"]["0"]["records"] == 6


def test_a_partial_state_or_a_bare_name_of_a_setting_is_refused_before_anything_is_sent(
    make_peer: Make, join: Join
) -> None:
    peer = make_peer(lanes=2)
    loader = join(peer)
    state = loader.state_dict()
    attached = len(peer.heard(p.Attach))
    with pytest.raises(CheckpointError, match="lanes \\[1\\]"):
        loader.load_state_dict({**state, "complete": False, "lanes": {"0": state["lanes"]["0"]}})
    with pytest.raises(SettingError, match="allow_changed"):
        loader.load_state_dict(state, allow_changed="mixture")
    assert len(peer.heard(p.Attach)) == attached


# The plan


def test_a_step_that_is_not_whole_rounds_is_refused_when_the_lanes_are_known(make_peer: Make, join: Join) -> None:
    loader = join(make_peer(lanes=4), batches_per_step=6)
    for _ in range(2):
        with pytest.raises(TopologyError, match="batches_per_step=6"):
            next(loader)
    assert next(join(make_peer(lanes=4), batches_per_step=8)).lane == 0


def test_warnings_of_the_daemon_reach_the_training_script_once(make_peer: Make, join: Join) -> None:
    loader = join(make_peer(lanes=2, warnings=["8 lanes do not split evenly"]))
    with pytest.warns(UserWarning, match="do not split evenly"):
        next(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(loader)


def test_the_engine_hears_of_slots_and_rounds_at_the_next_call(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=1, microbatch=2)
    loader = join(peer)
    next(loader)
    next(loader)
    loader.progress()
    peer.until(lambda: [(each.epoch, each.rounds) for each in peer.heard(p.Returned)][-1:] == [(0, 2)])
    assert [message.epoch for message in peer.heard(p.Begin)] == [0]


def test_ranks_of_one_group_each_get_every_batch(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=2, microbatch=2)
    loaders = [join(peer, dp_degree=1, dp_group_id=0, group_readers=2) for _ in range(2)]
    for loader in loaders:
        loader._begun()
    for _ in range(12):
        left, right = (pulled(loader, 1) for loader in loaders)
        assert left == right
    batch = next(loaders[0])
    assert not batch["id"].flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        batch["id"][0] = 1


def test_a_sole_reader_may_write_into_its_batch(make_peer: Make, join: Join) -> None:
    batch = next(join(make_peer()))
    array = batch["id"]
    array += 1
    assert np.array_equal(batch["id"], np.array(ids(0, 1, 3)))
