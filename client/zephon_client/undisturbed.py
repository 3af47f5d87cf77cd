"""Ctrl-C waits while bookkeeping is half done.

A KeyboardInterrupt may arise between any two steps of Python code. Between taking a descriptor off a connection and
noting it, it would lose a batch for good. So such pieces run `with undisturbed:`; a Ctrl-C that comes meanwhile is
passed to its handler right after. Waiting itself stays outside, and is interrupted at once.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Undisturbed:
    """A context manager for short pieces of code; not to be nested. Does nothing outside the main thread."""

    __slots__ = ("_came", "_handler")

    def __init__(self) -> None:
        self._handler: Any = None
        self._came: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and threading.get_ident() == threading.main_thread().ident:
            self._handler, self._came = handler, None
            signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        handler = self._handler
        if handler is None:
            return
        self._handler = None
        signal.signal(signal.SIGINT, handler)
        if self._came is not None:
            came, self._came = self._came, None
            handler(*came)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = (number, frame)
