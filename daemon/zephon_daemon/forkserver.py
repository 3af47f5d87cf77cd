"""A fork server: one small, single-threaded process that has the libraries loaded and forks engines and workers.

`ForkServer` is its owner's side, `serve` the process itself.

- A child costs a fork, not an import: milliseconds, and its libraries share memory with its siblings'.
- It never sees its owner's `__main__`, threads, locks or open files: only the descriptors 0 to 2 and its own channel.
- A child runs `target(fd, *args)`, in a session of its own (a terminal's Ctrl-C does not reach it), with SIGINT ignored
  and its standard output on stderr. It is of the scheduler's batch kind.
- How each child ended is reported. Whatever processes a child's session left behind are killed with it.
- Nothing survives: when the owner ends, however it ends, the server kills its children, reaps them and leaves; when the
  server is killed, the kernel kills its children.

multiprocessing's fork server was rejected: it imports the user's `__main__` again, and does not say how a child ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import random
import select
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

from zephon.errors import DaemonUnavailable, ProtocolError, RunFailed
from zephon.transport.channels import Channel, close_all, pair
from zephon.transport.messages import decode, encode, message
from zephon_daemon.bootstrap import command
from zephon_daemon.lifelines import die_with, watch
from zephon_daemon.pages import KEEP

QUIET = {
    "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "FASTOKENS_BPE_THREADS": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip
"""Environment of the server: libraries start no threads of their own; parallelism comes from workers."""

PRELOAD = (
    "numpy",
    "pyarrow",
    "pyarrow.parquet",
    "tokenizers",
    "fastokens",
    "setproctitle",
    "zephon.pipeline",
    "zephon.windows",
    "zephon_daemon.engine",
    "zephon_daemon.worker",
)
"""Loaded before the first fork. What is missing or broken is left to the child that needs it, with its error."""

END_SECONDS = 3.0
"""How long children have for their own end after SIGTERM."""

_START_SECONDS = 60.0

_log = logging.getLogger("zephon.forkserver")


@message("fork")
@dataclass(frozen=True, slots=True)
class _Fork:
    target: str
    args: list[Any]
    title: str
    path: list[str]


@message("forked")
@dataclass(frozen=True, slots=True)
class _Forked:
    pid: int


@message("fork_failed")
@dataclass(frozen=True, slots=True)
class _ForkFailed:
    text: str


@message("signal_child")
@dataclass(frozen=True, slots=True)
class _SignalChild:
    """Only the server knows for sure that a number still names its child: it alone reaps them."""

    pid: int
    number: int


@message("stop")
@dataclass(frozen=True, slots=True)
class _Stop:
    seconds: float


@message("child_ended")
@dataclass(frozen=True, slots=True)
class _ChildEnded:
    pid: int
    code: int


class ForkServer:
    """The owner's side. Used by one thread. Children find modules wherever the owner does, and then in `path`."""

    def __init__(self, *, title: str = "zephon forkserver", path: Sequence[str] = ()) -> None:
        self._title, self._path = title, [os.path.abspath(folder) for folder in (*sys.path, *path)]
        self._channel: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: list[tuple[int, int]] = []
        self._asked_to_end = False
        self.children: set[int] = set()
        """Children whose end has not been reported."""

    def start(self) -> None:
        """Starts the server. It loads its libraries while this process goes on."""
        assert self._process is None
        mine, its = pair()
        environment = {**KEEP, **os.environ, **QUIET}
        environment.pop("NOTIFY_SOCKET", None)
        number = its.fileno()
        try:
            self._process = subprocess.Popen(
                command("zephon_daemon.forkserver:serve", str(number), str(os.getpid()), self._title),
                pass_fds=(number,),
                stdin=subprocess.DEVNULL,
                stdout=_stderr(),
                env=environment,
                start_new_session=True,
            )
        finally:
            its.close()
        self._channel = mine

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the server still serves. Where it does not, its children are dead or dying."""
        return self._channel is not None and not self._channel.closed

    def fileno(self) -> int:
        """For a selector: readable when a child has ended or the server has."""
        assert self._channel is not None
        return self._channel.fileno()

    def spawn(self, target: str, args: Sequence[Any] = (), channel: Channel | None = None, *, title: str = "") -> int:
        """Forks a child that calls `target`, "module:function", as `target(fd, *args)`; returns its process id.

        `args` are plain data. `fd` is the child's copy of `channel`, which stays the caller's (-1 without one).
        """
        fds = () if channel is None else (channel.fileno(),)
        self._send(_Fork(target, list(args), title or target, self._path), fds)
        answer = self._answer()
        if isinstance(answer, _ForkFailed):
            raise RunFailed(f"the fork server cannot start a process: {answer.text}")
        self.children.add(answer.pid)
        return answer.pid

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a child; nothing happens if it has ended."""
        if self.alive:
            self._send(_SignalChild(pid, number))

    def exits(self) -> list[tuple[int, int]]:
        """Children that have ended since the last call, each with its exit code or minus its signal's number.

        Once the server is dead, all that were left are given, as killed by SIGKILL: so the kernel ends them.
        """
        if self._channel is not None:
            self._read()
        if not self.alive and self.children:
            self._ended += [(pid, -signal.SIGKILL) for pid in sorted(self.children)]
            self.children.clear()
        ended, self._ended = self._ended, []
        return ended

    def ask_to_end(self, seconds: float = END_SECONDS) -> None:
        """As `close`, but without waiting for it."""
        if self._channel is not None and self.alive and not self._asked_to_end:
            self._asked_to_end = True
            self._channel.send(encode(_Stop(seconds)))

    def close(self, seconds: float = END_SECONDS) -> None:
        """Ends all children, by SIGTERM and after `seconds` by SIGKILL, then the server, and waits for it."""
        if self._process is None or self._channel is None:
            return
        self.ask_to_end(seconds)
        deadline = time.monotonic() + seconds + 5.0
        with contextlib.suppress(subprocess.TimeoutExpired):
            while self.alive and (left := deadline - time.monotonic()) > 0:
                if _readable(self._channel, left):
                    self._read()
            self._process.wait(1.0)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._channel.close()
        self._channel = self._process = None
        self.children.clear()

    def ended(self, seconds: float = 0.0) -> int | None:
        """How the server process ended (see `exits`), waiting for it a while; None while it runs."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode

    def _send(self, value: object, fds: Sequence[int] = ()) -> None:
        assert self._channel is not None
        if not self._channel.send(encode(value), fds):
            raise DaemonUnavailable(f"the fork server (process {self.pid}) has died")

    def _answer(self) -> _Forked | _ForkFailed:
        assert self._channel is not None
        deadline = time.monotonic() + _START_SECONDS
        while True:
            for found in self._read():
                if isinstance(found, (_Forked, _ForkFailed)):
                    return found
            if not self.alive:
                raise DaemonUnavailable(f"the fork server (process {self.pid}) has died")
            if (left := deadline - time.monotonic()) <= 0:
                raise DaemonUnavailable(f"the fork server (process {self.pid}) did not answer in {_START_SECONDS:g} s")
            _readable(self._channel, left)

    def _read(self) -> list[Any]:
        """What the server says; ends of children are noted on the way."""
        assert self._channel is not None
        self._channel.flush()
        found: list[Any] = []
        try:
            for data, fds in self._channel.receive():
                close_all(fds)
                found.append(decode(data, expect=(_Forked, _ForkFailed, _ChildEnded)))
        except ProtocolError as error:  # it counts as dead, and without its owner it ends
            _log.error("the fork server (process %s) is given up: %s", self.pid, error)
            self._channel.close()
        for each in found:
            if isinstance(each, _ChildEnded):
                self.children.discard(each.pid)
                self._ended.append((each.pid, each.code))
        return found


def serve() -> int:
    """The process itself; its arguments are its channel, its owner's process id, and its title."""
    number, owner, title = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    server = _Server(Channel.from_fd(number), owner)
    _set_title(title)
    server.run()
    return 0


