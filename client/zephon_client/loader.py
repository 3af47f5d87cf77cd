"""The Loader: what a training loop iterates and takes checkpoints of.

A batch counts as delivered the moment it is handed over: one assignment, right before `__next__` returns, which the
next call turns into bookkeeping. So a Ctrl-C, at whatever point it strikes, leaves a state that names exactly the
batches that the training loop got.

States are composed here, from the rank's own counts and the windows that engines have announced; no request is made,
so that a checkpoint can be taken even after the daemon has died.

The run outlives the connection. When the engine or the daemon dies, the next call that wants a batch delivers what is
here already, then waits for them to come back, connects anew, says how far this rank is, and goes on: the training
loop notices nothing but a pause. A Ctrl-C in that wait changes nothing either; the next call goes on waiting.

One thread at a time uses a Loader; another may close it, which ends a wait with an error. Arrays of its batches may
live and die in any.
"""

from __future__ import annotations

import json
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

from zephon.batches import Batch
from zephon.errors import BatchesHeld, CheckpointError, DaemonUnavailable, SettingError, TopologyError, ZephonError
from zephon.frontiers import Checkpoint, complete_checkpoint
from zephon.lanes import check_step, rounds_of_step
from zephon.transport.protocol import Attach, Attached, Progress, ProgressReport
from zephon.words import many
from zephon_client.absence import LOSSES, Absence
from zephon_client.connection import Connection, leave, nonce_for
from zephon_client.copies import Bytes, Copies, share_of_a_rank
from zephon_client.output import Output
from zephon_client.ready import Ready
from zephon_client.reported import error_of, raised_there
from zephon_client.run import Run
from zephon_client.settings import Settings
from zephon_client.undisturbed import Undisturbed
from zephon_client.waiting import Limits, Waiting

_PROGRESS_SECONDS = 3.0
_CLOSE_SECONDS = 5.0
"""How long `close` waits for another thread that connects just then; that thread lets go of the connection itself."""


