"""The daemon process: the shell around `sessions.Sessions` and `supervision.Supervision`.

One thread, one loop over the control socket (requests), the data socket (connections of clients, passed on to the
engine once they are attached), the engine's channel, the fork server (ends of processes), a pidfd for each client, and
signals.
It never runs user code and never waits for one peer while others ask.

Both sockets belong together: who holds the data socket, which only one process can, may replace a dead control socket.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import zmq

from zephon.budget import Budget
from zephon.errors import ProtocolError, SettingError, ZephonError
from zephon.recipe import split_name
from zephon.transport import protocol as p
from zephon.transport.channels import Channel, Listener, close_all, listen
from zephon.transport.endpoints import announce, data_path, withdraw
from zephon.transport.large import decode_large
from zephon.transport.messages import MAX_MESSAGE, decode, encode
from zephon_daemon.asked import LONGEST_TEXT
from zephon_daemon.black_box import BlackBox
from zephon_daemon.engine_watch import EngineWatch
from zephon_daemon.forkserver import END_SECONDS
from zephon_daemon.lifelines import watch
from zephon_daemon.orders import Answer, Forget, HandOver, HangUp, Instruction, Start, ToEngine
from zephon_daemon.progress import Rates, memory_of
from zephon_daemon.sessions import Sessions
from zephon_daemon.stacks import Stack, state_of
from zephon_daemon.supervision import CannotGoOn, Supervision, Targets
from zephon_daemon.surroundings import check_free, memory_of_text, notify, supervisor, who_serves
from zephon_daemon.watchdog import Patience

FROM_ENGINE = (p.EngineReady, p.WorkerServes, p.RunStarted, p.RunRefused, p.ReaderGone, p.EngineReport)

JOIN_SECONDS = 10.0
"""A data connection that has not said whose it is by then is closed."""

MOST_JOINING = 256
"""Data connections that have not said whose they are yet; further ones are closed at once."""

MOST_REPORTS = 64
"""Requests for progress that wait for the engine's part; further ones are answered without it."""

REPORT_SECONDS = 2.0
"""How long a request for progress waits for the engine's part."""

DONE, FAILED, CANNOT_START, INTERRUPTED = 0, 1, 3, 130

_TICK_SECONDS = 0.5

_log = logging.getLogger("zephon.daemon")


@dataclass(frozen=True)
class Settings:
    """How a daemon is started. `parent`: a process with which it leaves, and the clients with it."""

    recipe: str
    socket: str
    workers: int
    memory: int | None = None
    parent: int | None = None
    targets: Targets = field(default_factory=Targets)
    patience: Patience = field(default_factory=Patience)


class CannotStart(ZephonError):
    """The daemon cannot start; the text is the one-line reason."""


