"""A client's two connections to the daemon, opened and closed together: hello, the data connection, goodbye.

They end when the daemon or its engine does. A client that comes back opens new ones, and says who it was; its nonce
says so too, where the answer that names it was lost. So it does for a `connect` that was interrupted: the daemon may
have let it in, and the next one of this process takes its place (`nonce_for`).

`end` is also what happens when a Loader is dropped or the interpreter ends: it is quiet, waits for nobody beyond a
fraction of a second, and does nothing in a forked child, whose copies of the sockets are not the rank's.
"""

from __future__ import annotations

import contextlib
import os

from zephon.errors import ZephonError
from zephon.transport.endpoints import data_path
from zephon.transport.protocol import Farewell, Goodbye, Hello, Join, Welcome
from zephon_client.control import Control
from zephon_client.feed import Feed
from zephon_client.settings import Settings
from zephon_client.undisturbed import Undisturbed

_FAREWELL_SECONDS = 0.6

_left: dict[tuple[int, str, str, int], bytes] = {}
"""Nonces of hellos whose `connect` did not come to its end."""


def nonce_for(path: str, settings: Settings) -> bytes:
    """A new reader's nonce: that of one before it in this process which has no loader, or of its own."""
    return _left.pop(_reader(path, settings), b"") or os.urandom(16)


def leave(path: str, settings: Settings, nonce: bytes) -> None:
    """No loader came of that hello."""
    _left[_reader(path, settings)] = nonce


def _reader(path: str, settings: Settings) -> tuple[int, str, str, int]:
    return os.getpid(), path, settings.pipeline, settings.dp_group_id


class Connection:
    """Opened by its constructor. Raises DaemonUnavailable, or what the daemon refuses the hello with."""

    def __init__(
        self,
        path: str,
        settings: Settings,
        start_seconds: float,
        nonce: bytes,
        undisturbed: Undisturbed,
        before: Welcome | None = None,
    ) -> None:
        self._pid = os.getpid()
        self.ended = False
        self.control = Control(path, start_seconds, undisturbed)
        try:
            self.welcome = self.control.request(_hello(settings, nonce, before), Welcome, settings.timeout)
            join = Join(self.welcome.token, self.welcome.client)
            writable, seconds = settings.group_readers == 1, max(start_seconds, 0.1)
            self.feed = Feed(data_path(path), join, undisturbed, writable=writable, start_seconds=seconds)
        except BaseException:
            self.control.close()
            raise

    @property
    def lost(self) -> bool:
        """Whether the daemon or its engine has gone."""
        return self.feed.closed or self.control.lost

    def close(self) -> None:
        """Says goodbye, hears the daemon out for a moment, and ends. Whoever was interrupted in here calls it again."""
        if not self.ended and not self.control.lost and os.getpid() == self._pid:
            with contextlib.suppress(ZephonError):
                watched = None if self.feed.closed else self.feed
                self.control.request(self._goodbye(), Farewell, _FAREWELL_SECONDS, watched)
                self.ended = True
        self.end()

    def abandon(self) -> None:
        """Ends what is left of both connections without a word: the client comes back over new ones."""
        self.ended = True
        self.end()

    def end(self) -> None:
        """Ends both connections without waiting for an answer. May be called again."""
        if os.getpid() != self._pid:
            return
        if not self.ended and not self.control.lost:
            self.control.tell(self._goodbye())
        self.ended = True
        self.control.close()
        self.feed.close()

    def _goodbye(self) -> Goodbye:
        return Goodbye(self.welcome.token, self.welcome.client)


def _hello(settings: Settings, nonce: bytes, before: Welcome | None) -> Hello:
    return Hello(
        pid=os.getpid(),
        dp_degree=settings.dp_degree,
        dp_group_id=settings.dp_group_id,
        group_readers=settings.group_readers,
        pipeline=settings.pipeline,
        job=settings.job,
        batches_per_step=settings.batches_per_step,
        timeout=settings.timeout,
        client=before.client if before is not None else -1,
        token=before.token if before is not None else b"",
        nonce=nonce,
    )
