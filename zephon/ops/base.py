"""What an operator is: a step of a pipeline, working on blocks of columns.

A *stateless* operator turns a block into a block. A *stateful* one makes an `Accumulator` for each window of each
lane; the accumulator holds records, and a flush at the window's end empties it. The same records must come out
however they were cut into blocks: that is what lets several workers run a pipeline with one outcome.

With `on_error="skip"` a bad record is counted and left out; `Faults` is where an operator reports one, so that
none decides that for itself.
"""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from zephon.columns import Block, IntArray
from zephon.errors import RecordError
from zephon.skips import counter_of
from zephon.words import did_you_mean

if TYPE_CHECKING:
    from zephon.custom_source import CustomSource
    from zephon.plan import Plan
    from zephon.whereabouts import Whereabouts
    from zephon.work import StaticMixtureWorkSource


READ = "read"
"""What stands for the operator where a record could not be read."""


class Named(Protocol):
    """What `Faults` needs of a dataset to name a record."""

    @property
    def name(self) -> str: ...

    def shard_path(self, shard: int) -> str: ...

    def fetch(self, shard: int, rows: IntArray, fields: frozenset[str] | None, faults: Faults) -> Block: ...


class Scope(NamedTuple):
    """Where in a run records are being processed. Only operators that run a user's code look at it, and tell `at`, if
    somebody watches them, which record they turn to; others tell through `Faults.moved` that they get on."""

    plan: Plan
    epoch: int
    lane: int
    at: Whereabouts | None = None


class Faults:
    """What happens to bad records: `"raise"` stops at the first, `"skip"` counts them and goes on.

    `skipped` counts those left out; `reports` keeps one line for each, for the log. `scope` says where the records
    belong; None outside a run. `counters` is where a stateless operator counts what it drops.
    """

    def __init__(self, on_error: str = "raise", datasets: Sequence[Named] = (), scope: Scope | None = None) -> None:
        self.on_error, self.datasets, self.scope = on_error, datasets, scope
        self.skipped = 0
        self.reports: list[str] = []
        self.counters: dict[str, int] = {}

    def moved(self) -> None:
        """Some of the block's records are done: nothing hangs, should all of them take long."""
        if self.scope is not None and self.scope.at is not None:
            self.scope.at.move()

    def count(self, name: str, amount: int) -> None:
        """Add to what is summed per lane and shown: `dropped_records`, say."""
        add_counts(self.counters, {name: amount})

    def lacks(self, sample: tuple[int, int, int], operator: str, fields: Sequence[str], expected: str) -> None:
        """Report a record that has none of these fields; the error says which fields its sample has."""
        cause = f"field {' or '.join(map(repr, fields))}: expected {expected}, found no such field"
        if self.on_error != "skip" and sample[0] < len(self.datasets):
            here = self.datasets[sample[0]].fetch(sample[1], np.array([sample[2]]), None, Faults())
            cause += f" (the sample has: {', '.join(here.fields)}{did_you_mean(fields[0], here.fields)})"
        self._report(self.error(sample, operator, cause, "the name of the field, or the record"), None)

    def bad(
        self,
        sample: tuple[int, int, int],
        operator: str,
        cause: str | BaseException,
        given: Callable[[], Iterable[str]] | None = None,
    ) -> None:
        """Report one bad record. Returns only if it is to be left out; otherwise raises `RecordError`.

        `given` tells which fields the record had that a user's function was given: the error of one that asks for
        another says so.
        """
        text, mend = cause if isinstance(cause, str) else said(cause), "the record"
        if type(cause) is KeyError and given is not None and self.on_error != "skip":
            fields, wanted = list(given()), cause.args[0] if cause.args else None
            if isinstance(wanted, str) and wanted not in fields:
                has = f"it has: {', '.join(fields)}{did_you_mean(wanted, fields)}"
                text, mend = f"{text}: the record has no field {wanted!r} ({has})", "the function, or the record"
        self._report(self.error(sample, operator, text, mend), cause)

    def _report(self, error: RecordError, cause: str | BaseException | None) -> None:
        if self.on_error != "skip":
            raise error from (cause if isinstance(cause, BaseException) else None)
        self.skipped += 1
        self.count(counter_of(error.dataset, error.operator), 1)
        self.reports.append(
            f"skipped: {error.operator}: {error.dataset!r}, {error.shard}, row {error.row}: {error.cause}"
        )

    def error(
        self, sample: tuple[int, int, int], operator: str, cause: str | BaseException, mend: str = "the record"
    ) -> RecordError:
        """The error that names a record by its sample, the operator, the lane, and how to look at the record; `mend`
        is what can be put right.
        """
        dataset, shard, row = sample
        known = dataset < len(self.datasets)
        return RecordError(
            self.datasets[dataset].name if known else str(dataset),
            self.datasets[dataset].shard_path(shard) if known else str(shard),
            row,
            operator,
            cause if isinstance(cause, str) else said(cause),
            None if self.scope is None else self.scope.lane,
            look(self.datasets[dataset], shard, row, raw=operator == READ) if known else "",
            mend,
        )


