"""The engine process: the shell around `run.Run` and `scheduler.Scheduler`.

It loads the recipe, resolves plans, hands tasks to workers, drives the accumulators, writes batches into the lanes'
rings and tells the clients. All decisions are the state machines'; here are the sockets, the memory and the clock.

One thread. It waits for the daemon, workers and clients at once and never for one of them; it ends when the daemon's
connection ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from zephon.budget import Budget
from zephon.errors import ProtocolError, RunFailed, ZephonError
from zephon.plan import Plan
from zephon.runners import make_pool
from zephon.transport import protocol as p
from zephon.transport import worker_protocol as w
from zephon.transport.channels import MAX_DESCRIPTOR, Channel, close_all
from zephon.transport.large import decode_large, send_large
from zephon.transport.layout import read
from zephon.transport.messages import decode, encode
from zephon.transport.statement import decode_statement
from zephon.windows import AnyTask, Front, Outcome
from zephon_daemon.black_box import STARTING, BlackBox
from zephon_daemon.composed import bounded
from zephon_daemon.inbox import Inbox
from zephon_daemon.instructions import DropRing, Instruction, MakeRing, Tell, Write
from zephon_daemon.loading import load
from zephon_daemon.named_work import given_up
from zephon_daemon.others import unsaid
from zephon_daemon.pages import give_back
from zephon_daemon.ports import (
    ClientPort,
    LiveRun,
    WorkerPort,
    memory_report,
    read_memory,
    workers_report,
)
from zephon_daemon.resolving import resolved
from zephon_daemon.ring_memory import make_ring
from zephon_daemon.scheduler import Scheduler, Work
from zephon_daemon.stages import Stages
from zephon_daemon.stalls import Oversight
from zephon_daemon.watchdog import Patience
from zephon_daemon.watches import Watches
from zephon_daemon.worker import failure
from zephon_daemon.worker_notes import WorkerNotes

FROM_DAEMON = (
    p.AddWorker, p.WorkerGone, p.StartRun, p.AddReader, p.ExpectReaders, p.DropReader, p.EndRun, p.Report,
    p.TellLanes, p.LanesTold, p.GroupsElsewhere, p.RetireWorker,
)  # fmt: skip
USERS = (Exception, KeyboardInterrupt, SystemExit)
"""What a user's code may raise, `sys.exit()` included: it ends the run, not the engine."""

TICK_SECONDS = 1.0
TOLD_AT_ONCE = 32
TASKS_AHEAD_LOCAL = 2

_log = logging.getLogger("zephon.engine")


