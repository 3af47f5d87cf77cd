"""Every message between an engine and its workers, on a SEQPACKET pair.

    engine -> worker   WorkerShare, LoadStage (+ memory with the pickled stage), DropStage, DoTask, DoStageTask,
                       SlotFree, NewSegment (+ memory, for the records of later stages)
    worker -> engine   WorkerReady (+ memory in which it notes where it is, and the means to its stack), TaskDone,
                       TaskFailed, NewSegment (+ memory)
"""

from __future__ import annotations

from dataclasses import dataclass

from zephon.transport.messages import message


@message("load_stage")
@dataclass(frozen=True, slots=True)
class LoadStage:
    """A pickled stage of `nbytes`; its memory comes with the message."""

    stage: int
    nbytes: int


@message("drop_stage")
@dataclass(frozen=True, slots=True)
class DropStage:
    stage: int


@message("worker_share")
@dataclass(frozen=True, slots=True)
class WorkerShare:
    """How many bytes the worker's rings may take, and what it may keep decoded."""

    ring_bytes: int
    cache_bytes: int


@message("worker_ready")
@dataclass(frozen=True, slots=True)
class WorkerReady:
    pid: int


@message("do_task")
@dataclass(frozen=True, slots=True)
class DoTask:
    """`pointers` are the samples' own, packed, where the worker cannot compute them."""

    task: int
    stage: int
    epoch: int
    lane: int
    low: int
    high: int
    pointers: bytes = b""


@message("do_stage_task")
@dataclass(frozen=True, slots=True)
class DoStageTask:
    """Records for later stage number `later`: the block lies in the ring that was handed to the worker for that."""

    task: int
    stage: int
    epoch: int
    lane: int
    low: int
    high: int
    later: int
    generation: int
    index: int
    nbytes: int


@message("task_done")
@dataclass(frozen=True, slots=True)
class TaskDone:
    """The outcome's block lies in the worker's ring."""

    task: int
    generation: int
    index: int
    nbytes: int
    skipped: int
    reports: list[str]
    counters: dict[str, int]
    microseconds: int


@message("task_failed")
@dataclass(frozen=True, slots=True)
class TaskFailed:
    """As `Failed`, with the worker's traceback for the log."""

    task: int
    kind: str
    text: str
    record: list[str]
    trace: str


@message("slot_free")
@dataclass(frozen=True, slots=True)
class SlotFree:
    generation: int
    index: int
