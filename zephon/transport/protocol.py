"""Every message between the processes of a node, and who sends which.

Control connection (ZeroMQ, client DEALER to daemon ROUTER; frames: request number, message). Each request is answered
once, by its answer or by `Refused`; while an answer takes long the daemon sends `Patience` about once a second.

    Hello    -> Welcome       a client comes, or comes back: which group of which pipeline it reads
    Attach   -> Attached      its first batch or state is wanted: the run takes shape, or goes on
    Progress -> ProgressReport
    Goodbye  -> Farewell

Data connection (Unix SEQPACKET). The client connects and sends `Join`; once it is attached, the daemon passes the
connection to the engine, and from then on:

    client -> engine   Begin (an epoch may be delivered), Returned (slots given back, how far delivered), Hungry
    engine -> client   NewSegment (+ descriptor of the memory), BatchReady, BatchesReady, Announced, LaneTotal,
    Released, ReadersLeft, Alive, Failed

When the engine or the daemon dies the data connection ends, and with it everything that the new engine would need to
know; the ranks know it. There is one way back from both. The client delivers what has arrived, drops nothing that it
handed over, and begins anew with two new connections:

    Hello    with its number and token of before. A daemon that knows them replaces the old client by the new one, in
             the same session and place; to a new daemon it is a client like any other, and the first to come makes the
             session. It is answered once the engine is ready, and `Patience` says so until then.
    Attach   with the checkpoint that it once loaded, which all ranks of the run must agree on as before, and with its
             resume statement (`zephon.transport.statement`). The first statement restarts the run from its origin; the
             lanes of a group restart at its slowest reader once all of its readers are back.
    Begin    of the epoch that it is in.

So groups come back one by one, at any time; nobody is asked for a lane that is not its own. A daemon counts the deaths
of an engine under a run; a statement that shows a batch delivered since the one before ends the row.

Daemon and engine (SEQPACKET pair): StartRun, AddWorker (+ its connection), RetireWorker, WorkerGone, AddReader (+ the
client's connection, + its resume statement in memory), DropReader, ExpectReaders, EndRun, TellLanes, GroupsElsewhere,
Report from the daemon; EngineReady (+ memory in which it notes what it works on), WorkerServes, RunStarted, RunRefused,
ReaderGone, EngineReport from the engine. Where several engines share a run, what one says of its lanes (LanesTold) goes
through the daemon to the others.

Engine and worker: `zephon.transport.worker_protocol`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from struct import Struct
from typing import Any

from zephon.frontiers import Frontier
from zephon.transport.messages import message

MOST_PIDS = 1 << 22
"""The largest process id of any Linux."""

LONGEST_NONCE = 64
"""Bytes of a client's nonce."""

# Control connection


@message("hello")
@dataclass(frozen=True, slots=True)
class Hello:
    """`job` names the training job (torchrun's run id and restart count; empty where there is none).

    `timeout` are the seconds after which the client wants to be refused rather than wait for others. `client` and
    `token` are those of an earlier Welcome if the client comes back, else -1 and empty. `nonce` is the client's own
    and the same in all its hellos: one whose answer was lost is told from that of another reader by it.
    """

    pid: int
    dp_degree: int
    dp_group_id: int
    group_readers: int
    pipeline: str
    job: str
    batches_per_step: int | None
    timeout: float = 60.0
    client: int = -1
    token: bytes = b""
    nonce: bytes = b""

    def __post_init__(self) -> None:
        if not 0 < self.pid <= MOST_PIDS:
            raise ValueError(f"pid={self.pid} is no process id")
        if len(self.nonce) > LONGEST_NONCE:
            raise ValueError(f"a nonce of {len(self.nonce)} bytes; at most {LONGEST_NONCE}")


@message("welcome")
@dataclass(frozen=True, slots=True)
class Welcome:
    """`token` proves the client to the data connection; `client` is its number in the session.

    `supervisor` says who starts the daemon again if it dies: "launch <process id>", "systemd", "kubernetes", or nobody
    that it knows of.
    """

    token: bytes
    client: int
    recipe: str
    supervisor: str = ""


