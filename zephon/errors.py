"""Every error a caller may want to handle on its own.

Each message says what happened, where (dataset, shard, row, lane, worker, socket) and what to do next, in one line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence


class ZephonError(Exception):
    """Base of all errors that Zephon raises on purpose. What libraries and users' functions say is put on one line."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(re.sub(r"\s*\n\s*", " ", a).strip() if isinstance(a, str) else a for a in arguments))


class SettingError(ZephonError, ValueError):
    """A setting has a value that makes no sense; the message names it and the allowed range."""


class RecipeError(ZephonError):
    """A recipe cannot be loaded or does not define what it should."""


class DatasetError(ZephonError):
    """A dataset cannot be found, listed or opened."""


class TokenizerError(ZephonError):
    """A tokenizer cannot be loaded, or its fast backend disagrees with the reference."""


class CheckpointError(ZephonError):
    """A checkpoint is malformed, incomplete or cannot be read."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint was taken under other data settings. `differences` maps each setting to (checkpoint, recipe)."""

    def __init__(self, message: str, differences: dict[str, tuple[object, object]] | None = None) -> None:
        super().__init__(message)
        self.differences = differences or {}


class TopologyError(ZephonError):
    """Ranks, groups and lanes do not fit together, or two ranks of one session contradict each other."""


class DaemonUnavailable(ZephonError):
    """No daemon answers on the socket."""


class ProtocolError(ZephonError):
    """A message is malformed, too large, or of another protocol version."""


class MemoryLimit(ZephonError, MemoryError):
    """Shared memory that was asked for is more than the machine or its cgroup has left."""


class BatchesHeld(ZephonError):
    """The training loop holds more batches than the memory budget allows."""


class RunFailed(ZephonError):
    """The run cannot go on: a worker or the engine died repeatedly, or an operator failed."""


class RecordError(RunFailed):
    """A record could not be read or processed. Attributes name it: `dataset`, `shard`, `row`, `operator`, `cause`,
    and, where they are known, `lane` and `look`, a command that prints the record as it is stored. `mend` says what
    can be put right. The message holds nothing of the record's content but what the cause itself says.
    """

    def __init__(
        self,
        dataset: str,
        shard: str,
        row: int,
        operator: str,
        cause: str,
        lane: int | None = None,
        look: str = "",
        mend: str = "the record",
    ) -> None:
        where = "" if lane is None else f", lane {lane}"
        advice = f"To see the record: {look}. " if look else ""
        super().__init__(
            f"{operator}: dataset {dataset!r}, shard {shard}, row {row}{where}: {cause}. {advice}"
            f'Fix {mend}, or count and skip such records with options(on_error="skip").'
        )
        self.dataset, self.shard, self.row, self.operator, self.cause = dataset, shard, row, operator, cause
        self.lane, self.look, self.mend = lane, look, mend

    def __reduce__(self) -> tuple[type[RecordError], tuple[str, str, int, str, str, int | None, str, str]]:
        where = self.dataset, self.shard, self.row, self.operator
        return RecordError, (*where, self.cause, self.lane, self.look, self.mend)

    @property
    def parts(self) -> list[str]:
        """What it is made of as plain text, for its way to another process."""
        lane = "" if self.lane is None else str(self.lane)
        return [self.dataset, self.shard, str(self.row), self.operator, self.cause, lane, self.look, self.mend]

    @staticmethod
    def from_parts(parts: Sequence[str]) -> RecordError:
        """The same error again; those from the lane on may be absent. ValueError for parts of another kind."""
        dataset, shard, row, operator, cause, lane, look, mend = [*parts, "", "", ""][:8]
        where = dataset, shard, int(row), operator
        return RecordError(*where, cause, int(lane) if lane else None, look, mend or "the record")


def whence(path: str | os.PathLike[str]) -> str:
    """For an error that names a path as it was given: where it starts, if it does not say that itself."""
    if os.path.isabs(os.path.expanduser(path)):
        return ""
    try:
        return f" (relative to {os.getcwd()})"
    except OSError:
        return " (relative to a working directory that is gone)"
