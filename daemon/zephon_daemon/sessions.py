"""Who reads what: sessions, their clients and runs, decided without I/O.

Events go in (a request, a connection, a death, an answer of the engine, the time), instructions come out; `daemon.py`
carries them out. An `ask` is whatever the caller needs to find its way back to who asked; each gets one answer.

- All living clients belong to one session, that of their job. A client of another job waits until they have ended, and
  is refused with their process ids if they have not.
- The first client of a pipeline that attaches gives the run its shape: checkpoint, number of groups, ranks a group.
  Who brings another shape is refused, both named, unless nobody wants the run any more: then it is waited for, and ends
  as soon as the engines that work on it have answered.
- A run ends with its last client. A rank whose place in a run is used up, since it closed and connected again, waits
  for that, and gets the next run: no rank ever continues in the middle of another's reading.
- A run is in each engine that has a group of it (`dealing`). The first one resolves its plan; the next ones start from
  the same origin, and must come to the same plan. From then on each tells the others of its lanes.
- When an engine dies its runs go on in the next one. Their clients are *lost* until they come back, each with a resume
  statement; they keep their places, and so does a rank that never had attached. The first attach starts the run anew
  there, from the origin it had; clients of other engines notice nothing. After `ENGINE_DEATHS` deaths of an engine
  under a run with no batch delivered between it has failed, for all.
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
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from zephon.errors import (
    DaemonUnavailable,
    ProtocolError,
    RecipeError,
    RunFailed,
    TopologyError,
    ZephonError,
)
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
    GroupsElsewhere,
    Hello,
    Join,
    LanesTold,
    Patience,
    Refused,
    RunStarted,
    StartRun,
    TellLanes,
    Welcome,
)
from zephon.transport.statement import decode_statement
from zephon_daemon.asked import (
    LOADS,
    TAKES_SHAPE,
    Wait,
    Waiting,
    check_hello,
    group_of,
    is_of,
    reasons_of,
    refused,
    run_before,
    unwanted,
)
from zephon_daemon.dealing import Dealing
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

JOIN_SECONDS = 30.0
"""A client without a data connection after that time is gone."""

MOST_CLIENTS = 1024
"""Clients at once."""

MOST_WAITING = 1024
"""Requests that wait at once."""

class Sessions:
    """The state machine. `now` is a clock in seconds that never goes back."""

    def __init__(
        self,
        recipe: str,
        make_token: Callable[[], bytes] = lambda: secrets.token_bytes(16),
        *,
        supervisor: str = "",
        engines: int = 1,
    ) -> None:
        self._recipe, self._make_token, self._supervisor = recipe, make_token, supervisor
        self._dealing = Dealing(engines)
        self._pipelines: list[str] = []
        self._waiting: list[Waiting] = []
        self._again: deque[Waiting] = deque()  # those of them that are yet to be decided about once more
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
            out += self.gone(client.number, now, closed=True)
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

    def gone(
        self, number: int, now: float, *, told_by_engine: bool = False, closed: bool = False
    ) -> list[Instruction]:
        """A client has `closed` or died."""
        out = self._gone(number, told_by_engine, closed)
        return [*out, *self._end_idle_runs(now), *self._retry(now)] if out else []

    def _gone(self, number: int, told_by_engine: bool = False, closed: bool = False) -> list[Instruction]:
        client = self.clients.get(number)
        if client is None:
            return []
        self._remove(client)
        out: list[Instruction] = [Forget(number)]
        run = self._run(client.run) if client.run is not None else None
        group = client.hello.dp_group_id
        if run is not None:
            run.gone[group] = run.gone.get(group, 0) + 1
            run.died[group] = run.died.get(group, 0) + (not closed)
        if client.handed_over and not told_by_engine:
            out.append(ToEngine(DropReader(number), client.engine))
        elif not client.handed_over and run is not None:
            readers = 0 if group in run.died_out else run.expected(group)
            out += [ToEngine(ExpectReaders(run.number, group, readers), engine) for engine in sorted(run.has)]
        return out

    def unreachable(self, ask: Hashable) -> None:
        """Who asked is gone."""
        self._waiting = [w for w in self._waiting if w.ask != ask]

    def engine_ready(self, pipelines: Iterable[str], now: float, engine: int = 0) -> list[Instruction]:
        """An engine has loaded the recipe."""
        self._pipelines = list(pipelines)
        self._dealing.ready.add(engine)
        return self._retry(now)

    def engine_died(self, how: str, now: float, engine: int = 0) -> list[Instruction]:
        """Its runs wait for the next one, and for their clients to come back."""
        out: list[Instruction] = []
        self._dealing.ready.discard(engine)
        for run in self._current.values():
            if engine not in run.started:
                continue
            run.deaths.setdefault(engine, []).append(how)
            if run.plan is not None:
                run.origin, run.resumed = json.dumps(origin_of(run.plan).to_json()), True
            run.started.discard(engine)
            run.has.discard(engine)
            run.elsewhere.pop(engine, None)
            if not run.has:
                run.plan = None
            out += self._lose(client for client in self._readers(run) if client.engine == engine)
        return [*out, *self._end_idle_runs(now), *self._retry(now)]

    def run_started(self, started: RunStarted, now: float, engine: int = 0) -> list[Instruction]:
        """An engine has resolved a run's plan."""
        run = self._run(started.run)
        if run is None or engine not in run.started:
            return []
        if run.plan is not None and json.loads(run.plan.identity) != json.loads(started.plan.identity):
            text = (
                f"engine {engine} comes to another plan for pipeline {run.pipeline!r} than the engine before it. Was "
                "the recipe changed, or its data, under the run? Does it depend on the clock, or on random numbers?"
            )
            refused = self.run_refused(run.number, RecipeError.__name__, text, now, engine)
            return [ToEngine(EndRun(run.number), engine), *refused]
        run.has.add(engine)
        out: list[Instruction] = [ToEngine(ExpectReaders(run.number, group, 0), engine) for group in run.died_out]
        if run.plan is None:
            run.plan, run.strategy = started.plan, started.strategy
            here = {c.engine for c in self.clients.values() if c.hello.pipeline == run.pipeline and not run.resumed}
            for other in sorted((here & self._dealing.ready) - run.started) if self._wanted(run) else ():
                out += self._start(run, other)  # as its groups are here, whose lanes the others' ends depend on
        return [*out, *self._retry(now), *self._end_idle_runs(now)]

    def run_refused(self, number: int, kind: str, text: str, now: float, engine: int = 0) -> list[Instruction]:
        """An engine cannot start a run. Where another one has it, it goes on there."""
        run = self._run(number)
        if run is None:
            return []
        run.started.discard(engine)
        if not run.has:
            del self._current[run.pipeline]
        refused = [w for w in self._waiting if self._waits_for(w, run, engine if run.has else None)]
        for client in self._readers(run):
            if client.engine == engine or not run.has:
                client.run, client.attached = None, False
        self._waiting = [w for w in self._waiting if w not in refused]
        answers = (Answer(waiting.ask, Refused(kind, text)) for waiting in refused)
        return [*answers, *self._end_idle_runs(now), *self._retry(now)]

    def lanes_told(self, told: LanesTold, engine: int) -> list[Instruction]:
        """An engine tells of its lanes: the run's other engines must know."""
        run = self._run(told.run)
        return [] if run is None else [ToEngine(told, other) for other in sorted(run.started - {engine})]

    def tick(self, now: float) -> list[Instruction]:
        """Time has passed: those who wait are told so or refused, and clients that never joined are given up."""
        out: list[Instruction] = []
        for waiting in list(self._waiting):
            if waiting.error is not None and now - waiting.since >= waiting.seconds:
                self._waiting.remove(waiting)
                out.append(Answer(waiting.ask, refused(waiting.error)))
            elif now - waiting.told >= PATIENCE_SECONDS:
                waiting.told = now
                out.append(Answer(waiting.ask, Patience(waiting.reason, isinstance(waiting.error, TopologyError))))
        late = [each for each in self.clients.values() if not each.joined and now - each.since >= JOIN_SECONDS]
        for client in late:
            out += self._gone(client.number)
        return [*out, *self._end_idle_runs(now), *self._retry(now)] if late else out

    @property
    def needs_ticks(self) -> bool:
        """Whether time alone may change anything."""
        return bool(self._waiting) or any(not client.joined for client in self.clients.values())

    @property
    def engines(self) -> set[int]:
        """The engines that have clients."""
        return {client.engine for client in self.clients.values()}

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
                "engine": client.engine,
            }
            for client in self.clients.values()
        ]
        job = next((client.hello.job for client in self.clients.values()), None)
        return {"session": self.session, "job": job, "clients": clients, "waiting": reasons_of(self._waiting)}

    def check_invariants(self) -> None:
        """What must hold after every event."""
        assert len({client.hello.job for client in self.clients.values()}) <= 1, "one job at a time"
        numbers = {run.number for run in self._current.values()}
        assert all(client.run is None or client.run in numbers for client in self.clients.values())
        assert {n: c for group in self._groups.values() for n, c in group.items()} == self.clients
        assert all(self.clients.get(client.number) is client for client in self._nonces.values())
        late = [each.request.client for each in self._waiting if isinstance(each.request, Attach) and not each.joins]
        assert {self.clients[number].hello.pipeline for number in late} <= self._current.keys(), "they wait for a run"
        for run in self._current.values():
            assert not run.started <= run.has or run.plan is None or self._wanted(run)
            assert all(count <= run.shape.group_readers for count in run.places.values())

    # Deciding

    def _take(self, ask: Hashable, request: Hello | Attach, now: float) -> list[Instruction]:
        out, wait = self._decide(ask, request, now)
        if wait is not None and len(self._waiting) >= MOST_WAITING:
            error = DaemonUnavailable(f"{MOST_WAITING} requests wait already, for {wait.reason}")
            out.append(Answer(ask, refused(error)))
        elif wait is not None:
            self._waiting.append(Waiting(ask, request, now, wait.reason, now, wait.seconds, wait.error, wait.joins))
        if isinstance(request, Attach) and request.statement:  # which may have decided for others, too
            out += self._retry(now)
        return [*out, *self._end_idle_runs(now)]

    def _retry(self, now: float) -> list[Instruction]:
        """Decide once more about everybody who waits, in the order they came."""
        out: list[Instruction] = []
        failed = self._failed
        self._again, self._waiting = deque(self._waiting), []
        while self._again:
            waiting = self._again.popleft()
            done, wait = self._decide(waiting.ask, waiting.request, now)
            out += done
            if wait is not None:
                waiting.reason, waiting.seconds, waiting.error, waiting.joins = wait
                self._waiting.append(waiting)
        return out if self._failed == failed else [*out, *self._retry(now)]

    @property
    def _failed(self) -> int:
        return sum(bool(run.failed) for run in self._current.values())

    def _decide(self, ask: Hashable, request: Hello | Attach, now: float) -> tuple[list[Instruction], Wait | None]:
        try:
            if isinstance(request, Hello):
                return self._welcome(ask, request, now)
            result = self._attached(request)
        except ZephonError as error:
            return [Answer(ask, refused(error))], None
        if isinstance(result, Wait):
            return [], result
        if isinstance(result, list):
            return result, TAKES_SHAPE
        client, plan = result
        return [Answer(ask, plan), *self._hand_over(client)], None

    def _welcome(self, ask: Hashable, hello: Hello, now: float) -> tuple[list[Instruction], Wait | None]:
        if not self._dealing.ready:
            return [], LOADS
        check_hello(hello)
        if hello.pipeline not in self._pipelines:
            near = difflib.get_close_matches(hello.pipeline, self._pipelines, 1)
            raise RecipeError(
                f"recipe {self._recipe} has no pipeline {hello.pipeline!r}; it has {', '.join(self._pipelines)}"
                + (f". Did you mean {near[0]!r}?" if near else "")
            )
        other = next(iter(self.clients.values()), None)  # one job at a time
        if other is not None and other.hello.job != hello.job:
            names = listed(list(self.clients.values()))
            return [], Wait(
                f"the clients of another job to end: {names}",
                min(OTHER_JOB_SECONDS, hello.timeout),
                TopologyError(
                    f"the daemon serves another job, whose clients are alive: {names}. End them, or start a daemon of "
                    "your own with `zephon launch` or `zephon daemon --socket`."
                ),
            )
        before = self._before(hello)
        peers = [peer for peer in self._groups.get(group_of(hello), {}).values() if peer is not before]
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
            return [], Wait(f"another reader of group {hello.dp_group_id} to end: {names}", seconds, error)
        if len(self.clients) >= MOST_CLIENTS:
            raise TopologyError(f"the daemon has {MOST_CLIENTS} clients already; close those that are not needed")
        engine = self._dealing.engine_of(group_of(hello), self._groups.keys())
        if engine not in self._dealing.ready:
            return [], LOADS
        if not self.clients:
            self.session += 1
        self._numbers += 1
        client = Client(self._numbers, self._make_token(), hello, now, hello.pid, engine)
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
        return same if same is not None and group_of(same.hello) == group_of(hello) else None

    def _replace(self, old: Client) -> list[Instruction]:
        """The client has come back as another: its place is not given up."""
        self._remove(old)
        return [Forget(old.number), *([ToEngine(DropReader(old.number), old.engine)] if old.handed_over else [])]

    def _attached(self, attach: Attach) -> tuple[Client, Attached] | list[Instruction] | Wait:
        client = self._known(attach.client, attach.token)
        hello = client.hello
        run = self._current.get(hello.pipeline)
        if client.lost:
            raise DaemonUnavailable("the engine died since, and this client's data connection with it: come back anew")
        statement = decode_statement(attach.statement) if attach.statement else None
        if run is not None and client.run == run.number and client.engine in run.has and client.attached:
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
        comes_late = used_up and statement is None and client.run != run.number
        if comes_late or shape != run.shape:
            members = self._members(run)
            if not members:
                return unwanted(run)
            if comes_late:
                return run_before(client, self._readers(run))
            if run.first.number not in self.clients:
                run.first = members[0]  # for an error that names the living
        check_shape(client, shape, run)
        deaths = run.deaths.get(client.engine, [])
        if statement is not None:
            check_origin(client, statement, run)
            if statement.delivered > client.delivered:
                del deaths[:-1]
            client.delivered, client.back = max(client.delivered, statement.delivered), True
            missing = hello.group_readers - statement.readers
            run.gone[hello.dp_group_id] = max(run.gone.get(hello.dp_group_id, 0), missing)
            run.died[hello.dp_group_id] = min(run.died.get(hello.dp_group_id, 0), hello.group_readers - 1)
        if len(deaths) >= ENGINE_DEATHS:
            return self._despair(run, client, deaths)
        if client.engine not in run.has:
            if client.engine in run.started or (run.plan is None and run.started):
                return TAKES_SHAPE
            if client.engine not in self._dealing.ready:
                return LOADS._replace(joins=True)
            return self._start(run, client.engine)
        plan = self._plan_for(client, run)
        if client.run != run.number:
            places = run.places.get(hello.dp_group_id, 0) + 1
            run.places[hello.dp_group_id] = min(run.shape.group_readers, places)
        client.run, client.attached, client.statement = run.number, True, attach.statement
        return client, plan

    def _start(self, run: Run, engine: int) -> list[Instruction]:
        """Have an engine start a run; lanes of the groups that are here at once, unless they may stand anywhere."""
        run.started.add(engine)
        mine = [c for c in self.clients.values() if c.hello.pipeline == run.pipeline and c.engine == engine]
        allowed = [] if run.resumed else list(run.shape.allow_changed)  # the origin's identity has the changes
        begun = [] if run.resumed else sorted({client.hello.dp_group_id for client in mine})
        careful = bool(run.deaths.get(engine))
        message = StartRun(run.number, run.pipeline, run.shape.dp_degree, allowed, begun, careful)
        # What a first engine drew or measured is not to be drawn and measured again.
        origin = run.origin or (json.dumps(origin_of(run.plan).to_json()) if run.plan is not None else "")
        all_of_them = sorted(run.started) if len(run.started) > 1 else []
        return [Start(message, origin, engine), *(ToEngine(TellLanes(run.number), each) for each in all_of_them)]

    def _lose(self, clients: Iterable[Client]) -> list[Instruction]:
        """Clients whose engine has died, or whose run has failed elsewhere, are to come back."""
        out: list[Instruction] = []
        for client in clients:
            client.back = False
            if client.attached:
                out += [HangUp(client.number)] if client.joined else []
                client.attached, client.lost, client.handed_over = False, True, False
        return out

    def _despair(self, run: Run, client: Client, deaths: list[str]) -> Wait:
        """Its engine has died too often. Only a rank that has not come back yet may know of a batch delivered."""
        text = run.hopeless(deaths)
        if not all(o.back or o is client for o in self._readers(run) if o.engine == client.engine):
            reason = "the other ranks to say whether they got a batch"
            return Wait(reason, COME_BACK_SECONDS, RunFailed(text), joins=True)
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
        message = AddReader(run.number, client.number, hello.dp_group_id, expected)
        return [HandOver(message, client.statement, client.engine)]

    def _end_idle_runs(self, now: float) -> list[Instruction]:
        """Runs of which nobody is left; who waits for that goes on. One that an engine works on ends when it answers.

        What else a run's engines are to be told comes with it.
        """
        out: list[Instruction] = []
        ended = False
        for run in list(self._current.values()):
            if run.started <= run.has and not self._wanted(run):
                ended = True
                del self._current[run.pipeline]
                out += [ToEngine(EndRun(run.number), engine) for engine in sorted(run.started)]
            elif run.failed:
                gone = [client for client in self._readers(run) if client.handed_over]
                out += [ToEngine(DropReader(client.number), client.engine) for client in gone]
                out += self._lose(gone)
            elif len(run.started) > 1 or run.elsewhere:
                out += self._tell_groups(run)
        return [*out, *self._retry(now), *self._end_idle_runs(now)] if ended else out

    def _tell_groups(self, run: Run) -> Iterator[ToEngine]:
        """Tell each engine which groups read from the others, where that has changed."""
        reading = {(c.hello.dp_group_id, c.engine) for c in self._readers(run) if c.handed_over}
        for engine in sorted(run.started):
            groups = sorted({group for group, other in reading if other != engine})
            lost = sorted({c.hello.dp_group_id for c in self._readers(run) if c.lost and c.engine != engine})
            if (groups, lost) != run.elsewhere.get(engine, ([], [])):
                run.elsewhere[engine] = groups, lost
                yield ToEngine(GroupsElsewhere(run.number, groups, lost), engine)

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
        self._groups.setdefault(group_of(client.hello), {})[client.number] = client
        if client.hello.nonce:
            self._nonces[client.hello.nonce] = client

    def _remove(self, client: Client) -> None:
        del self.clients[client.number]
        group = self._groups[group_of(client.hello)]
        del group[client.number]
        if not group:
            del self._groups[group_of(client.hello)]
        if self._nonces.get(client.hello.nonce) is client:
            del self._nonces[client.hello.nonce]
        self._waiting = [w for w in self._waiting if not is_of(w.request, client.number)]

    def _run(self, number: int) -> Run | None:
        return next((run for run in self._current.values() if run.number == number), None)

    def _readers(self, run: Run) -> list[Client]:
        return [client for client in self.clients.values() if client.run == run.number]

    def _wanted(self, run: Run) -> bool:
        return bool(self._members(run))

    def _members(self, run: Run) -> list[Client]:
        """Those who read it, or wait to attach to it."""
        numbers = {each.request.client for each in (*self._waiting, *self._again) if self._waits_for(each, run)}
        return [each for each in self.clients.values() if each.run == run.number or each.number in numbers]

    def _waits_for(self, waiting: Waiting, run: Run, engine: int | None = None) -> bool:
        """Whether a request waits to attach to a run that takes shape (not for one to end), in one engine or in any."""
        if not isinstance(waiting.request, Attach) or not waiting.joins:
            return False
        client = self.clients.get(waiting.request.client)
        return client is not None and client.hello.pipeline == run.pipeline and engine in (None, client.engine)
