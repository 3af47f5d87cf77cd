"""A channel: one non-blocking Unix SEQPACKET connection that carries descriptors and file descriptors.

The kernel keeps message boundaries and order, and orders memory: what a peer wrote into a segment before it sent the
descriptor can be read once the descriptor has arrived.

- `send` never blocks: what the kernel does not take waits in an outbox, in order, and `flush` goes on when the
  event loop finds the socket writable (`wants_write`).
- File descriptors stay the sender's own (they are duplicated if the message has to wait); received ones belong to
  the receiver, are close-on-exec, and come with the message that named them.
- `closed` turns true when the peer has closed or died. `receive` still gives what it had sent before that.
- A message that is too large or was cut is a ProtocolError, and the channel is closed; no descriptor leaks.
- An empty message does not exist: on SEQPACKET a read of nothing is the end.

A child forked by a peer may hold the connection open; who must know of a death at once also watches a pidfd.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import struct
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from zephon.errors import DaemonUnavailable, ProtocolError, SettingError

MAX_DESCRIPTOR = 64 * 1024
"""Bytes of the largest message."""

MAX_FDS = 32
"""File descriptors that one message may carry."""

MAX_PATH = 107
"""Bytes of the longest path that a Unix socket address holds."""

_FDS_SPACE = socket.CMSG_LEN(MAX_FDS * array("i").itemsize)
_BUFFER = 8 * MAX_DESCRIPTOR
_BACKLOG = 128
_FULL = (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS)
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN)
# Plain numbers: joining the members of an enum takes longer than the system call.
_READ_FLAGS = int(socket.MSG_DONTWAIT) | int(socket.MSG_CMSG_CLOEXEC)
_CUT = int(socket.MSG_TRUNC) | int(socket.MSG_CTRUNC)
_WRITE_FLAGS = int(socket.MSG_DONTWAIT) | int(socket.MSG_NOSIGNAL)
_RETRY_SECONDS = 0.02
_LOCK_SECONDS = 10.0


class Peer(NamedTuple):
    """Who was at the other end when the connection was made."""

    pid: int
    uid: int
    gid: int


class Channel:
    """One end of a connection. Used by one thread."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._socket = connection
        self._outbox: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._at_end = False
        self._closed = False

    @classmethod
    def from_fd(cls, fd: int) -> Channel:
        """Takes over a connected socket inherited or received as a descriptor."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        """For a selector; -1 after `close`."""
        return self._socket.fileno()

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more: the peer is gone, or `close` was called."""
        return self._closed

    @property
    def wants_write(self) -> bool:
        """Whether messages wait for the socket to become writable."""
        return bool(self._outbox)

    @property
    def waiting(self) -> int:
        """Messages in the outbox."""
        return len(self._outbox)

    def send(self, payload: bytes, fds: Sequence[int] = ()) -> bool:
        """Sends or queues one message; False, and nothing is sent, when the channel is closed.

        `fds` stay the caller's, which may close them right after.
        """
        if not payload:
            raise ProtocolError("an empty message cannot be sent: its receiver would take it for the end")
        if len(payload) > MAX_DESCRIPTOR or len(fds) > MAX_FDS:
            raise ProtocolError(
                f"a message of {len(payload)} bytes and {len(fds)} file descriptors is too large: at most "
                f"{MAX_DESCRIPTOR} and {MAX_FDS}. Payloads belong into a segment."
            )
        if self._closed:
            return False
        if self._outbox or not self._transmit(payload, fds):
            if self.closed:
                return False
            self._outbox.append((payload, _duplicate(fds)))
        return True

    def flush(self) -> None:
        """Sends what waits, as far as the kernel takes it."""
        while self._outbox and self._transmit(*self._outbox[0]):
            close_all(self._outbox.popleft()[1])

    def receive(self, limit: int = 64) -> list[tuple[bytes, list[int]]]:
        """What has arrived, up to `limit` messages, each with its file descriptors; empty when nothing has.

        After the last message of a peer that is gone, `closed` is true. With `limit` messages returned there may be
        more.
        """
        messages: list[tuple[bytes, list[int]]] = []
        while len(messages) < limit and not self._at_end:
            try:
                payload, fds, flags = self._read()
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    break
                if error.errno == errno.ECONNRESET:
                    # The peer died with our messages unread. Said once; its own messages still follow, then the end.
                    self._lose_peer()
                    continue
                if error.errno not in _GONE:
                    raise
                payload, fds, flags = b"", [], 0
            if flags & _CUT:
                close_all(fds)
                for _, earlier in messages:
                    close_all(earlier)
                self.close()
                raise ProtocolError(
                    f"a message came in cut short: its sender exceeded {MAX_DESCRIPTOR} bytes or {MAX_FDS} file "
                    "descriptors, or this process has no file descriptor left (see `ulimit -n`)"
                )
            if not payload:
                close_all(fds)
                self._at_end = True
                self._lose_peer()
                break
            messages.append((payload, fds))
        return messages

    def peer(self) -> Peer:
        """Process, user and group that made the other end."""
        size = struct.calcsize("3i")
        return Peer(*struct.unpack("3i", self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)))

    def interrupt(self) -> None:
        """Ends the connection in the kernel, so that whoever waits for it wakes up. Any thread may call it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection; what waits in the outbox is dropped. May be called again."""
        self._lose_peer()
        self._at_end = True
        self._socket.close()

    def _lose_peer(self) -> None:
        self._closed = True
        while self._outbox:
            close_all(self._outbox.popleft()[1])

    def _read(self) -> tuple[bytes, list[int], int]:
        # Not socket.recv_fds and send_fds: before Python 3.12 they drop the flags they are given.
        payload, ancillary, flags, _ = self._socket.recvmsg(MAX_DESCRIPTOR, _FDS_SPACE, _READ_FLAGS)
        fds = array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        return payload, fds.tolist(), flags

    def _transmit(self, payload: bytes, fds: Sequence[int]) -> bool:
        try:
            if fds:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))
                self._socket.sendmsg([payload], [rights], _WRITE_FLAGS)
            else:
                self._socket.send(payload, _WRITE_FLAGS)
        except OSError as error:
            if error.errno in _FULL:
                return False
            if error.errno not in _GONE:
                raise
            self._lose_peer()
            return False
        return True


