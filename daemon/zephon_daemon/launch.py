"""`zephon launch`: a daemon for one command, for exactly as long as that command runs.

- The command runs in the foreground, in this process group, so that terminal and job control see what they expect.
  Signals that came from the terminal have reached it already; those sent to the launcher alone are passed on.
- The daemon has a session of its own, so that Ctrl-C does not reach it before the command has ended. If it dies it is
  started again.
- If the launcher is killed, the kernel ends the command, and the daemon, which watches the launcher, ends the command's
  ranks and itself.

Signals are waited for, not handled: so their origin is known, and nothing has to be looked at again and again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from zephon.transport.channels import answers
from zephon.transport.endpoints import control_path, data_path
from zephon_daemon.bootstrap import command as python_command
from zephon_daemon.daemon import CANNOT_START, INTERRUPTED, CannotStart
from zephon_daemon.lifelines import describe_end, die_with

PASSED_ON = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip
QUICK_SECONDS = 5.0
"""A daemon that lived shorter than that is started again after a pause, which grows."""

STARTS = 6
"""Daemons in a row that may end so quickly, before they were ready."""

END_SECONDS = 12.0
"""How long the daemon has for its end."""

_WAITED_FOR = {*PASSED_ON, signal.SIGCHLD}
_FROM_KERNEL = 0x80  # si_code of a signal that a terminal sent
_LOOK_SECONDS = 0.05

_log = logging.getLogger("zephon.launch")


def launch(recipe: str, options: Sequence[str], arguments: Sequence[str]) -> int:
    """Run a command beside a daemon of `recipe`. `options` are the daemon's. Returns the command's exit status."""
    if shutil.which(arguments[0]) is None:
        raise CannotStart(f"the command {arguments[0]} is not found")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    launched = _Launch(recipe, options, mask)
    try:
        return launched.run(arguments)
    finally:
        launched.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class _Launch:
    def __init__(self, recipe: str, options: Sequence[str], mask: set[int]) -> None:
        self._recipe, self._options, self._mask = recipe, list(options), mask
        self._socket = control_path(f"launch-{os.getpid()}-{secrets.token_hex(4)}")
        self._daemon: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._quick_ends = 0
        self._start_at: float | None = None
        self._interrupts = 0

    def run(self, arguments: Sequence[str]) -> int:
        self._start_daemon()
        status = self._until_ready()
        if status is not None:
            return status
        command = subprocess.Popen(
            list(arguments),
            env={**os.environ, "ZEPHON_SOCKET": self._socket},
            preexec_fn=self._before_command(os.getpid()),  # noqa: PLW1509  this process has one thread
        )
        while (code := command.poll()) is None:
            self._keep_daemon()
            timeout = None if self._start_at is None else max(0.0, self._start_at - time.monotonic())
            self._pass_on(_next_signal(timeout), command)
        if code and self._interrupts:
            return INTERRUPTED
        return code if code >= 0 else 128 - code

    def close(self) -> None:
        """End the daemon and leave nothing behind."""
        if self._daemon is None:
            return
        if self._daemon.poll() is None:
            self._daemon.send_signal(signal.SIGINT if self._interrupts > 1 else signal.SIGTERM)
        deadline = time.monotonic() + END_SECONDS
        while self._daemon.poll() is None and (left := deadline - time.monotonic()) > 0:
            found = _next_signal(left)
            if found is not None and found.si_signo == signal.SIGINT and self._daemon.poll() is None:
                self._daemon.send_signal(signal.SIGINT)
        if self._daemon.poll() is None:
            self._daemon.kill()
        self._daemon.wait()
        self._close_pipe()
        for path, kind in ((self._socket, socket.SOCK_STREAM), (data_path(self._socket), socket.SOCK_SEQPACKET)):
            if os.path.exists(path) and not answers(path, kind):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)

    def _start_daemon(self) -> None:
        self._close_pipe()
        self._start_at, self._started = None, time.monotonic()
        self._daemon = subprocess.Popen(
            python_command(
                "zephon_daemon.cli:main", "daemon", self._recipe, *self._options,
                "--socket", self._socket, "--parent", str(os.getpid()),
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"},
            start_new_session=True,
            preexec_fn=self._unblock,  # noqa: PLW1509  this process has one thread
        )  # fmt: skip

    def _until_ready(self) -> int | None:
        """Waits for the daemon's ready line. An exit status where it cannot start, or a signal says not to wait."""
        assert self._daemon is not None
        assert self._daemon.stdout is not None
        while True:
            if select.select([self._daemon.stdout], [], [], _LOOK_SECONDS)[0]:
                if os.read(self._daemon.stdout.fileno(), 4096):
                    return None
                code = self._daemon.wait()
                if code != CANNOT_START:  # which comes with its reason
                    print(f"zephon launch: the daemon ended before it was ready: {describe_end(code)}", file=sys.stderr)
                return CANNOT_START
            found = _next_signal(0)
            if found is not None and found.si_signo in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                return 128 + found.si_signo

    def _keep_daemon(self) -> None:
        """Start the daemon again if it has died."""
        now = time.monotonic()
        if self._start_at is not None and self._start_at <= now:
            self._start_daemon()
        assert self._daemon is not None
        code = self._daemon.poll()
        if code is None or self._start_at is not None or self._quick_ends >= STARTS:
            return
        quick = now - self._started < QUICK_SECONDS
        self._quick_ends = self._quick_ends + 1 if quick and not self._was_ready() else 0
        if self._quick_ends >= STARTS:
            _log.error("the daemon ended %d times in a row (%s), it is not started again", STARTS, describe_end(code))
            return
        _log.warning("the daemon ended: %s. It is started again", describe_end(code))
        self._start_at = now + (0.25 * 2**self._quick_ends if self._quick_ends else 0.0)

    def _was_ready(self) -> bool:
        """Whether the daemon that has ended had said that it was ready."""
        assert self._daemon is not None
        assert self._daemon.stdout is not None
        if not select.select([self._daemon.stdout], [], [], 0)[0]:
            return False
        return bool(os.read(self._daemon.stdout.fileno(), 4096))

    def _pass_on(self, found: signal.struct_siginfo | None, command: subprocess.Popen[bytes]) -> None:
        if found is None or found.si_signo == signal.SIGCHLD or command.poll() is not None:
            return
        if found.si_signo == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts == 1:
                print("zephon launch: interrupted; once more to force the end", file=sys.stderr)
            else:
                command.kill()
                return
        if found.si_code != _FROM_KERNEL:
            command.send_signal(found.si_signo)

    def _before_command(self, launcher: int) -> Callable[[], None]:
        def prepare() -> None:
            if not die_with(launcher, signal.SIGTERM):
                os._exit(1)
            self._unblock()

        return prepare

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _close_pipe(self) -> None:
        if self._daemon is not None and self._daemon.stdout is not None:
            self._daemon.stdout.close()


def _next_signal(timeout: float | None) -> signal.struct_siginfo | None:
    if timeout is None:
        return signal.sigwaitinfo(_WAITED_FOR)
    return signal.sigtimedwait(_WAITED_FOR, timeout)
