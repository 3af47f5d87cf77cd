"""Which documents may share a sequence: all, those of one group of datasets, or those of one dataset.

Documents that may share one are of one *component*. Each component has open sequences of its own, so that no sequence
ever holds two; what comes out is ordered as if they had been packed side by side, one document after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from zephon.columns import Block, IntArray
from zephon.errors import SettingError
from zephon.ops.base import Faults, Named
from zephon.ops.bins import NUMBER, Bins, Closed, keys_of

HOMOGENEITIES = ("none", "group", "full")


class DomainGroups:
    """Datasets by group: `{"text": ["web", "books"], "code": ["github"]}`. A dataset belongs to one group at most; one
    that is named nowhere is a group of its own.
    """

    def __init__(self, groups: Mapping[str, Sequence[str]]) -> None:
        given: Any = groups
        if not isinstance(given, Mapping):
            raise SettingError(f"groups: must be a dict from a group's name to its datasets, not {given!r}")
        found: dict[str, str] = {}
        for group, datasets in given.items():
            several = isinstance(datasets, (list, tuple, set, frozenset))
            if not isinstance(group, str) or not several or not all(isinstance(name, str) for name in datasets):
                raise SettingError(f"groups: {group!r}: {datasets!r} must be a name with a list of datasets' names")
            for name in datasets:
                if name in found and found[name] != group:
                    raise SettingError(f"groups: dataset {name!r} is in two groups, {found[name]!r} and {group!r}")
                found[name] = group
        self.groups: dict[str, list[str]] = {
            group: sorted(name for name, of in found.items() if of == group) for group in groups
        }
        self._group_of = found

    def __repr__(self) -> str:
        return f"DomainGroups({self.groups!r})"

    def group_of(self, dataset: str) -> str | None:
        """The group that names this dataset."""
        return self._group_of.get(dataset)

    def check(self, operator: str, datasets: Sequence[str]) -> None:
        """Raises SettingError for a group with a dataset that the run does not have."""
        unknown = sorted(set(self._group_of) - set(datasets))
        if unknown:
            raise SettingError(f"{operator}: groups: no dataset is called {unknown[0]!r}; there are {sorted(datasets)}")


def components_of(
    block: Block, records: IntArray, homogeneity: str, groups: DomainGroups | None, operator: str, faults: Faults
) -> tuple[IntArray, IntArray]:
    """`(which of the records may be packed, component of each of those)`, both int64.

    A record that was itself made of samples of two components can be in no sequence, and is a bad one.
    """
    of = Block({}, block.samples, block.sample_offsets).take(records)
    each = _component(of.samples[:, 0], homogeneity, groups, faults.datasets)
    if of.sample_offsets is None or not len(records):
        return np.arange(len(records)), each
    starts, counts = of.sample_offsets[:-1], np.diff(of.sample_offsets)
    first = each[starts]
    mixed = np.zeros(len(records), np.bool_)
    mixed[np.repeat(np.arange(len(records)), counts)[each != np.repeat(first, counts)]] = True
    for record in records[mixed].tolist():
        faults.bad(block.sample_of(record), operator, f"made of samples that homogeneity={homogeneity!r} keeps apart")
    kept = np.flatnonzero(~mixed)
    return kept, first[kept]


def _component(datasets: IntArray, homogeneity: str, groups: DomainGroups | None, named: Sequence[Named]) -> IntArray:
    """The component of each dataset number."""
    if homogeneity != "group" or groups is None:
        return datasets
    names = list(groups.groups)
    numbers, back = np.unique(datasets, return_inverse=True)
    found = []
    for number in numbers.tolist():
        group = groups.group_of(named[number].name if number < len(named) else str(number))
        found.append(number + len(names) if group is None else names.index(group))
    return np.array(found, np.int64)[back]


class ByComponent:
    """Bins for each component."""

    def __init__(self, make: Callable[[], Bins]) -> None:
        self._make = make
        self._of: dict[int, Bins] = {}

    def place(self, documents: IntArray, lengths: IntArray, components: IntArray | None) -> list[list[int]]:
        """Documents by number, with the length and the component of each (None: all are of one). Returns the pieces of
        the bins that were closed, in the order of the documents that closed them.
        """
        if components is None:
            return [pieces for _, pieces in self._bins(0).place(keys_of(documents, lengths))]
        closed: list[Closed] = []
        for component in np.unique(components).tolist():
            mine = np.flatnonzero(components == component)
            closed += self._bins(component).place(keys_of(documents[mine], lengths[mine]))
        closed.sort(key=lambda one: -(one[0] & NUMBER))
        return [pieces for _, pieces in closed]

    def finish(self) -> list[list[int]]:
        """As `Bins.finish`, one component after another."""
        return [pieces for component in sorted(self._of) for _, pieces in self._of[component].finish()]

    @property
    def open(self) -> list[list[list[int]]]:
        """The pieces of the open bins: for each component those of each bin, oldest bin first."""
        return [self._of[component].open for component in sorted(self._of)]

    def _bins(self, component: int) -> Bins:
        bins = self._of.get(component)
        if bins is None:
            bins = self._of[component] = self._make()
        return bins