class Loader(Iterator[Batch]):
    """The batches of this rank's group. Made by `zephon_client.connect`; a context manager.

    `for batch in loader` delivers the rest of the epoch; iterating again starts the next one.
    """

    def __init__(self, path: str, settings: Settings, start_seconds: float) -> None:
        self._path, self._settings, self._start_seconds = path, settings, start_seconds
        self._pid = os.getpid()
        self._undisturbed = Undisturbed()
        self._limits = Limits(stalled=settings.timeout, hungry=min(1.0, settings.timeout / 2))
        self._loaded: Checkpoint | None = None
        self._allow_changed: list[str] = []
        self._plan: Attached | None = None
        self._run: Run | None = None
        self._output: Output | None = None
        self._copies = Copies()
        self._handed: Ready | None = None
        self._ended = False
        """Whether the epoch has ended and the caller has not been told yet."""
        self._ungiven = 0
        """Batches handed over since slots were last returned."""
        self._losses = 0
        """Connections made anew since the last batch was delivered."""
        self._coming_back = False
        """Whether the connection does not know the run yet, so that a call that was interrupted then begins anew."""
        self._refused: ZephonError | None = None
        """Why the run cannot go on, said when this rank came back to it."""
        self._warned: set[str] = set()
        self._closed = False
        self._left = False
        """Whether `close` has been through."""
        self._waits = threading.RLock()
        """Held by the thread that waits for the daemon."""
        self._connect()

    def _connect(self) -> None:
        self._nonce = nonce_for(self._path, self._settings)
        try:
            self._use(Connection(self._path, self._settings, self._start_seconds, self._nonce, self._undisturbed))
        except BaseException:
            leave(self._path, self._settings, self._nonce)
            raise

    def _use(self, connection: Connection) -> None:
        with self._undisturbed:
            self._connection = connection
            # Not `__del__`: this runs at the interpreter's end too, while modules still exist, and keeps no Loader
            # alive. Detached when a connection has ended, not before: else one that was cut in its end would stay.
            self._ending = weakref.finalize(self, connection.end)

    # Iterating

    def __iter__(self) -> Iterator[Batch]:
        """The rest of this epoch, or the next epoch if this one has ended. One such iterator stays ended.

        No line of Python lies between `__next__` and the training loop, so a Ctrl-C finds no batch on its way there.
        """
        self._check_process()
        return iter(self.__next__, None)

    def __next__(self) -> Batch:
        """The next batch; StopIteration at the end of the epoch, after which the next one begins.

        Raises what ended the run (RecordError, RunFailed, …), DaemonUnavailable when the daemon is silent, or gone and
        does not come back, and TopologyError when nothing has moved for `timeout` seconds because ranks are missing.
        """
        if self._closed or os.getpid() != self._pid:
            self._check_open()
        if self._ended:
            self._ended = False
            raise StopIteration
        run, output = self._run, self._output
        if run is None or output is None or not run.begun:
            run, output = self._begun()
        waiting: Waiting | None = None
        while True:
            if self._handed is not None:
                self._settle(run)
            epoch, slots = run.epoch, self._connection.feed.slots
            ready = epoch.due()
            self._ungiven += 1
            # Half-way it only hears what has come: two short halts are better than one long one.
            if ready is None or self._ungiven > slots.spare or self._ungiven == slots.spare // 2:
                ready = self._exchange(run)
            if ready is not None:
                batch: Batch | None = ready.batch
                if output.copies or not ready.records or not slots.at_hand(ready):
                    batch = self._made(ready, run, output)
                elif batch is None:
                    batch = ready.batch = output.batch(ready, slots.lease(ready))
                if batch is None:
                    continue
                self._losses = 0
                self._handed = ready
                return batch
            if epoch.over:
                self._end_epoch(run)
                waiting = None
                continue
            with self._waiting():
                self._check_alive()
                if self._connection.feed.closed or self._coming_back:
                    self._come_back()
                    waiting = None
                    continue
                if waiting is None:
                    feed, ask, (lane, stands) = self._connection.feed, self._stall_of_engine, epoch.place
                    waiting = Waiting(feed, self._limits, self._path, lane, epoch.number, stands, ask)
                waiting.step()

    def _exchange(self, run: Run) -> Ready | None:
        """Takes in what has arrived, and returns slots. The batch that is due, if it is here now."""
        with self._undisturbed:
            if self._closed:
                raise self._was_closed()
            self._hear(run)
            ready = run.epoch.due()
            if ready is None or self._ungiven > self._connection.feed.slots.spare:
                self._give_back(run, wait=ready is None)
        return ready

    def _made(self, ready: Ready, run: Run, output: Output) -> Batch | None:
        """A batch that may have to be copied, or that is None: a void one, which is passed over."""
        epoch, slots = run.epoch, self._connection.feed.slots
        expected = True
        with self._undisturbed:
            if self._closed:
                raise self._was_closed()
            if epoch.is_void(ready):
                slots.unused(epoch.pass_over(ready))
                return None
            copied = ready.batch is None and self._make(ready, output)
            if output.ahead is not None:
                self._go_ahead(ready, run, output)
            elif copied:
                expected = output.copies or ready.ring.alone
                self._give_back(run)
        if not expected:
            self._warn_of_copies(ready)
        if output.ahead is not None and output.ahead.unsaid:
            unsaid, output.ahead.unsaid = output.ahead.unsaid, ""
            warnings.warn(unsaid, stacklevel=3)
        batch: Batch = ready.batch
        return batch

    def _make(self, ready: Ready, output: Output) -> bool:
        """Makes the batch; whether it is a copy, so that its slot is free at once."""
        slots = self._connection.feed.slots
        copied, sent = output.copies or slots.short(ready), None
        if copied or output.ahead is not None:
            self._copies.make_room(ready.nbytes)
        buffer: Bytes = slots.lease(ready)
        if output.ahead is not None:
            buffer, sent = output.ahead.send(slots, ready, buffer, self._copies)
        elif copied:
            buffer = self._copies.copy(buffer, output.copied)
        ready.batch = output.batch(ready, buffer, sent)
        ready.source = None
        return copied

    def _go_ahead(self, ready: Ready, run: Run, output: Output) -> None:
        """The batch is handed over; the next one is sent to the device, so that it is there when it is asked for."""
        epoch = run.epoch
        ready.batch.arrive(ready.ends_round)
        after = epoch.after(ready)
        if after is None:
            self._hear(run)
            after = epoch.after(ready)
        if after is not None and after.batch is None and after.records:
            with suppress(BatchesHeld):  # then it is said when the batch is due
                self._make(after, output)

    def _end_epoch(self, run: Run) -> None:
        """Goes on to the next epoch; StopIteration unless the epoch was over when its state was loaded."""
        epoch = run.epoch
        again = run.resumed_at_end
        with self._undisturbed:
            for left in run.advance():
                self._connection.feed.slots.unused(left)
            self._give_back(run)
            self._ended = not again
        if again:
            self._begin(run)
            return
        report = epoch.end_report() if self._settings.dp_group_id == 0 else None
        if report is not None:
            warnings.warn(report, stacklevel=3)
        self._ended = False
        raise StopIteration

    # The run

    @property
    def lanes(self) -> list[int]:
        """The lanes that this rank's group owns, ascending. Asking for them gives the run its shape."""
        self._check_process()
        return list(self._attached().lanes)

    @property
    def rounds(self) -> int:
        """Rounds delivered in this run, over all its epochs."""
        self._check_process()
        if self._run is None:
            return 0
        self._settle(self._run)
        return self._run.rounds

    @property
    def step(self) -> int:
        """Global training steps done since the run's beginning, over its epochs and resumes; the same on every rank.

        A step is one round, or `batches_per_step` batches where `connect` was given that. Asking after
        `load_state_dict` gives the run its shape.
        """
        self._check_process()
        if self._run is None and self._loaded is None:
            return 0
        run = self._attached()
        self._settle(run)
        return run.steps // rounds_of_step(self._settings.batches_per_step, run.lanes)

    @property
    def epoch(self) -> int:
        """The epoch of the batches that are delivered; after its end the next one."""
        self._check_process()
        if self._run is None:
            return self._loaded.epoch if self._loaded is not None else 0
        return self._run.epoch.number

    def state_dict(self) -> dict[str, Any]:
        """A checkpoint: plain JSON, of the whole run at the end of a round, of this group's lanes inside one.

        Makes no request once the run has taken shape, so it also works after `close` and without the daemon.
        """
        self._check_process()
        run = self._attached()
        with self._undisturbed:
            self._catch_up(run)
        checkpoint = run.checkpoint()
        if checkpoint.missing and "partial" not in self._warned:
            self._warned.add("partial")
            warnings.warn(
                f"this state was taken inside a round: it holds lanes {sorted(checkpoint.lanes)} only (complete: "
                "false). Take states where batch.ends_round is True, or join those of all groups with "
                "zephon.merge_checkpoints([...]).",
                stacklevel=2,
            )
        # No part of it is shared with the next state, nor with the run.
        state: dict[str, Any] = json.loads(json.dumps(checkpoint.to_json()))
        return state

    def load_state_dict(self, state: Mapping[str, Any], allow_changed: Sequence[str] = ()) -> None:
        """Resumes from a checkpoint, before the first batch. `allow_changed` names settings that may differ.

        Raises CheckpointError if it is malformed, partial or too late. Whether it fits the recipe is found at the first
        batch or state: CheckpointMismatch.
        """
        self._check_open()
        if isinstance(allow_changed, str) or not all(isinstance(name, str) for name in allow_changed):
            raise SettingError(f'allow_changed={allow_changed!r}: must be a list of names, such as ["mixture"]')
        loaded = complete_checkpoint(state)
        run = self._run
        if run is not None and (self._handed is not None or run.epoch.touched or run.rounds_before):
            raise CheckpointError(
                "a state cannot be loaded after the first batch was delivered: load it right after connect, before "
                "iterating, or connect again."
            )
        if self._plan is not None:
            # The run already has a shape, say because `state_dict` was asked for first: leave it and come anew, which
            # the first batch does if an interrupt comes now.
            with self._undisturbed:
                self._run = self._plan = self._output = None
                self._connection.close()
                self._ending.detach()
            self._connect()
        self._loaded, self._allow_changed = loaded, list(allow_changed)

    def progress(self) -> dict[str, Any]:
        """What `zephon progress --json` prints. Raises DaemonUnavailable if no answer comes within seconds."""
        self._check_open()
        if self._run is not None:
            with self._undisturbed:
                self._catch_up(self._run)
        limit = min(self._settings.timeout, _PROGRESS_SECONDS)
        with self._waiting():
            connection = self._connection
            return connection.control.request(Progress(), ProgressReport, limit, connection.feed).report

    def close(self) -> None:
        """Leaves the session. Batches stay readable, and a state can still be taken. May be called again.

        Another thread that waits for a batch just then gets a ZephonError. A Ctrl-C takes effect when this is done,
        within a second; while it waits for such a thread, at once, and then another call does what is left.
        """
        if self._left or os.getpid() != self._pid:
            return
        self._closed = True
        if self._undisturbed.afterwards(self.close):  # in a finalizer that ran in the middle of something
            return
        if not self._waits.acquire(blocking=False):
            self._connection.feed.interrupt()
            if not self._waits.acquire(timeout=_CLOSE_SECONDS):
                return
        try:
            with self._undisturbed:
                try:
                    if self._run is not None and not self._connection.feed.closed:
                        self._catch_up(self._run)
                finally:
                    self._connection.close()
                    self._ending.detach()
                    self._left = True
        finally:
            self._waits.release()

    def __enter__(self) -> Loader:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise ZephonError(
            "a Loader cannot be pickled: it belongs to the process that connected. Call zephon_client.connect in the "
            "process that reads the batches (batches themselves can be pickled)."
        )

    def __repr__(self) -> str:
        at = "not attached" if self._run is None else f"lanes {self._run.lanes}, epoch {self._run.epoch.number}"
        return f"Loader({self._path}, {'closed, ' if self._closed else ''}{at})"

    # Inside

    def _attached(self) -> Run:
        """The run, which takes its shape now if it has none yet."""
        if self._run is not None:
            return self._run
        self._check_open()
        while self._plan is None:
            with self._waiting():
                try:
                    self._attach("", self._keep_plan)
                except DaemonUnavailable:
                    if self._closed or not self._connection.lost:
                        raise
                    self._come_back()
        return self._shaped(self._plan)

    def _shaped(self, plan: Attached) -> Run:
        with self._undisturbed:  # a second run, made by a signal's handler, would keep what it heard to itself
            if self._run is not None:  # such a handler has asked for a state meanwhile
                return self._run
            run = Run(plan, self._settings.group_readers, self._loaded.past if self._loaded is not None else 0)
            check_step(self._settings.batches_per_step, run.lanes)
            self._output = Output(self._settings, run.dataset_names, plan.packed)
            self._copies.limit = share_of_a_rank(plan.memory)
            self._run = run
        for text in plan.warnings:
            warnings.warn(text, stacklevel=5)
        return run

    def _attach(self, statement: str, keep: Callable[[Attached], None]) -> None:
        connection, welcome = self._connection, self._connection.welcome
        checkpoint = json.dumps(self._loaded.to_json()) if self._loaded is not None else ""
        attach = Attach(welcome.token, welcome.client, checkpoint, self._allow_changed, statement)
        connection.control.request(attach, Attached, self._settings.timeout, connection.feed, keep=keep)

    def _keep_plan(self, plan: Attached) -> None:
        self._plan = plan

    def _come_back(self) -> None:
        """The connection has ended: makes a new one, and goes on with the run where this rank is.

        Raises DaemonUnavailable when nobody comes back, and what the daemon refuses this rank with.
        """
        if self._losses >= LOSSES:
            raise DaemonUnavailable(
                f"the daemon on {self._path}, or its engine, has ended {self._losses} times since the last batch. See "
                "its log; state_dict() still works."
            )
        if self._run is not None:
            with self._undisturbed:
                self._settle(self._run)
                self._run.forget_undelivered()
        before = self._connection.welcome
        absence = Absence(self._path, before.supervisor, self._settings.timeout)
        while True:
            if self._closed:
                raise self._was_closed()
            self._connection.abandon()
            self._ending.detach()
            try:
                connection = Connection(self._path, self._settings, 0.0, self._nonce, self._undisturbed, before)
                self._coming_back = self._run is not None
                self._use(connection)
                before = connection.welcome
                absence.answered()
                if self._run is not None:
                    self._go_on(self._run)
                self._losses += 1
                self._coming_back = False
                return
            except DaemonUnavailable as error:
                absence.wait(error)

    def _go_on(self, run: Run) -> None:
        """Attaches the run to a new connection."""
        found: list[Attached] = []
        try:
            self._attach(run.statement().encode(), found.append)
            run.check_same(found[0])
        except DaemonUnavailable:
            raise
        except ZephonError as error:
            if not isinstance(error, TopologyError):  # ranks that are in the way may end
                self._refused = error
            self._connection.close()
            self._ending.detach()
            raise
        if run.begun:
            self._connection.feed.begin(run.epoch.number, run.past)

    def _begun(self) -> tuple[Run, Output]:
        run = self._attached()
        if not run.begun:
            self._begin(run)
        assert self._output is not None
        return run, self._output

    def _begin(self, run: Run) -> None:
        assert self._output is not None
        self._output.prepare()
        with self._undisturbed:
            if self._closed:
                raise self._was_closed()
            self._connection.feed.begin(run.epoch.number, run.past)
            run.begun = True

    def _catch_up(self, run: Run) -> None:
        """Brings the bookkeeping up to date, without waiting. Called undisturbed."""
        self._settle(run)
        self._hear(run)
        self._give_back(run)

    def _settle(self, run: Run) -> None:
        """Notes the batch that was handed over last. Whoever was interrupted in here calls it again."""
        handed = self._handed
        if handed is not None:
            run.epoch.deliver(handed)
            if self._handed is handed:  # still, where another thread closes the loader
                self._handed = None

    def _hear(self, run: Run) -> None:
        """Takes in what has arrived. Where that fails half-way, it comes once more, over another connection."""
        feed = self._connection.feed
        feed.pump_undisturbed()
        if feed.arrived:
            try:
                for stale in run.take(feed.arrived):
                    feed.slots.unused(stale)
            except BaseException:
                feed.leave()
                run.forget_undelivered()
                raise

    def _give_back(self, run: Run, wait: bool = False) -> None:
        """Returns the slots over which no array lives any more, and no copy to a device is under way.

        `wait` waits for such copies. While batches are here, several go back together: each message wakes the engine,
        which may take this very core.
        """
        self._ungiven = 0
        if self._output is not None and self._output.ahead is not None:
            self._output.ahead.reap(wait)
        self._connection.feed.give_back(run.epoch.number, run.epoch.turns.rounds)

    def _warn_of_copies(self, ready: Ready) -> None:
        if "copies" not in self._warned:
            self._warned.add("copies")
            lane, ring = ready.lane, many(ready.ring.slots, "slot")
            ring += f" for {ready.ring.parts} ranks" if ready.ring.parts > 1 else ""
            held = many(self._connection.feed.slots.held(lane), "batch", "batches")
            warnings.warn(
                f"the training loop holds {held} of lane {lane}, whose ring has {ring}, so batches are delivered as "
                "private copies, which costs time and memory. Let go of arrays that are no longer needed, or raise "
                "options(prefetch_batches=...).",
                stacklevel=4,
            )

    def _stall_of_engine(self) -> str:
        """What the daemon says of an engine that does not answer; empty if it says nothing."""
        connection = self._connection
        try:
            found = connection.control.request(Progress(), ProgressReport, _PROGRESS_SECONDS, connection.feed).report
        except ZephonError:
            return ""
        stall = found.get("engine_stall")
        return f"the engine of the daemon {stall}" if isinstance(stall, str) and stall else ""

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ZephonError(
                f"this Loader was connected by process {self._pid} and is used in its forked child {os.getpid()}: the "
                "connection is not the child's. Connect in the child, or read batches in the parent."
            )

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise ZephonError("this Loader is closed. Call zephon_client.connect for another.")

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Around whatever may take long. Where the loader is closed meanwhile, that is what it ends with."""
        with self._waits:
            self._end_if_closed()
            try:
                yield
            except Exception as error:
                self._end_if_closed(error)
                raise
            self._end_if_closed()

    def _end_if_closed(self, error: Exception | None = None) -> None:
        """Of a loader that was closed, lets go of the connection and says so."""
        if self._closed:
            self._connection.end()
            self._ending.detach()
            raise self._was_closed() from error

    def _was_closed(self) -> ZephonError:
        return ZephonError(
            "this Loader was closed while a batch was asked for. Its state_dict() still works; "
            "zephon_client.connect makes another."
        )

    def _check_alive(self) -> None:
        """Raises what ended the run. Batches that are already here were delivered before."""
        if self._refused is not None:  # what its connection says after that is of its end
            raise self._refused
        failed = self._connection.feed.failed
        if failed is not None:
            raise error_of(failed.kind, failed.text, failed.record) from raised_there(failed.trace)
