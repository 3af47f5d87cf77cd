"""Batches that the training loop keeps: never overwritten, never a stuck run, and no memory kept for nothing."""

from __future__ import annotations

import gc
import os
import pickle
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from tests.unit.client.peer import Peer, ids
from zephon.transport import protocol as p

Make = Callable[..., Peer]
Join = Callable[..., Any]


def returned(peer: Peer) -> list[tuple[int, int, int]]:
    return [slot for message in peer.heard(p.Returned) for slot in message.slots]


def test_a_plain_loop_over_one_lane_reads_shared_memory_in_place(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=1, microbatch=2, slots=4)
    loader = join(peer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = next(loader)
        for _ in range(30):
            batch = next(loader)
    numbers, writer = batch["id"], peer.rings[0].segments[0].array
    assert numbers.any()
    peer.do(lambda: writer.fill(0))
    assert not numbers.any()  # the very bytes of the slot


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 8])
def test_case_C9_batches_kept_in_a_list_stay_as_they_were_with_one_warning(
    make_peer: Make, join: Join, slots: int
) -> None:
    loader = join(make_peer(lanes=1, microbatch=2, slots=slots))
    with pytest.warns(UserWarning, match="private copies") as caught:
        kept = [next(loader) for _ in range(50)]
    assert len(caught) == 1
    loader.close()
    del loader
    for number, batch in enumerate(kept):
        assert batch["id"].tolist() == ids(0, 2 * number, 2 * number + 2)
        assert list(batch["text"]) == [f"record {2 * number}", f"record {2 * number + 1}"]


def test_a_private_copy_gives_its_slot_back_at_once(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=1, microbatch=2, slots=4)
    loader = join(peer)
    kept = [next(loader), next(loader)]
    with pytest.warns(UserWarning, match="holds 2 batches of lane 0"):
        kept.append(next(loader))
    peer.until(lambda: returned(peer) == [(0, 0, 2)])


@pytest.mark.parametrize(("kept", "fails"), [(0, "output.Batch"), (2, "output.Batch"), (2, "loader.Copies.copy")])
def test_a_batch_that_could_not_be_made_comes_with_the_next_call_and_its_slot_goes_back_once(
    make_peer: Make, join: Join, monkeypatch: pytest.MonkeyPatch, kept: int, fails: str
) -> None:
    peer = make_peer(lanes=1, microbatch=2, slots=4)
    loader = join(peer)
    held = [next(loader) for _ in range(kept)]  # with two of them the next one is a private copy
    warnings.simplefilter("ignore")
    with monkeypatch.context() as patch:
        patch.setattr(f"zephon_client.{fails}", mock.Mock(side_effect=MemoryError))
        for _ in range(3):
            with pytest.raises(MemoryError):
                next(loader)
            loader.progress()
    assert not returned(peer), "the slot has a batch that is still to come"
    found = [next(loader)["id"].tolist() for _ in range(9)]
    assert found == [ids(0, 2 * n, 2 * n + 2) for n in range(kept, kept + 9)]
    assert len(held) == kept
    assert returned(peer)[:2] == [(0, 0, kept), (0, 0, kept + 1)]  # the peer refuses one that comes back twice


def test_case_C11_keeping_batches_takes_no_descriptors(make_peer: Make, join: Join) -> None:
    loader = join(make_peer(lanes=2, microbatch=2))
    kept = [next(loader) for _ in range(4)]
    gc.collect()  # what earlier tests left to it
    before = len(os.listdir("/proc/self/fd"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept += [next(loader) for _ in range(300)]
    assert len(os.listdir("/proc/self/fd")) <= before  # fewer where another test's are closed only now


def test_a_slot_is_held_by_any_array_taken_out_of_its_batch_and_returned_after_the_last(
    make_peer: Make, join: Join
) -> None:
    peer = make_peer(lanes=1, microbatch=2, slots=8)
    loader = join(peer)
    text = next(loader)["text"]
    row = next(loader)["input_ids"][1, 1:]
    for _ in range(12):
        next(loader)
    loader.progress()
    assert {index for _, _, index in returned(peer)} == set(range(2, 8))
    assert (list(text), row.tolist()) == (["record 0", "record 1"], [3, 3])
    del text, row
    gc.collect()
    loader.progress()
    peer.until(lambda: {index for _, _, index in returned(peer)} == set(range(8)))


def test_a_lane_that_regrows_is_unmapped_once_its_old_slots_are_back(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=1, microbatch=2, slots=4)
    loader = join(peer)
    kept = next(loader)
    peer.regrow(0, slots=6)
    got = [next(loader)["id"].tolist() for _ in range(12)]
    assert got == [ids(0, 2 * n, 2 * n + 2) for n in range(1, 13)]
    mapped = loader._connection.feed.slots.mapped
    assert mapped() == [(0, 0), (0, 1)]
    assert kept["id"].tolist() == ids(0, 0, 2)
    del kept
    loader.progress()
    assert mapped() == [(0, 1)]


def test_a_generation_whose_slots_were_all_back_before_goes_when_the_next_one_begins(
    make_peer: Make, join: Join
) -> None:
    peer = make_peer(lanes=1, microbatch=2, slots=4)
    peer.hold = {0}
    loader = join(peer)
    loader._begun()
    peer.let_go(0)
    peer.until(lambda: peer.rings and not peer.rings[0].writer.free)
    peer.hold = {0}
    for _ in range(4):
        next(loader)
    loader.progress()
    peer.until(lambda: peer.rings[0].writer.in_flight == 0)
    peer.regrow(0, slots=6)
    peer.let_go(0)
    assert next(loader)["id"].tolist() == ids(0, 8, 10)
    assert loader._connection.feed.slots.mapped() == [(0, 1)]


def test_a_pickled_batch_is_a_copy_and_a_loader_is_not_pickled(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=1, microbatch=2)
    loader = join(peer)
    batch = pickle.loads(pickle.dumps(next(loader)))
    next(loader)
    next(loader)
    loader.progress()
    peer.until(lambda: (0, 0, 0) in returned(peer))
    assert (batch["id"].tolist(), batch.lane) == (ids(0, 0, 2), 0)
    with pytest.raises(Exception, match="cannot be pickled"):
        pickle.dumps(loader)


def test_arrays_outlive_a_loader_that_was_dropped_without_being_closed(make_peer: Make, join: Join) -> None:
    from zephon_client import connect

    peer = make_peer(lanes=1, microbatch=2)
    loader = connect(peer.path, output="numpy")
    array = next(loader)["input_ids"]
    del loader
    gc.collect()
    peer.until(lambda: peer.heard(p.Goodbye) and not peer.guests)
    assert array.tolist() == [[0] * 3, [1] * 3]
