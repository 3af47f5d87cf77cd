"""Errors that daemon and engine report, as the exceptions that they name."""

from __future__ import annotations

from collections.abc import Sequence

from zephon import errors
from zephon.errors import RecordError, ZephonError


class Traceback(Exception):
    """Where an exception was raised in a worker or the engine. As the cause of an error it is printed before it."""


def raised_there(trace: str) -> Traceback | None:
    """A traceback as the cause of the error that reports it; None for an error that says all there is to say."""
    return Traceback(f"in a worker or the engine of the daemon:\n\n{trace.rstrip()}\n") if trace else None


def error_of(kind: str, text: str, record: Sequence[str] = ()) -> ZephonError:
    """The exception `kind` of `zephon.errors`; a plain ZephonError where this version knows no such class.

    `record` is the `parts` of a RecordError, else empty.
    """
    named = getattr(errors, kind, None)
    if not isinstance(named, type) or not issubclass(named, ZephonError):
        return ZephonError(f"{kind}: {text}")
    if issubclass(named, RecordError):
        try:
            return RecordError.from_parts(record)
        except ValueError:
            return errors.RunFailed(text)
    return named(text)
