"""Who reads what: sessions, their clients and runs, decided without I/O.

Events go in (a request, a connection, a death, an answer of the engine, the time), instructions come out; `daemon.py`
carries them out. An `ask` is whatever the caller needs to find its way back to who asked; each gets one answer.

- All living clients belong to one session, that of their job. A client of another job waits until they have ended, and
  is refused with their process ids if they have not.
- The first client of a pipeline that attaches gives the run its shape: checkpoint, number of groups, ranks a group.
  Who brings another shape is refused, both named.
- A run ends with its last client. A rank whose place in a run is used up, since it closed and connected again, waits
  for that, and gets the next run: no rank ever continues in the middle of another's reading.
- When the engine dies the session dies with it: every client of it is told how, whenever it asks.
"""

from __future__ import annotations

import difflib
import hashlib
import hmac
import json
import secrets
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from zephon.errors import (
    CheckpointError,
    CheckpointMismatch,
    DaemonUnavailable,
    ProtocolError,
    RecipeError,
    RunFailed,
    SettingError,
    TopologyError,
    ZephonError,
)
from zephon.frontiers import MOST_LANES, checkpoint_from_text
from zephon.lanes import check_step, check_topology, owned_lanes
from zephon.transport.protocol import (
    AddReader,
    Attach,
    Attached,
    DropReader,
    EndRun,
    Farewell,
    Goodbye,
    Hello,
    Join,
    Patience,
    Refused,
    RunStarted,
    StartRun,
    Welcome,
)

PATIENCE_SECONDS = 1.0
"""How often one who waits hears that it has not been forgotten."""

OTHER_JOB_SECONDS = 10.0
"""How long a client waits for the clients of another job, or of its own group, to end."""

SAME_JOB_SECONDS = 30.0
"""How long a rank that connects again waits for its peers to leave the run before."""

JOIN_SECONDS = 30.0
"""A client without a data connection after that time is gone."""

MOST_CLIENTS = 1024
"""Clients at once."""

LONGEST_NAME = 1000
"""Characters of a pipeline's or a job's name."""

LONGEST_TEXT = 8000
"""Characters of an error's text."""

MOST_WAITING = 4096
"""Requests that wait at once."""

_REMEMBERED = 4096


class Answer(NamedTuple):
    """Answer a request."""

    ask: Hashable
    message: Welcome | Attached | Farewell | Patience | Refused


class Start(NamedTuple):
    """Have the engine start a run from a checkpoint (JSON, empty for a new run)."""

    message: StartRun
    checkpoint: str


class HandOver(NamedTuple):
    """Pass a client's data connection to the engine."""

    message: AddReader


class ToEngine(NamedTuple):
    message: DropReader | EndRun


class Forget(NamedTuple):
    """A client is gone: its watch and its data connection, if still held, can go."""

    client: int


Instruction = Answer | Start | HandOver | ToEngine | Forget


class _Wait(NamedTuple):
    """A request cannot be answered yet. After `seconds` it is refused with `error` (None: it waits on)."""

    reason: str
    seconds: float = 0.0
    error: ZephonError | None = None


class Shape(NamedTuple):
    """What all clients of a run must agree on."""

    dp_degree: int
    group_readers: int
    checkpoint: str
    allow_changed: tuple[str, ...]


@dataclass
class Client:
    """One connection of one rank."""

    number: int
    token: bytes
    hello: Hello
    since: float
    pid: int
    joined: bool = False
    handed_over: bool = False
    run: int | None = None
    """Its run, once it is attached."""

    def __str__(self) -> str:
        return f"process {self.pid} (group {self.hello.dp_group_id})"


@dataclass
class Run:
    """A pipeline's run. `plan` is None while the engine works on it."""

    number: int
    pipeline: str
    shape: Shape
    first: Client
    plan: Attached | None = None
    strategy: str = ""
    places: dict[int, int] = field(default_factory=dict)
    """How many readers of each group have ever attached."""


@dataclass
class _Waiting:
    ask: Hashable
    request: Hello | Attach
    since: float
    reason: str
    told: float
    seconds: float
    error: ZephonError | None


