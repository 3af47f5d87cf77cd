"""Copies to a device, one batch ahead, by a made-up device whose copies are made when its events fire.

What CUDA itself does is not run here: registration, streams and events are those of `LazyDevice`.
"""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.unit.client.peer import Peer, ids
from zephon.errors import BatchesHeld
from zephon.transport import protocol as p
from zephon_client.device import Bytes, NotRegistered

Make = Callable[..., Peer]
Join = Callable[..., Any]
torch = pytest.importorskip("torch")


class LazyEvent:
    def __init__(self, device: LazyDevice, number: int) -> None:
        self._device, self._number = device, number

    def query(self) -> bool:
        return self._device.done >= self._number

    def synchronize(self) -> None:
        self._device.fire(self._number)


class LazyDevice:
    """Copies nothing before its event fires, so that a source which is written again too early is found out.

    Unless it `holds`, an event fires when the trainer's stream waits for it.
    """

    def __init__(self, registers: bool = True, pins: bool = True, holds: bool = False) -> None:
        self.registers, self.pins, self.holds = registers, pins, holds
        self.registered: Counter[int] = Counter()
        self.known: dict[int, int] = {}
        self.started = self.done = self.placed = 0
        self._under_way: deque[tuple[Bytes, Any]] = deque()
        self.read_only: set[bool] = set()
        self._kept: list[Bytes] = []

    def register(self, memory: Bytes, read_only: bool) -> None:
        if not self.registers:
            raise NotRegistered("no more memory may be locked")
        address = memory.ctypes.data
        assert address not in self.known, "registered twice"
        self.registered[address] += 1
        self.known[address] = memory.nbytes
        self.read_only.add(read_only)

    def unregister(self, memory: Bytes) -> None:
        for source, _ in self._under_way:
            assert not np.shares_memory(source, memory), "memory goes while copies from it are under way"
        del self.known[memory.ctypes.data]

    def pinned(self, data: Bytes) -> Bytes:
        if not self.pins:
            raise NotRegistered("no pinned memory")
        copy = np.array(data)
        self.known[copy.ctypes.data] = copy.nbytes
        self._kept.append(copy)  # so that its address stays its own
        return copy

    def send(self, data: Bytes) -> Any:
        assert self.knows(data), "a copy from memory that the driver does not know"
        there = torch.zeros(len(data), dtype=torch.uint8)
        self.started += 1
        self._under_way.append((data, there))
        return there

    def knows(self, data: Any) -> bool:
        low = data.ctypes.data
        return any(at <= low and low + data.nbytes <= at + size for at, size in self.known.items())

    def mark(self) -> LazyEvent:
        return LazyEvent(self, self.started)

    def arrive(self, event: LazyEvent, tensor: Any) -> None:
        if not self.holds:
            event.synchronize()

    def place(self, tensor: Any) -> Any:
        self.placed += 1
        return tensor.clone()

    def fire(self, number: int | None = None) -> None:
        """Makes copies, up to that number of them or all."""
        while self._under_way and (number is None or self.done < number):
            data, there = self._under_way.popleft()
            there.copy_(torch.from_numpy(np.array(data)))
            self.done += 1

    @property
    def regions(self) -> int:
        return len(self.known) - len(self._kept)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, join: Join) -> Callable[..., Any]:
    """`on(device, peer, ...)`: a loader whose device is the made-up one."""

    def make(device: LazyDevice, peer: Peer, **arguments: Any) -> Any:
        monkeypatch.setattr("zephon_client.output.device_of", lambda name: device)
        return join(peer, output="torch", device="cpu", **arguments)

    return make


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("kind", [{}, {"registers": False}, {"registers": False, "pins": False}])
@pytest.mark.filterwarnings("ignore:device")
def test_a_device_gets_every_batch_as_any_rank_would(
    make_peer: Make, join: Join, on: Callable[..., Any], lanes: int, kind: dict[str, bool]
) -> None:
    shape = {"lanes": lanes, "microbatch": 2, "totals": [9 + lane for lane in range(lanes)], "drop_last": False}
    plain = list(join(make_peer(**shape), output="torch"))
    there = list(on(LazyDevice(**kind), make_peer(**shape)))
    assert len(there) == len(plain)
    for mine, expected in zip(there, plain):
        assert (mine.lane, mine.first_record, mine.ends_round) == (
            expected.lane, expected.first_record, expected.ends_round,
        )  # fmt: skip
        assert (mine.samples, mine.digest, list(mine["text"])) == (
            expected.samples, expected.digest, list(expected["text"]),
        )  # fmt: skip
        for field in ("id", "input_ids"):
            assert mine[field].dtype == expected[field].dtype
            assert mine[field].tolist() == expected[field].tolist()
        if len(mine):
            made, wanted = (batch.to_training(return_labels=True) for batch in (mine, expected))
            assert made.keys() == wanted.keys()
            assert all(torch.equal(made[name], wanted[name]) for name in made)