@message("attach")
@dataclass(frozen=True, slots=True)
class Attach:
    """`checkpoint` is JSON, empty for a new run. `statement` is a resume statement, empty unless the client was
    attached before.
    """

    token: bytes
    client: int
    checkpoint: str
    allow_changed: list[str]
    statement: str = ""


@message("attached")
@dataclass(frozen=True, slots=True)
class Attached:
    """What a client must know of the run. `totals` has each lane's records where arithmetic gives them (else empty);
    `starts` each lane's frontier (chunk, offset, records, skipped), `sources` the state of the work source in those
    that have one, `stands` where in turn-taking those stand that say it. `memory` is the node's budget in bytes, 0 for
    none."""

    identity: str
    lanes: int
    owned: list[int]
    microbatch_size: int
    drop_last: bool
    even_ends: bool
    packed: bool
    dataset_names: list[str]
    epoch: int
    starts: list[list[int]]
    warnings: list[str]
    sources: dict[int, str] = field(default_factory=dict)
    memory: int = 0
    stands: dict[int, int] = field(default_factory=dict)

    def frontiers(self) -> dict[int, Frontier]:
        """The frontier of each lane that the run started from."""
        return {
            lane: Frontier(chunk, offset, records, skipped, self.sources.get(lane, ""), self.stands.get(lane))
            for lane, (chunk, offset, records, skipped) in enumerate(self.starts)
        }


@message("progress")
@dataclass(frozen=True, slots=True)
class Progress:
    pass


@message("progress_report")
@dataclass(frozen=True, slots=True)
class ProgressReport:
    """Plain data, as `zephon progress --json` prints it."""

    report: dict[str, Any]


@message("goodbye")
@dataclass(frozen=True, slots=True)
class Goodbye:
    token: bytes
    client: int


@message("farewell")
@dataclass(frozen=True, slots=True)
class Farewell:
    pass


@message("patience")
@dataclass(frozen=True, slots=True)
class Patience:
    """The answer is being worked on; `reason` says what it waits for. `others`: for processes of the user's to end."""

    reason: str
    others: bool = False


@message("refused")
@dataclass(frozen=True, slots=True)
class Refused:
    """An error for the caller: `kind` is the name of a class in `zephon.errors`."""

    kind: str
    text: str


# Data connection: client to daemon and engine

_SLOT = Struct("=3q")


@message("join")
@dataclass(frozen=True, slots=True)
class Join:
    token: bytes
    client: int


@message("begin")
@dataclass(frozen=True, slots=True)
class Begin:
    """The client is ready for this epoch's batches. `past`: records that each lane had its turn for in earlier ones."""

    epoch: int
    past: int = 0


@message("returned")
@dataclass(frozen=True, slots=True)
class Returned:
    """Slots given back, and the client's delivered rounds of the epoch. `packed` are the slots' lanes, generations and
    indices, end to end, as int64: each batch of each rank is in one, and a list's items are taken apart one by one."""

    packed: bytes
    epoch: int
    rounds: int

    def __post_init__(self) -> None:
        if len(self.packed) % _SLOT.size:
            raise ValueError(f"{len(self.packed)} bytes are no slots of {_SLOT.size} each")

    @classmethod
    def of(cls, numbers: Iterable[int], epoch: int, rounds: int) -> Returned:
        """`numbers` are the slots' lanes, generations and indices, end to end."""
        return cls(array("q", numbers).tobytes(), epoch, rounds)

    @property
    def slots(self) -> list[tuple[int, int, int]]:
        """(lane, generation, index) of each."""
        return list(_SLOT.iter_unpack(self.packed))


@message("hungry")
@dataclass(frozen=True, slots=True)
class Hungry:
    """The client has waited a while for this lane; `Alive` answers until its batch comes.

    `stands` is where that batch begins in turn-taking.
    """

    lane: int
    epoch: int
    stands: int


