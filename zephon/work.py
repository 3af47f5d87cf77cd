"""Work sources: which samples, in which order, in which proportions. They yield pointers and do no I/O.

`StaticMixtureWorkSource` is a validated set of data settings. Given the rows of each dataset it resolves proportions
and the epoch's end (`zephon.exhaustion`), both closed-form, and makes a `Curriculum`, which does the arithmetic.
Senseless settings are refused at construction, where nothing of the data has been read; only what depends on row counts
(an empty dataset with a weight) waits for `curriculum`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from zephon.arguments import drop_ignored
from zephon.curriculum import BlockSize, Curriculum, Shuffling
from zephon.custom_source import WorkChunk, WorkSource
from zephon.errors import DatasetError, SettingError
from zephon.exhaustion import Stretch, by_dataset, epoch_of, read_rules
from zephon.proportions import LARGEST_TOTAL, integer_weights
from zephon.schedules import Mixture, MixtureSchedule, MixtureSpec, mixture_from, timeline
from zephon.token_estimation import TokenEstimation, token_estimation_from, weights_by_sample
from zephon.words import many

if TYPE_CHECKING:
    from zephon.datasets import Dataset

__all__ = [
    "Curriculum",
    "MixtureSchedule",
    "MixtureSpec",
    "StaticMixtureWorkSource",
    "TokenEstimation",
    "WorkChunk",
    "WorkSource",
]

LARGEST_CHUNK = 2048
ROUNDS_PER_PASS = 64


class _NotGiven(int):
    """A default that can be told from the same value given by the user."""


@dataclass(frozen=True)
class MixtureChange:
    """The mixture was changed knowingly: at a position of an epoch, from the one that `before` describes."""

    epoch: int
    position: int
    before: Mapping[str, Any]


class StaticMixtureWorkSource:
    """Datasets in proportions that are fixed or scheduled, in an order drawn from a seed. All of it data settings.

    - `datasets`: each name once. `mixture`: a weight for each of them, counted in samples; or a `MixtureSchedule`;
      None: by their rows.
    - `chunk_size`: samples; "auto" is 2048, or less so that a pass is at least 64 rounds of chunks.
    - `shuffle_shards`, `shuffle_within_shard`: in each pass. `shuffle_block_size`: rows that are shuffled together
      across shards; "auto" is eight of the largest shard, "global" the whole dataset.
    - When an epoch ends: `stop_after_passes` (1); or `exhausted_policy` ("stop", "repeat") and `max_repeats`, each for
      all datasets or as a dict for some (`zephon.exhaustion`).
    - `reshuffle_on_repeat`: False for the order of the epoch's first pass in all its passes; also as a dict.
    - `lane_assignment`: "permute", a seeded order of the lanes in each round of chunks, or "modulo".
    - `token_estimation`: a `TokenEstimation`; weights then mean tokens.

    A dataset's name takes part in the order of its rows. Raises SettingError.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        mixture: Mixture | Mapping[str, int | float] | None,
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
        token_estimation: TokenEstimation | Mapping[str, Any] | None = None,
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
        names = [dataset.name for dataset in self.datasets]
        passes = _whole("stop_after_passes", stop_after_passes)
        given = not isinstance(stop_after_passes, _NotGiven)
        self.rules = read_rules(names, exhausted_policy, max_repeats, passes, given)
        self.stop_after_passes = self.rules.passes
        self.exhausted_policy, self.max_repeats = _as_given(exhausted_policy), _as_given(max_repeats)
        self.reshuffle_on_repeat = _as_given(reshuffle_on_repeat)
        reshuffled = by_dataset("reshuffle_on_repeat", reshuffle_on_repeat, names, _flag)
        if not reshuffled:
            _flag("reshuffle_on_repeat", reshuffle_on_repeat)
        self._same_order = frozenset(name for name, value in reshuffled.items() if not value)
        token_estimation = token_estimation_from(token_estimation)
        if token_estimation is not None and self.mixture is None:
            raise SettingError(
                "token_estimation makes weights mean tokens, and mixture=None has none: name a weight for each dataset."
            )
        self.token_estimation = token_estimation
        if token_estimation is not None:
            token_estimation.check_names(names)

    def describe(self) -> dict[str, Any]:
        """The data settings as JSON, without paths.

        Left out: seed and chunk size, which a plan resolves and hands to `curriculum`, and the datasets themselves.
        """
        return {
            "kind": "static_mixture",
            "mixture": None if self.mixture is None else self.mixture.describe(),
            "shuffle_shards": self.shuffling.shards,
            "shuffle_within_shard": self.shuffling.within_shard,
            "shuffle_block_size": self.shuffling.block_size,
            "exhausted_policy": self.exhausted_policy,
            "stop_after_passes": self.stop_after_passes,
            "reshuffle_on_repeat": self.reshuffle_on_repeat,
            "max_repeats": self.max_repeats,
            "lane_assignment": self.lane_assignment,
            "token_estimation": None if self.token_estimation is None else self.token_estimation.describe(),
        }

    def auto_chunk_size(self, lanes: int) -> int:
        """What "auto" means: 2048, or less so that a pass over all rows is at least 64 rounds of chunks; at least 1."""
        rows = sum(int(dataset.counts.sum()) for dataset in self.datasets)
        return max(1, min(LARGEST_CHUNK, rows // (ROUNDS_PER_PASS * _whole("canonical_replicas", lanes))))

    def curriculum(
        self,
        seed: int,
        epoch: int,
        lanes: int,
        chunk_size: int,
        changes: Sequence[MixtureChange] = (),
        estimates: Mapping[str, float] | None = None,
    ) -> Curriculum:
        """The samples of one epoch. DatasetError for a dataset without rows that has a weight.

        `changes` are those that the mixture has seen so far in the run, in order; each keeps the weights before it.
        `estimates` are tokens a sample by dataset name; given where weights mean tokens.
        """
        _whole("canonical_replicas", lanes)
        _whole("chunk_size", chunk_size)
        shards = [(dataset.name, np.asarray(dataset.counts, dtype=np.int64)) for dataset in self.datasets]
        names, rows = [name for name, _ in shards], [int(counts.sum()) for _, counts in shards]
        ahead = [change for change in changes if change.epoch >= epoch]
        mixtures = [*(mixture_from(change.before) for change in ahead), self.mixture]
        begins = [0, *(change.position for change in ahead if change.epoch == epoch)]
        for mixture in mixtures[: len(begins)]:
            self._check_rows(mixture, shards)
        stretches = [self._stretch(mixture, begin, names, rows, estimates) for mixture, begin in zip(mixtures, begins)]
        proportions, total = epoch_of(stretches, names, rows, self.rules)
        return Curriculum(
            shards,
            proportions,
            total,
            self.shuffling,
            seed=_integer("seed", seed),
            epoch=epoch,
            lanes=lanes,
            chunk_size=chunk_size,
            permute_lanes=self.lane_assignment == "permute",
            same_order=self._same_order,
        )

    def drawn(self, mixture: Mixture | None = None) -> list[str]:
        """The datasets that a mixture, or else that of this source, gives a weight at any place."""
        mixture = self.mixture if mixture is None else mixture
        if mixture is None:
            return [dataset.name for dataset in self.datasets if dataset.counts.sum()]
        points = mixture.points if isinstance(mixture, MixtureSchedule) else [mixture]
        named = [dataset.name for dataset in self.datasets]
        return [name for name in named if any(point.weights.get(name, 0) for point in points)]

    def _check_rows(self, mixture: Mixture | None, shards: list[tuple[str, Any]]) -> None:
        drawn = self.drawn(mixture)
        if not drawn:
            names = ", ".join(repr(name) for name, _ in shards)
            raise DatasetError(f"no dataset has any rows: {names}. Check their paths and files.")
        for name, counts in shards:
            if name in drawn and not counts.sum():
                raise DatasetError(
                    f"dataset {name!r} has no rows in its {many(len(counts), 'shard')} but a weight in the mixture. "
                    f"Check its path and files, set its weight to 0, or leave it out."
                )

    def _stretch(
        self,
        mixture: Mixture | None,
        begin: int,
        names: list[str],
        rows: list[int],
        estimates: Mapping[str, float] | None,
    ) -> Stretch:
        if mixture is None:
            if sum(rows) > LARGEST_TOTAL:
                message = "more than 2**48 rows: proportions by rows are rounded, so a pass may repeat a few of them"
                warnings.warn(message, stacklevel=4)
            by_rows = [(Fraction(0), integer_weights(rows))]
            return Stretch(begin, lambda _: by_rows, by_fractions=False)

        def by_sample(weights: list[int]) -> list[int]:
            return weights if estimates is None else weights_by_sample(weights, [estimates.get(n) for n in names])

        by_fractions = isinstance(mixture, MixtureSchedule) and mixture.by_fractions
        return Stretch(begin, lambda length: timeline(mixture, names, length, by_sample), by_fractions)


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


def _fitting(mixture: Any, datasets: list[Dataset]) -> Mixture | None:
    spec = mixture_from(mixture)
    if spec is None:
        return None
    names, weighted = {dataset.name for dataset in datasets}, spec.names
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


def _as_given(value: Any) -> Any:
    """A setting as JSON."""
    if isinstance(value, Mapping):
        return {name: _as_given(each) for name, each in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def __getattr__(name: str) -> Any:
    """A user's own work sources have a module of their own, and their published place here."""
    if name in ("WorkChunk", "WorkSource"):
        return getattr(import_module("zephon.custom_source"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