def test_the_next_batch_is_on_its_way_before_it_is_asked_for(make_peer: Make, on: Callable[..., Any]) -> None:
    device = LazyDevice()
    peer = make_peer(lanes=2, microbatch=2, slots=4)
    loader = on(device, peer)
    loader._begun()
    peer.until(lambda: peer.heard(p.Begin))
    peer.do(lambda: None)  # what it did on hearing that is done: all that fits the rings has been sent
    for number in range(6):
        batch = next(loader)
        assert device.started == number + 2
        assert device.done == number + 1  # the trainer's stream waits for its own batch, not for the next
        assert batch["id"].tolist() == ids(number % 2, number // 2 * 2, number // 2 * 2 + 2)


def test_a_slot_goes_back_when_its_copy_is_done_and_not_before(make_peer: Make, on: Callable[..., Any]) -> None:
    device = LazyDevice(holds=True)
    peer = make_peer(lanes=1, microbatch=2, slots=8)
    loader = on(device, peer)
    kept = [next(loader) for _ in range(3)]
    loader.progress()
    assert not any(message.slots for message in peer.heard(p.Returned))
    device.fire(2)
    kept.append(next(loader))
    loader.progress()
    peer.until(lambda: any(message.slots for message in peer.heard(p.Returned)))
    assert [slot for message in peer.heard(p.Returned) for slot in message.slots] == [(0, 0, 0), (0, 0, 1)]
    device.fire()
    for number, batch in enumerate(kept):
        assert batch["id"].tolist() == ids(0, 2 * number, 2 * number + 2)


def test_a_ring_of_one_slot_goes_on(make_peer: Make, on: Callable[..., Any]) -> None:
    """What is waited for is the slot under the copy, so the copy is waited for."""
    loader = on(LazyDevice(holds=True), make_peer(lanes=1, microbatch=2, slots=1))
    assert [next(loader).first_record for _ in range(5)] == [0, 2, 4, 6, 8]


def test_a_segment_is_registered_once_and_until_it_is_unmapped(make_peer: Make, on: Callable[..., Any]) -> None:
    device = LazyDevice()
    peer = make_peer(lanes=2, microbatch=2)
    loader = on(device, peer)
    for _ in range(12):
        next(loader)
    assert (device.regions, sum(device.registered.values())) == (2, 2)
    peer.regrow(0, slots=6)
    for _ in range(30):
        next(loader)
    assert device.regions == 2
    assert sum(device.registered.values()) == 3
    loader.close()
    assert device.regions == 0
    assert device.read_only == {False}


def test_rings_that_several_ranks_read_are_registered_for_reading(make_peer: Make, on: Callable[..., Any]) -> None:
    device = LazyDevice()
    peer = make_peer(lanes=1, microbatch=2)
    loaders = [on(device, peer, group_readers=2) for _ in range(2)]
    for loader in loaders:
        loader._begun()
    assert [next(loader)["id"].tolist() for loader in loaders] == [ids(0, 0, 2)] * 2
    assert device.read_only == {True}


def test_the_trainer_gets_nothing_over_the_ring(make_peer: Make, on: Callable[..., Any]) -> None:
    device = LazyDevice()
    peer = make_peer(lanes=1, microbatch=2)
    batch = next(on(device, peer))
    assert not [name for name, column in batch.block.fields.items() if device.knows(column.values)]
    assert not device.knows(batch["id"].numpy())
    assert not device.knows(batch.block.samples)


@pytest.mark.parametrize(("pins", "how"), [(True, "through pinned memory"), (False, "while the trainer waits")])
def test_a_driver_that_takes_no_memory_is_told_of_once_and_batches_come_all_the_same(
    make_peer: Make, on: Callable[..., Any], pins: bool, how: str
) -> None:
    device = LazyDevice(registers=False, pins=pins)
    peer = make_peer(lanes=2, microbatch=2)
    loader = on(device, peer)
    with pytest.warns(UserWarning, match="device: batches are not copied from their ring") as caught:
        assert next(loader)["id"].tolist() == ids(0, 0, 2)
    assert [how in str(warning.message) for warning in caught] == [True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(1, 20):  # more than the rings have slots
            assert next(loader)["id"].tolist() == ids(number % 2, number // 2 * 2, number // 2 * 2 + 2)
    assert bool(device.started) == pins


def test_a_batch_too_many_is_refused_when_it_is_due_and_comes_later(make_peer: Make, on: Callable[..., Any]) -> None:
    loader = on(LazyDevice(), make_peer(lanes=1, microbatch=2))
    held = [next(loader)]
    nbytes = loader._copies.nbytes // 2  # one handed over, one ahead
    loader._copies.limit = 3 * nbytes
    held += [next(loader), next(loader)]
    with pytest.raises(BatchesHeld):
        next(loader)
    held.clear()
    assert next(loader).first_record == 6


def test_what_was_on_its_way_when_the_engine_died_is_sent_again(make_peer: Make, on: Callable[..., Any]) -> None:
    device = LazyDevice(holds=True)
    peer = make_peer(lanes=2, microbatch=2)
    loader = on(device, peer)
    got = [next(loader), next(loader)]
    peer.cut()
    got += [next(loader) for _ in range(6)]
    device.fire()
    assert [batch["id"].tolist() for batch in got] == [ids(n % 2, n // 2 * 2, n // 2 * 2 + 2) for n in range(8)]
    loader.close()
    assert device.regions == 0


def test_a_state_names_what_was_handed_over_and_not_what_is_on_its_way(make_peer: Make, on: Callable[..., Any]) -> None:
    loader = on(LazyDevice(), make_peer(lanes=1, microbatch=2, window=2))
    for _ in range(3):
        next(loader)
    assert loader.state_dict()["lanes"]["0"]["records"] == 6