class Engine:
    """The loop of the engine process."""

    def __init__(self, daemon: Channel, recipe: str, settings: dict[str, Any]) -> None:
        self._daemon, self._recipe_path, self._settings = daemon, recipe, settings
        workers, memory = int(settings.get("most_workers") or settings.get("workers") or 1), settings.get("memory")
        engines, origin = int(settings.get("engines") or 1), "set when it started"
        # What the daemon settled at its start holds, whatever is free by now.
        self._budget = Budget.of(None, workers) if memory is None else Budget(memory, workers, origin, engines)
        self._watches = Watches()
        self._runs: dict[int, LiveRun] = {}
        self._workers: dict[int, WorkerPort] = {}
        self._clients: dict[int, ClientPort] = {}
        self._scheduler = Scheduler()
        patience = Patience.of(settings.get("stall_seconds"), settings.get("stall_end_seconds"))
        self._oversight = Oversight(patience, self._scheduler, self._plan_of, time.monotonic, self._ends_worker)
        self._look_seconds = min(TICK_SECONDS, patience.look)
        self._stages = Stages()
        self._local: deque[tuple[Hashable, int, Future[Outcome]]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._errors: deque[str] = deque(maxlen=50)
        self._box = BlackBox.create()
        self._moved, self._tell_in = 0, TICK_SECONDS
        self._next_tick = self._next_look = time.monotonic() + self._look_seconds

    def run(self) -> None:
        """Until the daemon is gone."""
        recipe = load(self._daemon, self._recipe_path, self._box)
        if recipe is None:
            return
        self._recipe = recipe
        self._watches.add(self._daemon, self._from_daemon)
        self._watches.add_descriptor(self._wake, self._drain_local)
        self._to_daemon(p.EngineReady(list(recipe.names), int(self._settings.get("workers") or 0)))
        while not self._daemon.closed:
            self._box.beat()
            for act in self._watches.wait(min(self._next_look - time.monotonic(), self._tell_in)):
                act()
            if time.monotonic() >= self._next_look:
                self._look()
            self._assign()
            self._tell_others()
            for worker in self._scheduler.let_go():
                self._let_go(worker)
        for number in list(self._runs):
            self._end_run(number)

    # The daemon

    def _to_daemon(self, message: Any) -> None:
        self._daemon.send(encode(message, limit=MAX_DESCRIPTOR))

    def _from_daemon(self) -> None:
        self._daemon.flush()
        for payload, fds in self._daemon.receive():
            try:
                self._daemon_says(payload, fds)
            except ProtocolError as error:
                self._errors.append(f"the daemon: {error}")
                _log.error("the daemon: %s", error)
            finally:
                close_all(fds)

    def _daemon_says(self, payload: bytes, fds: list[int]) -> None:
        """`fds` are taken out of the list by who keeps them."""
        message = decode_large(payload, fds, FROM_DAEMON)
        if isinstance(message, (p.AddWorker, p.StartRun, p.AddReader)) and not fds:
            raise ProtocolError(f"{type(message).__name__} came without its descriptor")
        if isinstance(message, p.AddWorker):
            self._add_worker(message, Channel.from_fd(fds.pop(0)))
        elif isinstance(message, p.WorkerGone):
            self._lose_worker(message.worker, message.how)
        elif isinstance(message, p.RetireWorker):
            self._scheduler.retire(message.worker)
        elif isinstance(message, p.StartRun):
            self._start_run(message, read_memory(fds.pop(0)))
        elif isinstance(message, p.AddReader):
            self._add_reader(message, Channel.from_fd(fds.pop(0)), read_memory(fds.pop(0)) if fds else b"")
        elif isinstance(message, p.ExpectReaders):
            self._expect(message)
        elif isinstance(message, p.DropReader):
            self._lose_client(message.client)
        elif isinstance(message, p.EndRun):
            self._end_run(message.run)
        elif isinstance(message, (p.TellLanes, p.LanesTold, p.GroupsElsewhere)):
            self._other_engines(message)
        else:
            self._to_daemon(p.EngineReport(message.request, bounded(self._report())))

    def _start_run(self, order: p.StartRun, checkpoint: bytes) -> None:
        self._box.other(f"{STARTING} {order.pipeline!r}")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                live = self._resolve(order, checkpoint)
        except ZephonError as error:
            self._to_daemon(p.RunRefused(order.run, type(error).__name__, str(error)))
            return
        except USERS as error:  # a user's function called while the recipe is resolved may raise anything
            traceback.print_exc()
            self._to_daemon(p.RunRefused(order.run, "RecipeError", f"{type(error).__name__}: {error}"))
            return
        finally:
            self._box.idle()
        self._runs[order.run] = live
        give_back()
        said = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
        attached = live.attached(said, self._budget)
        send_large(self._daemon, p.RunStarted(order.run, attached, live.pipeline.topology.mapping_strategy))

    def _resolve(self, order: p.StartRun, checkpoint: bytes) -> LiveRun:
        live = resolved(self._recipe, order, checkpoint, self._budget)
        plan, pipeline = live.run.plan, live.pipeline
        front = Front(plan)
        if pipeline.execution.runner in ("inline", "threads"):
            count = pipeline.execution.max_workers or int(self._settings.get("workers") or 1)
            live.pool = make_pool(pipeline.execution.runner, front, count)
            credit = TASKS_AHEAD_LOCAL * live.pool.ahead
            self._scheduler.add(("local", order.run), lambda run, mine=order.run: run == mine, credit)  # type: ignore[misc]
        else:
            live.stage, dropped = self._stages.of(front, {other.stage for other in self._runs.values()})
            for port in self._workers.values():
                port.drop_stages(dropped)
                if plan.later:
                    port.share(self._budget, later=True)
        return live

    # The run's other engines

    def _other_engines(self, message: p.TellLanes | p.LanesTold | p.GroupsElsewhere) -> None:
        live = self._runs.get(message.run)
        if live is None:
            return
        if isinstance(message, p.TellLanes):
            live.run.tell_lanes()
            if live.failed is not None:
                self._to_daemon(p.LanesTold(live.number, failed=live.failed))
        elif isinstance(message, p.GroupsElsewhere):
            live.run.read_there(message.groups, message.lost)
        elif message.failed is not None:
            self._fail(live.number, message.failed, ours=False)
        elif live.failed is None:
            self._do(live, lambda: live.run.hear(message))

    def _tell_others(self) -> None:
        all_runs = {number: live.run.others for number, live in self._runs.items()}
        told, self._tell_in = unsaid(all_runs, time.monotonic(), self._moved + self._oversight.moves)
        for words in told:
            send_large(self._daemon, words)

    def _end_run(self, number: int) -> None:
        live = self._runs.pop(number, None)
        if live is None:
            return
        for client in [c for c, port in self._clients.items() if port.run == number]:
            self._close_client(client)
        self._scheduler.forget(number)
        self._scheduler.workers.pop(("local", number), None)
        live.close()

    # Workers

    def _add_worker(self, message: p.AddWorker, channel: Channel) -> None:
        inbox = Inbox(channel, lambda failed: self._task_failed(message.worker, failed))
        port = self._workers[message.worker] = WorkerPort(channel, message.pid, inbox)
        port.share(self._budget, any(live.run.plan.later for live in self._runs.values()))
        self._watches.add(channel, lambda: self._from_worker(message.worker))

    def _from_worker(self, number: int) -> None:
        port = self._workers.get(number)
        if port is None:
            return
        port.channel.flush()
        messages: list[tuple[bytes, list[int]]] = []
        try:
            messages = port.channel.receive()
            for payload, fds in messages:
                self._worker_says(number, port, payload, fds)
        except ProtocolError as error:  # what a worker says may be anything after user code has gone wild in it
            self._errors.append(f"worker {number}: {error}")
            port.channel.close()
        finally:
            for _, fds in messages:
                close_all(fds)
        if port.channel.closed:
            self._watches.drop(port.channel)

    def _worker_says(self, number: int, port: WorkerPort, payload: bytes, fds: list[int]) -> None:
        message = decode(payload, expect=(w.WorkerReady, p.NewSegment, w.TaskDone, w.TaskFailed))
        if isinstance(message, w.TaskDone):
            self._task_done(number, port, message)
        elif isinstance(message, w.TaskFailed):
            port.inbox.done(message.task)
            self._task_failed(number, message)
        elif isinstance(message, p.NewSegment):
            port.ring.take(message, fds)
        else:
            if fds:
                self._oversight.met(number, WorkerNotes(fds, port.pid), port.pid)
            self._scheduler.add(number, self._served_by_workers)

    def _ends_worker(self, worker: Hashable, why: str) -> None:
        self._to_daemon(p.WorkerEnds(worker, why))  # type: ignore[arg-type]

    def _plan_of(self, run: int) -> Plan | None:
        live = self._runs.get(run)
        return live.run.plan if live is not None else None

    def _served_by_workers(self, run: int) -> bool:
        live = self._runs.get(run)
        return live is not None and live.pool is None

    def _task_failed(self, number: int, message: w.TaskFailed) -> None:
        """A task came to an error, in the worker or on its way there."""
        work = self._scheduler.done(number, message.task)
        if work is not None:
            self._errors.append(message.trace)
            self._fail(work.run, p.Failed(message.kind, message.text, message.record, message.trace))

    def _task_done(self, number: int, port: WorkerPort, message: w.TaskDone) -> None:
        # Before the task counts as done, in case it has to be done again.
        block = read(port.ring.slot(message.generation, message.index, message.nbytes))
        port.inbox.done(message.task)
        work = self._scheduler.done(number, message.task, message.microseconds)
        live = self._runs.get(work.run) if work is not None else None
        if work is not None and live is not None and live.failed is None:
            if work.whole or not live.run.takes_borrowed(work.task.lane, work.task.epoch, work.number):
                block = block.copy()
            self._accept(live, work, Outcome(block, message.skipped, message.reports, message.counters))
        port.channel.send(encode(w.SlotFree(message.generation, message.index)))

    def _let_go(self, worker: Hashable) -> None:
        if (port := self._workers.get(worker)) is not None:  # type: ignore[call-overload]
            self._watches.drop(port.channel)
            port.channel.close()

    def _lose_worker(self, number: int, how: str) -> None:
        port = self._workers.pop(number, None)
        if port is not None:
            self._watches.drop(port.channel)
            port.close()
        place, at = self._oversight.place(number), self._scheduler.workers.get(number)
        how, divides = self._oversight.gone(number, how)
        said = f"worker {number} ended: {how}"
        if how:
            self._errors.append(said)
        if at is not None and at.oldest is not None:
            _log.warning("%s. Its tasks are done again", said)
        grains = {run: live.run.plan.grain for run, live in self._runs.items()}
        for work in self._scheduler.lost(number, how, grain=lambda run: grains.get(run, 1), divides=divides):
            live = self._runs.get(work.run)
            if live is not None:
                where = "reading" if place is None else place.cause
                self._fail(work.run, p.Failed(RunFailed.__name__, given_up(live.run.plan, work, where), []))

    def _drain_local(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._local:
            worker, task_id, future = self._local.popleft()
            work = self._scheduler.done(worker, task_id)
            live = self._runs.get(work.run) if work is not None else None
            if work is None or live is None or live.failed is not None or future.cancelled():
                continue
            error = future.exception()
            if error is not None:
                self._fail_with(live, error)
            else:
                self._accept(live, work, future.result())

    # Assigning and accepting work

    def _assign(self) -> None:
        for worker, task_id, work in self._scheduler.assign(self._pick):
            live = self._runs.get(work.run)
            if live is None:  # it has ended since
                self._scheduler.done(worker, task_id)
                continue
            if live.pool is not None:
                try:
                    future = live.pool.submit(work.task)
                except (KeyboardInterrupt, SystemExit) as error:  # all else is the future's
                    self._fail_with(live, error)
                    continue
                future.add_done_callback(lambda f, w=worker, t=task_id: self._finished_locally(w, t, f))  # type: ignore[misc]
                continue
            port = self._workers[worker]  # type: ignore[index]
            if not port.stages:
                self._to_daemon(p.WorkerServes(worker))  # type: ignore[arg-type]
            assert live.stage is not None
            port.give_stage(self._stages[live.stage])
            port.inbox.give(task_id, live.stage, work.task)

    def _finished_locally(self, worker: Hashable, task_id: int, future: Future[Outcome]) -> None:
        self._local.append((worker, task_id, future))
        os.eventfd_write(self._wake, 1)

    def _pick(self, serves: Callable[[int], bool], worker: int, workers: int) -> tuple[int, int, AnyTask] | None:
        """The next task for a worker, of the run with the least runway among those that it serves."""
        best: tuple[float, int, int] | None = None
        for number, live in self._runs.items():
            try:
                chosen = live.run.choose(worker, workers) if live.failed is None and serves(number) else None
            except USERS as error:  # a work source of the user's own was asked for chunks
                self._fail_with(live, error)
                continue
            if chosen is not None and (best is None or chosen[0] < best[0]):
                best = (chosen[0], number, chosen[1])
        if best is None:
            return None
        _, number, lane = best
        task = self._runs[number].run.next_task(lane)
        return None if task is None else (number, *task)

    def _accept(self, live: LiveRun, done: Work, part: Outcome) -> None:
        self._moved += 1
        joined = self._scheduler.joined(done, part)
        if joined is None:
            return
        work, outcome = joined
        live.say(outcome.reports, self._errors)
        self._box.task(work.task, live.doing(work.task))
        try:
            self._carry_out(live, live.run.outcome(work.task.lane, work.task.epoch, work.number, outcome))
            live.say(live.run.unsaid(work.task.lane), self._errors)
        except USERS as error:  # an accumulator, or a stateless operator after one, failed
            self._fail_with(live, error)
        self._box.idle()

    def _do(self, live: LiveRun, event: Callable[[], list[Instruction]]) -> None:
        """An event of a run. It may have batches written, and so operators work, which may fail."""
        try:
            self._carry_out(live, event())
        except USERS as error:
            self._fail_with(live, error)

    def _carry_out(self, live: LiveRun, instructions: list[Instruction]) -> None:
        written: list[Write] = []
        for order in instructions:
            if isinstance(order, Write):
                segment = live.segments[order.ready.lane, order.slot.generation]
                order.layout.write(segment.array[order.slot.offset : order.slot.offset + order.ready.nbytes])
                if written and (order.clients != written[0].clients or len(written) == TOLD_AT_ONCE):
                    self._tell_of(written)
                written.append(order)
                continue
            self._tell_of(written)
            if isinstance(order, Tell):
                port = self._clients.get(order.client)
                if port is not None and not (order.droppable and port.channel.wants_write):
                    self._send(order.client, encode(order.message))
            elif isinstance(order, MakeRing):
                self._make_ring(live, order)
            elif isinstance(order, DropRing):
                live.segments.pop((order.lane, order.generation)).close()
        self._tell_of(written)

    def _tell_of(self, written: list[Write]) -> None:
        """Tell the clients of batches that have been written for them; the list is emptied."""
        if written:
            ready = [order.ready for order in written]
            payload = encode(ready[0] if len(ready) == 1 else p.BatchesReady.of(ready), limit=MAX_DESCRIPTOR)
            for client in written[0].clients:
                self._send(client, payload)
            written.clear()

    def _make_ring(self, live: LiveRun, order: MakeRing) -> None:
        used = sum(segment.size for run in self._runs.values() for segment in run.segments.values())
        segment = make_ring(order, used, self._budget)
        live.segments[order.lane, order.generation] = segment
        alone = bool(order.alone)
        new = p.NewSegment(order.lane, order.generation, order.slot_bytes, order.slots, alone, order.parts)
        payload = encode(new)
        for client in order.clients:
            port = self._clients.get(client)
            if port is not None:
                port.channel.send(payload, (segment.fileno(),))

    def _fail_with(self, live: LiveRun, error: BaseException) -> None:
        if not isinstance(error, ZephonError):
            traceback.print_exception(error)
        told = failure(0, error)
        self._fail(live.number, p.Failed(told.kind, told.text, told.record, told.trace))

    def _fail(self, number: int, failed: p.Failed, *, ours: bool = True) -> None:
        live = self._runs.get(number)
        if live is None or live.failed is not None:
            return
        live.failed = failed
        self._errors.append(failed.text)
        self._scheduler.forget(number)
        if len(encode(failed)) > MAX_DESCRIPTOR:
            failed = live.failed = replace(failed, trace="")
        if ours and live.run.others.telling:
            self._to_daemon(p.LanesTold(number, failed=failed))
        for client in list(live.run.readers):
            self._send(client, encode(failed))

    # Clients

    def _send(self, client: int, payload: bytes) -> None:
        port = self._clients.get(client)
        if port is not None:
            port.channel.send(payload)

    def _add_reader(self, message: p.AddReader, channel: Channel, statement: bytes) -> None:
        live = self._runs.get(message.run)
        if live is None:
            channel.close()
            return
        self._clients[message.client] = ClientPort(channel, message.run)
        self._watches.add(channel, lambda: self._from_client(message.client))
        try:
            stated = decode_statement(statement.decode()) if statement else None
            self._carry_out(live, live.run.join(message.client, message.group, message.group_readers, stated))
        except ProtocolError as error:
            self._send(message.client, encode(p.Failed("ProtocolError", str(error), [])))
        except USERS as error:  # as in `_from_client`
            self._fail_with(live, error)
        if live.failed is not None:
            self._send(message.client, encode(live.failed))

    def _expect(self, message: p.ExpectReaders) -> None:
        live = self._runs.get(message.run)
        if live is not None:
            self._do(live, lambda: live.run.expect(message.group, message.readers))

    def _from_client(self, client: int) -> None:
        port = self._clients.get(client)
        live = self._runs.get(port.run) if port is not None else None
        if port is None or live is None:
            return
        port.channel.flush()
        try:
            messages = port.channel.receive()
            for _, fds in messages:
                close_all(fds)
            for payload, _ in messages:
                try:
                    self._client_says(client, port, live, payload)
                except ProtocolError:
                    raise
                except USERS as error:  # writing a batch that a slot was awaited for may fail as any operator may
                    self._fail_with(live, error)
        except ProtocolError as error:  # nothing that it says can be relied on: it is out, the others go on
            self._errors.append(f"client {client} is dropped: {error}")
            self._send(client, encode(p.Failed("ProtocolError", str(error), [])))
            port.channel.close()
        if port.channel.closed:
            self._lose_client(client)
            self._to_daemon(p.ReaderGone(client))

    def _client_says(self, client: int, port: ClientPort, live: LiveRun, payload: bytes) -> None:
        message = decode(payload, expect=(p.Returned, p.Begin, p.Hungry))
        if isinstance(message, p.Hungry):
            port.hungry = message.lane
            if live.failed is None:
                self._carry_out(live, live.run.waits(client, message.lane, message.epoch, message.stands))
            self._reassure(port, live)
            return
        port.hungry = None
        if live.failed is not None:
            return
        if isinstance(message, p.Returned):
            self._moved += 1
            self._carry_out(live, live.run.returned(client, message.slots, message.epoch, message.rounds))
        else:
            self._carry_out(live, live.run.begin(client, message.epoch, message.past))

    def _reassure(self, port: ClientPort, live: LiveRun) -> None:
        assert port.hungry is not None
        moved = self._moved + self._oversight.moves + live.run.others.words  # a task of slow records may take minutes
        working, port.seen = moved != port.seen, moved
        if not port.channel.wants_write:
            port.channel.send(encode(live.alive(port.hungry, working, self._scheduler, self._oversight)))

    def _look(self) -> None:
        """What time alone makes due."""
        now = time.monotonic()
        self._next_look = now + self._look_seconds
        said = self._oversight.look()
        self._errors.extend(said)
        if said or now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._tick(now)

    def _tick(self, now: float) -> None:
        for live in self._runs.values():
            live.look(self._scheduler, self._oversight, now)
            if live.failed is None and live.waits_in_vain(now):
                self._do(live, live.run.go_without)
        for port in self._clients.values():
            of = self._runs.get(port.run)
            if port.hungry is not None and of is not None:
                self._reassure(port, of)

    def _close_client(self, client: int) -> None:
        port = self._clients.pop(client, None)
        if port is not None:
            self._watches.drop(port.channel)
            port.channel.close()

    def _lose_client(self, client: int) -> None:
        port = self._clients.get(client)
        self._close_client(client)
        live = self._runs.get(port.run) if port is not None else None
        if live is not None:
            self._do(live, lambda: live.run.leave(client))

    def _report(self) -> dict[str, Any]:
        lanes = sum(segment.size for live in self._runs.values() for segment in live.segments.values())
        memory = {"lane_rings": lanes, "stages": self._stages.nbytes, "worker_notes": self._oversight.nbytes}
        now = time.monotonic()
        return {
            "runs": [live.report(self._scheduler, self._oversight, now) for live in self._runs.values()],
            "workers": workers_report(self._workers, self._scheduler),
            "stalls": self._oversight.stalls(),
            "memory": memory_report(memory, self._workers.values(), self._budget),
            "errors": [text[-1000:] for text in list(self._errors)[-10:]],
        }


def main(fd: int, recipe: str, settings: dict[str, Any]) -> None:
    """Entry of the forked child: `fd` is its end of the connection to the daemon."""
    Engine(Channel.from_fd(fd), recipe, settings).run()