class _Server:
    def __init__(self, channel: Channel, owner: int) -> None:
        self._channel = channel
        self._owner = watch(owner) if os.getppid() == owner else None
        self._orphan = os.getppid() != owner
        self._children: set[int] = set()
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        _preload()
        # What is loaded now is never collected, so that no child's collector touches, and thereby copies, its pages.
        gc.collect()
        gc.freeze()
        seconds = 0.0
        for given, fds in self._requests():
            if isinstance(given, _Stop):
                seconds = given.seconds
                break
            if isinstance(given, _SignalChild):
                if given.pid in self._children and given.number in signal.valid_signals():
                    os.kill(given.pid, given.number)
            else:
                self._fork(given, fds)
        self._end_children(seconds)

    def _requests(self) -> Iterator[tuple[Any, list[int]]]:
        """What the owner asks for, until it is gone; children that end are reaped meanwhile."""
        poller = select.poll()
        for fd in (self._channel.fileno(), self._wake, self._owner):
            if fd is not None:
                poller.register(fd, select.POLLIN)
        while not self._orphan:
            self._reap()
            for data, fds in self._channel.receive():
                try:
                    yield decode(data, expect=(_Fork, _SignalChild, _Stop)), fds
                except ProtocolError as error:
                    _log.error("%s", error)
                finally:
                    close_all(fds)
            if self._channel.closed:
                return
            self._channel.flush()
            ready = [fd for fd, _ in poller.poll(100 if self._channel.wants_write else None)]
            if self._owner in ready:
                return
            _drain(self._wake)

    def _fork(self, given: _Fork, fds: list[int]) -> None:
        server = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            with warnings.catch_warnings():
                # Python warns of any second thread; the only one here is the allocator's, which is ready for a fork.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError as error:
            self._channel.send(encode(_ForkFailed(f"{error.strerror}; is the limit of processes reached (ulimit -u)?")))
        else:
            if pid == 0:
                _child(given, fds[0] if fds else -1, server)
            self._children.add(pid)
            self._channel.send(encode(_Forked(pid)))

    def _reap(self) -> None:
        while self._children:
            # Looked at first and taken away second, so that its number cannot name another group meanwhile.
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None:
                return
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(found.si_pid, signal.SIGKILL)
            _, status = os.waitpid(found.si_pid, 0)
            self._children.discard(found.si_pid)
            self._channel.send(encode(_ChildEnded(found.si_pid, os.waitstatus_to_exitcode(status))))

    def _end_children(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for pid in self._children:
            os.kill(pid, signal.SIGTERM if seconds > 0 else signal.SIGKILL)
        self._reap()
        while self._children and (left := deadline - time.monotonic()) > 0:
            select.select([self._wake], [], [], left)
            _drain(self._wake)
            self._reap()
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        while self._children:
            select.select([self._wake], [], [], 1.0)
            _drain(self._wake)
            self._reap()


def _child(given: _Fork, fd: int, server: int) -> NoReturn:
    """The rest of a child's life. Nothing of the server's loop may run after it."""
    code = 1
    try:
        _become(given, fd, server)
        module, _, function = given.target.partition(":")
        result = getattr(import_module(module), function)(fd, *given.args)
        code = result if isinstance(result, int) else 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)


