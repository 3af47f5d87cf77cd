"""Requests to the daemon: one ZeroMQ DEALER socket, each request answered once by its number.

`Patience` starts the wait anew; `Refused` is raised as the error that it names. An answer that nobody waits for any
more is dropped. A request that was interrupted and is made again is not sent twice: its answer is waited for.

The connection is to one daemon process. It is not made again behind the caller's back when that process ends, since
another one knows nothing of what was asked; `lost` says so.

Its sockets are closed before their context ends, whatever becomes of the Control: a context that is garbage together
with open sockets, in a cycle of exceptions and frames say, would wait for them for ever.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import zmq

from zephon.errors import DaemonUnavailable
from zephon.transport.channels import answers
from zephon.transport.messages import decode, encode
from zephon.transport.protocol import Patience, Refused
from zephon_client.reported import error_of
from zephon_client.undisturbed import Undisturbed

A = TypeVar("A")

_LOOK_AGAIN_SECONDS = 0.02
_LAST_WORDS_SECONDS = 1.0
_TOLD_SECONDS = 3.0
_LOOK_SECONDS = 1.0  # a handler's own request is noticed after so long
"""From when on it is said that other processes are waited for."""

_LINGER_MS = 200


class Watched(Protocol):
    """The data connection, as far as a waiting request looks at it: its end means that no answer will come."""

    @property
    def closed(self) -> bool: ...
    def fileno(self) -> int: ...
    def pump(self) -> None: ...


class Control:
    """The control connection of one client. Used by one thread, in the process that made it."""

    def __init__(self, path: str, start_seconds: float, undisturbed: Undisturbed) -> None:
        """Raises DaemonUnavailable when nothing listens at `path` within `start_seconds`."""
        self.path = path
        self._undisturbed = undisturbed
        _wait_for_listener(path, start_seconds)
        with undisturbed:
            self._context = zmq.Context(io_threads=1)
            sockets: list[zmq.Socket[bytes]] = []
            self._ending = weakref.finalize(self, _end, self._context, sockets, os.getpid())
            try:
                self._socket = self._context.socket(zmq.DEALER)
                sockets.append(self._socket)
                self._socket.setsockopt(zmq.LINGER, 0)
                self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
                self._ends = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
                sockets.append(self._ends)
                self._ends.setsockopt(zmq.LINGER, 0)
                self._socket.connect(f"ipc://{path}")
            except BaseException:
                self._ending()
                raise
        self._lost = False
        self._number = 0
        self._asked: object = None
        self._answer: object = None

    @property
    def lost(self) -> bool:
        """Whether the daemon at the other end is gone, or the connection closed."""
        if not self._lost:
            self._lost = self._context.closed or bool(self._ends.poll(0))
        return self._lost

    def request(
        self,
        message: object,
        expect: type[A],
        timeout: float,
        watched: Watched | None = None,
        *,
        keep: Callable[[A], None] | None = None,
    ) -> A:
        """Sends a request and waits for its answer, up to `timeout` seconds since the last sign of `Patience`.

        `keep` stores the answer where no interrupt can lose it.
        """
        if self.lost:
            raise self._gone()
        answer = None
        while answer is None:
            if self._asked != message:
                with self._whole():
                    self._number += 1
                    self._socket.send_multipart([self._name(), encode(message)])
                    self._asked, self._answer = message, None
            answer = self._awaited(message, expect, timeout, watched)
        with self._whole():
            self._asked = self._answer = None
            if isinstance(answer, expect) and keep is not None:
                keep(answer)
        if isinstance(answer, Refused):
            raise error_of(answer.kind, answer.text)
        assert isinstance(answer, expect)
        return answer

    def tell(self, message: object) -> None:
        """Sends a request whose answer nobody will wait for."""
        self._number += 1
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart([self._name(), encode(message)], zmq.NOBLOCK)

    def close(self) -> None:
        """Gives what was said a moment to leave, and closes. May be called again."""
        with self._undisturbed:
            self._lost = True
            _end(self._context, [self._socket, self._ends], os.getpid())
            self._ending.detach()

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Around what must not be done by halves. Where it was, who waits for an answer would wait in vain."""
        with self._undisturbed:
            try:
                yield
            except BaseException:
                self._lost = True
                raise

    def _gone(self) -> DaemonUnavailable:
        return DaemonUnavailable(
            f"the daemon on {self.path} has gone. `zephon launch` starts it again by itself, and the next batch comes; "
            "else start it again, and the job from its last checkpoint."
        )

    def _name(self) -> bytes:
        return str(self._number).encode()

    def _awaited(self, message: object, expect: type[object], timeout: float, watched: Watched | None) -> object:
        """None if a signal's handler has made a request of its own meanwhile, so that this one is to be made again."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._ends, zmq.POLLIN)
        fd, reason, told = -1, "", False
        began = time.monotonic()
        deadline = began + timeout
        if watched is not None and watched.closed:
            deadline = min(deadline, time.monotonic() + _LAST_WORDS_SECONDS)
        elif watched is not None:
            fd = watched.fileno()
            poller.register(fd, zmq.POLLIN)
        while self._asked == message:
            answer = self._take((expect, Refused, Patience))
            if isinstance(answer, Patience):
                self._answer, reason, deadline = None, answer.reason, time.monotonic() + timeout
                if answer.others and not told and time.monotonic() - began >= _TOLD_SECONDS:
                    told = True
                    warnings.warn(f"this rank waits for {reason}", stacklevel=_callers_level())
                continue
            if answer is not None:
                return answer
            if self.lost:
                self._asked = None
                raise self._gone()
            left = deadline - time.monotonic()
            if left <= 0:
                self._asked = None
                gone = watched is not None and watched.closed
                limit = "since its other connection ended" if gone else f"within {timeout:g} s"
                said = f", and last waited for {reason}" if reason else ""
                raise DaemonUnavailable(
                    f"the daemon on {self.path} has not answered {limit} (expected: {expect.__name__}){said}. See "
                    f"whether it still runs (`zephon progress --socket {self.path}`); if it does not, start it again, "
                    "and the job from its last checkpoint."
                )
            poller.poll(max(1, int(min(left, _LOOK_SECONDS) * 1000)))
            if watched is not None and fd >= 0:
                watched.pump()
                if watched.closed:
                    # Nothing more to read there, so it must not wake the wait; a last answer may still be on its way.
                    poller.unregister(fd)
                    fd, deadline = -1, min(deadline, time.monotonic() + _LAST_WORDS_SECONDS)
        return None

    def _take(self, expect: tuple[type, ...]) -> object:
        """The answer to what was asked, if it is here; it is kept until the request has been dealt with."""
        while self._answer is None:
            with self._whole():
                try:
                    number, payload = self._socket.recv_multipart(zmq.NOBLOCK)[-2:]
                except zmq.Again:
                    return None
                if number == self._name():
                    self._answer = decode(payload, expect=expect)
        return self._answer


def _end(context: zmq.Context[zmq.Socket[bytes]], sockets: list[zmq.Socket[bytes]], pid: int) -> None:
    """Closes what is open, the monitored socket first in the list. Whoever was interrupted in here calls it again."""
    if context.closed or os.getpid() != pid:
        return
    for n, each in enumerate(sockets):
        if not each.closed:
            if n == 0:
                each.disable_monitor()
            each.close(linger=_LINGER_MS if n == 0 else 0)
    # A signal would cut the context's end short, and leave its threads and descriptors behind.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        context.destroy(linger=0)  # with sockets that it was interrupted in making
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _callers_level() -> int:
    """The `stacklevel` with which a warning of the calling function names the caller's line outside of Zephon."""
    frame, level = sys._getframe(1), 1
    ours = ("zephon_client", "zephon")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ours:
        frame, level = frame.f_back, level + 1
    return level


def _wait_for_listener(path: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not answers(path, socket.SOCK_STREAM):
        if time.monotonic() >= deadline:
            raise DaemonUnavailable(
                f"no daemon listens on {path} (waited {seconds:g} s). Start one with `zephon daemon RECIPE --socket "
                f"{path}`, or run the training command under `zephon launch RECIPE -- ...`; for one in another place "
                "name its socket (argument `socket`, or ZEPHON_SOCKET)."
            )
        time.sleep(_LOOK_AGAIN_SECONDS)
