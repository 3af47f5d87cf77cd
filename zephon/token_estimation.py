"""Weights that mean tokens: the mean number of tokens that a sample of each dataset becomes.

A run is apportioned in samples, so a weight by tokens is divided by the dataset's tokens a sample. That mean is
measured once, when a run is first resolved, on a seeded choice of rows put through the pipeline's own tokenizer and
the operators before it; or the user gives it. It is a pure function of seed, data and recipe, goes into the run's
identity, and is taken from there ever after: a resumed run never measures again.

Operators from the first on that makes records of several (packing) are left out. A sample that a filter drops, or
that is skipped as bad, counts as no tokens, so the means are of what is drawn.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from zephon.datasets.fetch import read
from zephon.errors import SettingError
from zephon.function_digest import digest_of
from zephon.ops.base import Faults, Operator, Scope, Stateful, Stateless
from zephon.ops.records import fields_of
from zephon.ops.token_fields import AUTO
from zephon.permutations import mix, permute
from zephon.proportions import rounded_weights
from zephon.token_counts import tokens_of_records
from zephon.words import many

if TYPE_CHECKING:
    from zephon.datasets import Dataset
    from zephon.plan import Plan

_AT_ONCE = 512
_Counting = Callable[["Dataset", Any, Faults], int]  # (dataset, pointers of rows, faults) to their tokens
_RATIO = 'Allowed: "measure", the mean tokens a sample as a number above 0, or a dict of such numbers by dataset name'


@dataclass(frozen=True)
class TokenEstimation:
    """How tokens a sample are found.

    - `primer`: `"measure"`, or the mean tokens a sample: one number for all datasets, or a dict by dataset name.
    - `measure(payload) -> int` counts the tokens of a row in place of the pipeline's operators.
    - `calibration_samples`: rows measured of each dataset; all of them where it has no more.

    Raises SettingError.
    """

    primer: Any = "measure"
    measure: Callable[[dict[str, Any]], int] | None = None
    calibration_samples: int = 2048

    def __post_init__(self) -> None:
        count: Any = self.calibration_samples
        if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
            raise SettingError(f"calibration_samples is {count!r}. Allowed: a whole number of at least 1.")
        given: Any = self.measure
        if given is not None and not callable(given):
            raise SettingError(f"measure is {given!r}. Allowed: None or a function from a row's dict to its tokens.")
        if isinstance(self.primer, Mapping):
            object.__setattr__(self, "primer", {name: _ratio(value) for name, value in self.primer.items()})
        elif self.primer != "measure":
            object.__setattr__(self, "primer", _ratio(self.primer))
        if self.primer != "measure" and self.measure is not None:
            raise SettingError(f"primer={self.primer!r} and measure={self.measure!r}: give one of them.")

    def check_names(self, names: Sequence[str]) -> None:
        """SettingError unless a dict of ratios names the datasets."""
        if isinstance(self.primer, Mapping) and set(self.primer) != set(names):
            different = sorted(set(self.primer) ^ set(names), key=str)
            raise SettingError(f"primer and datasets differ in {different}. Allowed: a ratio for each of {names}.")

    def describe(self) -> dict[str, Any]:
        """The settings as JSON."""
        return {
            "primer": dict(self.primer) if isinstance(self.primer, Mapping) else self.primer,
            "measure": None if self.measure is None else digest_of(self.measure),
            "calibration_samples": int(self.calibration_samples),
        }

    def estimates(
        self, datasets: Sequence[Dataset], operators: Sequence[Operator], seed: int, on_error: str
    ) -> dict[str, float]:
        """Mean tokens a sample of each dataset, by its name.

        Raises SettingError where nothing makes tokens, RecordError for a bad row under `on_error="raise"`.
        """
        if self.primer != "measure":
            ratios = self.primer if isinstance(self.primer, Mapping) else {}
            return {d.name: float(ratios.get(d.name, self.primer if not ratios else 1.0)) for d in datasets}
        counted = self._counted_by_user if self.measure is not None else _Counted(operators, seed)
        return {dataset.name: self._mean(dataset, counted, seed, on_error) for dataset in datasets}

    def _mean(self, dataset: Dataset, counted: _Counting, seed: int, on_error: str) -> float:
        chosen = _choice(dataset, int(self.calibration_samples), seed)
        tokens = sum(counted(dataset, part, Faults(on_error, [dataset])) for part in _parts(chosen))
        if not tokens:
            raise SettingError(
                f"token_estimation: none of the {many(len(chosen), 'row')} measured of dataset {dataset.name!r} "
                'becomes a token. Is it the right field? Else raise calibration_samples, or give tokens a sample: '
                f'primer={{"{dataset.name}": …}}.'
            )
        return tokens / len(chosen)

    def _counted_by_user(self, dataset: Dataset, pointers: Any, faults: Faults) -> int:
        assert self.measure is not None
        block = read([dataset], pointers, None, faults)
        total = 0
        for record, row in enumerate(block.to_rows()):
            try:
                count: Any = self.measure(row)
            except Exception as error:
                faults.bad(block.sample_of(record), "measure", error, partial(fields_of, block, record))
                continue
            if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 0:
                faults.bad(block.sample_of(record), "measure", f"returned {count!r}, not a whole number of tokens")
                continue
            total += int(count)
        return total


def weights_by_sample(weights: Sequence[int], means: Sequence[float | None]) -> list[int]:
    """Weights of samples from weights of tokens and the tokens a sample; these to one part in 2**48 of their sum."""
    each = [weight / mean if weight and mean else 0.0 for weight, mean in zip(weights, means, strict=True)]
    largest = max(each)
    return rounded_weights([max(1, int(share / largest * 2**53)) if share else 0 for share in each])


def token_estimation_from(value: Any) -> TokenEstimation | None:
    """What a recipe gives: an estimation, its arguments as a dict (as a recipe without code has them), or None."""
    if value is None or isinstance(value, TokenEstimation):
        return value
    names = [each.name for each in fields(TokenEstimation)]
    if not isinstance(value, Mapping) or set(value) - set(names):
        allowed = f"None, a zephon.work.TokenEstimation, or a dict of its arguments: {', '.join(names)}"
        raise SettingError(f"token_estimation is {value!r}. Allowed: {allowed}.")
    try:
        return TokenEstimation(**value)
    except SettingError as error:
        raise SettingError(f"token_estimation: {error}") from None


class _Counted:
    """Counts tokens with the pipeline's operators, loaded in copies of their own."""

    def __init__(self, operators: Sequence[Operator], seed: int) -> None:
        copies = {id(operator): copy.copy(operator) for operator in measured_by(operators)}
        self.operators, self._seed = list(copies.values()), seed
        self._all = [copies.get(id(operator), operator) for operator in operators]
        self.fields: frozenset[str] | None = frozenset(AUTO)
        for operator in reversed(self.operators):
            self.fields = operator.requires(self.fields)
        for operator in self.operators:
            operator.setup()

    def __call__(self, dataset: Dataset, pointers: Any, faults: Faults) -> int:
        faults.scope = Scope(cast("Plan", _Rehearsed(self._all, self._seed, (dataset.name,))), 0, 0)
        block = read([dataset], pointers, self.fields, faults)
        for operator in self.operators:
            if not len(block):
                return 0
            block = operator.process(block, faults)
        if not len(block):
            return 0
        tokens = tokens_of_records(block)
        if tokens is None:
            names = ", ".join(operator.name for operator in self.operators) or "no operator"
            raise SettingError(
                f"token_estimation: weights mean tokens, but the samples of dataset {dataset.name!r} have none of the "
                f"fields {', '.join(AUTO)} after {names}. Tokenize before packing, or give measure= (a function of a "
                "row) or primer= (tokens a sample)."
            )
        return int(tokens.sum())


