"""torch's CUDA as a driver, as far as it can be tried without one: what is asked of it, of whom, and in which order.

A made-up `torch.cuda` writes down what it is asked for. Whatever is asked exists in torch itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from zephon_client.device import CudaDevice, NotRegistered, _as_writable, device_of


class Recorder:
    """Stands in for `torch`: notes calls, with the stream that is current. Tensors are torch's own, on the CPU."""

    uint8 = torch.uint8

    def __init__(self, error: int = 0, pins: bool = True) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.current, self.error, self.pins = "the trainer's", error, pins
        self.cuda = self

    def Stream(self, device: Any) -> str:
        return "copies"

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    def cudart(self) -> Recorder:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", address, nbytes, flags))
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return 0

    def empty(self, size: int, dtype: Any, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        if not self.pins:
            raise RuntimeError("out of memory")
        return torch.empty(size, dtype=dtype)

    def from_numpy(self, data: np.ndarray) -> Tensor:
        return Tensor(self, data)

    def Event(self) -> Mark:
        return Mark(self)

    def current_stream(self, device: Any) -> Waiting:
        return Waiting(self)


class Tensor:
    def __init__(self, torch_: Recorder, data: np.ndarray) -> None:
        self.torch, self.data = torch_, data

    def to(self, device: Any, non_blocking: bool) -> Tensor:
        assert non_blocking
        self.torch.calls.append(("copy", self.data.ctypes.data, self.torch.current))
        return self

    def pin_memory(self) -> Tensor:
        return Tensor(self.torch, np.array(self.data))

    def record_stream(self, stream: Waiting) -> None:
        self.torch.calls.append(("used on", stream.torch.current))


class Mark:
    def __init__(self, torch_: Recorder) -> None:
        self.torch = torch_

    def record(self, stream: str) -> None:
        self.torch.calls.append(("mark", stream))


class Waiting:
    def __init__(self, torch_: Recorder) -> None:
        self.torch = torch_

    def wait_event(self, event: Mark) -> None:
        self.torch.calls.append(("wait", self.torch.current))


def cuda(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> CudaDevice:
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "torch", recorder)
        return CudaDevice("cuda:0")


@pytest.mark.parametrize("read_only", [False, True])
def test_memory_is_registered_for_all_contexts_and_for_reading_where_it_is_mapped_so(
    monkeypatch: pytest.MonkeyPatch, read_only: bool
) -> None:
    recorder, memory = Recorder(), np.zeros(8192, np.uint8)
    device, at = cuda(monkeypatch, recorder), memory.ctypes.data
    device.register(memory, read_only)
    device.unregister(memory)
    assert recorder.calls == [("register", at, 8192, 0x9 if read_only else 0x1), ("unregister", at)]


def test_what_the_driver_does_not_take_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    device = cuda(monkeypatch, Recorder(error=2, pins=False))
    with pytest.raises(NotRegistered, match="cudaHostRegister of 64 bytes gave error 2"):
        device.register(np.zeros(64, np.uint8), False)
    with pytest.raises(NotRegistered, match="no pinned memory: out of memory"):
        device.pinned(np.zeros(64, np.uint8))


def test_a_batch_is_copied_from_the_ring_itself_beside_the_trainers_stream_which_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder, slot = Recorder(), np.arange(64, dtype=np.uint8)
    slot.flags.writeable = False
    device = cuda(monkeypatch, recorder)
    tensor = device.send(slot)
    event = device.mark()
    assert recorder.calls == [("copy", slot.ctypes.data, "copies"), ("mark", "copies")]
    device.arrive(event, tensor)
    assert recorder.calls[2:] == [("wait", "the trainer's"), ("used on", "the trainer's")]


def test_training_arrays_go_through_pinned_memory_and_the_trainers_stream_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder, array = Recorder(), np.arange(64, dtype=np.uint8)
    cuda(monkeypatch, recorder).place(Tensor(recorder, array))
    (copied, source, stream), *then = recorder.calls
    assert (copied, stream) == ("copy", "copies")
    assert source != array.ctypes.data
    assert then == [("mark", "copies"), ("wait", "the trainer's"), ("used on", "the trainer's")]


def test_a_pinned_copy_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.arange(64, dtype=np.uint8)
    copy = cuda(monkeypatch, Recorder()).pinned(data)
    assert copy.tolist() == data.tolist()
    assert not np.shares_memory(copy, data)


@pytest.mark.parametrize("size", [0, 64])
def test_memory_that_is_read_only_stays_where_it_is(size: int) -> None:
    data = np.zeros(size, np.uint8)
    data.flags.writeable = False
    assert _as_writable(data).ctypes.data == data.ctypes.data


def test_what_is_asked_of_torch_is_there() -> None:
    for owner, names in (
        (torch.cuda, ("Stream", "Event", "stream", "device", "cudart", "current_stream", "is_available")),
        (torch.Tensor, ("record_stream", "pin_memory")),
        (torch.cuda.Stream, ("wait_event",)),
        (torch.cuda.Event, ("record", "query", "synchronize")),
    ):
        assert all(callable(getattr(owner, name)) for name in names)


@pytest.mark.parametrize("name", ["cpu", "meta"])
def test_devices_without_a_stream_of_copies_get_each_field_when_asked(name: str) -> None:
    assert device_of(name) is None