def _become(given: _Fork, fd: int, server: int) -> None:
    os.setsid()
    if not die_with(server, signal.SIGKILL):
        os._exit(1)
    with contextlib.suppress(OSError):  # waking up, it takes no core from a trainer that runs there
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    if fd < 0:
        os.closerange(3, _descriptor_limit())
    else:
        os.closerange(3, fd)
        os.closerange(fd + 1, _descriptor_limit())
    _set_title(given.title)
    faulthandler.enable()
    gc.enable()
    # Python's own generator seeds itself after a fork; numpy's would give every worker the same numbers.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(random.SystemRandom().getrandbits(32))
    if "pyarrow" in sys.modules:
        sys.modules["pyarrow"].set_cpu_count(1)
    sys.path += [folder for folder in given.path if folder not in sys.path]
    sys.argv = [given.title]


def _preload() -> None:
    for name in PRELOAD:
        try:
            import_module(name)
        except Exception as error:  # The child that needs it raises the same, where somebody looks for it.
            _log.debug("preload of %s: %s", name, error)


def _set_title(title: str) -> None:
    with contextlib.suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(title)


def _stderr() -> int | None:
    """The real standard error, also where a test or notebook has put another object in its place."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2


def _descriptor_limit() -> int:
    return max((int(name) for name in os.listdir("/proc/self/fd")), default=2) + 1


def _readable(channel: Channel, seconds: float) -> bool:
    writers = [channel] if channel.wants_write else []
    return bool(select.select([channel], writers, [], max(0.0, seconds))[0])


def _drain(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(fd, 512):
            pass
