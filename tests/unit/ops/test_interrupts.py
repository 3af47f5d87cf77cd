"""A user's function that raises what ends programs has failed on a record; a program that is to end still ends."""
from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.custom_operators import pipeline_of
from zephon import Pipeline
from zephon.errors import RecordError, RunFailed
from zephon.ops.interrupts import is_interrupt


def mapping(fn: Any) -> Pipeline:
    pipeline = pipeline_of(rows=(40,), lanes=1, batch=1)
    pipeline._batched = False
    return pipeline.map_transform(fn).batch(1)


def raising(error: BaseException) -> Any:
    def fail(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == 30:
            raise error
        return row

    return fail


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit("no"), StopIteration("no")])
def test_what_a_function_raises_is_an_error_of_its_record(error: BaseException) -> None:
    with pytest.raises(RecordError, match=f"row 15, lane 0: {type(error).__name__}"):
        list(mapping(raising(error)))
    with pytest.warns(UserWarning, match="1 bad record was skipped"):
        assert len(list(mapping(raising(error)).options(on_error="skip"))) == 39


@pytest.fixture
def terminating() -> Iterator[None]:
    """A program whose handler of SIGTERM calls sys.exit, as many do."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, leave)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_that_arrives_inside_a_function_ends_the_program_and_not_the_record(
    terminating: None, number: int, expected: type[BaseException]
) -> None:
    def interrupted(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == 30:
            os.kill(os.getpid(), number)
        return row

    pipeline = mapping(interrupted)
    with pytest.raises(expected):
        list(pipeline)
    with pytest.raises(RunFailed, match="was interrupted"):
        next(iter(pipeline))


def test_in_a_thread_nothing_is_an_interrupt() -> None:
    with pytest.raises(RecordError, match="KeyboardInterrupt"):
        list(mapping(raising(KeyboardInterrupt())).options(runner="threads", max_workers=1))
    assert not is_interrupt(ValueError())