# Data connection: engine to client


@message("new_segment")
@dataclass(frozen=True, slots=True)
class NewSegment:
    """Memory for a lane's ring (or a worker's, lane -1); its descriptor comes with the message.

    With `alone` it is for one payload only, and the ring stays as it is. Of a ring whose slots are divided into `parts`
    the client may hold one part, so that with those of the others a slot stays free.
    """

    lane: int
    generation: int
    slot_bytes: int
    slots: int
    alone: bool = False
    parts: int = 1


@message("batch_ready")
@dataclass(frozen=True, slots=True)
class BatchReady:
    """A batch lies in slot `index` of `generation` of its lane's ring, `nbytes` long."""

    lane: int
    epoch: int
    generation: int
    index: int
    nbytes: int
    first_record: int
    records: int

    @property
    def rows(self) -> Iterable[tuple[int, ...]]:
        """Its fields, as of one of `BatchesReady`."""
        return (_numbers_of(self),)


_BATCH = Struct(f"={len(fields(BatchReady))}q")
_numbers_of = attrgetter(*(each.name for each in fields(BatchReady)))


@message("batches_ready")
@dataclass(frozen=True, slots=True)
class BatchesReady:
    """Several at once, in their order: each message wakes the client. `packed` are their fields, int64, end to end."""

    packed: bytes

    def __post_init__(self) -> None:
        if len(self.packed) % _BATCH.size:
            raise ValueError(f"{len(self.packed)} bytes are no batches of {_BATCH.size} each")

    @classmethod
    def of(cls, batches: Iterable[BatchReady]) -> BatchesReady:
        return cls(b"".join([_BATCH.pack(*_numbers_of(ready)) for ready in batches]))

    @property
    def rows(self) -> Iterable[tuple[int, ...]]:
        """The fields of each."""
        return _BATCH.iter_unpack(self.packed)


@message("announced")
@dataclass(frozen=True, slots=True)
class Announced:
    """A window of the lane begins at chunk `chunk`, at the lane's record `records`, after `skipped` bad ones, and with
    the work source in state `source` (as `zephon.frontiers.Announcement`)."""

    lane: int
    epoch: int
    chunk: int
    records: int
    skipped: int
    source: str = ""


@message("lane_total")
@dataclass(frozen=True, slots=True)
class LaneTotal:
    """The lane has this many records in the epoch, all told, and `skipped` bad ones were left out."""

    lane: int
    epoch: int
    records: int
    skipped: int


@message("released")
@dataclass(frozen=True, slots=True)
class Released:
    """Rounds up to `rounds` may be delivered; with `final` there are no more in this epoch.

    `spent`: the state that was loaded was the end of this epoch, so no lane that takes part has a record left of it.
    """

    epoch: int
    rounds: int
    final: bool
    spent: bool = False


@message("readers_left")
@dataclass(frozen=True, slots=True)
class ReadersLeft:
    """So many ranks read the client's group, itself included; the others of its `group_readers` are gone."""

    readers: int


@message("alive")
@dataclass(frozen=True, slots=True)
class Alive:
    """The engine is there. `working` if something moved since it last said so; `reason` what the lane waits for;
    `stall` the report of a worker that does not move, if there is one."""

    working: bool
    reason: str
    stall: str = ""


@message("failed")
@dataclass(frozen=True, slots=True)
class Failed:
    """The run has ended with an error. `record` is the `parts` of a RecordError, else empty; `trace` the traceback of
    the exception, where it was raised."""

    kind: str
    text: str
    record: list[str]
    trace: str = ""


# Daemon and engine


@message("start_run")
@dataclass(frozen=True, slots=True)
class StartRun:
    """Give a pipeline's run its shape. The checkpoint (JSON, maybe empty) comes as a memory descriptor with the
    message. `careful`: engines have died under the run, so note by name what is in work.
    """

    run: int
    pipeline: str
    dp_degree: int
    allow_changed: list[str]
    groups: list[int]
    careful: bool = False


