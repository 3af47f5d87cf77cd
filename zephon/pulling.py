"""Pulling: asking a lane's own source for its chunks, and checking what it says.

Whatever a user's source does wrong is an error that names it with its lane and chunk: a chunk that is none, that has no
sample or names one that does not exist, an exception, a state that JSON would not give back as it was or that is too
large. A source that repeats itself differently, given the state of a checkpoint, is found out by the digest of the
window that the checkpoint names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from zephon.columns import IntArray
from zephon.custom_source import CustomSource, WorkChunk, interleaved, said
from zephon.errors import CheckpointError, CheckpointMismatch, RunFailed
from zephon.source_state import STATE_LIMIT, SourceState, as_text, parse_state, unlike_json
from zephon.words import many


class Pulled(NamedTuple):
    """Consecutive chunks as one: their pointers, int64 `[m, 3]` with m from 1, and the state before them."""

    pointers: IntArray
    before: SourceState


class PulledChunks:
    """The chunks of one lane of one epoch, in order."""

    def __init__(self, source: CustomSource, epoch: int, lane: int, lanes: int) -> None:
        self._source, self._epoch, self._lane = source, epoch, lane
        self._own = source.for_lane(lane, lanes, epoch)
        self._chunk = self._samples = 0
        self._ended = False
        self._expected = ""
        shards = [dataset.counts for dataset in source.datasets]
        self._counts = np.concatenate(shards)  # rows of every shard of every dataset
        self._shards = np.array([len(each) for each in shards], np.int64)
        self._first_shard = np.cumsum([0, *self._shards[:-1]])

    def restore(self, chunk: int, text: str, *, replays: bool) -> None:
        """Go on from `chunk`, in the state that `text` has. With `replays` the next window must be what it was."""
        name = self._source.name
        if not text:
            raise CheckpointError(
                f"lane {self._lane}: the checkpoint lacks the state of {name} before chunk {chunk}: "
                f"lanes.{self._lane}.source"
            )
        state = parse_state(text)
        try:
            self._own.load_state_dict(state.state)
        except Exception as error:
            raise CheckpointError(f"lane {self._lane}: {name}.load_state_dict raised {said(error)}") from error
        self._chunk, self._samples = chunk, state.samples
        self._expected = state.window if replays else ""

    def pull(self, chunks: int) -> Pulled | None:
        """The next chunks, at most so many; None when there are none left."""
        if self._ended:
            return None
        state, samples, first = self._state(), self._samples, self._chunk
        parts: list[IntArray] = []
        while len(parts) < chunks and (part := self._next()) is not None:
            parts.append(part)
        if not parts:
            return None
        pointers = np.concatenate(parts)
        digest = hashlib.blake2b(pointers.tobytes(), digest_size=8).hexdigest()
        if self._expected not in ("", digest):
            raise CheckpointMismatch(
                f"lane {self._lane}, chunks {first} to {self._chunk - 1}: {self._source.name} hands out other samples "
                "than before the checkpoint was taken. Chunks must follow from what state_dict() returns and "
                "load_state_dict() takes, and from nothing else: no clock, no other randomness, no count left out."
            )
        self._expected = ""
        return Pulled(pointers, SourceState(samples, digest, state))

    def _next(self) -> IntArray | None:
        """The pointers of the next chunk, in their order; None at the end."""
        if self._ended:
            return None
        try:
            chunk = self._own.next_chunk()
        except Exception as error:
            raise RunFailed(self._where(f"next_chunk raised {said(error)}")) from error
        if chunk is None:
            if self._source.endless:
                raise RunFailed(self._where("next_chunk returned None, but the source says that it is endless"))
            self._ended = True
            return None
        pointers = self._pointers(chunk)
        self._chunk += 1
        self._samples += len(pointers)
        return pointers

    def _pointers(self, chunk: Any) -> IntArray:
        if not isinstance(chunk, WorkChunk) or not isinstance(chunk.components, Mapping):
            what = f"a WorkChunk of {chunk.components!r:.200}" if isinstance(chunk, WorkChunk) else f"{chunk!r:.200}"
            raise RunFailed(
                self._where(f"next_chunk returned {what}. Allowed: WorkChunk(components={{name: pointers}}), or None")
            )
        seed = chunk.seed
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, (int, np.integer))):
            raise RunFailed(self._where(f"its seed is {seed!r}. Allowed: None or a whole number"))
        parts = [self._component(name, given) for name, given in chunk.components.items()]
        if not any(map(len, parts)):
            text = "it has no sample. Return None at the lane's end, and leave out chunks that would be empty"
            raise RunFailed(self._where(text))
        pointers = np.concatenate(parts)
        if len(parts) > 1 or seed is not None:
            pointers = pointers[interleaved([len(part) for part in parts], None if seed is None else int(seed))]
        self._check_range(pointers)
        return pointers

    def _component(self, name: Any, given: Any) -> IntArray:
        """A component's pointers as an array, with datasets by number."""
        ids = self._source.ids
        array: Any = given
        if not isinstance(given, np.ndarray):
            try:
                given = list(given)
                array = np.array([(ids[dataset], shard, row) for dataset, shard, row in given] or np.empty((0, 3), int))
            except KeyError as error:
                known = ", ".join(map(repr, ids))
                raise RunFailed(
                    self._where(f"component {name!r} names the dataset {error.args[0]!r}; datasets_by_id has {known}")
                ) from None
            except (TypeError, ValueError) as error:
                raise RunFailed(self._where(f"component {name!r}: {self._first_odd(given)}")) from error
        if array.dtype.kind not in "iu" or array.ndim != 2 or array.shape[1] != 3:
            odd = f"an array of {array.dtype} {list(array.shape)}" if array is given else self._first_odd(given)
            raise RunFailed(self._where(f"component {name!r}: {odd}"))
        return np.asarray(array, np.int64)

    @staticmethod
    def _first_odd(given: Any) -> str:
        """What is no pointer among those given, in words."""
        allowed = "Allowed: a list of pointers (dataset id, shard, row), or an int64 array [m, 3]"
        for place, pointer in enumerate(given if isinstance(given, list) else ()):
            whole = isinstance(pointer, (tuple, list)) and len(pointer) == 3
            if not whole or not all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in pointer[1:]):
                return f"pointer {place} is {pointer!r:.200}. {allowed}"
        return f"its pointers are {given!r:.200}. {allowed}"

    def _check_range(self, pointers: IntArray) -> None:
        dataset, shard, row = pointers.T
        known = (dataset >= 0) & (dataset < len(self._shards))
        number = np.where(known, dataset, 0)
        known &= (shard >= 0) & (shard < self._shards[number])
        rows = self._counts[self._first_shard[number] + np.where(known, shard, 0)]
        good = known & (row >= 0) & (row < rows)
        if good.all():
            return
        d, s, r = pointers[int(np.argmin(good))].tolist()
        if not 0 <= d < len(self._shards):
            text = f"dataset number {d}; datasets_by_id has {len(self._shards)}, numbered from 0"
        elif not 0 <= s < self._shards[d]:
            name = self._source.datasets[d].name
            text = f"shard {s} of dataset {name!r}, which has {self._shards[d]}, numbered from 0"
        else:
            name, count = self._source.datasets[d].name, self._source.datasets[d].counts[s]
            text = f"row {r} of shard {s} of dataset {name!r}, which has {many(count, 'row')}, numbered from 0"
        raise RunFailed(self._where(f"it names {text}"))

    def _state(self) -> Any:
        """The state of the source now, as a checkpoint will give it back."""
        try:
            state = self._own.state_dict()
        except Exception as error:
            raise RunFailed(self._where(f"state_dict raised {said(error)}")) from error
        wrong = unlike_json(state) if isinstance(state, dict) else f"it is {state!r:.200}, not a dict"
        if wrong is not None:
            raise RunFailed(self._where(f"state_dict() is no plain JSON, which a checkpoint is: {wrong}"))
        text = as_text(state)
        if len(text) > STATE_LIMIT:
            raise RunFailed(
                self._where(
                    f"state_dict() is {len(text)} bytes of JSON, and at most {STATE_LIMIT} may be: a checkpoint holds "
                    "one for each lane. Keep what cannot be computed (counters, a seed), not lists of samples"
                )
            )
        return json.loads(text)

    def _where(self, text: str) -> str:
        return f"{self._source.name}: lane {self._lane}, chunk {self._chunk} of epoch {self._epoch}: {text}"
