"""Tasks on their way to a worker: in order, with their records, in no more memory than there is."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.columns import Block, Fixed, Objects
from zephon.transport.channels import Channel, pair
from zephon.transport.layout import read
from zephon.transport.messages import decode
from zephon.transport.protocol import NewSegment
from zephon.transport.worker_protocol import DoStageTask, DoTask, TaskFailed
from zephon.windows import AnyTask, StageTask, Task
from zephon_daemon.block_ring import OtherRing
from zephon_daemon.inbox import Inbox
from zephon_daemon.scheduler import CREDITS

LIMIT = 24 << 20


class Worker:
    """The other end: it takes tasks in and is done with them in their order."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.ring = channel, OtherRing("tasks")
        self.tasks: deque[tuple[int, Any]] = deque()

    def receive(self) -> None:
        for payload, fds in self.channel.receive():
            message = decode(payload, expect=(DoTask, DoStageTask, NewSegment))
            if isinstance(message, NewSegment):
                self.ring.take(message, fds)
            elif isinstance(message, DoTask):
                self.tasks.append((message.task, Task(message.epoch, message.lane, message.low, message.high)))
            else:
                found = self.ring.slot(message.generation, message.index, message.nbytes)
                self.tasks.append((message.task, (message.low, message.high, message.later, read(found))))


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    both = pair()
    yield both
    for channel in both:
        channel.close()


def stage_task(number: int, nbytes: int) -> StageTask:
    samples = np.full((1, 4), number, np.int64)
    return StageTask(0, 1, number, number + 1, 2, Block({"x": Fixed(np.full((1, nbytes), number, np.uint8))}, samples))


@given(
    st.lists(
        st.one_of(st.none(), st.sampled_from([1, 1000, 300_000, 2 << 20, 9 << 20, 15 << 20])), min_size=1, max_size=14
    ),
    st.sampled_from([None, LIMIT]),
    st.data(),
)
def test_tasks_arrive_in_order_and_whole_however_large_their_records_are(
    sizes: list[int | None], limit: int | None, data: st.DataObject
) -> None:
    ours, theirs = pair()
    refused: list[TaskFailed] = []
    inbox, worker = Inbox(ours, refused.append), Worker(theirs)
    inbox.limit = limit
    given_out: deque[tuple[int, AnyTask]] = deque()
    left = deque(enumerate(sizes))
    try:
        while left or given_out:
            in_hand = len(given_out)
            if left and in_hand < CREDITS and (not in_hand or data.draw(st.booleans())):
                number, size = left.popleft()
                task: AnyTask = Task(0, 1, number, number + 1) if size is None else stage_task(number, size)
                given_out.append((number, task))
                inbox.give(number, 0, task)
                assert limit is None or inbox.nbytes <= limit
                continue
            worker.receive()
            number, expected = given_out.popleft()
            assert worker.tasks, "what is first in a worker's hands has been sent"
            got, task_there = worker.tasks.popleft()
            assert got == number
            if isinstance(expected, StageTask):
                low, high, later, block = task_there
                assert (low, high, later) == (number, number + 1, 2)
                assert (block.fields["x"].values == number % 256).all()
                assert block.fields["x"].values.shape == expected.block.fields["x"].values.shape  # type: ignore[attr-defined]
            else:
                assert task_there == expected
            inbox.done(number)
        assert refused == []
    finally:
        inbox.close()
        worker.ring.close()
        ours.close()
        theirs.close()


def test_records_that_cannot_be_sent_or_do_not_fit_are_an_error_of_their_task(ends: tuple[Channel, Channel]) -> None:
    refused: list[TaskFailed] = []
    inbox = Inbox(ends[0], refused.append)
    inbox.limit = LIMIT
    inbox.give(1, 0, stage_task(1, 10))
    unsendable = Block({"f": Objects([lambda: 1])}, np.zeros((1, 4), np.int64))
    inbox.give(2, 0, StageTask(0, 0, 0, 1, 1, unsendable))
    assert refused[-1].task == 2
    assert "cannot be pickled" in refused[-1].text
    inbox.give(3, 0, stage_task(3, LIMIT + 1))
    assert len(refused) == 1, "it waits until the worker has done what it has"
    inbox.give(4, 0, Task(0, 0, 0, 1))
    inbox.done(1)
    assert refused[-1].task == 3
    assert refused[-1].kind == "MemoryLimit"
    worker = Worker(ends[1])
    worker.receive()
    assert [number for number, _ in worker.tasks] == [1, 4]
    inbox.close()
    worker.ring.close()