def add_counts(total: dict[str, int], more: Mapping[str, int]) -> None:
    """Add counts by name; a count of nothing leaves no name behind."""
    for name, amount in more.items():
        if amount:
            total[name] = total.get(name, 0) + amount


def said(error: BaseException) -> str:
    """An exception in words, even one of a class whose text cannot be made."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def look(dataset: Named, shard: int, row: int, *, raw: bool = False) -> str:
    """A command that prints one row; for rows held in memory, the call that returns it. `raw`: as it is stored, for one
    that cannot be read.
    """
    read = "raw" if raw else "read"
    location, kind = getattr(dataset, "location", "memory"), getattr(dataset, "format", "memory")
    if kind == "memory":
        return f"zephon.debug.DatasetInspector(dataset).{read}({dataset.shard_path(shard)!r}, {row})"
    code = (
        "from zephon import Dataset; from zephon.debug import DatasetInspector; print(DatasetInspector("
        f"Dataset.from_path({_quoted(dataset.name)}, {_quoted(location)}, fmt={_quoted(kind)})).{read}({shard}, {row}))"
    )
    return f"python -c {shlex.quote(code)}"


def _quoted(text: str) -> str:
    """A literal of the text, in double quotes where that will do: the shell's are single ones."""
    return repr(text) if "'" in text or '"' in text else f'"{repr(text)[1:-1]}"'


class WindowKey(NamedTuple):
    """Names a window of a run: all that the randomness of a stateful operator may depend on."""

    seed: int
    epoch: int
    lane: int
    chunk: int


class Operator(ABC):
    """One step of a pipeline. Instances are picklable before `setup`."""

    name: str
    changes_counts: bool = False
    """Whether more or fewer records may come out than went in."""
    joins_samples: bool = False
    """Whether a record that comes out may be made from several samples."""
    users_code: bool = False
    """Whether it runs functions of a user's, which may not be what they should be."""
    needs: tuple[str, ...] = ()
    """Fields of which each record must have one, as far as the operator's settings say."""
    keeps_fields: bool = True
    """Whether records that come out have the fields of those that went in."""
    parallelism: int | None = None
    """Of a stateless operator behind a stateful one: on how many workers at once it runs; None: lane by lane, where
    lanes are produced. An execution setting, so no part of what `describe` says.
    """
    grain: int = 1
    """In front of the first stateful operator: its records are worked on in groups whose borders are the multiples of
    this in the lane's samples, so a task is cut nowhere else.
    """

    @property
    def parts(self) -> tuple[Operator, ...]:
        """What it runs as behind the first stateful operator: itself, or parts of it that run in different places."""
        return (self,)

    @property
    def whole(self) -> Operator:
        """The operator of the pipeline that it is, or is a part of."""
        return self

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The operator's data settings as plain JSON values. They are part of the run's identity."""

    def check(self, source: StaticMixtureWorkSource | CustomSource) -> None:  # noqa: B027
        """Called when a run is planned. Raises SettingError for settings that do not fit its work source."""

    def requires(self, downstream: frozenset[str] | None) -> frozenset[str] | None:
        """The fields it needs from upstream, given those that are needed of its output. None means all."""
        return downstream

    def empty(self, block: Block) -> Block:
        """No record, with the fields that the operator's output has, as far as its settings say them."""
        return block

    def setup(self) -> None:  # noqa: B027
        """Called once in the process that runs the operator, before the first record. Calling it again does nothing."""

    def teardown(self) -> None:  # noqa: B027
        """Called when the process is done with the operator, unless it is killed. `setup` may follow."""


class Stateless(Operator):
    """Records in, records out."""

    of_lists: bool = False
    """Whether it is a part of a stateful operator that works on the lists which the other one gave out."""

    @abstractmethod
    def process(self, block: Block, faults: Faults) -> Block:
        """The records that come of `block`, in its order."""


class Accumulator(ABC):
    """The state of a stateful operator for one window of one lane. Driven by one thread, in lane order."""

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        """What was dropped or padded, by name (`dropped_tokens`, `padding_tokens`); summed per lane and shown."""

    @abstractmethod
    def push(self, block: Block, faults: Faults) -> list[Block]:
        """Take in records; give out those that are ready. Copies whatever outlives the call."""

    @abstractmethod
    def flush(self, faults: Faults) -> list[Block]:
        """Give out all that is held. The window is over; the accumulator is used no more."""

    def count(self, name: str, amount: int) -> None:
        add_counts(self.counters, {name: amount})


class Stateful(Operator):
    """Holds records, for one window at a time."""

    @abstractmethod
    def accumulator(self, key: WindowKey) -> Accumulator:
        """An empty state for one window."""
