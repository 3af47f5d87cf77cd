"""Work sources of a user's own: any curriculum that a Python object can hand out chunk by chunk.

`StaticMixtureWorkSource` is arithmetic; a subclass of `WorkSource` may remember. Each lane gets a source of its own,
made by `clone_for_lane` from the one in the recipe, which itself is never asked for a chunk. A lane's source is asked
by one process, for one chunk after another, and from nowhere else. So whatever it does is a function of its state, as
long as it looks at nothing but that state; and its state at the beginning of a window (`state_dict`) travels in the
lane's frontier, so that a resumed run goes on from there. `clone_for_lane` is abstract, since nobody else can know how
lanes are to differ: copies of one source would all hand out the same samples.

Rejected: one source for all lanes that is asked in turn, since every rank would have to run it, and its chunks would
depend on who asks first.

This module has what a user writes and what a plan keeps of it; `zephon.pulling` asks for the chunks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from zephon.columns import IntArray
from zephon.datasets import Dataset
from zephon.errors import RunFailed, SettingError, ZephonError
from zephon.function_digest import digest_of
from zephon.permutations import mix, permute
from zephon.proportions import Proportions
from zephon.source_state import unlike_json

__all__ = ["WorkChunk", "WorkSource"]

Pointers = Sequence[tuple[str, int, int]] | IntArray


@dataclass(frozen=True)
class WorkChunk:
    """The next samples of a lane.

    `components` has a list of pointers `(dataset id, shard, row)` under each component's name; a component may draw
    from several datasets. An int64 array `[m, 3]`, with datasets numbered in the order of `datasets_by_id`, may stand
    for a list. Shards are numbered over those that hold rows, rows within their shard, all from 0.

    Without a seed components are interleaved smoothly, each in the order given: the first k samples of the chunk hold
    each component in proportion to its count, to about one sample. With a `seed` the chunk's samples are in an order
    drawn from it.
    """

    components: Mapping[str, Pointers]
    seed: int | None = None


class WorkSource(ABC):
    """A curriculum of a user's own. Subclass it and give an instance to `Pipeline`.

    A source may also have `seed` (an attribute, used by shuffling operators), `describe()` (the settings that make the
    run's identity, as plain JSON) and `set_epoch(epoch)`, called on a lane's fresh source before its first chunk.
    """

    datasets_by_id: Mapping[str, Dataset]
    """The datasets by the ids that pointers name them with. Set it in `__init__`, or write a property."""

    endless: bool = False
    """True promises that `next_chunk` never returns None: no rank then waits to hear whether a lane has ended."""

    @abstractmethod
    def next_chunk(self) -> WorkChunk | None:
        """The lane's next samples, at least one; None at the end of the epoch.

        A pure function of the state that `state_dict` returns: no clock, no randomness kept elsewhere, nothing of
        other lanes. Called in the process that runs the lanes, so it should be quick and read no files.
        """

    @abstractmethod
    def clone_for_lane(self, lane_id: int, canonical_replicas: int) -> WorkSource:
        """A new source for lane `lane_id` of `canonical_replicas`, at the beginning of an epoch.

        It shares nothing with this one that either changes. It is called once for each epoch of each lane.
        """

    @abstractmethod
    def state_dict(self) -> Mapping[str, Any]:
        """All that decides the chunks to come, in plain JSON values (dict with str keys, list, str, int, float, bool,
        None), at most 16 KiB of it.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that another source of the same lane returned."""


class CustomSource:
    """What a plan holds of a user's source.

    Raises SettingError for an object that cannot be a work source.
    """

    def __init__(self, user: WorkSource) -> None:
        self._user: WorkSource | None = user
        self.name = type(user).__name__
        by_id = getattr(user, "datasets_by_id", None)
        if not isinstance(by_id, Mapping) or not by_id or not all(isinstance(d, Dataset) for d in by_id.values()):
            raise SettingError(
                f"{self.name}.datasets_by_id is {by_id!r}. Allowed: a dict of at least one Dataset by its id."
            )
        self.ids = {dataset_id: number for number, dataset_id in enumerate(by_id)}
        self.datasets: list[Dataset] = list(by_id.values())
        names = [dataset.name for dataset in self.datasets]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SettingError(f"{self.name}.datasets_by_id has {twice} more than once. Allowed: each name once.")
        seed = getattr(user, "seed", 0)
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
            raise SettingError(f"{self.name}.seed is {seed!r}. Allowed: a whole number.")
        self.seed = int(seed)
        self.endless = bool(user.endless)
        self._described: dict[str, Any] | None = None

    def for_reading(self) -> CustomSource:
        """The datasets without the user's object, for workers: they are never asked for a chunk."""
        bare = copy(self)
        bare._user = bare._described = None
        return bare

    def describe(self) -> dict[str, Any]:
        """What identifies the source: its code, and its settings or else the state of the object as it was first seen.

        Of a dataset that it holds its name and content count, not its path.
        """
        if self._described is None:
            assert self._user is not None
            describe = getattr(self._user, "describe", None)
            if not callable(describe):
                self._described = {"kind": "custom", "digest": digest_of(self._user)}
            else:
                settings = self._asked("describe", describe)
                wrong = unlike_json(settings) if isinstance(settings, dict) else f"it is {settings!r:.200}, not a dict"
                if wrong is not None:
                    raise SettingError(f"{self.name}.describe() must be plain JSON: {wrong}")
                settings = {**settings, "seed": self.seed}  # only the source knows what follows from its seed
                self._described = {"kind": "custom", "digest": digest_of(type(self._user)), "settings": settings}
        return dict(self._described)

    def for_lane(self, lane: int, lanes: int, epoch: int) -> WorkSource:
        """A fresh source of a lane at the beginning of an epoch."""
        assert self._user is not None, "workers do not ask for chunks"
        made = self._asked("clone_for_lane", self._user.clone_for_lane, lane, lanes)
        if not isinstance(made, WorkSource) or made is self._user:
            found = "itself" if made is self._user else repr(made)
            raise RunFailed(f"{self.name}.clone_for_lane({lane}, {lanes}) returned {found}, not a new WorkSource")
        set_epoch = getattr(made, "set_epoch", None)
        if callable(set_epoch):
            self._asked("set_epoch", set_epoch, epoch)
        return made

    def _asked(self, name: str, method: Any, *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except Exception as error:
            raise RunFailed(f"{self.name}.{name}{arguments} raised {said(error)}") from error


def interleaved(counts: Sequence[int], seed: int | None) -> IntArray:
    """The order of a chunk's samples: for each place the number of the sample, counted through all components.

    `counts` are the samples of each component, not all 0.
    """
    total = sum(counts)
    if seed is not None:
        return permute(np.arange(total), total, mix("work chunk", seed))
    component, index = Proportions(counts).locate(np.arange(total))
    return (np.cumsum([0, *counts])[component] + index).astype(np.int64)


def said(error: BaseException) -> str:
    """An exception of a user's code in words, with the line that raised it."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    where = f" ({at.tb_frame.f_code.co_filename}:{at.tb_lineno})" if at is not None else ""
    text = str(error)
    if isinstance(error, ZephonError):
        return text
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}"
