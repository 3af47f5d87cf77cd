"""Notices data that are listed under two names, whose samples would come twice as often as their user thinks.

Each name has an order of its own, so the copies do not come side by side; but they are the same rows, and that is
worth a warning. Files are compared by their real path (so through links), and whole datasets by digest.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zephon.datasets import Dataset


def warn_of_same_data(datasets: Sequence[Dataset], stacklevel: int = 3) -> None:
    """One UserWarning for each two datasets that share files or have the same content; both are named."""
    if len(datasets) < 2:
        return
    files = [_real_paths(dataset) for dataset in datasets]
    for (one, here), (other, there) in combinations(zip(datasets, files, strict=True), 2):
        shared = here & there
        if one.digest == other.digest:
            what = "hold the same data"
        elif shared:
            what = f"share {len(shared)} of their files, {min(shared)} among them"
        else:
            continue
        warnings.warn(
            f"datasets {one.name!r} and {other.name!r} {what}: those rows come under both names, each in an order of "
            "its own. List them once and give that entry the weight of both, unless this is meant.",
            stacklevel=stacklevel,
        )


def _real_paths(dataset: Dataset) -> set[str]:
    if dataset.format == "memory":
        return set()
    return {os.path.realpath(dataset.shard_path(shard)) for shard in range(dataset.shard_count)}
