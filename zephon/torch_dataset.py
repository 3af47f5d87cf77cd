"""A pipeline as a dataset of torch, for training loops that are written around `torch.utils.data.DataLoader`.

`DataLoader(pipeline.to_torch_dataset(), batch_size=None)` hands on the pipeline's own batches: each item is a dict of
tensors that still knows its lane, its round and how to make training arrays. The dataset has the state, so it is the
dataset, not the loader, that is saved and loaded.

Parallel work belongs to Zephon, so no torch worker is needed. One is allowed, as long as it cannot deliver anything
wrong: its process alone knows how far it is, so a state asked of the training process, a second worker process that
would begin at the same place, and an iteration begun after one that was left half-way are refused. Under torchdata's
`StatefulDataLoader`, which asks the worker for the state, it resumes as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from zephon.batches import Batch
from zephon.columns import Fixed, Objects, Ragged
from zephon.errors import SettingError
from zephon.training import to_torch
from zephon.types import SampleBatch

if TYPE_CHECKING:
    from zephon.pipeline import Pipeline

INSTEAD = (
    "Use DataLoader(dataset, batch_size=None, num_workers=0): the workers are Zephon's, options(runner=\"process\", "
    "max_workers=N) here, or the node daemon's with zephon_client.connect()"
)


class TorchBatch(dict[str, Any]):
    """A batch as a dict of tensors, which DataLoader's conversion and pinning keep as it is.

    Records of one shape are one tensor `[records, ...]`; of varying length a list of tensors; text, bytes and other
    objects a list. `batch` is the `SampleBatch` itself.
    """

    def __init__(self, fields: Mapping[str, Any], batch: SampleBatch | None = None) -> None:
        super().__init__(fields)
        self._batch = batch

    @property
    def batch(self) -> SampleBatch:
        """The batch that the tensors are from. Functions that copy a dict field by field lose it."""
        if self._batch is None:
            raise AttributeError("this dict was copied field by field: take it from the dataset's own item")
        return self._batch

    @property
    def lane(self) -> int:
        return self.batch.lane

    @property
    def first_record(self) -> int:
        return self.batch.first_record

    @property
    def ends_round(self) -> bool:
        return self.batch.ends_round

    @property
    def samples(self) -> list[Any]:
        return self.batch.samples

    @property
    def digest(self) -> str:
        return self.batch.digest

    def to_training(self, **arguments: Any) -> dict[str, Any]:
        """Training arrays, as tensors; `zephon.training.to_training` says what each argument does."""
        return self.batch.to_training(**arguments)


class TorchDataset(IterableDataset[TorchBatch]):  # type: ignore[misc]
    """The batches of a pipeline: iterating delivers the rest of the epoch, iterating again the next epoch."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._began_in = 0  # the process in which this copy was iterated
        self._placed = False  # whether a state was loaded into this copy since
        self._unfinished = False
        self._worker = torch.zeros(1, dtype=torch.int64).share_memory_()  # the worker process that iterates, for all

    def __iter__(self) -> Iterator[TorchBatch]:
        # A generator, checks included: torch carries to the trainer what an item raises, not what iter() does.
        worker, here = get_worker_info(), os.getpid()
        if worker is not None:
            self._check_worker(worker.num_workers, here)
            self._worker[0] = here
        self._began_in, self._placed, self._unfinished = here, False, True
        for batch in self._pipeline:
            yield TorchBatch({name: _as_torch(batch, name) for name in batch}, batch)
        self._unfinished = False

    def _check_worker(self, workers: int, here: int) -> None:
        if workers > 1:
            raise SettingError(f"num_workers={workers}: each torch worker would deliver all data once more. {INSTEAD}")
        if self._began_in not in (0, here):
            raise SettingError(f"num_workers=1: the training process has begun to iterate this dataset. {INSTEAD}")
        if self._placed:
            return
        if int(self._worker[0]) not in (0, here):
            raise SettingError(
                "num_workers=1: this new worker process would begin where the one before it began. Set "
                f"persistent_workers=True. {INSTEAD}"
            )
        if self._unfinished:
            raise SettingError(
                f"num_workers=1: the last iteration was left before its end, with batches in torch's queue. {INSTEAD}"
            )


class StatefulTorchDataset(TorchDataset):
    """A dataset that is saved and resumed as the pipeline is."""

    def state_dict(self) -> dict[str, Any]:
        """The checkpoint of what was delivered so far: JSON, loadable on any number of groups."""
        if get_worker_info() is None and int(self._worker[0]):
            raise SettingError(
                f"state_dict(): a torch worker process iterates this dataset, and it alone knows how far. {INSTEAD}, "
                "or ask torchdata's StatefulDataLoader for its state_dict()"
            )
        return self._pipeline.checkpoint()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint of this pipeline, also one taken under the daemon. Raises as `Pipeline.restore`."""
        self._pipeline.restore(state)
        self._placed, self._unfinished = True, False


def _as_torch(batch: Batch, name: str) -> Any:
    column = batch.block.fields[name]
    if isinstance(column, Fixed):
        values = column.values
        return to_torch(values if values.flags.writeable else values.copy())
    if isinstance(column, Ragged):
        return [to_torch(values if values.flags.writeable else values.copy()) for values in column.to_list()]
    return column.values if isinstance(column, Objects) else column.to_list()
