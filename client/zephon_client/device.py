"""What copying to a device needs of its driver, and torch's CUDA as such a driver.

Copies are made on a stream of their own, beside the trainer's kernels, from memory that the driver knows: a ring that
was registered once, or a pinned copy. Whoever starts a copy keeps its source alive, and unchanged, until the copy's
event has fired.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from zephon.errors import SettingError
from zephon.extras import needing

Bytes = npt.NDArray[np.uint8]

_PORTABLE, _READ_ONLY = 0x1, 0x8  # flags of cudaHostRegister


class NotRegistered(Exception):
    """The driver does not take memory; the text says why."""


class Event(Protocol):
    """A mark behind what was started on the stream of copies."""

    def query(self) -> bool:
        """Whether it has fired."""

    def synchronize(self) -> None:
        """Wait until it has."""


class Device(Protocol):
    """One device and its stream of copies. Used by one thread."""

    def register(self, memory: Bytes, read_only: bool) -> None:
        """Make host memory known to the driver; NotRegistered where it will not have it."""

    def unregister(self, memory: Bytes) -> None:
        """The memory is about to go. No copy from it is under way."""

    def pinned(self, data: Bytes) -> Bytes:
        """A copy of the bytes in memory that the driver knows; NotRegistered where there is none."""

    def send(self, data: Bytes) -> Any:
        """Start a copy: a tensor on the device (uint8 `[len(data)]`), whole once an event marked later has fired."""

    def mark(self) -> Event:
        """An event that fires when all that was started before is done."""

    def arrive(self, event: Event, tensor: Any) -> None:
        """Have the trainer's current stream wait for the event before it uses the tensor. The host goes on at once."""

    def place(self, tensor: Any) -> Any:
        """A host tensor, which may change or die right after, on the device, for the current stream."""


def device_of(name: Any) -> Device | None:
    """The device to copy ahead to; None where there is no stream of copies: such devices get each field when asked.

    SettingError where torch has no such device.
    """
    with needing(f"device={name!r}"):
        import torch

    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise SettingError(f"device={name!r}: torch knows no such device: {error}") from error
    if device.type != "cuda":
        return None
    if not torch.cuda.is_available():
        raise SettingError(f"device={name!r}: torch finds no CUDA device in this process. Leave device out.")
    return CudaDevice(device)


class CudaDevice:
    """A CUDA device through torch (HIP devices too, which torch calls the same)."""

    def __init__(self, device: Any) -> None:
        import torch

        self._torch: Any = torch
        self._device = device
        self._copies = torch.cuda.Stream(device)

    def register(self, memory: Bytes, read_only: bool) -> None:
        flags = _PORTABLE | (_READ_ONLY if read_only else 0)
        with self._torch.cuda.device(self._device):
            code = self._torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, flags)
        if int(code):
            raise NotRegistered(f"cudaHostRegister of {memory.nbytes} bytes gave error {int(code)}")

    def unregister(self, memory: Bytes) -> None:
        self._torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)

    def pinned(self, data: Bytes) -> Bytes:
        try:
            out: Bytes = self._torch.empty(len(data), dtype=self._torch.uint8, pin_memory=True).numpy()
        except RuntimeError as error:
            raise NotRegistered(f"no pinned memory: {error}") from error
        out[:] = data
        return out

    def send(self, data: Bytes) -> Any:
        with self._torch.cuda.stream(self._copies):
            return self._torch.from_numpy(_as_writable(data)).to(self._device, non_blocking=True)

    def mark(self) -> Event:
        event: Event = self._torch.cuda.Event()
        event.record(self._copies)  # type: ignore[attr-defined]
        return event

    def arrive(self, event: Event, tensor: Any) -> None:
        current = self._torch.cuda.current_stream(self._device)
        current.wait_event(event)
        tensor.record_stream(current)  # so that its memory is not used again while kernels there still read it

    def place(self, tensor: Any) -> Any:
        pinned = tensor.pin_memory()  # torch keeps pinned memory until the copies from it are done
        with self._torch.cuda.stream(self._copies):
            there = pinned.to(self._device, non_blocking=True)
        self.arrive(self.mark(), there)
        return there


def _as_writable(data: Bytes) -> Bytes:
    """The same memory without the flag that torch warns of. It is only read from, and `data` alone keeps it alive."""
    if data.flags.writeable or not len(data):
        return data
    memory: Any = (ctypes.c_uint8 * len(data)).from_address(data.ctypes.data)
    out: Bytes = np.frombuffer(memory, np.uint8)
    return out
