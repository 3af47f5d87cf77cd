"""Ctrl-C waits while bookkeeping is half done.

A KeyboardInterrupt may arise between any two steps of Python code. Between taking a descriptor off a connection and
noting it, it would lose a batch for good. So such pieces run `with undisturbed:`; a Ctrl-C that comes meanwhile is
passed to its handler right after. Waiting itself stays outside, and is interrupted at once.
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


class Undisturbed:
    """A context manager for short pieces of code; not to be nested. Does nothing outside the main thread."""

    __slots__ = ("_came", "_handler")

    def __init__(self) -> None:
        self._handler: Any = None
        self._came: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        handler = _get_handler(_SIGINT)
        if callable(handler) and threading.get_ident() == threading.main_thread().ident:
            self._handler, self._came = handler, None
            _set_handler(_SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        handler = self._handler
        if handler is None:
            return
        self._handler = None
        _set_handler(_SIGINT, handler)
        if self._came is not None:
            came, self._came = self._came, None
            handler(*came)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = (number, frame)
