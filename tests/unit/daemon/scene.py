"""A daemon's sessions without sockets, processes or a clock, for tests: ranks that come, attach and leave."""
from __future__ import annotations

import json
from typing import Any

from zephon.frontiers import Checkpoint, Frontier
from zephon.transport.protocol import Attach, Attached, Goodbye, Hello, Join, RunStarted, Welcome
from zephon.transport.statement import Statement
from zephon_daemon.orders import Answer, Forget, HandOver, HangUp, Start, ToEngine
from zephon_daemon.sessions import Sessions

LANES = 4


def plan(lanes: int = LANES) -> Attached:
    starts = [[0, 0, 0, 0]] * lanes
    return Attached(json.dumps({"canonical_replicas": lanes}), lanes, [], 2, True, True, False, ["d"], 0, starts, [])


def checkpoint(records: int, chunk: int = 0, lanes: int = LANES, epoch: int = 0) -> str:
    entries = {str(n): {"chunk": chunk, "offset": 0, "records": records, "skipped": 0} for n in range(lanes)}
    identity = {"canonical_replicas": lanes}
    return json.dumps({"format": 1, "identity": identity, "epoch": epoch, "complete": True, "lanes": entries})


def statement(group: int = 0, records: int = 0, *, degree: int = 2, seed: int | None = None, readers: int = 1,
              epoch: int = 0) -> str:  # fmt: skip
    """What a rank states that has delivered `records` of each of its lanes."""
    identity = {"canonical_replicas": LANES, **({} if seed is None else {"seed": seed})}
    own = range(group * LANES // degree, (group + 1) * LANES // degree)
    at = Checkpoint(identity, epoch, {lane: Frontier(0, records, records) for lane in range(LANES)})
    origin = Checkpoint(identity, 0, {lane: Frontier() for lane in range(LANES)})
    return Statement(origin, at, dict.fromkeys(own, records), records // 2, readers).encode()


class Scene:
    """A daemon of ranks that say hello, attach and leave; what it told each is kept."""

    def __init__(self, pipelines: tuple[str, ...] = ("pipeline", "eval"), engines: int = 1) -> None:
        self.sessions = Sessions("recipe.py", engines=engines)
        self.now = 0.0
        self.told: dict[Any, list[Any]] = {}
        self.starts: list[Start] = []
        self.engine: list[Any] = []
        self.heard: list[tuple[int, Any]] = []
        """The same, each with the engine that it was for."""
        self.stated: list[str] = []
        self.hung_up: list[int] = []
        self.forgotten: list[int] = []
        self.hellos: list[Hello] = []
        self.asks = 0
        for engine in range(engines if pipelines else 0):
            self.do(self.sessions.engine_ready(pipelines, 0.0, engine))

    def do(self, instructions: list[Any]) -> None:
        for order in instructions:
            if isinstance(order, Answer):
                self.told.setdefault(order.ask, []).append(order.message)
            elif isinstance(order, Start):
                self.starts.append(order)
                self.heard.append((order.engine, order.message))
            elif isinstance(order, (HandOver, ToEngine)):
                self.engine.append(order.message)
                self.heard.append((order.engine, order.message))
                self.stated += [order.statement] if isinstance(order, HandOver) else []
            elif isinstance(order, HangUp):
                self.hung_up.append(order.client)
            else:
                assert isinstance(order, Forget)
                self.forgotten.append(order.client)
        self.sessions.check_invariants()

    def ask(self) -> int:
        self.asks += 1
        return self.asks

    def hello(self, group: int = 0, degree: int = 1, *, pid: int = 0, readers: int = 1, job: str = "j",
              pipeline: str = "pipeline", step: int | None = None, timeout: float = 60.0,
              old: Welcome | None = None, nonce: bytes = b"") -> int:  # fmt: skip
        ask = self.ask()
        before = (old.client, old.token) if old is not None else (-1, b"")
        own = nonce or f"nonce {ask}".encode()
        given = Hello(pid or 100 + ask, degree, group, readers, pipeline, job, step, timeout, *before, own)
        self.hellos.append(given)
        self.do(self.sessions.hello(ask, given, self.now))
        return ask

    def say_again(self, number: int) -> int:
        """One of the hellos once more, by who has not got its answer."""
        ask = self.ask()
        self.do(self.sessions.hello(ask, self.hellos[number], self.now))
        return ask

    def welcome(self, *args: Any, **kwargs: Any) -> Welcome:
        found = self.told[self.hello(*args, **kwargs)][-1]
        assert isinstance(found, Welcome), found
        self.join(found)
        return found

    def join(self, who: Welcome) -> None:
        """Its data connection comes."""
        self.do(self.sessions.joined(Join(who.token, who.client), 0, self.now))

    def attach(self, who: Welcome, state: str = "", allow: tuple[str, ...] = (), stated: str = "") -> int:
        ask = self.ask()
        self.do(self.sessions.attach(ask, Attach(who.token, who.client, state, list(allow), stated), self.now))
        return ask

    def running(self, degree: int = 2, **kwargs: Any) -> list[Welcome]:
        """A run with a rank of each group attached."""
        found = [self.welcome(group, degree, **kwargs) for group in range(degree)]
        for who in found:
            self.attach(who)
        self.started()
        return found

    def engine_dies(self, how: str = "killed by signal 9 (SIGKILL)", engine: int = 0) -> None:
        """And the next one is ready."""
        before = len(self.starts)
        self.do(self.sessions.engine_died(how, self.now, engine))
        assert len(self.starts) == before, "there is nobody to start a run"
        self.engine.clear()
        self.heard.clear()
        self.do(self.sessions.engine_ready(["pipeline", "eval"], self.now, engine))

    def started(self, run: int = 0, engine: int = 0, **kwargs: Any) -> None:
        number = run or self.starts[-1].message.run
        self.do(self.sessions.run_started(RunStarted(number, plan(**kwargs), "contiguous"), self.now, engine))

    def goodbye(self, who: Welcome) -> None:
        self.do(self.sessions.goodbye(self.ask(), Goodbye(who.token, who.client), self.now))

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.sessions.tick(self.now))

    def last(self, ask: int) -> Any:
        return self.told[ask][-1] if ask in self.told else None