@dataclass(frozen=True)
class _Rehearsed:
    """What `zephon.generator()` asks of a plan, before there is one: a row draws as in its first pass of epoch 0."""

    operators: Sequence[Operator]
    seed: int
    dataset_names: tuple[str, ...]
    chunk_size: int = 0


def measured_by(operators: Sequence[Operator]) -> list[Stateless]:
    """The operators that samples go through one by one; those that only reorder records are passed over."""
    found: list[Stateless] = []
    for operator in operators:
        if isinstance(operator, Stateful):
            if operator.changes_counts:
                break
        elif isinstance(operator, Stateless):
            found.append(operator)
    return found


def _choice(dataset: Dataset, most: int, seed: int) -> Any:
    """Pointers of the rows to measure, int64 [k, 3], in the order of the files."""
    total = int(dataset.total)
    if total <= most:
        rows = np.arange(total)
    else:
        rows = np.sort(permute(np.arange(most), total, mix(seed, "calibration", dataset.name)))
    ends = np.cumsum(dataset.counts)
    shard = np.searchsorted(ends, rows, side="right")
    return np.column_stack((np.zeros_like(rows), shard, rows - (ends - dataset.counts)[shard]))


def _parts(pointers: Any) -> Iterator[Any]:
    for low in range(0, len(pointers), _AT_ONCE):
        yield pointers[low : low + _AT_ONCE]


def _ratio(value: Any) -> float:
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise SettingError(f"primer is {value!r}. {_RATIO}.")
    return float(value)
