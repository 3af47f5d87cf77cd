"""What the first rows of each dataset hold, and the fields that operators would look for in them in vain.

Reads a few rows, runs nothing. Only what settings say can be known this way: behind a function of the user's, and
behind an operator that makes records of fields of its own, nobody knows which fields there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from zephon.datasets import Dataset
from zephon.errors import ZephonError
from zephon.ops.base import Faults
from zephon.plan import Plan
from zephon.words import did_you_mean

ROWS = 8
"""Rows of a dataset's first shard that are looked at."""

FIELDS_SHOWN = 12


def first_rows(dataset: Dataset) -> list[dict[str, Any]]:
    """The first rows of the first shard. Raises what reading raises."""
    rows = np.arange(min(ROWS, int(dataset.counts[0])))
    return dataset.fetch(0, rows, None, Faults("raise", [dataset])).to_rows()


def described(dataset: Dataset, rows: list[dict[str, Any]]) -> str:
    """The fields of the first rows, with what they hold."""
    found: dict[str, str] = {}
    for row in rows:
        for name, value in row.items():
            found.setdefault(name, type(value).__name__)
    shown = [f"{name} ({kind})" for name, kind in found.items()]
    more = f" and {len(shown) - FIELDS_SHOWN} more" if len(shown) > FIELDS_SHOWN else ""
    return ", ".join(shown[:FIELDS_SHOWN]) + more


def lacking(plan: Plan, dataset: Dataset, rows: list[dict[str, Any]]) -> Iterator[str]:
    """What operators need and the first row that lacks it does not have."""
    for operator in plan.operators:
        if operator.users_code:
            return
        for number, row in enumerate(rows if operator.needs else ()):
            if row.keys().isdisjoint(operator.needs):
                yield (
                    f"{operator.name}: dataset {dataset.name!r}, shard {dataset.shard_path(0)}, row {number} has no "
                    f"field {' or '.join(map(repr, operator.needs))} (it has: {', '.join(row)}"
                    f"{did_you_mean(operator.needs[0], row)})"
                )
                break
        if not operator.keeps_fields:
            return


def looked_at(plan: Plan) -> tuple[dict[str, str], list[str]]:
    """Of each dataset by name what its first rows hold, and all that is wrong with them."""
    fields, wrong = {}, []
    for dataset in plan.source.datasets:
        try:
            rows = first_rows(dataset)
        except (ZephonError, OSError) as error:
            fields[dataset.name] = "not known: its first rows cannot be read"
            wrong.append(str(error))
            continue
        fields[dataset.name] = described(dataset, rows)
        wrong += lacking(plan, dataset, rows)
    return fields, wrong
