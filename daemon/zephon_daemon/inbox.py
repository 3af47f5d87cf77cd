"""The tasks of one worker on their way to it, in the order in which it got them.

A task of the front is a few numbers. The records of a later stage's lie in a ring of their own, which the worker maps:
it has as many slots as the worker has credits, so there is one for every task in its hands. Where records are so large
that the limit leaves room for fewer, the tasks from there on wait here until the worker has done some.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from zephon.errors import ZephonError
from zephon.transport.channels import MAX_DESCRIPTOR, Channel
from zephon.transport.layout import Layout, measure
from zephon.transport.messages import encode
from zephon.transport.protocol import NewSegment
from zephon.transport.worker_protocol import DoStageTask, DoTask, TaskFailed
from zephon.windows import AnyTask, StageTask
from zephon_daemon.block_ring import BlockRing
from zephon_daemon.scheduler import CREDITS
from zephon_daemon.worker import failure

Order = tuple[int, int, AnyTask, "Layout | None"]
"""A task's number, the number of its pickled stage, and the task."""


class Inbox:
    """`refused` is told of a task that cannot be given to the worker, as if the worker had failed at it."""

    def __init__(self, channel: Channel, refused: Callable[[TaskFailed], None]) -> None:
        self._channel, self._refused = channel, refused
        self._ring: BlockRing | None = None
        self._slots: dict[int, tuple[int, int]] = {}
        self._waiting: deque[Order] = deque()
        self.limit: int | None = None
        """Bytes that it may take."""

    @property
    def nbytes(self) -> int:
        """Bytes of its memory."""
        return self._ring.nbytes if self._ring is not None else 0

    def give(self, task_id: int, stage: int, task: AnyTask) -> None:
        """A task for the worker."""
        if isinstance(task, StageTask):
            try:
                layout = measure(task.block)
            except ZephonError as error:  # records that cannot be sent to another process
                self._refused(failure(task_id, error))
                return
            self._waiting.append((task_id, stage, task, layout))
            self._send_on()
        elif self._waiting:
            self._waiting.append((task_id, stage, task, None))
        else:
            self._send(DoTask(task_id, stage, *task))

    def done(self, task_id: int) -> None:
        """The worker is done with a task."""
        slot = self._slots.pop(task_id, None)
        if slot is not None:
            assert self._ring is not None
            self._ring.free(*slot)
            self._send_on()

    def close(self) -> None:
        """The worker is gone."""
        self._waiting.clear()
        if self._ring is not None:
            self._ring.close()

    def _send_on(self) -> None:
        while self._waiting:
            task_id, stage, task, layout = self._waiting[0]
            if isinstance(task, StageTask):
                assert layout is not None
                if not self._has_room(layout.nbytes):
                    return
                self._waiting.popleft()
                self._hand_over(task_id, stage, task, layout)
            else:
                self._waiting.popleft()
                self._send(DoTask(task_id, stage, *task))

    def _has_room(self, nbytes: int) -> bool:
        if self._ring is None:
            self._ring = BlockRing("zephon-tasks", CREDITS, self._made)
        self._ring.limit = self.limit
        return self._ring.has_room(nbytes)

    def _hand_over(self, task_id: int, stage: int, task: StageTask, layout: Layout) -> None:
        assert self._ring is not None
        try:
            slot = self._ring.write(layout)
        except ZephonError as error:
            self._refused(failure(task_id, error))
            return
        self._slots[task_id] = slot.generation, slot.index
        where = slot.generation, slot.index, layout.nbytes
        self._send(DoStageTask(task_id, stage, task.epoch, task.lane, task.low, task.high, task.stage, *where))

    def _made(self, message: NewSegment, fd: int) -> None:
        self._channel.send(encode(message), (fd,))

    def _send(self, order: DoTask | DoStageTask) -> None:
        self._channel.send(encode(order, limit=MAX_DESCRIPTOR))