class Sessions:
    """The state machine. `now` is a clock in seconds that never goes back."""

    def __init__(self, recipe: str, make_token: Callable[[], bytes] = lambda: secrets.token_bytes(16)) -> None:
        self._recipe, self._make_token = recipe, make_token
        self._pipelines: list[str] | None = None
        self._waiting: list[_Waiting] = []
        self._lost: dict[int, tuple[bytes, str]] = {}
        self._numbers = self._run_numbers = 0
        self._current: dict[str, Run] = {}
        self.clients: dict[int, Client] = {}
        self.session = 0

    # Requests

    def hello(self, ask: Hashable, hello: Hello, now: float) -> list[Instruction]:
        """A client comes."""
        return self._take(ask, hello, now)

    def attach(self, ask: Hashable, attach: Attach, now: float) -> list[Instruction]:
        """A client wants its first batch or state."""
        return self._take(ask, attach, now)

    def goodbye(self, ask: Hashable, goodbye: Goodbye, now: float) -> list[Instruction]:
        """A client leaves."""
        out: list[Instruction] = []
        client = self.clients.get(goodbye.client)
        if client is not None and hmac.compare_digest(client.token, goodbye.token):
            out += self.gone(client.number, now)
        return [*out, Answer(ask, Farewell())]

    def joined(self, join: Join, pid: int) -> list[Instruction]:
        """A client's data connection has come, from process `pid` (0 if the kernel cannot say)."""
        client = self._known(join.client, join.token)
        if client.joined:
            raise ProtocolError(f"client {client.number} has a data connection already")
        client.joined, client.pid = True, pid or client.pid
        return self._hand_over(client)

    # What happens

    def gone(self, number: int, now: float, *, told_by_engine: bool = False) -> list[Instruction]:
        """A client has closed or died."""
        client = self.clients.pop(number, None)
        if client is None:
            return []
        out: list[Instruction] = [Forget(number)]
        self._waiting = [w for w in self._waiting if not (isinstance(w.request, Attach) and w.request.client == number)]
        if client.handed_over and not told_by_engine:
            out.append(ToEngine(DropReader(number)))
        return [*out, *self._end_idle_runs(), *self._retry(now)]

    def unreachable(self, ask: Hashable) -> None:
        """Who asked is gone."""
        self._waiting = [w for w in self._waiting if w.ask != ask]

    def engine_ready(self, pipelines: Iterable[str], now: float) -> list[Instruction]:
        """The engine has loaded the recipe."""
        self._pipelines = list(pipelines)
        return self._retry(now)

    def engine_died(self, how: str, now: float) -> list[Instruction]:
        """All runs are lost, and so is everybody in them."""
        text = f"the engine died ({how}), and with it the run. Start again from the last checkpoint"
        out: list[Instruction] = []
        self._pipelines = None
        for waiting in self._waiting:
            if isinstance(waiting.request, Attach):
                out.append(Answer(waiting.ask, _refused(RunFailed(text))))
        self._waiting = [w for w in self._waiting if isinstance(w.request, Hello)]
        for client in self.clients.values():
            self._lost[client.number] = client.token, text
            out.append(Forget(client.number))
        while len(self._lost) > _REMEMBERED:
            del self._lost[next(iter(self._lost))]
        self.clients.clear()
        self._current.clear()
        return [*out, *self._retry(now)]

    def run_started(self, started: RunStarted, now: float) -> list[Instruction]:
        """The engine has resolved a run's plan."""
        run = next((r for r in self._current.values() if r.number == started.run), None)
        if run is None:
            return []
        run.plan, run.strategy = started.plan, started.strategy
        return [*self._retry(now), *self._end_idle_runs()]

    def run_refused(self, number: int, kind: str, text: str) -> list[Instruction]:
        """The engine cannot start a run."""
        run = next((r for r in self._current.values() if r.number == number), None)
        if run is None:
            return []
        del self._current[run.pipeline]
        asks = [w.ask for w in self._waiting if self._waits_for(w, run)]
        self._waiting = [w for w in self._waiting if not self._waits_for(w, run)]
        return [Answer(ask, Refused(kind, text)) for ask in asks]

    def tick(self, now: float) -> list[Instruction]:
        """Time has passed: those who wait are told so or refused, and clients that never joined are given up."""
        out: list[Instruction] = []
        for waiting in list(self._waiting):
            if waiting.error is not None and now - waiting.since >= waiting.seconds:
                self._waiting.remove(waiting)
                out.append(Answer(waiting.ask, _refused(waiting.error)))
            elif now - waiting.told >= PATIENCE_SECONDS:
                waiting.told = now
                out.append(Answer(waiting.ask, Patience(waiting.reason)))
        for client in list(self.clients.values()):
            if not client.joined and now - client.since >= JOIN_SECONDS:
                out += self.gone(client.number, now)
        return out

    @property
    def needs_ticks(self) -> bool:
        """Whether time alone may change anything."""
        return bool(self._waiting) or any(not client.joined for client in self.clients.values())

    def report(self) -> dict[str, Any]:
        """For `zephon progress`."""
        clients = [
            {
                "client": client.number,
                "pid": client.pid,
                "group": client.hello.dp_group_id,
                "dp_degree": client.hello.dp_degree,
                "pipeline": client.hello.pipeline,
                "attached": client.run is not None,
            }
            for client in self.clients.values()
        ]
        job = next((client.hello.job for client in self.clients.values()), None)
        return {"session": self.session, "job": job, "clients": clients, "waiting": [w.reason for w in self._waiting]}

    def check_invariants(self) -> None:
        """What must hold after every event."""
        assert len({client.hello.job for client in self.clients.values()}) <= 1, "one job at a time"
        numbers = {run.number for run in self._current.values()}
        assert all(client.run is None or client.run in numbers for client in self.clients.values())
        for run in self._current.values():
            assert run.plan is None or self._wanted(run)
            assert all(count <= run.shape.group_readers for count in run.places.values())

    # Deciding

    def _take(self, ask: Hashable, request: Hello | Attach, now: float) -> list[Instruction]:
        out, wait = self._decide(ask, request, now)
        if wait is not None and len(self._waiting) >= MOST_WAITING:
            error = DaemonUnavailable(f"{MOST_WAITING} requests wait already, for {wait.reason}")
            out.append(Answer(ask, _refused(error)))
        elif wait is not None:
            self._waiting.append(_Waiting(ask, request, now, wait.reason, now, wait.seconds, wait.error))
        return [*out, *self._end_idle_runs()]

    def _retry(self, now: float) -> list[Instruction]:
        """Decide once more about everybody who waits, in the order they came."""
        out: list[Instruction] = []
        queue = deque(self._waiting)
        self._waiting = []
        while queue:
            waiting = queue.popleft()
            done, wait = self._decide(waiting.ask, waiting.request, now)
            out += done
            if wait is not None:
                waiting.reason, waiting.seconds, waiting.error = wait
                self._waiting.append(waiting)
        return out

    def _decide(self, ask: Hashable, request: Hello | Attach, now: float) -> tuple[list[Instruction], _Wait | None]:
        try:
            result = self._welcome(request, now) if isinstance(request, Hello) else self._attached(request)
        except ZephonError as error:
            return [Answer(ask, _refused(error))], None
        if isinstance(result, _Wait):
            return [], result
        if isinstance(result, Welcome):
            return [Answer(ask, result)], None
        if isinstance(result, Start):
            return [result], _Wait("the run takes shape")
        client, plan = result
        return [Answer(ask, plan), *self._hand_over(client)], None

    def _welcome(self, hello: Hello, now: float) -> Welcome | _Wait:
        if self._pipelines is None:
            return _Wait("the engine loads the recipe")
        _check_hello(hello)
        if hello.pipeline not in self._pipelines:
            near = difflib.get_close_matches(hello.pipeline, self._pipelines, 1)
            raise RecipeError(
                f"recipe {self._recipe} has no pipeline {hello.pipeline!r}; it has {', '.join(self._pipelines)}"
                + (f". Did you mean {near[0]!r}?" if near else "")
            )
        strangers = [client for client in self.clients.values() if client.hello.job != hello.job]
        if strangers:
            names = _name(strangers)
            return _Wait(
                f"the clients of another job to end: {names}",
                OTHER_JOB_SECONDS,
                TopologyError(
                    f"the daemon serves another job, whose clients are alive: {names}. End them, or start a daemon of "
                    "your own with `zephon launch` or `zephon daemon --socket`."
                ),
            )
        peers = self._peers(hello)
        if len(peers) >= hello.group_readers:
            names = _name(peers)
            error = TopologyError(
                f"group {hello.dp_group_id} of pipeline {hello.pipeline!r} has its {hello.group_readers} reader(s) "
                f"already: {names}. Give every data-parallel group its own dp_group_id; ranks that share one say how "
                "many they are with group_readers; a loader that is not needed any more must be closed."
            )
            if any(peer.pid == hello.pid for peer in peers):
                raise error
            return _Wait(f"another reader of group {hello.dp_group_id} to end: {names}", OTHER_JOB_SECONDS, error)
        if len(self.clients) >= MOST_CLIENTS:
            raise TopologyError(f"the daemon has {MOST_CLIENTS} clients already; close those that are not needed")
        if not self.clients:
            self.session += 1
        self._numbers += 1
        client = Client(self._numbers, self._make_token(), hello, now, hello.pid)
        self.clients[client.number] = client
        return Welcome(client.token, client.number, self._recipe)

    def _attached(self, attach: Attach) -> tuple[Client, Attached] | Start | _Wait:
        client = self._known(attach.client, attach.token)
        hello = client.hello
        run = self._current.get(hello.pipeline)
        if run is not None and client.run == run.number:
            return client, self._plan_for(client, run)
        shape = Shape(
            hello.dp_degree, hello.group_readers, _digest(attach.checkpoint), tuple(sorted(attach.allow_changed))
        )
        if run is None:
            self._run_numbers += 1
            run = self._current[hello.pipeline] = Run(self._run_numbers, hello.pipeline, shape, client)
            groups = {c.hello.dp_group_id for c in self.clients.values() if c.hello.pipeline == hello.pipeline}
            message = StartRun(run.number, hello.pipeline, hello.dp_degree, list(attach.allow_changed), sorted(groups))
            return Start(message, attach.checkpoint)
        if run.places.get(hello.dp_group_id, 0) >= run.shape.group_readers:
            names = _name(self._readers(run))
            return _Wait(
                f"the run before to end: {names}",
                SAME_JOB_SECONDS,
                TopologyError(
                    f"group {hello.dp_group_id} has read in this run of pipeline {hello.pipeline!r} and left it, while "
                    f"others still read: {names}. A new run starts once all of them have closed."
                ),
            )
        _check_shape(client, shape, run)
        if run.plan is None:
            return _Wait("the run takes shape")
        plan = self._plan_for(client, run)
        client.run = run.number
        run.places[hello.dp_group_id] = run.places.get(hello.dp_group_id, 0) + 1
        return client, plan

    def _plan_for(self, client: Client, run: Run) -> Attached:
        assert run.plan is not None
        hello, lanes = client.hello, run.plan.lanes
        warning = check_topology(lanes, hello.dp_degree, hello.dp_group_id, run.strategy)
        owned = owned_lanes(lanes, hello.dp_degree, hello.dp_group_id, run.strategy)
        check_step(hello.batches_per_step, owned)
        warnings = [*run.plan.warnings, warning] if warning else run.plan.warnings
        if hello.dp_group_id:  # they concern the whole run: one group says them
            warnings = []
        return replace(run.plan, owned=owned, warnings=list(dict.fromkeys(warnings)))

    def _hand_over(self, client: Client) -> list[Instruction]:
        if client.run is None or not client.joined or client.handed_over:
            return []
        client.handed_over = True
        hello = client.hello
        return [HandOver(AddReader(client.run, client.number, hello.dp_group_id, hello.group_readers))]

    def _end_idle_runs(self) -> list[Instruction]:
        """Runs of which nobody is left. One that the engine still works on ends when its answer has come."""
        idle = [run for run in self._current.values() if run.plan is not None and not self._wanted(run)]
        for run in idle:
            del self._current[run.pipeline]
        return [ToEngine(EndRun(run.number)) for run in idle]

    def _known(self, number: int, token: bytes) -> Client:
        client = self.clients.get(number)
        if client is not None and hmac.compare_digest(client.token, token):
            return client
        lost = self._lost.get(number)
        if lost is not None and hmac.compare_digest(lost[0], token):
            raise RunFailed(lost[1])
        raise DaemonUnavailable(
            "the daemon does not know this client: it was started again since, or has given the client up. "
            "Connect again."
        )

    def _peers(self, hello: Hello) -> list[Client]:
        key = hello.pipeline, hello.dp_group_id
        return [c for c in self.clients.values() if (c.hello.pipeline, c.hello.dp_group_id) == key]

    def _readers(self, run: Run) -> list[Client]:
        return [client for client in self.clients.values() if client.run == run.number]

    def _wanted(self, run: Run) -> bool:
        return bool(self._readers(run)) or any(self._waits_for(waiting, run) for waiting in self._waiting)

    def _waits_for(self, waiting: _Waiting, run: Run) -> bool:
        """Whether a request waits to attach to a run that takes shape (not for one to end)."""
        if not isinstance(waiting.request, Attach) or waiting.error is not None:
            return False
        client = self.clients.get(waiting.request.client)
        return client is not None and client.hello.pipeline == run.pipeline


