"""A loader that another thread closes while the training thread is in `next`: a named error, at once, and no harm."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from tests.unit.client.peer import Peer, ids
from zephon.errors import ZephonError
from zephon.transport import protocol as p

Make = Callable[..., Peer]
Join = Callable[..., Any]


def training(loader: Any, got: list[int]) -> Future[None]:
    """A thread that iterates, with the ids that it got and what ended it."""
    done: Future[None] = Future()

    def train() -> None:
        try:
            for batch in loader:
                got.extend(batch["id"].tolist())
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=train, daemon=True).start()
    return done


def closed_error(done: Future[None]) -> None:
    error = done.exception(timeout=60)
    assert type(error) is ZephonError
    assert "was closed" in str(error) or "is closed" in str(error)


@pytest.mark.parametrize("waits_for", ["a batch", "the daemon's answer", "a daemon that has gone"])
def test_a_wait_ends_with_an_error_when_another_thread_closes_the_loader(
    make_peer: Make, join: Join, waits_for: str
) -> None:
    peer = make_peer(lanes=1, microbatch=2)
    peer.hold, peer.supervisor = {0}, "systemd"
    if waits_for == "the daemon's answer":
        peer.answers[p.Attach] = lambda _: []
    loader = join(peer, timeout=60.0)
    done = training(loader, [])
    peer.until(lambda: peer.heard(p.Attach if waits_for == "the daemon's answer" else p.Begin))
    if waits_for == "a daemon that has gone":
        peer.close()
    loader.close()
    closed_error(done)
    loader.close()
    with pytest.raises(ZephonError, match="is closed"):
        next(loader)


def test_wherever_the_training_thread_is_nothing_is_lost_or_half_done(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=1, microbatch=2, slots=2)
    for number in range(12):
        loader = join(peer, timeout=60.0)
        loader.lanes
        got: list[int] = []
        done = training(loader, got)
        heard = len(peer.heard(p.Returned))
        peer.until(lambda some=heard + number % 4: len(peer.heard(p.Returned)) > some)
        loader.close()
        closed_error(done)
        assert got == ids(0, 0, len(got))
        assert loader.state_dict()["lanes"]["0"]["records"] == len(got)
        peer.until(lambda: not peer.guests)


def test_a_signal_handler_may_close_the_loader_that_its_own_thread_waits_in(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=1, microbatch=2)
    peer.hold, peer.alive = {0}, []
    loader = join(peer, timeout=60.0)

    def signalled() -> None:
        peer.until(lambda: peer.heard(p.Hungry))
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: loader.close())
    thread = threading.Thread(target=signalled)
    try:
        thread.start()
        with pytest.raises(ZephonError, match="was closed"):
            next(loader)
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
