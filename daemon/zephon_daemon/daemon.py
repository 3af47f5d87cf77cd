"""The daemon process: the shell around `sessions.Sessions` and `supervision.Supervision`.

One thread, one loop over the control socket (requests), the data socket (connections of clients, passed on to their
engine once they are attached), the engines' channels, the fork servers (ends of processes), a pidfd for each client,
and signals.
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
from zephon.engines import check_engines
from zephon.errors import ProtocolError, SettingError, ZephonError
from zephon.recipe import split_name
from zephon.transport import protocol as p
from zephon.transport.channels import Channel, Listener, close_all, listen
from zephon.transport.endpoints import announce, data_path, withdraw
from zephon.transport.large import decode_large, send_large
from zephon.transport.messages import MAX_MESSAGE, decode, encode
from zephon_daemon.asked import LONGEST_TEXT
from zephon_daemon.composed import composed
from zephon_daemon.dealing import Sharing
from zephon_daemon.engine_seat import EngineSeat
from zephon_daemon.forkserver import END_SECONDS
from zephon_daemon.lifelines import watch
from zephon_daemon.orders import Answer, Forget, HandOver, HangUp, Instruction, Start, ToEngine
from zephon_daemon.progress import Rates, memory_of
from zephon_daemon.report_requests import MOST_REPORTS, ReportRequest, ReportRequests
from zephon_daemon.sessions import Sessions
from zephon_daemon.stacks import state_of
from zephon_daemon.supervision import CannotGoOn, Supervision, Targets, end_leftovers, reap
from zephon_daemon.surroundings import check_free, memory_of_text, notify, supervisor, who_serves
from zephon_daemon.watchdog import Patience

FROM_ENGINE = (
    p.EngineLoads, p.EngineReady, p.WorkerServes, p.WorkerEnds, p.RunStarted, p.RunRefused, p.ReaderGone, p.LanesTold,
    p.EngineReport,
)  # fmt: skip

JOIN_SECONDS = 10.0
"""A data connection that has not said whose it is by then is closed."""

MOST_JOINING = 256
"""Data connections that have not said whose they are yet; further ones are closed at once."""

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
    engines: int = 1
    targets: Targets = field(default_factory=Targets)
    patience: Patience = field(default_factory=Patience)


class CannotStart(ZephonError):
    """The daemon cannot start; the text is the one-line reason."""


class _End(Exception):
    """Leaves the loop with the exit code that is its argument."""


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
        check_engines(settings.engines, settings.workers)
        self._sessions = Sessions(self._recipe, supervisor=supervisor(settings.parent), engines=settings.engines)
        self._sharing = Sharing(settings.workers, settings.engines)
        memory = Budget.of(settings.memory, settings.workers).total
        self._seats = [self._seat(number, memory) for number in range(settings.engines)]
        self._poller = zmq.Poller()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._control: zmq.Socket[bytes] | None = None
        self._listener: Listener | None = None
        self._joining: dict[int, tuple[Channel, float]] = {}
        self._held: dict[int, Channel] = {}
        self._watches: dict[int, int] = {}
        self._reports = ReportRequests()
        self._rates = Rates()
        self._look_at = 0.0
        self._signals: list[int] = []
        self._started = time.monotonic()
        self._parent: int | None = None
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._ready = self._bound = self._closing = self._ends_clients = False

    def _seat(self, number: int, memory: int) -> EngineSeat:
        settings, of = self._settings, self._settings.engines
        workers = self._sharing.shares[number]
        supervision = Supervision(
            self._recipe,
            {
                "workers": workers,
                "most_workers": settings.workers,
                "memory": memory // of,
                "engines": of,
                "stall_seconds": settings.patience.limit,
                "stall_end_seconds": settings.patience.end,
            },
            path=[os.path.dirname(split_name(self._recipe)[0])],
            targets=settings.targets,
            label=str(number) if of > 1 else "",
        )
        seat = EngineSeat(number, supervision, settings.patience, workers)
        supervision.hear = partial(self._from_engine, seat)
        return seat

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
        self._seats[0].start()

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
            return int(end.args[0])
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
        for seat in self._seats:
            seat.supervision.ask_to_end()
        for seat in self._seats:
            seat.supervision.close()
        end_leftovers()
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
        for seat in self._seats:
            seat.close()

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
        announce(path, self._recipe, launched=self._settings.parent is not None)
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
        times = self._reports.deadlines
        if self._sessions.needs_ticks or self._joining:
            times.append(now + _TICK_SECONDS)
        if self._sessions.clients or times or not all(seat.ready for seat in self._seats):
            times.append(self._look_at)
        times += [self._sharing.due] if self._sharing.due is not None else []
        times += [at for seat in self._seats if (at := seat.supervision.wake_at) is not None]
        return int(max(0.0, min(times) - now) * 1000) + 1 if times else -1

    def _tick(self) -> None:
        now = time.monotonic()
        if self._sessions.needs_ticks:
            self._carry_out(self._sessions.tick(now))
        for fd in [fd for fd, (_, since) in self._joining.items() if now - since >= JOIN_SECONDS]:
            self._drop_joining(fd)
        if now >= self._look_at:
            self._look_at = now + self._settings.patience.look
            for seat in self._seats:
                seat.look()
        self._give_reports(self._reports.late(now))
        if self._sharing.look(self._sessions.engines, now):
            for seat, workers in zip(self._seats, self._sharing.shares, strict=True):
                seat.give(workers)

    # Signals

    def _on_signal(self, number: int, _: Any) -> None:
        if self._closing and number == signal.SIGINT:
            for seat in self._seats:
                seat.supervision.force()
        self._signals.append(number)

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake, 512):
                pass

    def _act_on_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGCHLD:
                reap([seat.supervision.server_pid for seat in self._seats])
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
        for seat in self._seats:
            if (how := seat.supervision.step()) is None:
                continue
            self._unwatch(seat.watched_engine)
            self._unwatch(seat.watched_server)
            seat.watched_engine = seat.watched_server = -1
            how = seat.lost(how)
            self._carry_out(self._sessions.engine_died(how, time.monotonic(), seat.number))
            self._give_reports(self._reports.died(seat.number, how))

    def _update_watches(self) -> None:
        for seat in self._seats:
            server = seat.supervision.fileno()
            if server != seat.watched_server:
                self._unwatch(seat.watched_server)
                if server >= 0:
                    self._watch(server, lambda: None)
                seat.watched_server = server
            engine = seat.channel
            if engine is None:
                continue
            fd = engine.fileno()
            if fd != seat.watched_engine:
                self._unwatch(seat.watched_engine)
                self._watch(fd, partial(self._from_engine, seat))
                seat.watched_engine = fd
            if engine.closed:
                self._unwatch(fd)  # until the fork server reports its end it would be readable without end
            else:
                self._poller.modify(fd, zmq.POLLIN | (zmq.POLLOUT if engine.wants_write else 0))

    def _from_engine(self, seat: EngineSeat) -> None:
        engine = seat.channel
        if engine is None:
            return
        engine.flush()
        try:
            self._hear_engine(seat, engine)
        except ProtocolError as error:  # an engine that is out of its mind is replaced like a dead one
            _log.error("the engine is ended: %s", error)
            seat.supervision.kill_engine()

    def _hear_engine(self, seat: EngineSeat, engine: Channel) -> None:
        now = time.monotonic()
        for data, fds in engine.receive():
            try:
                message = decode_large(data, fds, FROM_ENGINE)
                if isinstance(message, p.EngineLoads):
                    seat.loads(fds)
            finally:
                close_all(fds)
            if isinstance(message, p.EngineReady):
                self._engine_ready(seat, message)
            elif isinstance(message, (p.WorkerServes, p.WorkerEnds)):
                seat.supervision.told(message)
            elif isinstance(message, p.RunStarted):
                self._carry_out(self._sessions.run_started(message, now, seat.number))
            elif isinstance(message, p.ReaderGone):
                self._carry_out(self._sessions.gone(message.client, now, told_by_engine=True))
            elif isinstance(message, p.LanesTold):
                self._carry_out(self._sessions.lanes_told(message, seat.number))
            elif isinstance(message, p.EngineReport):
                self._give_reports(self._reports.answered(message.request, seat.number, message.report))
            elif isinstance(message, p.RunRefused):
                if message.run < 0:
                    raise CannotStart(message.text)
                kind, text = message.kind, message.text
                self._carry_out(self._sessions.run_refused(message.run, kind, text, time.monotonic(), seat.number))

    def _engine_ready(self, seat: EngineSeat, message: p.EngineReady) -> None:
        seat.met()
        for other in self._seats:  # what the first one had to index or download, the others need not
            other.start()
        self._carry_out(self._sessions.engine_ready(message.pipelines, time.monotonic(), seat.number))
        if not self._ready and all(each.ready for each in self._seats):
            self._ready = True
            print(f"zephon daemon ready: {self._settings.socket}", flush=True)
            notify("READY=1")

    def _to_engine(self, number: int, message: object, fds: tuple[int, ...] = ()) -> None:
        # Where the engine is gone, its end is noticed in a moment, and everybody who waits for it is told.
        engine = self._seats[number].channel
        if engine is not None:
            send_large(engine, message, fds)

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
        elif not any(seat.channel for seat in self._seats) or not self._ready:
            self._answer(ask, p.ProgressReport(self._report({}, {}, "starting")))
        elif self._reports.full:
            self._answer(ask, p.ProgressReport(self._report({}, {}, f"asked for {MOST_REPORTS} reports already")))
        else:
            there = [seat.number for seat in self._seats if seat.channel is not None]
            number = self._reports.open(ask, there, now)
            for engine in there:
                self._to_engine(engine, p.Report(number))

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
                message = order.message
                if isinstance(message, p.Welcome):
                    client = self._sessions.clients.get(message.client)
                    if client is not None:
                        self._watch_client(message.client, client.pid)
                    else:  # an earlier answer in this list, to another connection of that client, found nobody
                        message = p.Refused("DaemonUnavailable", "this client's connection before ended just now")
                self._answer(order.ask, message)
            elif isinstance(order, Start):
                self._start_run(order)
            elif isinstance(order, HandOver):
                self._hand_over(order)
            elif isinstance(order, HangUp):
                self._hang_up(order.client)
            elif isinstance(order, ToEngine):
                self._to_engine(order.engine, order.message)
            else:
                self._forget(order)

    def _start_run(self, order: Start) -> None:
        fd = memory_of_text(order.checkpoint)
        self._to_engine(order.engine, order.message, (fd,))
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
                close_all(fds)
                join = decode(data, expect=p.Join)
                orders = self._sessions.joined(join, channel.peer().pid, time.monotonic())
                self._unwatch(fd)
                del self._joining[fd]
                self._held[join.client] = channel
                self._watch(channel.fileno(), partial(self._lose, join.client), zmq.POLLIN | zmq.POLLERR)
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
        if (fd := watch(pid) if pid > 0 else None) is not None:
            self._watches[client] = fd
            self._watch(fd, partial(self._lose, client))

    def _unwatch_client(self, client: int) -> None:
        fd = self._watches.pop(client, None)
        if fd is not None:
            self._unwatch(fd)
            os.close(fd)

    def _lose(self, client: int) -> None:
        """A client's process or connection has ended, or it spoke too early: a message may hold its own connection."""
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
        engine, channel = self._seats[order.engine].channel, self._held.get(order.message.client)
        if channel is None:
            return
        self._unwatch(channel.fileno())
        if engine is None or engine.closed:
            return  # a dead engine's clients are hung up on once its death is reported: before, they would come in vain
        del self._held[order.message.client]
        memory = (memory_of_text(order.statement),) if order.statement else ()
        self._to_engine(order.engine, order.message, (channel.fileno(), *memory))
        close_all(memory)
        channel.close()

    # Progress

    def _give_reports(self, requests: list[ReportRequest]) -> None:
        for request in requests:
            self._answer(request.ask, p.ProgressReport(self._report(request.found, request.silent, "not there")))

    def _report(self, found: dict[int, dict[str, Any]], silent: dict[int, str], else_: str) -> dict[str, Any]:
        """The report, of what the engines said; of those that said nothing, why, or else what."""
        engines = [s.report("running" if s.number in found else silent.get(s.number, else_)) for s in self._seats]
        whole = composed(found) if found else None
        self._rates.add(whole or {}, time.monotonic(), engines)
        states = dict.fromkeys(each["state"] for each in engines if each["engine"] not in found)
        processes = {name: pid for seat in self._seats for name, pid in seat.supervision.pids.items()}
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
            "processes": processes,
            "workers_died": sum(seat.supervision.died for seat in self._seats),
            "memory": memory_of({"daemon": os.getpid(), **processes}),
            "engine_state": "; ".join(states) or "running",
            "engine_stall": "; ".join(seat.named(state) for seat in self._seats if (state := seat.watch.state())),
            "engine": whole,
            "engines": engines,
        }
