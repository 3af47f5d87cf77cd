"""Ctrl-C waits while bookkeeping is half done.

A KeyboardInterrupt may arise between any two steps of Python code. Between taking a descriptor off a connection and
noting it, it would lose a batch for good. So such pieces run `with undisturbed:`; a Ctrl-C that comes meanwhile is
passed to its handler right after. Waiting itself stays outside, and is interrupted at once.

For the same reason another thread, which may close a loader while one waits in it, finds no such piece half done.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

# CPython's own functions, where there are such: those of `signal` turn numbers into enum members and back, which takes
# ten times as long, and a batch is not to wait for that.
_fast: Any = sys.modules.get("_signal", signal)
_get_handler: Callable[[int], Any] = _fast.getsignal
_set_handler: Callable[[int, Any], Any] = _fast.signal
_SIGINT = int(signal.SIGINT)
_get_ident = threading.get_ident


class Undisturbed:
    """A context manager for short pieces of code, one thread at a time. Only the main thread has interrupts that
    could disturb it.
    """

    __slots__ = ("_came", "_handler", "_lock", "_mains")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._mains: list[bool] = []
        """Of each piece under way, the innermost last, whether it has put the interrupts off."""
        self._handler: Any = None
        self._came: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        handler = _get_handler(_SIGINT)
        main = (
            callable(handler) and handler != self._note and _get_ident() == threading.main_thread().ident
        )  # a handler of another signal may come in between, and have a piece of its own
        if main:
            self._handler, self._came = handler, None
            _set_handler(_SIGINT, self._note)
        self._lock.acquire()
        self._mains.append(main)

    def __exit__(self, *_: object) -> None:
        main = self._mains.pop()
        self._lock.release()
        if not main:
            return
        handler, self._handler = self._handler, None
        _set_handler(_SIGINT, handler)
        if self._came is not None:
            came, self._came = self._came, None
            handler(*came)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = (number, frame)
