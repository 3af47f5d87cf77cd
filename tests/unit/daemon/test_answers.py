"""The daemon's answers to clients that have gone meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from zephon.transport import protocol as p
from zephon.transport.messages import decode
from zephon_daemon.daemon import Daemon, Settings
from zephon_daemon.orders import Answer


@pytest.fixture
def daemon(runtime_folder: Path, no_leaks: None) -> Iterator[Daemon]:
    """One that has started nothing and listens nowhere yet."""
    made = Daemon(Settings(str(runtime_folder / "recipe.py"), str(runtime_folder / "d.sock"), workers=1))
    yield made
    for fd in (made._wake, made._waker, *made._watches.values()):
        os.close(fd)
    for seat in made._seats:
        seat.close()


def test_a_client_whose_first_answer_found_nobody_is_refused_by_the_second_and_may_come_again(
    daemon: Daemon, runtime_folder: Path
) -> None:
    sessions = daemon._sessions
    sessions.engine_ready(["pipeline"], 0.0)
    hello = p.Hello(os.getpid(), 1, 0, 1, "pipeline", "job", None, 60.0, -1, b"", b"nonce")
    (welcome,) = (order.message for order in sessions.hello((b"gone", b"1"), hello, 0.0) if isinstance(order, Answer))
    assert isinstance(welcome, p.Welcome)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as control, context.socket(zmq.DEALER) as client:
        control.setsockopt(zmq.ROUTER_MANDATORY, 1)
        control.bind(f"ipc://{runtime_folder / 'd.sock'}")
        client.setsockopt(zmq.IDENTITY, b"here")
        client.connect(f"ipc://{runtime_folder / 'd.sock'}")
        client.send(b"")
        control.recv_multipart()
        daemon._control = control
        daemon._carry_out([Answer((b"gone", b"1"), welcome), Answer((b"here", b"2"), welcome)])
        number, payload = client.recv_multipart()
    (runtime_folder / "d.sock").unlink()
    answer: Any = decode(payload)
    assert (number, type(answer), answer.kind) == (b"2", p.Refused, "DaemonUnavailable")
    assert not sessions.clients
    again = [order for order in sessions.hello((b"here", b"3"), hello, 1.0) if isinstance(order, Answer)]
    assert [type(order.message) for order in again] == [p.Welcome]
