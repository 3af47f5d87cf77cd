"""Who reads what: sessions, their clients and runs, decided without I/O.

Events go in (a request, a connection, a death, an answer of the engine, the time), instructions come out; `daemon.py`
carries them out. An `ask` is whatever the caller needs to find its way back to who asked; each gets one answer.

- All living clients belong to one session, that of their job. A client of another job waits until they have ended, and
  is refused with their process ids if they have not.
- The first client of a pipeline that attaches gives the run its shape: checkpoint, number of groups, ranks a group.
  Who brings another shape is refused, both named.
- A run ends with its last client. A rank whose place in a run is used up, since it closed and connected again, waits
  for that, and gets the next run: no rank ever continues in the middle of another's reading.
- When the engine dies its runs go on in the next one. Their clients are *lost* until they come back, each with a resume
  statement; they keep their places, and so does a rank that never had attached. The first attach starts the run anew,
  from the origin it had. After `ENGINE_DEATHS` deaths under a run with no batch delivered between it has failed.
- A client that comes back names its number and token of before. Known here, it takes the place of the old one, whose
  connections are dead; unknown, since this daemon is a new one, it is a client like any other. A new job's clients name
  none, and wait as ever for those that are here, lost or not, to end.
- A hello that is said again, since its answer was lost, has the nonce of before. Another nonce is another reader.
"""

from __future__ import annotations

