"""What a rank gets: a batch over its slot, or over memory of its own where it asked for pinned memory or a device.

Where the device has a stream of copies, batches are on their way before they are due (`ahead`); to other devices each
field is copied when it is first touched.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from zephon.batches import Batch
from zephon.transport.layout import LyingBlock
from zephon_client.ahead import Ahead, Sent
from zephon_client.copies import Bytes
from zephon_client.device import device_of
from zephon_client.ready import Ready
from zephon_client.settings import Settings


class Output:
    """Makes batches as the settings ask for them."""

    def __init__(self, settings: Settings, dataset_names: tuple[str, ...], packed: bool) -> None:
        self._kind = settings.output
        self._pin, self._device = settings.pin_memory, settings.device
        self._names, self._packed = dataset_names, packed
        self.ahead: Ahead | None = None
        """Copies to the device, where it is of the kind that takes them ahead."""

    @property
    def copies(self) -> bool:
        """Whether batches are copied out of their slots in any case."""
        return self._pin or self._device is not None

    def prepare(self) -> None:
        """Looks for the device, and for a GPU if pinned memory was asked for; imports torch then, and only then."""
        if self._device is not None and self.ahead is None:
            device = device_of(self._device)
            self.ahead = None if device is None else Ahead(device)
        if self._pin and not _has_gpu():
            self._pin = False
            warnings.warn(
                "pin_memory=True is ignored: torch finds no CUDA device in this process, and without one there is "
                "nothing to pin memory for.",
                stacklevel=5,
            )

    def copied(self, data: Bytes) -> Bytes:
        """The bytes of a slot in memory of their own, pinned if so asked."""
        return _pinned(data) if self._pin else np.array(data)

    def batch(self, ready: Ready, buffer: Bytes, sent: Sent | None = None) -> Batch:
        """The batch whose bytes are in `buffer`; it may be on its way to the device."""
        batch = Batch(
            LyingBlock(buffer),
            lane=ready.lane,
            first_record=ready.first_record,
            ends_round=ready.ends_round,
            dataset_names=self._names,
            packed=self._packed,
            output=self._kind,
        )
        return batch if self._device is None else DeviceBatch(batch, self._device, sent)


class DeviceBatch(Batch):
    """A batch whose tensors are on a device: sent there before, or each when it is first touched, and then kept.

    The host's side of it (`digest`, `samples`, text) stays as it is. Copies and pickles are ordinary batches.
    """

    def __init__(self, batch: Batch, device: Any, sent: Sent | None = None) -> None:
        super().__init__(
            batch.block,
            lane=batch.lane,
            first_record=batch.first_record,
            ends_round=batch.ends_round,
            dataset_names=batch.dataset_names,
            packed=batch.packed,
            output=batch.output,
        )
        self.device = device
        self._host = batch
        self._on_device: dict[str, Any] = {}
        self._sent = sent

    def arrive(self, ends_round: bool) -> None:
        """It is handed over now; one that was sent ahead did not know yet whether it ends a round."""
        self.ends_round = self._host.ends_round = ends_round
        if self._sent is not None:
            self._sent.arrive()

    def __getitem__(self, field: str) -> Any:
        if field not in self._on_device:
            value = self._host[field]
            if not _is_tensor(value):
                return value
            there = None if self._sent is None else self._sent.field(field, value.numpy())
            self._on_device[field] = self._placed(value) if there is None else there
        return self._on_device[field]

    def to_training(self, **settings: Any) -> dict[str, Any]:
        made = self._host.to_training(**settings)
        return {name: self._placed(value) if _is_tensor(value) else value for name, value in made.items()}

    def _placed(self, tensor: Any) -> Any:
        return tensor.to(self.device) if self._sent is None else self._sent.device.place(tensor)

    def copy(self) -> Batch:  # type: ignore[override]
        return self._host.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        return self._host.__reduce__()


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _pinned(data: Bytes) -> Bytes:
    """A copy in torch's pinned memory, which it keeps alive."""
    import torch

    out: Bytes = torch.empty(len(data), dtype=torch.uint8, pin_memory=True).numpy()
    out[...] = data
    return out