class _End(Exception):
    """Leaves the loop with an exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def serve(settings: Settings) -> int:
    """Run a daemon until it is told to end. Returns its exit code; raises `CannotStart`."""
    daemon = Daemon(settings)
    try:
        daemon.open()
        return daemon.run()
    finally:
        daemon.close()


class Daemon:
    """The loop and all that it watches."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        path, name = split_name(settings.recipe)
        self._recipe = os.path.abspath(os.path.expanduser(path)) + ("" if path == settings.recipe else f":{name}")
        self._sessions = Sessions(self._recipe, supervisor=supervisor(settings.parent))
        self._supervision = Supervision(
            self._recipe,
            {
                "workers": settings.workers,
                "memory": Budget.of(settings.memory, settings.workers).total,
                "stall_seconds": settings.patience.limit,
                "stall_end_seconds": settings.patience.end,
            },
            path=[os.path.dirname(os.path.abspath(os.path.expanduser(path)))],
            targets=settings.targets,
        )
        self._poller = zmq.Poller()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._control: zmq.Socket[bytes] | None = None
        self._listener: Listener | None = None
        self._joining: dict[int, tuple[Channel, float]] = {}
        self._held: dict[int, Channel] = {}
        self._watches: dict[int, int] = {}
        self._reports: dict[int, tuple[Hashable, float]] = {}
        self._report_number = 0
        self._rates = Rates()
        self._engine_watch = EngineWatch(settings.patience, time.monotonic)
        self._look_at = 0.0
        self._signals: list[int] = []
        self._started = time.monotonic()
        self._parent: int | None = None
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._ready = self._bound = self._closing = self._ends_clients = False
        self._watched_engine = self._watched_server = -1
        self._box: BlackBox | None = None

    # Life

    def open(self) -> None:
        """Take the sockets and start the processes."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        self._watch(self._wake, self._drain_wakes)
        if self._settings.parent is not None:
            self._parent = watch(self._settings.parent)
            if self._parent is None:
                raise CannotStart(f"process {self._settings.parent}, to leave with, is gone")
            self._watch(self._parent, self._on_parent)
        self._bind()
        self._supervision.start()

    def run(self) -> int:
        """The loop. Returns the exit code."""
        try:
            while True:
                self._act_on_signals()
                self._supervise()
                self._update_watches()
                before = dict(self._handlers)
                for ready, _ in self._poller.poll(self._timeout()):
                    number = ready if isinstance(ready, int) else ready.fileno()
                    # A handler may have closed what another one of this round is for, its number may be in use again.
                    if (handler := before.get(number)) is not None and self._handlers.get(number) is handler:
                        handler()
                self._tick()
        except _End as end:
            return end.code
        except CannotGoOn as error:
            if not self._ready:
                raise CannotStart(str(error)) from error
            _log.error("%s. The daemon ends", error)
            return FAILED

    def close(self) -> None:
        """End all processes and take away sockets and note. A second SIGINT ends them by force."""
        self._closing = True
        notify("STOPPING=1")
        if self._ends_clients:
            self._end_clients(signal.SIGTERM)
        for channel in [*self._held.values(), *(channel for channel, _ in self._joining.values())]:
            channel.close()
        self._supervision.close()
        if self._ends_clients:
            self._wait_for_clients()
        if self._context is not None:
            self._context.destroy(linger=0)
        if self._bound:
            withdraw(self._settings.socket)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._settings.socket)
        if self._listener is not None:
            self._listener.close()
        signal.set_wakeup_fd(-1)
        for fd in (*self._watches.values(), self._wake, self._waker, self._parent):
            if fd is not None:
                os.close(fd)
        self._engine_watch.gone()
        self._open_box()

    def _bind(self) -> None:
        path = self._settings.socket
        folder = os.path.dirname(path)
        if not os.path.isdir(folder):
            raise CannotStart(f"the folder {folder} of the socket does not exist. Make it, or choose another --socket.")
        try:
            self._listener = listen(data_path(path))
            check_free(path)
            self._context = zmq.Context()
            self._control = self._context.socket(zmq.ROUTER)
            self._control.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._control.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
            self._control.setsockopt(zmq.SNDHWM, 0)
            self._control.setsockopt(zmq.LINGER, 0)
            before = os.umask(0o177)
            try:
                self._control.bind(f"ipc://{path}")
            finally:
                os.umask(before)
        except SettingError as error:
            other = who_serves(path) if self._listener is None else None
            raise CannotStart(other or str(error)) from error
        except OSError as error:  # zmq's errors are such, too
            raise CannotStart(f"cannot listen on {path}: {error.strerror or error}") from error
        self._bound = True
        announce(path, self._recipe)
        self._poller.register(self._control, zmq.POLLIN)
        self._handlers[self._control.fileno()] = self._from_control
        self._watch(self._listener.fileno(), self._accept)

    def _watch(self, fd: int, handler: Callable[[], None], flags: int = zmq.POLLIN) -> None:
        self._poller.register(fd, flags)
        self._handlers[fd] = handler

    def _unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._poller.unregister(fd)

    def _timeout(self) -> int:
        """Milliseconds until time alone may change something; -1 for never."""
        now = time.monotonic()
        times = [at for _, at in self._reports.values()]
        if self._sessions.needs_ticks or self._joining:
            times.append(now + _TICK_SECONDS)
        if self._sessions.clients or self._reports:
            times.append(self._look_at)
        if (at := self._supervision.wake_at) is not None:
            times.append(at)
        return int(max(0.0, min(times) - now) * 1000) + 1 if times else -1

    def _tick(self) -> None:
        now = time.monotonic()
        if self._sessions.needs_ticks:
            self._carry_out(self._sessions.tick(now))
        for fd in [fd for fd, (_, since) in self._joining.items() if now - since >= JOIN_SECONDS]:
            self._drop_joining(fd)
        if now >= self._look_at:
            self._look_at = now + self._engine_watch.look_seconds
            if self._engine_watch.look():
                self._supervision.kill_engine()
        late = [number for number, (_, deadline) in self._reports.items() if deadline <= now]
        if late:
            why = self._engine_watch.state() or f"gave no report within {REPORT_SECONDS:g} s"
            self._give_up_reports(late, why)

    # Signals

    def _on_signal(self, number: int, _: Any) -> None:
        if self._closing and number == signal.SIGINT:
            self._supervision.force()
        self._signals.append(number)

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake, 512):
                pass

    def _act_on_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGCHLD:
                self._supervision.reap()
                continue
            _log.info("%s: ending", signal.Signals(number).name)
            # A launched daemon has a session of its own: its SIGINT is the launcher's, whose user wants all to end now.
            self._ends_clients = number == signal.SIGINT and self._parent is not None
            raise _End(INTERRUPTED if number == signal.SIGINT else DONE)

    def _on_parent(self) -> None:
        _log.info("process %s has ended: ending with it", self._settings.parent)
        self._ends_clients = True
        raise _End(DONE)

    def _end_clients(self, number: int) -> None:
        """Ranks whose launcher was killed have nobody else who ends them. Only those whose number the kernel said."""
        for client, fd in self._watches.items():
            if client in self._sessions.clients and self._sessions.clients[client].joined:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(fd, number)

    def _wait_for_clients(self) -> None:
        poller = zmq.Poller()
        left = set(self._watches.values())
        deadline = time.monotonic() + END_SECONDS
        for fd in left:
            poller.register(fd, zmq.POLLIN)
        while left and (seconds := deadline - time.monotonic()) > 0:
            for fd, _ in poller.poll(int(seconds * 1000) + 1):
                poller.unregister(fd)
                left.discard(int(fd))
        self._end_clients(signal.SIGKILL)

    # Processes

    def _supervise(self) -> None:
        how = self._supervision.step()
        if how is not None:
            self._from_engine()
            self._unwatch(self._watched_engine)
            self._unwatch(self._watched_server)
            self._watched_engine = self._watched_server = -1
            how = self._engine_watch.gone() or how
            work = self._open_box()
            how = f"{how}, {work}" if work else how
            self._supervision.lose_engine(how)
            self._carry_out(self._sessions.engine_died(how, time.monotonic()))
            self._give_up_reports(list(self._reports), f"died ({how}), a new one is started")

    def _open_box(self) -> str:
        """What the engine was at work on when it died."""
        box, self._box = self._box, None
        if box is None:
            return ""
        work = str(box)
        box.close()
        return work

    def _update_watches(self) -> None:
        server = self._supervision.fileno()
        if server != self._watched_server:
            self._unwatch(self._watched_server)
            self._watch(server, lambda: None)
            self._watched_server = server
        engine = self._supervision.engine
        if engine is None:
            return
        fd = engine.fileno()
        if fd != self._watched_engine:
            self._unwatch(self._watched_engine)
            self._watch(fd, self._from_engine)
            self._watched_engine = fd
        if engine.closed:
            # The fork server reports its end in a moment; until then the connection would be readable without end.
            self._unwatch(fd)
        else:
            self._poller.modify(fd, zmq.POLLIN | (zmq.POLLOUT if engine.wants_write else 0))

    def _from_engine(self) -> None:
        engine = self._supervision.engine
        if engine is None:
            return
        engine.flush()
        try:
            self._hear_engine(engine)
        except ProtocolError as error:  # an engine that is out of its mind is replaced like a dead one
            _log.error("the engine is ended: %s", error)
            self._supervision.kill_engine()

    def _hear_engine(self, engine: Channel) -> None:
        now = time.monotonic()
        for data, fds in engine.receive():
            try:
                message = decode_large(data, fds, FROM_ENGINE)
                if isinstance(message, p.EngineReady) and fds:
                    self._engine_watch.gone()
                    self._open_box()
                    self._box = BlackBox.attach(fds.pop(0))
                    if len(fds) == 2:
                        stack = Stack(fds.pop(0), fds.pop(0), self._supervision.engine_pid or 0)
                        self._engine_watch.met(self._box, stack)
            finally:
                close_all(fds)
            if isinstance(message, p.EngineReady):
                self._engine_ready(message)
            elif isinstance(message, p.WorkerServes):
                self._supervision.worker_serves(message.worker)
            elif isinstance(message, p.RunStarted):
                self._carry_out(self._sessions.run_started(message, now))
            elif isinstance(message, p.ReaderGone):
                self._carry_out(self._sessions.gone(message.client, now, told_by_engine=True))
            elif isinstance(message, p.EngineReport):
                self._engine_report(message)
            elif message.run < 0:
                raise CannotStart(message.text)
            else:
                self._carry_out(self._sessions.run_refused(message.run, message.kind, message.text))

    def _engine_ready(self, message: p.EngineReady) -> None:
        self._supervision.engine_ready(message.workers)
        self._carry_out(self._sessions.engine_ready(message.pipelines, time.monotonic()))
        if not self._ready:
            self._ready = True
            print(f"zephon daemon ready: {self._settings.socket}", flush=True)
            notify("READY=1")

    def _to_engine(self, message: object, fds: tuple[int, ...] = ()) -> None:
        # Where the engine is gone, its end is noticed in a moment, and everybody who waits for it is told.
        if self._supervision.engine is not None:
            self._supervision.engine.send(encode(message), fds)

    # Control requests

    def _from_control(self) -> None:
        assert self._control is not None
        for _ in range(64):
            try:
                frames = self._control.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 3:
                continue
            ask: Hashable = (frames[0], frames[1])
            try:
                request = decode(frames[2], expect=(p.Hello, p.Attach, p.Progress, p.Goodbye))
                self._serve_request(ask, request)
            except ProtocolError as error:
                self._answer(ask, p.Refused(ProtocolError.__name__, str(error)[:LONGEST_TEXT]))

    def _serve_request(self, ask: Hashable, request: object) -> None:
        now = time.monotonic()
        if isinstance(request, p.Hello):
            self._carry_out(self._sessions.hello(ask, request, now))
        elif isinstance(request, p.Attach):
            self._carry_out(self._sessions.attach(ask, request, now))
        elif isinstance(request, p.Goodbye):
            self._carry_out(self._sessions.goodbye(ask, request, now))
        elif self._supervision.engine is None or not self._ready:
            self._answer(ask, p.ProgressReport(self._report(None, "starting")))
        elif len(self._reports) >= MOST_REPORTS:
            self._answer(ask, p.ProgressReport(self._report(None, f"asked for {MOST_REPORTS} reports already")))
        else:
            self._report_number += 1
            self._reports[self._report_number] = ask, now + REPORT_SECONDS
            self._to_engine(p.Report(self._report_number))

    def _answer(self, ask: Hashable, message: Any) -> None:
        assert self._control is not None
        assert isinstance(ask, tuple)
        try:
            self._control.send_multipart([*ask, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:  # who asked is gone
            self._sessions.unreachable(ask)
            if isinstance(message, p.Welcome):
                self._carry_out(self._sessions.gone(message.client, time.monotonic()))

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for order in instructions:
            if isinstance(order, Answer):
                if isinstance(order.message, p.Welcome):
                    self._watch_client(order.message.client, self._sessions.clients[order.message.client].pid)
                self._answer(order.ask, order.message)
            elif isinstance(order, Start):
                self._start_run(order)
            elif isinstance(order, HandOver):
                self._hand_over(order)
            elif isinstance(order, HangUp):
                self._hang_up(order.client)
            elif isinstance(order, ToEngine):
                self._to_engine(order.message)
            else:
                self._forget(order)

    def _start_run(self, order: Start) -> None:
        fd = memory_of_text(order.checkpoint)
        self._to_engine(order.message, (fd,))
        os.close(fd)

    # Data connections and clients

    def _accept(self) -> None:
        assert self._listener is not None
        while (channel := self._listener.accept()) is not None:
            if len(self._joining) >= MOST_JOINING:
                channel.close()
                continue
            fd = channel.fileno()
            self._joining[fd] = channel, time.monotonic()
            self._watch(fd, partial(self._from_joining, channel, fd))

    def _from_joining(self, channel: Channel, fd: int) -> None:
        try:
            for data, fds in channel.receive(limit=1):
                for surplus in fds:
                    os.close(surplus)
                join = decode(data, expect=p.Join)
                orders = self._sessions.joined(join, channel.peer().pid, time.monotonic())
                self._unwatch(fd)
                del self._joining[fd]
                self._held[join.client] = channel
                self._watch(channel.fileno(), partial(self._lose, join.client), zmq.POLLERR)
                self._watch_client(join.client, channel.peer().pid)
                self._carry_out(orders)
                return
        except ZephonError as error:
            _log.info("a data connection is refused: %s", error)
            channel.send(encode(p.Failed(type(error).__name__, str(error), [])))
            self._drop_joining(fd)
            return
        if channel.closed:
            self._drop_joining(fd)

    def _drop_joining(self, fd: int) -> None:
        """`fd` is what the connection's was: one that broke the protocol is closed already."""
        self._unwatch(fd)
        self._joining.pop(fd)[0].close()

    def _watch_client(self, client: int, pid: int) -> None:
        self._unwatch_client(client)
        fd = watch(pid) if pid > 0 else None
        if fd is not None:
            self._watches[client] = fd
            self._watch(fd, partial(self._lose, client))

    def _unwatch_client(self, client: int) -> None:
        fd = self._watches.pop(client, None)
        if fd is not None:
            self._unwatch(fd)
            os.close(fd)

    def _lose(self, client: int) -> None:
        """A client's process or connection has ended."""
        self._carry_out(self._sessions.gone(client, time.monotonic()))

    def _forget(self, order: Forget) -> None:
        self._unwatch_client(order.client)
        self._hang_up(order.client)

    def _hang_up(self, client: int) -> None:
        channel = self._held.pop(client, None)
        if channel is not None:
            self._unwatch(channel.fileno())
            channel.close()

    def _hand_over(self, order: HandOver) -> None:
        channel = self._held.pop(order.message.client, None)
        if channel is not None:
            self._unwatch(channel.fileno())
            memory = (memory_of_text(order.statement),) if order.statement else ()
            self._to_engine(order.message, (channel.fileno(), *memory))
            close_all(memory)
            channel.close()

    # Progress

    def _engine_report(self, message: p.EngineReport) -> None:
        found = self._reports.pop(message.request, None)
        if found is not None:
            self._rates.add(message.report, time.monotonic())
            self._answer(found[0], p.ProgressReport(self._report(message.report, "running")))

    def _give_up_reports(self, numbers: list[int], state: str) -> None:
        for number in numbers:
            ask, _ = self._reports.pop(number)
            self._answer(ask, p.ProgressReport(self._report(None, state)))

    def _report(self, engine: dict[str, Any] | None, state: str) -> dict[str, Any]:
        sessions = self._sessions.report()
        for client in sessions["clients"]:
            client["stopped"] = state_of(client["pid"]) in ("T", "t")
        return {
            "daemon": {
                "pid": os.getpid(),
                "uptime": time.monotonic() - self._started,
                "recipe": self._recipe,
                "socket": self._settings.socket,
                "data_socket": data_path(self._settings.socket),
            },
            **sessions,
            "processes": self._supervision.pids,
            "workers_died": self._supervision.died,
            "memory": memory_of({"daemon": os.getpid(), **self._supervision.pids}),
            "engine_state": state,
            "engine_stall": self._engine_watch.state(),
            "engine": engine,
        }