import difflib
import hmac
import json
import secrets
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from zephon.errors import (
    DaemonUnavailable,
    ProtocolError,
    RecipeError,
    RunFailed,
    SettingError,
    TopologyError,
    ZephonError,
)
from zephon.frontiers import MOST_LANES
from zephon.lanes import check_step, check_topology, owned_lanes
from zephon.transport.protocol import (
    AddReader,
    Attach,
    Attached,
    DropReader,
    EndRun,
    ExpectReaders,
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
from zephon.transport.statement import decode_statement
from zephon_daemon.members import Client, Run, Shape, check_origin, check_shape, digest_of, listed, origin_of
from zephon_daemon.orders import Answer, Forget, HandOver, HangUp, Instruction, Start, ToEngine

ENGINE_DEATHS = 3
"""Deaths of an engine under a run, with no batch delivered between, that end it."""

COME_BACK_SECONDS = 10.0
"""How long the rest of a run's ranks have, after that many deaths, to say that they got a batch after all."""

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

MOST_WAITING = 1024
"""Requests that wait at once."""

MOST_REASONS = 20
"""Reasons to wait that a report names."""


class _Wait(NamedTuple):
    """A request cannot be answered yet. After `seconds` it is refused with `error` (None: it waits on).

    `joins`: it is to attach to the current run of its pipeline.
    """

    reason: str
    seconds: float = 0.0
    error: ZephonError | None = None
    joins: bool = False


@dataclass
class _Waiting:
    ask: Hashable
    request: Hello | Attach
    since: float
    reason: str
    told: float
    seconds: float
    error: ZephonError | None
    joins: bool


class Sessions:
    """The state machine. `now` is a clock in seconds that never goes back."""

    def __init__(
        self,
        recipe: str,
        make_token: Callable[[], bytes] = lambda: secrets.token_bytes(16),
        *,
        supervisor: str = "",
    ) -> None:
        self._recipe, self._make_token, self._supervisor = recipe, make_token, supervisor
        self._pipelines: list[str] | None = None
        self._waiting: list[_Waiting] = []
        self._numbers = self._run_numbers = 0
        self._current: dict[str, Run] = {}
        self.clients: dict[int, Client] = {}
        # The same clients by what a hello asks for. Who says many hellos must cost the others no time.
        self._groups: dict[tuple[str, int], dict[int, Client]] = {}
        self._nonces: dict[bytes, Client] = {}
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

    def joined(self, join: Join, pid: int, now: float) -> list[Instruction]:
        """A client's data connection has come, from process `pid` (0 if the kernel cannot say)."""
        client = self._known(join.client, join.token)
        if client.lost:
            return [HangUp(client.number)]
        if client.joined:
            raise ProtocolError(f"client {client.number} has a data connection already")
        client.joined, client.pid = True, pid or client.pid
        return [*self._hand_over(client), *self._retry(now)]

    # What happens

    def gone(self, number: int, now: float, *, told_by_engine: bool = False) -> list[Instruction]:
        """A client has closed or died."""
        out = self._gone(number, told_by_engine)
        return [*out, *self._end_idle_runs(), *self._retry(now)] if out else []

    def _gone(self, number: int, told_by_engine: bool = False) -> list[Instruction]:
        client = self.clients.get(number)
        if client is None:
            return []
        self._remove(client)
        out: list[Instruction] = [Forget(number)]
        run = next((r for r in self._current.values() if r.number == client.run), None)
        group = client.hello.dp_group_id
        if run is not None:
            run.gone[group] = run.gone.get(group, 0) + 1
        if client.handed_over and not told_by_engine:
            out.append(ToEngine(DropReader(number)))
        elif not client.handed_over and run is not None and run.plan is not None and run.shape.group_readers > 1:
            out.append(ToEngine(ExpectReaders(run.number, group, run.expected(group))))
        return out

    def unreachable(self, ask: Hashable) -> None:
        """Who asked is gone."""
        self._waiting = [w for w in self._waiting if w.ask != ask]

    def engine_ready(self, pipelines: Iterable[str], now: float) -> list[Instruction]:
        """The engine has loaded the recipe."""
        self._pipelines = list(pipelines)
        return self._retry(now)

    def engine_died(self, how: str, now: float) -> list[Instruction]:
        """Its runs wait for the next one, and for their clients to come back."""
        out: list[Instruction] = []
        self._pipelines = None
        for run in self._current.values():
            before = run.number
            self._run_numbers += 1
            run.number = self._run_numbers
            if run.started:
                run.deaths.append(how)
            if run.plan is not None:
                run.origin, run.resumed = json.dumps(origin_of(run.plan).to_json()), True
            run.plan, run.started = None, False
            for client in self.clients.values():
                if client.run == before:
                    client.run, client.back = run.number, False
                    if client.attached:
                        out += [HangUp(client.number)] if client.joined and not client.handed_over else []
                        client.attached, client.lost, client.handed_over = False, True, False
        return [*out, *self._end_idle_runs(), *self._retry(now)]

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
        for client in self._readers(run):
            client.run, client.attached = None, False
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
        late = [each for each in self.clients.values() if not each.joined and now - each.since >= JOIN_SECONDS]
        for client in late:
            out += self._gone(client.number)
        return [*out, *self._end_idle_runs(), *self._retry(now)] if late else out

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
                "attached": client.attached,
            }
            for client in self.clients.values()
        ]
        job = next((client.hello.job for client in self.clients.values()), None)
        return {"session": self.session, "job": job, "clients": clients, "waiting": self._reasons()}

    def _reasons(self) -> list[str]:
        """What is waited for, the first few reasons."""
        counts = Counter(waiting.reason for waiting in self._waiting)
        named = [f"{reason} ({count} requests)" if count > 1 else reason for reason, count in counts.items()]
        return [*named[:MOST_REASONS], *([f"and {len(named) - MOST_REASONS} more"] if named[MOST_REASONS:] else [])]

    def check_invariants(self) -> None:
        """What must hold after every event."""
        assert len({client.hello.job for client in self.clients.values()}) <= 1, "one job at a time"
        numbers = {run.number for run in self._current.values()}
        assert all(client.run is None or client.run in numbers for client in self.clients.values())
        assert {n: c for group in self._groups.values() for n, c in group.items()} == self.clients
        assert all(self.clients.get(client.number) is client for client in self._nonces.values())
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
            self._waiting.append(_Waiting(ask, request, now, wait.reason, now, wait.seconds, wait.error, wait.joins))
        if isinstance(request, Attach) and request.statement:  # which may have decided for others, too
            out += self._retry(now)
        return [*out, *self._end_idle_runs()]

    def _retry(self, now: float) -> list[Instruction]:
        """Decide once more about everybody who waits, in the order they came."""
        out: list[Instruction] = []
        failed = self._failed
        queue = deque(self._waiting)
        self._waiting = []
        while queue:
            waiting = queue.popleft()
            done, wait = self._decide(waiting.ask, waiting.request, now)
            out += done
            if wait is not None:
                waiting.reason, waiting.seconds, waiting.error, waiting.joins = wait
                self._waiting.append(waiting)
        return out if self._failed == failed else [*out, *self._retry(now)]

    @property
    def _failed(self) -> int:
        return sum(bool(run.failed) for run in self._current.values())

    def _decide(self, ask: Hashable, request: Hello | Attach, now: float) -> tuple[list[Instruction], _Wait | None]:
        try:
            if isinstance(request, Hello):
                return self._welcome(ask, request, now)
            result = self._attached(request)
        except ZephonError as error:
            return [Answer(ask, _refused(error))], None
        if isinstance(result, _Wait):
            return [], result
        if isinstance(result, Start):
            return [result], _TAKES_SHAPE
        client, plan = result
        return [Answer(ask, plan), *self._hand_over(client)], None

    def _welcome(self, ask: Hashable, hello: Hello, now: float) -> tuple[list[Instruction], _Wait | None]:
        if self._pipelines is None:
            return [], _Wait("the engine loads the recipe")
        _check_hello(hello)
        if hello.pipeline not in self._pipelines:
            near = difflib.get_close_matches(hello.pipeline, self._pipelines, 1)
            raise RecipeError(
                f"recipe {self._recipe} has no pipeline {hello.pipeline!r}; it has {', '.join(self._pipelines)}"
                + (f". Did you mean {near[0]!r}?" if near else "")
            )
        other = next(iter(self.clients.values()), None)  # one job at a time
        if other is not None and other.hello.job != hello.job:
            names = listed(list(self.clients.values()))
            return [], _Wait(
                f"the clients of another job to end: {names}",
                min(OTHER_JOB_SECONDS, hello.timeout),
                TopologyError(
                    f"the daemon serves another job, whose clients are alive: {names}. End them, or start a daemon of "
                    "your own with `zephon launch` or `zephon daemon --socket`."
                ),
            )
        before = self._before(hello)
        peers = [peer for peer in self._groups.get(_group(hello), {}).values() if peer is not before]
        if len(peers) >= hello.group_readers:
            names = listed(peers)
            error = TopologyError(
                f"group {hello.dp_group_id} of pipeline {hello.pipeline!r} has its {hello.group_readers} reader(s) "
                f"already: {names}. Give every data-parallel group its own dp_group_id; ranks that share one say how "
                "many they are with group_readers; a loader that is not needed any more must be closed."
            )
            own = [peer for peer in peers if peer.pid == hello.pid]
            if any(peer.joined for peer in own):
                raise error
            # One of the same process whose data connection never comes, since its connect was interrupted, is given up.
            seconds = min(2 * JOIN_SECONDS if own else OTHER_JOB_SECONDS, hello.timeout)
            return [], _Wait(f"another reader of group {hello.dp_group_id} to end: {names}", seconds, error)
        if len(self.clients) >= MOST_CLIENTS:
            raise TopologyError(f"the daemon has {MOST_CLIENTS} clients already; close those that are not needed")
        if not self.clients:
            self.session += 1
        self._numbers += 1
        client = Client(self._numbers, self._make_token(), hello, now, hello.pid)
        out: list[Instruction] = []
        if before is not None:
            client.run, client.delivered = before.run, before.delivered
            out = self._replace(before)
        self._add(client)
        return [*out, Answer(ask, Welcome(client.token, client.number, self._recipe, self._supervisor))], None

    def _before(self, hello: Hello) -> Client | None:
        """Whom a client that comes back was; or the same hello, whose answer was lost."""
        known = self.clients.get(hello.client)
        if known is not None and hmac.compare_digest(known.token, hello.token) and known.hello.job == hello.job:
            return known
        same = self._nonces.get(hello.nonce)
        return same if same is not None and _group(same.hello) == _group(hello) else None

    def _replace(self, old: Client) -> list[Instruction]:
        """The client has come back as another: its place is not given up."""
        self._remove(old)
        return [Forget(old.number), *([ToEngine(DropReader(old.number))] if old.handed_over else [])]

    def _attached(self, attach: Attach) -> tuple[Client, Attached] | Start | _Wait:
        client = self._known(attach.client, attach.token)
        hello = client.hello
        run = self._current.get(hello.pipeline)
        if client.lost:
            raise DaemonUnavailable("the engine died since, and this client's data connection with it: come back anew")
        statement = decode_statement(attach.statement) if attach.statement else None
        if run is not None and client.run == run.number and run.plan is not None and client.attached:
            return client, self._plan_for(client, run)
        shape = Shape(
            hello.dp_degree, hello.group_readers, digest_of(attach.checkpoint), tuple(sorted(attach.allow_changed))
        )
        if run is None:
            self._run_numbers += 1
            origin = json.dumps(statement.origin.to_json()) if statement is not None else attach.checkpoint
            run = Run(self._run_numbers, hello.pipeline, shape, client, origin, resumed=statement is not None)
            self._current[hello.pipeline] = run
        if run.failed:
            raise RunFailed(run.failed)
        used_up = run.places.get(hello.dp_group_id, 0) >= run.shape.group_readers
        if used_up and statement is None and client.run != run.number:
            names = listed(self._readers(run))
            return _Wait(
                f"the run before to end: {names}",
                SAME_JOB_SECONDS,
                TopologyError(
                    f"group {hello.dp_group_id} has read in this run of pipeline {hello.pipeline!r} and left it, while "
                    f"others still read: {names}. A new run starts once all of them have closed."
                ),
            )
        check_shape(client, shape, run)
        if statement is not None:
            check_origin(client, statement, run)
            if statement.delivered > client.delivered:
                del run.deaths[:-1]
            client.delivered, client.back = max(client.delivered, statement.delivered), True
            missing = hello.group_readers - statement.readers
            run.gone[hello.dp_group_id] = max(run.gone.get(hello.dp_group_id, 0), missing)
        if len(run.deaths) >= ENGINE_DEATHS:
            return self._despair(run, client)
        if run.plan is None:
            if run.started:
                return _TAKES_SHAPE
            if self._pipelines is None:
                return _Wait("the engine loads the recipe", joins=True)
            run.started = True
            return self._start(run, attach)
        plan = self._plan_for(client, run)
        if client.run != run.number:
            places = run.places.get(hello.dp_group_id, 0) + 1
            run.places[hello.dp_group_id] = min(run.shape.group_readers, places)
        client.run, client.attached, client.statement = run.number, True, attach.statement
        return client, plan

    def _start(self, run: Run, attach: Attach) -> Start:
        """Have the engine start a run; lanes of the groups that are here at once, unless they may stand anywhere."""
        groups = {c.hello.dp_group_id for c in self.clients.values() if c.hello.pipeline == run.pipeline}
        allowed = [] if run.resumed else list(attach.allow_changed)  # the origin's identity has the changes
        begun = [] if run.resumed else sorted(groups)
        careful = bool(run.deaths)
        message = StartRun(run.number, run.pipeline, run.shape.dp_degree, allowed, begun, careful)
        return Start(message, run.origin)

    def _despair(self, run: Run, client: Client) -> _Wait:
        """The engine has died too often. Only a rank that has not come back yet may know of a batch delivered."""
        text = (
            f"the engine died {len(run.deaths)} times under pipeline {run.pipeline!r}, and no batch was delivered "
            f"between: {'; '.join(run.deaths)}. Look for a record that makes an operator crash or take too much memory."
        )
        if not all(other.back or other is client for other in self._readers(run)):
            reason = "the other ranks to say whether they got a batch"
            return _Wait(reason, COME_BACK_SECONDS, RunFailed(text), joins=True)
        run.failed = text
        raise RunFailed(text)

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
        if client.run is None or not client.attached or not client.joined or client.handed_over:
            return []
        client.handed_over = True
        hello = client.hello
        run = next(run for run in self._current.values() if run.number == client.run)
        expected = run.expected(hello.dp_group_id)
        return [HandOver(AddReader(run.number, client.number, hello.dp_group_id, expected), client.statement)]

    def _end_idle_runs(self) -> list[Instruction]:
        """Runs of which nobody is left. One that the engine still works on ends when its answer has come."""
        resolving = [run for run in self._current.values() if run.started and run.plan is None]
        idle = [run for run in self._current.values() if run not in resolving and not self._wanted(run)]
        for run in idle:
            del self._current[run.pipeline]
        return [ToEngine(EndRun(run.number)) for run in idle]

    def _known(self, number: int, token: bytes) -> Client:
        client = self.clients.get(number)
        if client is not None and hmac.compare_digest(client.token, token):
            return client
        raise DaemonUnavailable(
            "the daemon does not know this client: it was started again since, or has given the client up. "
            "Connect again."
        )

    def _add(self, client: Client) -> None:
        self.clients[client.number] = client
        self._groups.setdefault(_group(client.hello), {})[client.number] = client
        if client.hello.nonce:
            self._nonces[client.hello.nonce] = client

    def _remove(self, client: Client) -> None:
        del self.clients[client.number]
        group = self._groups[_group(client.hello)]
        del group[client.number]
        if not group:
            del self._groups[_group(client.hello)]
        if self._nonces.get(client.hello.nonce) is client:
            del self._nonces[client.hello.nonce]
        self._waiting = [w for w in self._waiting if not _is_of(w.request, client.number)]

    def _readers(self, run: Run) -> list[Client]:
        return [client for client in self.clients.values() if client.run == run.number]

    def _wanted(self, run: Run) -> bool:
        return bool(self._readers(run)) or any(self._waits_for(waiting, run) for waiting in self._waiting)

    def _waits_for(self, waiting: _Waiting, run: Run) -> bool:
        """Whether a request waits to attach to a run that takes shape (not for one to end)."""
        if not isinstance(waiting.request, Attach) or not waiting.joins:
            return False
        client = self.clients.get(waiting.request.client)
        return client is not None and client.hello.pipeline == run.pipeline


_TAKES_SHAPE = _Wait("the run takes shape", joins=True)


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


def _group(hello: Hello) -> tuple[str, int]:
    return hello.pipeline, hello.dp_group_id


def _is_of(request: Hello | Attach, client: int) -> bool:
    return isinstance(request, Attach) and request.client == client


def _refused(error: ZephonError) -> Refused:
    return Refused(type(error).__name__, str(error)[:LONGEST_TEXT])