class Listener:
    """A server socket at a path, mode 0600. `close` removes the file, if it is still its own.

    A connection of another user, who got past the mode somehow, is closed unheard; root's is not. Where this process
    has no descriptor left, connections are turned away rather than left to wake it for ever.
    """

    def __init__(self, path: str, server: socket.socket) -> None:
        self.path = path
        self._socket = server
        self._file = _identity(path)
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> Channel | None:
        """The next connection that waits, or None."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return None
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._turn_away():
                    raise
                continue
            channel = Channel(connection)
            if channel.peer().uid in (os.geteuid(), 0):
                return channel
            channel.close()

    def _turn_away(self) -> bool:
        """Closes the connection that waits, with the descriptor that was kept for that; False where there is none."""
        if self._spare < 0:
            return False
        os.close(self._spare)
        self._spare = -1
        with suppress(BlockingIOError):
            self._socket.accept()[0].close()
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        return True

    def close(self) -> None:
        self._socket.close()
        spare, self._spare = self._spare, -1
        if spare >= 0:
            os.close(spare)
        if self._file is not None and _identity(self.path) == self._file:
            os.unlink(self.path)
        self._file = None


def pair() -> tuple[Channel, Channel]:
    """Two connected ends, one of them usually for a child (`Channel.from_fd`)."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(left), Channel(right)


def listen(path: str) -> Listener:
    """A server at `path`, reachable by this user only.

    Replaces the socket file of a dead server; raises SettingError where a live one answers, or for any other file.
    """
    _check_length(path)
    with _locked(os.path.dirname(path) or "."):
        _remove_dead(path)
        server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            server.setblocking(False)
            # The kernel makes the file with the mode of the socket: there is no moment in which others may connect.
            os.fchmod(server.fileno(), 0o600)
            server.bind(path)
            server.listen(_BACKLOG)
            return Listener(path, server)
        except BaseException:
            server.close()
            raise


def connect(path: str, timeout: float) -> Channel:
    """Connects to the server at `path`, waiting up to `timeout` seconds for one; else DaemonUnavailable."""
    _check_length(path)
    deadline = time.monotonic() + timeout
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        try:
            connection.connect(path)
            return Channel(connection)
        except OSError as error:
            connection.close()
            passing = error.errno in (errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN)
            if not passing or time.monotonic() >= deadline:
                raise DaemonUnavailable(
                    f"no daemon answers on {path} ({error.strerror}), waited {timeout:g} s. Start one with "
                    "`zephon daemon` or `zephon launch`, or name its socket (argument `socket`, or ZEPHON_SOCKET)."
                ) from error
        time.sleep(min(_RETRY_SECONDS, max(0.0, deadline - time.monotonic())))


def answers(path: str, kind: int = socket.SOCK_SEQPACKET) -> bool:
    """Whether a live server holds the socket file at `path`."""
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except OSError as error:
            # A full backlog, another type of socket or one we may not open: somebody's in any case.
            return error.errno not in (errno.ENOENT, errno.ECONNREFUSED)
    return True


def _remove_dead(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SettingError(f"{path} exists and is no socket. Remove it, or choose another path for the socket.")
    if answers(path):
        raise SettingError(f"a live process already serves {path}. Stop it, or choose another path for the socket.")
    os.unlink(path)


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Keeps two servers that start at once from removing each other's socket. Leaves no file."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise SettingError(
                        f"another process has locked the folder {folder} for {_LOCK_SECONDS:g} s. "
                        "Choose a folder of your own for the socket."
                    ) from error
            time.sleep(_RETRY_SECONDS)
        yield
    finally:
        os.close(handle)


def _check_length(path: str) -> None:
    size = len(os.fsencode(path))
    if size > MAX_PATH:
        raise SettingError(
            f"the socket path has {size} bytes, more than the {MAX_PATH} that the system allows: {path}. "
            "zephon.transport.endpoints.control_path gives a short one."
        )


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _duplicate(fds: Sequence[int]) -> tuple[int, ...]:
    copies: list[int] = []
    try:
        for fd in fds:
            copies.append(os.dup(fd))
    except OSError:
        close_all(copies)
        raise
    return tuple(copies)


def close_all(fds: Sequence[int]) -> None:
    """Closes descriptors that came with a message and that nobody wants."""
    for fd in fds:
        os.close(fd)