def _check_hello(hello: Hello) -> None:
    if len(hello.pipeline) > LONGEST_NAME or len(hello.job) > LONGEST_NAME:
        raise SettingError(f"the name of a pipeline or a job has more than {LONGEST_NAME} characters")
    if not (1 <= hello.dp_degree <= MOST_LANES and 1 <= hello.group_readers <= MOST_LANES):
        raise SettingError(
            f"dp_degree={hello.dp_degree}, group_readers={hello.group_readers}: both must be in 1..{MOST_LANES}"
        )
    if not 0 <= hello.dp_group_id < hello.dp_degree:
        raise TopologyError(
            f"dp_group_id={hello.dp_group_id} with dp_degree={hello.dp_degree}: must be in 0..{hello.dp_degree - 1}"
        )


def _check_shape(client: Client, shape: Shape, run: Run) -> None:
    first = run.first
    if shape.checkpoint != run.shape.checkpoint or shape.allow_changed != run.shape.allow_changed:
        raise CheckpointMismatch(
            f"{client} and {first} of one run bring different checkpoints: {_brought(shape)} and {_brought(run.shape)}."
            " Load the same checkpoint on every rank, with the same allow_changed."
        )
    for name, here, there in (
        ("dp_degree", shape.dp_degree, run.shape.dp_degree),
        ("group_readers", shape.group_readers, run.shape.group_readers),
    ):
        if here != there:
            raise TopologyError(
                f"{client} and {first} of one run contradict each other: {name}={here} and {name}={there}. "
                "All ranks must say the same."
            )


def _brought(shape: Shape) -> str:
    text = shape.checkpoint[:12] or "none"
    return text + (f" with allow_changed={list(shape.allow_changed)}" if shape.allow_changed else "")


def _digest(text: str) -> str:
    """A checkpoint's digest, empty for none. States of one round that name different windows resume to the same."""
    if not text:
        return ""
    checkpoint = checkpoint_from_text(text)
    records = {lane: frontier.records for lane, frontier in checkpoint.lanes.items()}
    try:
        canonical = json.dumps([checkpoint.identity, checkpoint.epoch, sorted(records.items())], sort_keys=True)
    except RecursionError as error:
        raise CheckpointError("malformed checkpoint: its identity is nested too deeply") from error
    return hashlib.sha256(canonical.encode()).hexdigest()


def _name(clients: Iterable[Client]) -> str:
    return ", ".join(str(client) for client in clients)


def _refused(error: ZephonError) -> Refused:
    return Refused(type(error).__name__, str(error)[:LONGEST_TEXT])
