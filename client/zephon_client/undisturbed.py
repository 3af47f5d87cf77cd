"""Signal handlers wait while bookkeeping is half done.

A handler that Python code has set (Ctrl-C's, a timeout's with SIGALRM, a launcher's SIGTERM) runs between any two steps
of the main thread, and may raise. Between taking a descriptor off a connection and noting it, that would lose a batch
for good; and one that closes the loader would close it under a piece that goes on. So such pieces run `with
undisturbed:`; what comes meanwhile is passed to its handler right after. Waiting itself stays outside, and is
interrupted at once.

For the same reason another thread, which may close a loader while one waits in it, finds no such piece half done.

Rejected: blocking the signals (any other thread of the process then takes them, and the handler runs here all the
same), and holding back SIGINT alone (timeouts raise, too).
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

# CPython's own functions, where there are such: those of `signal` turn numbers into enum members and back, which takes
# ten times as long, and a batch is not to wait for that.
_fast: Any = sys.modules.get("_signal", signal)
_get_handler: Callable[[int], Any] = _fast.getsignal
_set_handler: Callable[[int, Any], Any] = _fast.signal
_get_ident = threading.get_ident

_NAMES = ["HUP", "INT", "QUIT", "USR1", "USR2", "ALRM", "TERM", "CHLD", "XCPU", "VTALRM", "PROF"]
_SIGNALS = tuple(int(getattr(signal, f"SIG{name}")) for name in _NAMES)
"""Those whose handlers are known to raise or to end things; to look at all 64 would take longer than all else here."""


class Undisturbed:
    """A context manager for short pieces of code, one thread at a time. A piece may hold others.

    Only the main thread runs handlers, so only its pieces have to hold them back.
    """

    __slots__ = (
        "_after",
        "_came",
        "_depth",
        "_held",
        "_holds",
        "_lock",
        "_main",
        "_owner",
        "_python",
        "_seen",
    )

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._lock = threading.RLock()
        self._owner: int | None = None
        """The thread whose piece is under way."""
        self._depth = 0
        self._holds = False
        """Whether that piece holds handlers back."""
        self._held: list[tuple[int, Any]] = []
        """Signals and their own handlers, which are to be put back."""
        self._came: dict[int, FrameType | None] = {}
        self._after: list[Callable[[], object]] = []
        self._seen: list[Any] = []
        self._python: list[tuple[int, Any]] = []
        """Of the handlers seen last, those that are Python's."""

    def __enter__(self) -> None:
        ident = _get_ident()
        holds = ident == self._main and ident != self._owner
        if holds:
            handlers = [*map(_get_handler, _SIGNALS)]
            if handlers != self._seen:
                self._seen, self._python = handlers, [each for each in zip(_SIGNALS, handlers) if callable(each[1])]
            held, note = self._python, self._note
            try:
                for number, _ in held:
                    _set_handler(number, note)
            except BaseException:  # of a handler that was not held back yet
                _put_back(held)
                raise
        self._lock.acquire()
        self._depth += 1
        self._owner = ident
        if holds:  # only now: a finalizer may have had a piece of its own meanwhile
            self._holds, self._held = True, held

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth:
            self._lock.release()
            return
        holds, held, after = self._holds, self._held, self._after
        self._holds, self._owner = False, None
        if after:
            self._after = []
        self._lock.release()
        if holds:
            try:
                for number, own in held:
                    _set_handler(number, own)
            except BaseException:  # of a handler that has been put back
                _put_back(held)
                raise
            finally:
                if self._came:
                    after = [*after, *self._told(dict(held))]
                if after:
                    _call_all(after)
        elif after:
            _call_all(after)

    def afterwards(self, call: Callable[[], object]) -> bool:
        """Whether this thread is in such a piece, say in a finalizer that runs there; then `call` is made after it."""
        inside = self._owner == _get_ident()
        if inside:
            self._after.append(call)
        return inside

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came[number] = frame

    def _told(self, own: dict[int, Any]) -> list[Callable[[], object]]:
        came, self._came = self._came, {}
        return [partial(own[number], number, frame) for number, frame in came.items() if number in own]


def _put_back(held: list[tuple[int, Any]]) -> None:
    try:
        for number, own in held:
            _set_handler(number, own)
    except BaseException:
        _put_back(held)
        raise


def _call_all(calls: list[Callable[[], object]]) -> None:
    """Makes each call, whatever the ones before it raise."""
    try:
        calls.pop(0)()
    finally:
        if calls:
            _call_all(calls)
