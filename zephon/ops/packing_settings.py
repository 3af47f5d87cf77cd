"""What `pack_flat` and `pack_sequences` are told alike: lengths, bins, what may share a sequence, what is dropped."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zephon.arguments import recipe_level
from zephon.errors import SettingError
from zephon.ops.base import Stateful
from zephon.ops.bins import DEFAULT_BINS, BestFit, Bins, FirstFit, Rules
from zephon.ops.candidates import BestFitCandidates, FirstFitCandidates
from zephon.ops.homogeneity import HOMOGENEITIES, ByComponent, DomainGroups
from zephon.ops.token_fields import AUTO

if TYPE_CHECKING:
    from zephon.custom_source import CustomSource
    from zephon.work import StaticMixtureWorkSource

LARGEST = 2**31 - 1
SHUFFLES = (None, "within_bin", "bins")
SPLITTING = ("wrap", "best_fit_wrap")
DEFAULT_POOL = 64


class Packer(Stateful):
    """An operator that puts documents into sequences of at most `max_length` tokens.

    - `algorithm`: "first_fit" and "best_fit" keep documents whole, in one of `num_bins` open sequences (64 unless told
      otherwise); "wrap" lays documents end to end and cuts; "best_fit_wrap" is best fit, where a document that has room
      nowhere is split instead of a sequence being closed before it is full.
    - `flush_strategy`: which open sequence is closed, or filled up, to make room: the oldest ("fifo") or the fullest.
    - `max_sequences_per_bin`: how many documents a sequence may hold.
    - `candidate_pool_size`: how many documents wait for a sequence that they fit well (`zephon.ops.candidates`); None
      is 64 with best fit, 0 with first fit. `max_candidate_age`: after how many placements a waiting one has its turn.
    - `homogeneity` with `groups`: which documents may share a sequence (`zephon.ops.homogeneity`).
    - `shuffle_strategy`: None, "within_bin" (documents inside each sequence in a random order) or "bins" (blocks of
      `num_bins` finished sequences in a random order); the order is drawn from the run's seed and `shuffle_seed`.
    - `drop_oversized`: documents longer than `max_length` are cut into pieces (None), dropped and counted (True), or
      bad records (False). Documents shorter than `min_sequence_length` are dropped and counted.
    """

    changes_counts = True
    joins_samples = True
    keeps_fields = False
    algorithms: tuple[str, ...] = ("first_fit", "best_fit", "wrap", "best_fit_wrap")

    def __init__(
        self,
        max_length: int,
        *,
        algorithm: str = "first_fit",
        num_bins: int | None = None,
        max_sequences_per_bin: int | None = None,
        tokens_field: str = "auto",
        drop_oversized: bool | None = None,
        min_sequence_length: int = 1,
        shuffle_strategy: str | None = None,
        shuffle_seed: int | None = None,
        flush_strategy: str = "fifo",
        candidate_pool_size: int | None = None,
        max_candidate_age: int | None = None,
        homogeneity: str = "none",
        groups: DomainGroups | Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._choice("algorithm", algorithm, self.algorithms)
        self._choice("flush_strategy", flush_strategy, ("fifo", "fullest"))
        self._choice("shuffle_strategy", shuffle_strategy, SHUFFLES)
        self._choice("homogeneity", homogeneity, HOMOGENEITIES)
        self._choice("drop_oversized", drop_oversized, (None, True, False))
        if type(tokens_field) is not str or not tokens_field:
            raise SettingError(f"{self.name}: tokens_field={tokens_field!r}: must be the name of a field, or 'auto'")
        if shuffle_seed is not None and type(shuffle_seed) is not int:
            raise SettingError(f"{self.name}: shuffle_seed={shuffle_seed!r}: must be a whole number")
        if homogeneity == "group" and groups is None:
            raise SettingError(f"{self.name}: homogeneity='group' needs groups=DomainGroups({{group: [dataset, …]}})")
        self.max_length = self._whole("max_length", max_length, 1)
        self.min_sequence_length = self._whole("min_sequence_length", min_sequence_length, 1, self.max_length)
        for name, value, least in (
            ("num_bins", num_bins, 1),
            ("max_sequences_per_bin", max_sequences_per_bin, 1),
            ("candidate_pool_size", candidate_pool_size, 0),
            ("max_candidate_age", max_candidate_age, 0),
        ):
            if value is not None:
                self._whole(name, value, least)
                if algorithm == "wrap" and name != "num_bins":
                    raise SettingError(f"{self.name}: {name}: algorithm='wrap' has no bins; use 'best_fit'")
        self.algorithm, self.flush_strategy, self.tokens_field = algorithm, flush_strategy, tokens_field
        self.needs = AUTO if tokens_field == "auto" else (tokens_field,)
        self.num_bins = DEFAULT_BINS if num_bins is None else num_bins
        self.max_sequences_per_bin, self.max_candidate_age = max_sequences_per_bin, max_candidate_age
        best = algorithm in ("best_fit", "best_fit_wrap")
        self.candidate_pool_size = (DEFAULT_POOL if best else 0) if candidate_pool_size is None else candidate_pool_size
        self.shuffle_strategy, self.shuffle_seed = shuffle_strategy, shuffle_seed
        self.homogeneity, self.drop_oversized = homogeneity, drop_oversized
        self.groups = groups if groups is None or isinstance(groups, DomainGroups) else DomainGroups(groups)
        self._warn_of_idle(num_bins)

    def _warn_of_idle(self, num_bins: int | None) -> None:
        """Name the settings that the others leave without effect."""
        wrap, bins = self.algorithm == "wrap", self.shuffle_strategy == "bins"
        idle = {
            "num_bins: algorithm='wrap' has no bins": num_bins is not None and wrap and not bins,
            "flush_strategy: algorithm='wrap' has no bins": self.flush_strategy != "fifo" and wrap,
            "max_candidate_age: there is no pool, give candidate_pool_size": self.max_candidate_age is not None
            and not self.candidate_pool_size,
            "shuffle_seed: nothing is shuffled, give shuffle_strategy": self.shuffle_seed is not None
            and self.shuffle_strategy is None,
            "groups: give homogeneity='group'": self.groups is not None and self.homogeneity != "group",
        }
        for text in (text for text, is_idle in idle.items() if is_idle):
            warnings.warn(f"{self.name} has no use for {text}", stacklevel=recipe_level())

    def describe(self) -> dict[str, Any]:
        described: dict[str, Any] = {
            "max_length": self.max_length,
            "algorithm": self.algorithm,
            "tokens_field": self.tokens_field,
            "drop_oversized": self.drop_oversized,
            "min_sequence_length": self.min_sequence_length,
            "shuffle_strategy": self.shuffle_strategy,
            "homogeneity": self.homogeneity,
        }
        if self.shuffle_strategy is not None:
            described["shuffle_seed"] = self.shuffle_seed
        if self.homogeneity == "group" and self.groups is not None:
            described["groups"] = self.groups.groups
        if self.algorithm != "wrap" or self.shuffle_strategy == "bins":
            described["num_bins"] = self.num_bins
        if self.algorithm != "wrap":
            described["flush_strategy"] = self.flush_strategy
            described["max_sequences_per_bin"] = self.max_sequences_per_bin
            described["candidate_pool_size"] = self.candidate_pool_size
            described["max_candidate_age"] = self.max_candidate_age if self.candidate_pool_size else None
        return described

    def check(self, source: StaticMixtureWorkSource | CustomSource) -> None:
        if self.groups is not None:
            self.groups.check(self.name, [dataset.name for dataset in source.datasets])

    @property
    def splits(self) -> bool:
        """Whether a document may be split although it is no longer than a sequence."""
        return self.algorithm in SPLITTING

    def bins(self) -> ByComponent:
        """Empty bins as the settings want them."""
        return ByComponent(self._bins)

    def _bins(self) -> Bins:
        limit = 1 if self.algorithm == "wrap" else self.num_bins  # one open sequence that is always filled up
        rules = Rules(self.max_length, limit, self.flush_strategy == "fullest", self.max_sequences_per_bin, self.splits)
        first = self.algorithm == "first_fit"
        if not self.candidate_pool_size:
            return FirstFit(rules) if first else BestFit(rules)
        pooled: Callable[..., Bins] = FirstFitCandidates if first else BestFitCandidates
        return pooled(rules, self.candidate_pool_size, self.max_candidate_age)

    def _whole(self, name: str, value: Any, least: int, most: int = LARGEST) -> int:
        if type(value) is not int or not least <= value <= most:
            raise SettingError(f"{self.name}: {name}={value!r}: must be a whole number from {least} to {most}")
        return value

    def _choice(self, name: str, value: Any, allowed: tuple[Any, ...]) -> None:
        if not isinstance(value, (str, bool, type(None))) or value not in allowed:
            raise SettingError(f"{self.name}: {name}={value!r}: must be one of {', '.join(map(repr, allowed))}")