@message("run_started")
@dataclass(frozen=True, slots=True)
class RunStarted:
    """`plan` is an `Attached` without `owned`; `strategy` the mapping of lanes to groups."""

    run: int
    plan: Attached
    strategy: str


@message("run_refused")
@dataclass(frozen=True, slots=True)
class RunRefused:
    run: int
    kind: str
    text: str


@message("add_reader")
@dataclass(frozen=True, slots=True)
class AddReader:
    """A client to deliver a group's lanes to; its data connection comes with the message, then its resume statement, if
    it has one, as memory.
    """

    run: int
    client: int
    group: int
    group_readers: int


@message("expect_readers")
@dataclass(frozen=True, slots=True)
class ExpectReaders:
    """A rank of the group has left before it came back: so many of it will; 0 where all have died."""

    run: int
    group: int
    readers: int


@message("drop_reader")
@dataclass(frozen=True, slots=True)
class DropReader:
    client: int


@message("reader_gone")
@dataclass(frozen=True, slots=True)
class ReaderGone:
    """The client's data connection has ended."""

    client: int


@message("end_run")
@dataclass(frozen=True, slots=True)
class EndRun:
    run: int


@message("tell_lanes")
@dataclass(frozen=True, slots=True)
class TellLanes:
    """Other engines have lanes of the run: tell of yours from now on, and first of all everything once more."""

    run: int


@message("lanes_told")
@dataclass(frozen=True, slots=True)
class LanesTold:
    """What an engine tells the run's other engines of its lanes (`zephon_daemon.others`); the daemon passes it on.

    `reached` has (epoch, lane, records) each, `barren` (epoch, lane, samples, 1 if it has ended, skipped) of lanes
    without a record, `begun` the latest epoch that a reader has begun. `failed`: the run has ended with that error.
    """

    run: int
    announced: list[Announced] = field(default_factory=list)
    totals: list[LaneTotal] = field(default_factory=list)
    released: list[Released] = field(default_factory=list)
    reached: list[list[int]] = field(default_factory=list)
    barren: list[list[int]] = field(default_factory=list)
    begun: int = -1
    failed: Failed | None = None


@message("groups_elsewhere")
@dataclass(frozen=True, slots=True)
class GroupsElsewhere:
    """The groups whose readers get their lanes from other engines of the run, and those `lost`: their engine has died,
    and they have not come back.
    """

    run: int
    groups: list[int]
    lost: list[int] = field(default_factory=list)


@message("engine_ready")
@dataclass(frozen=True, slots=True)
class EngineReady:
    """The recipe is loaded. Its pipelines by name, with what `zephon progress` shows of each."""

    pipelines: list[str]
    workers: int


@message("engine_loads")
@dataclass(frozen=True, slots=True)
class EngineLoads:
    """The engine begins to load the recipe. Its black box, the memory of its stack and its pidfd come with it."""


@message("add_worker")
@dataclass(frozen=True, slots=True)
class AddWorker:
    worker: int
    pid: int


@message("worker_serves")
@dataclass(frozen=True, slots=True)
class WorkerServes:
    """The worker has been given its first task."""

    worker: int


@message("worker_ends")
@dataclass(frozen=True, slots=True)
class WorkerEnds:
    """The engine ends the worker by force, and why."""

    worker: int
    why: str


@message("retire_worker")
@dataclass(frozen=True, slots=True)
class RetireWorker:
    """The worker is needed elsewhere: it gets no further task, and is let go once it has done those that it has."""

    worker: int


@message("worker_gone")
@dataclass(frozen=True, slots=True)
class WorkerGone:
    """`how` says exit code or signal, for people; empty for one that was let go."""

    worker: int
    how: str


@message("report")
@dataclass(frozen=True, slots=True)
class Report:
    request: int


@message("engine_report")
@dataclass(frozen=True, slots=True)
class EngineReport:
    request: int
    report: dict[str, Any]
