"""Work sources: which samples, in which order, in which proportions. They yield pointers and do no I/O.

`StaticMixtureWorkSource` is a validated set of data settings. Given the rows of each dataset it resolves proportions
and the epoch's end, both closed-form, and makes a `Curriculum`, which does the arithmetic. Senseless settings are
refused at construction, where nothing of the data has been read; only what depends on row counts (an empty dataset
with a weight) waits for `curriculum`.

Ends, of one epoch. By default every drawn dataset completes `stop_after_passes` passes, the shorter ones repeating
meanwhile. "stop" ends before any dataset would begin its second pass. "repeat" is endless.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from zephon.arguments import drop_ignored
from zephon.curriculum import BlockSize, Curriculum, Shuffling
from zephon.errors import DatasetError, SettingError
from zephon.proportions import LARGEST_TOTAL, ChangingProportions, Proportions, checked_weights, integer_weights

if TYPE_CHECKING:
    from zephon.datasets import Dataset

__all__ = ["Curriculum", "MixtureSpec", "StaticMixtureWorkSource"]

LARGEST_CHUNK = 2048
ROUNDS_PER_PASS = 64


@dataclass(frozen=True)
class MixtureSpec:
    """Weights by dataset name, in any unit: `{"web": 0.7, "code": 0.3}`. 0 means never drawn."""

    weights: Mapping[str, int | float]

    def __post_init__(self) -> None:
        if not isinstance(self.weights, Mapping):
            raise SettingError(f"mixture: weights are {self.weights!r}. Allowed: a dict from dataset name to weight.")
        object.__setattr__(self, "weights", checked_weights("mixture", self.weights))


class _NotGiven(int):
    """A default that can be told from the same value given by the user."""


@dataclass(frozen=True)
class MixtureChange:
    """The mixture was changed knowingly: at a position of an epoch, from the weights `before` (by dataset name)."""

    epoch: int
    position: int
    before: Mapping[str, int | float]


class StaticMixtureWorkSource:
    """Datasets in fixed proportions, in an order drawn from a seed. The arguments are data settings.

    - `datasets`: each name once. `mixture`: a weight for each of them, counted in samples; None: by their rows.
    - `chunk_size`: samples; "auto" is 2048, or less so that a pass is at least 64 rounds of chunks.
    - `shuffle_shards`, `shuffle_within_shard`: in each pass. `shuffle_block_size`: rows that are shuffled together
      across shards; "auto" is eight of the largest shard, "global" the whole dataset.
    - `stop_after_passes`, or `exhausted_policy` ("stop", "repeat"): when an epoch ends.
    - `lane_assignment`: "permute", a seeded order of the lanes in each round of chunks, or "modulo".

    A dataset's name takes part in the order of its rows. Raises SettingError.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        mixture: MixtureSpec | Mapping[str, int | float] | None,
        chunk_size: int | Literal["auto"] = "auto",
        seed: int = 0,
        shuffle_shards: bool = True,
        shuffle_within_shard: bool = False,
        shuffle_block_size: BlockSize = None,
        exhausted_policy: Literal["stop", "repeat"] | Mapping[str, str] | None = None,
        reshuffle_on_repeat: bool | Mapping[str, bool] = True,
        max_repeats: int | Mapping[str, int] | None = None,
        stop_after_passes: int = _NotGiven(1),
        lane_assignment: Literal["permute", "modulo"] = "permute",
        token_estimation: Any = None,
        **ignored: Any,
    ) -> None:
        drop_ignored("StaticMixtureWorkSource", ignored, StaticMixtureWorkSource.__init__.__annotations__)
        self.datasets = _distinct(datasets)
        self.mixture = _fitting(mixture, self.datasets)
        self.chunk_size = chunk_size if chunk_size == "auto" else _whole("chunk_size", chunk_size, '"auto"')
        self.seed = _integer("seed", seed)
        if shuffle_block_size not in (None, "auto", "global"):
            _whole("shuffle_block_size", shuffle_block_size, 'None, "auto", "global"')
        self.shuffling = Shuffling(
            shards=_flag("shuffle_shards", shuffle_shards),
            within_shard=_flag("shuffle_within_shard", shuffle_within_shard),
            block_size=shuffle_block_size,
        )
        self.lane_assignment = _choice("lane_assignment", lane_assignment, ("permute", "modulo"))
        by_dataset = isinstance(exhausted_policy, Mapping)
        _not_available("exhausted_policy", exhausted_policy, by_dataset, "use one value for all datasets")
        self.exhausted_policy = _choice("exhausted_policy", exhausted_policy, (None, "stop", "repeat"))
        passes = _whole("stop_after_passes", stop_after_passes)
        if self.exhausted_policy is not None and not isinstance(stop_after_passes, _NotGiven):
            raise SettingError(
                f"exhausted_policy={exhausted_policy!r} and stop_after_passes={passes} both say when an epoch ends: "
                "give one of them (stop_after_passes counts passes only where exhausted_policy is None)."
            )
        self.stop_after_passes = passes if self.exhausted_policy is None else None
        _not_available("max_repeats", max_repeats, max_repeats is not None, "use stop_after_passes or exhausted_policy")
        _not_available("token_estimation", token_estimation, token_estimation is not None, "give weights by sample")
        other = isinstance(reshuffle_on_repeat, Mapping) or reshuffle_on_repeat is False
        _not_available("reshuffle_on_repeat", reshuffle_on_repeat, other, "leave it at True")
        _flag("reshuffle_on_repeat", reshuffle_on_repeat)

    def describe(self) -> dict[str, Any]:
        """The data settings as JSON, without paths.

        Left out: seed and chunk size, which a plan resolves and hands to `curriculum`, and the datasets themselves.
        """
        return {
            "kind": "static_mixture",
            "mixture": None if self.mixture is None else dict(self.mixture.weights),
            "shuffle_shards": self.shuffling.shards,
            "shuffle_within_shard": self.shuffling.within_shard,
            "shuffle_block_size": self.shuffling.block_size,
            "exhausted_policy": self.exhausted_policy,
            "stop_after_passes": self.stop_after_passes,
            "reshuffle_on_repeat": True,
            "max_repeats": None,
            "lane_assignment": self.lane_assignment,
            "token_estimation": None,
        }

    def auto_chunk_size(self, lanes: int) -> int:
        """What "auto" means: 2048, or less so that a pass over all rows is at least 64 rounds of chunks; at least 1."""
        rows = sum(int(dataset.counts.sum()) for dataset in self.datasets)
        return max(1, min(LARGEST_CHUNK, rows // (ROUNDS_PER_PASS * _whole("canonical_replicas", lanes))))

    def curriculum(
        self, seed: int, epoch: int, lanes: int, chunk_size: int, changes: Sequence[MixtureChange] = ()
    ) -> Curriculum:
        """The samples of one epoch. DatasetError for a dataset without rows that has a weight.

        `changes` are those that the mixture has seen so far in the run, in order; each keeps the weights before it.
        """
        _whole("canonical_replicas", lanes)
        _whole("chunk_size", chunk_size)
        shards = [(dataset.name, np.asarray(dataset.counts, dtype=np.int64)) for dataset in self.datasets]
        rows = [int(counts.sum()) for _, counts in shards]
        proportions = self._proportions(rows, epoch, changes)
        for (name, counts), weight, count in zip(shards, proportions.weights, rows):
            if weight and not count:
                raise DatasetError(
                    f"dataset {name!r} has no rows in its {len(counts)} shards but a weight in the mixture. "
                    f"Check its path and files, set its weight to 0, or leave it out."
                )
        return Curriculum(
            shards,
            proportions,
            self._total(proportions, rows),
            self.shuffling,
            seed=_integer("seed", seed),
            epoch=epoch,
            lanes=lanes,
            chunk_size=chunk_size,
            permute_lanes=self.lane_assignment == "permute",
        )

    def _proportions(
        self, rows: list[int], epoch: int, changes: Sequence[MixtureChange]
    ) -> Proportions | ChangingProportions:
        now = Proportions(self._integer_weights(rows))
        ahead = [change for change in changes if change.epoch >= epoch]
        if not ahead:
            return now
        names = [dataset.name for dataset in self.datasets]
        each = [Proportions(integer_weights([change.before.get(name, 0) for name in names])) for change in ahead]
        here = sum(change.epoch == epoch for change in ahead)
        following = [*each[1:], now]
        return ChangingProportions(each[0], [(ahead[i].position, following[i]) for i in range(here)])

    def _integer_weights(self, rows: list[int]) -> list[int]:
        if self.mixture is not None:
            return integer_weights([self.mixture.weights[dataset.name] for dataset in self.datasets])
        if not any(rows):
            names = ", ".join(repr(dataset.name) for dataset in self.datasets)
            raise DatasetError(f"no dataset has any rows: {names}. Check their paths and files.")
        if sum(rows) > LARGEST_TOTAL:
            message = "more than 2**48 rows: proportions by rows are rounded, so a pass may repeat a few of them"
            warnings.warn(message, stacklevel=3)
        return integer_weights(rows)

    def _total(self, proportions: Proportions | ChangingProportions, rows: list[int]) -> int | None:
        drawn = [component for component, weight in enumerate(proportions.weights) if weight]
        if self.exhausted_policy == "repeat":
            return None
        if self.exhausted_policy == "stop":
            return min(proportions.first_total_with(c, rows[c] + 1) for c in drawn) - 1
        passes = self.stop_after_passes or 1
        return max(proportions.first_total_with(c, rows[c] * passes) for c in drawn)


def _distinct(datasets: Any) -> list[Dataset]:
    if isinstance(datasets, (str, bytes)) or hasattr(datasets, "counts"):
        raise SettingError(f"datasets is {datasets!r}. Allowed: a list of at least one Dataset.")
    found = list(datasets)
    if not found:
        raise SettingError("datasets is empty. Allowed: a list of at least one Dataset.")
    names = [dataset.name for dataset in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SettingError(f"datasets: the names {twice} occur more than once. Allowed: each name once.")
    return found


def _fitting(mixture: Any, datasets: list[Dataset]) -> MixtureSpec | None:
    if mixture is None:
        return None
    spec = mixture if isinstance(mixture, MixtureSpec) else MixtureSpec(mixture)
    names = {dataset.name for dataset in datasets}
    weighted = set(spec.weights)
    for problem, which in (("names unknown datasets", weighted - names), ("lacks datasets", names - weighted)):
        if which:
            allowed = f"one weight for each of {sorted(names)}, 0 for never drawn"
            raise SettingError(f"mixture {problem}: {sorted(which, key=str)}. Allowed: {allowed}.")
    return spec


def _integer(setting: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise SettingError(f"{setting} is {value!r}. Allowed: a whole number.")
    return int(value)


def _whole(setting: str, value: Any, others: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        others = f"{others} or " if others else ""
        raise SettingError(f"{setting} is {value!r}. Allowed: {others}a whole number of at least 1.")
    return int(value)


def _flag(setting: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise SettingError(f"{setting} is {value!r}. Allowed: True or False.")
    return bool(value)


def _choice(setting: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if not isinstance(value, (str, type(None))) or value not in allowed:
        raise SettingError(f"{setting} is {value!r}. Allowed: {', '.join(map(repr, allowed))}.")
    return value


def _not_available(setting: str, value: Any, given: bool, instead: str) -> None:
    if given:
        raise SettingError(f"{setting}={value!r} is not available yet: {instead}.")
