"""Sessions: who is let in, who is refused and how, which runs start and end. No sockets, no processes, no clock."""
from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zephon.frontiers import Checkpoint, Frontier
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
    Welcome,
)  # fmt: skip
from zephon.transport.statement import Statement
from zephon_daemon.orders import Answer, Forget, HandOver, HangUp, Start, ToEngine
from zephon_daemon.sessions import (
    COME_BACK_SECONDS,
    ENGINE_DEATHS,
    JOIN_SECONDS,
    OTHER_JOB_SECONDS,
    SAME_JOB_SECONDS,
    Sessions,
)

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
    at = Checkpoint(identity, epoch, {lane: Frontier(0, records, records) for lane in own})
    origin = Checkpoint(identity, 0, {lane: Frontier() for lane in range(LANES)})
    return Statement(origin, at, dict.fromkeys(own, records), records // 2, readers).encode()


class Scene:
    """A daemon of ranks that say hello, attach and leave; what it told each is kept."""

    def __init__(self, pipelines: tuple[str, ...] = ("pipeline", "eval")) -> None:
        self.sessions = Sessions("recipe.py")
        self.now = 0.0
        self.told: dict[Any, list[Any]] = {}
        self.starts: list[Start] = []
        self.engine: list[Any] = []
        self.stated: list[str] = []
        self.hung_up: list[int] = []
        self.forgotten: list[int] = []
        self.asks = 0
        if pipelines:
            self.do(self.sessions.engine_ready(pipelines, 0.0))

    def do(self, instructions: list[Any]) -> None:
        for order in instructions:
            if isinstance(order, Answer):
                self.told.setdefault(order.ask, []).append(order.message)
            elif isinstance(order, Start):
                self.starts.append(order)
            elif isinstance(order, (HandOver, ToEngine)):
                self.engine.append(order.message)
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
              old: Welcome | None = None) -> int:  # fmt: skip
        ask = self.ask()
        before = (old.client, old.token) if old is not None else ()
        given = Hello(pid or 100 + ask, degree, group, readers, pipeline, job, step, timeout, *before)
        self.do(self.sessions.hello(ask, given, self.now))
        return ask

    def welcome(self, *args: Any, **kwargs: Any) -> Welcome:
        found = self.told[self.hello(*args, **kwargs)][-1]
        assert isinstance(found, Welcome), found
        self.do(self.sessions.joined(Join(found.token, found.client), 0))
        return found

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

    def engine_dies(self, how: str = "killed by signal 9 (SIGKILL)") -> None:
        """And the next one is ready."""
        before = len(self.starts)
        self.do(self.sessions.engine_died(how, self.now))
        assert len(self.starts) == before, "there is nobody to start a run"
        self.engine.clear()
        self.do(self.sessions.engine_ready(["pipeline", "eval"], self.now))

    def started(self, run: int = 0, **kwargs: Any) -> None:
        number = run or self.starts[-1].message.run
        self.do(self.sessions.run_started(RunStarted(number, plan(**kwargs), "contiguous"), self.now))

    def goodbye(self, who: Welcome) -> None:
        self.do(self.sessions.goodbye(self.ask(), Goodbye(who.token, who.client), self.now))

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.sessions.tick(self.now))

    def last(self, ask: int) -> Any:
        return self.told[ask][-1] if ask in self.told else None


def test_the_first_attach_starts_the_run_with_the_groups_that_said_hello_and_all_get_their_lanes() -> None:
    scene = Scene()
    first, second = scene.welcome(0, 2), scene.welcome(1, 2)
    asks = [scene.attach(second), scene.attach(first)]
    assert len(scene.starts) == 1
    assert (scene.starts[0].message.groups, scene.starts[0].message.dp_degree) == ([0, 1], 2)
    assert scene.last(asks[0]) is None
    scene.started()
    assert [scene.last(ask).owned for ask in asks] == [[2, 3], [0, 1]]
    assert [m.client for m in scene.engine if isinstance(m, AddReader)] == [second.client, first.client]


def test_attaching_again_gives_the_same_answer_and_no_second_reader() -> None:
    scene = Scene()
    who = scene.welcome()
    scene.attach(who)
    scene.started()
    assert scene.last(scene.attach(who)).owned == [0, 1, 2, 3]
    assert len(scene.starts) == 1
    assert len([m for m in scene.engine if isinstance(m, AddReader)]) == 1


def test_a_client_that_attaches_before_its_data_connection_comes_is_handed_over_when_it_does() -> None:
    scene = Scene()
    who = scene.last(scene.hello())
    scene.attach(who)
    scene.started()
    assert scene.engine == []
    scene.do(scene.sessions.joined(Join(who.token, who.client), 77))
    assert scene.engine == [AddReader(1, who.client, 0, 1)]


@pytest.mark.parametrize(("here", "there", "kind"), [
    ({"state": checkpoint(8)}, {"state": ""}, "CheckpointMismatch"),
    ({"state": checkpoint(8)}, {"state": checkpoint(10)}, "CheckpointMismatch"),
    ({"state": checkpoint(8)}, {"state": checkpoint(8, epoch=1)}, "CheckpointMismatch"),
    ({"state": checkpoint(8), "allow": ("mixture",)}, {"state": checkpoint(8)}, "CheckpointMismatch"),
])  # fmt: skip
def test_ranks_of_one_run_with_different_checkpoints_are_refused_both_named(here: Any, there: Any, kind: str) -> None:
    scene = Scene()
    first, second = scene.welcome(0, 2, pid=71), scene.welcome(1, 2, pid=72)
    scene.attach(first, **here)
    refused = scene.last(scene.attach(second, **there))
    assert isinstance(refused, Refused)
    assert refused.kind == kind
    assert all(f"process {pid} (group {group})" in refused.text for pid, group in ((71, 0), (72, 1)))


def test_states_of_one_round_that_name_different_windows_are_the_same_checkpoint() -> None:
    scene = Scene()
    first, second = scene.welcome(0, 2), scene.welcome(1, 2)
    asks = scene.attach(first, checkpoint(8, chunk=0)), scene.attach(second, checkpoint(8, chunk=3))
    scene.started()
    assert all(isinstance(scene.last(ask), Attached) for ask in asks)


@pytest.mark.parametrize("change", [{"degree": 4}, {"readers": 2}])
def test_ranks_of_one_run_with_different_topologies_are_refused_both_named(change: dict[str, int]) -> None:
    scene = Scene()
    first, second = scene.welcome(0, 2, pid=71), scene.welcome(**{"group": 1, "degree": 2, "pid": 72, **change})
    scene.attach(first)
    refused = scene.last(scene.attach(second))
    assert refused.kind == "TopologyError"
    assert "process 71" in refused.text
    assert "process 72" in refused.text


def test_a_partial_checkpoint_is_refused_before_anything_starts() -> None:
    scene = Scene()
    state = json.loads(checkpoint(8))
    del state["lanes"]["2"]
    state["complete"] = False
    refused = scene.last(scene.attach(scene.welcome(), json.dumps(state)))
    assert refused.kind == "CheckpointError"
    assert "[2]" in refused.text
    assert not scene.starts


def test_more_groups_than_lanes_and_steps_of_part_rounds_are_refused_by_name() -> None:
    scene = Scene()
    ask = scene.attach(scene.welcome(0, 5))
    scene.started()
    assert scene.last(ask).kind == "TopologyError"
    assert "4 lanes" in scene.last(ask).text
    assert scene.engine == [EndRun(1)], "a run that nobody could join does not stay"
    ask = scene.attach(scene.welcome(0, 1, step=3, pipeline="eval"))
    scene.started()
    assert "batches_per_step=3" in scene.last(ask).text


def test_an_uneven_split_is_a_warning() -> None:
    scene = Scene()
    ask = scene.attach(scene.welcome(0, 3))
    scene.started()
    assert any("unequal work" in text for text in scene.last(ask).warnings)


def test_a_group_takes_no_more_clients_than_its_readers_and_names_who_is_there() -> None:
    scene = Scene()
    scene.welcome(0, 2, readers=2, pid=71)
    scene.welcome(0, 2, readers=2, pid=72)
    third = scene.hello(0, 2, readers=2, pid=73)
    scene.later(OTHER_JOB_SECONDS)
    assert scene.last(third).kind == "TopologyError"
    assert "process 71" in scene.last(third).text
    assert "process 72" in scene.last(third).text


def test_a_second_loader_in_the_same_process_is_refused_at_once() -> None:
    scene = Scene()
    scene.welcome(pid=71)
    assert scene.last(scene.hello(pid=71)).kind == "TopologyError"


def test_a_client_of_another_job_waits_patiently_and_comes_in_when_the_first_job_has_ended() -> None:
    scene = Scene()
    old = scene.welcome(job="a")
    ask = scene.hello(job="b")
    scene.later(1.0)
    assert isinstance(scene.last(ask), Patience)
    scene.goodbye(old)
    assert isinstance(scene.last(ask), Welcome)
    assert scene.sessions.session == 2


def test_a_client_of_another_job_is_refused_with_the_living_process_ids() -> None:
    scene = Scene()
    scene.welcome(0, 2, job="a", pid=71)
    scene.welcome(1, 2, job="a", pid=72)
    ask = scene.hello(job="b")
    scene.later(OTHER_JOB_SECONDS)
    assert scene.last(ask).kind == "TopologyError"
    assert "71" in scene.last(ask).text
    assert "72" in scene.last(ask).text


def test_several_pipelines_of_one_recipe_run_in_one_session_and_an_unknown_one_is_refused() -> None:
    scene = Scene()
    train, evaluation = scene.welcome(pid=71), scene.welcome(pid=71, pipeline="eval")
    scene.attach(train)
    scene.attach(evaluation)
    assert [s.message.pipeline for s in scene.starts] == ["pipeline", "eval"]
    assert len({s.message.run for s in scene.starts}) == 2
    refused = scene.last(scene.hello(pipeline="evil"))
    assert refused.kind == "RecipeError"
    assert "'eval'" in refused.text


def test_a_client_that_dies_is_dropped_and_the_last_one_ends_the_run() -> None:
    scene = Scene()
    first, second = scene.welcome(0, 2), scene.welcome(1, 2)
    scene.attach(first)
    scene.attach(second)
    scene.started()
    scene.engine.clear()
    scene.do(scene.sessions.gone(first.client, scene.now))
    assert scene.engine == [DropReader(first.client)]
    scene.do(scene.sessions.gone(second.client, scene.now, told_by_engine=True))
    assert scene.engine == [DropReader(first.client), EndRun(1)]
    assert scene.forgotten == [first.client, second.client]


def test_a_rank_that_connects_again_waits_for_its_peers_and_gets_the_next_run() -> None:
    scene = Scene()
    first, second = scene.welcome(0, 2), scene.welcome(1, 2)
    scene.attach(first)
    scene.attach(second)
    scene.started()
    scene.goodbye(first)
    again = scene.welcome(0, 2)
    ask = scene.attach(again, checkpoint(8))
    assert scene.last(ask) is None
    scene.goodbye(second)
    assert len(scene.starts) == 2
    assert scene.starts[1].checkpoint == checkpoint(8)
    scene.started()
    assert scene.last(ask).owned == [0, 1]


def test_a_rank_that_connects_again_while_its_peers_go_on_is_refused_naming_them() -> None:
    scene = Scene()
    first, second = scene.welcome(0, 2), scene.welcome(1, 2, pid=72)
    scene.attach(first)
    scene.attach(second)
    scene.started()
    scene.goodbye(first)
    ask = scene.attach(scene.welcome(0, 2))
    scene.later(SAME_JOB_SECONDS)
    assert scene.last(ask).kind == "TopologyError"
    assert "process 72" in scene.last(ask).text


def test_a_run_that_the_engine_refuses_is_refused_to_all_who_wait_and_may_be_tried_again() -> None:
    scene = Scene()
    first, second = scene.welcome(0, 2), scene.welcome(1, 2)
    asks = scene.attach(first), scene.attach(second)
    scene.do(scene.sessions.run_refused(1, "CheckpointMismatch", "seed differs"))
    assert [scene.last(ask) for ask in asks] == [Refused("CheckpointMismatch", "seed differs")] * 2
    ask = scene.attach(first)
    scene.started()
    assert isinstance(scene.last(ask), Attached)


def test_a_run_whose_client_died_while_it_took_shape_is_ended() -> None:
    scene = Scene()
    who = scene.welcome()
    scene.attach(who)
    scene.do(scene.sessions.gone(who.client, scene.now))
    scene.started()
    assert scene.engine == [EndRun(1)]


def test_after_the_death_of_the_engine_ranks_come_back_into_their_session_and_run_with_their_statements() -> None:
    scene = Scene()
    first, second = scene.running()
    scene.engine_dies()
    assert len(scene.starts) == 1, "nobody has come back yet"
    back = scene.welcome(0, 2, old=first)
    assert scene.forgotten == [first.client]
    ask = scene.attach(back, stated=statement(0, 8))
    start = scene.starts[-1]
    assert (start.message.groups, json.loads(start.checkpoint)["identity"]) == ([], {"canonical_replicas": LANES})
    assert scene.last(ask) is None
    scene.started()
    assert scene.last(ask).owned == [0, 1]
    other = scene.attach(scene.welcome(1, 2, old=second), stated=statement(1, 6))
    assert scene.last(other).owned == [2, 3]
    assert len(scene.starts) == 2
    assert scene.stated[-2:] == [statement(0, 8), statement(1, 6)]
    assert scene.sessions.session == 1


def test_a_rank_that_waits_to_attach_or_attaches_late_is_let_in_after_a_death_without_a_statement() -> None:
    scene = Scene()
    first, second, third = (scene.welcome(group, 3) for group in range(3))
    waiting = scene.attach(first)
    scene.engine_dies()
    assert len(scene.starts) == 2
    scene.started()
    assert isinstance(scene.last(waiting), Attached)
    asks = [scene.attach(second)]
    scene.engine_dies()
    scene.attach(scene.welcome(0, 3, old=first), stated=statement(0, degree=4))
    scene.started()
    asks += [scene.attach(third)]
    assert all(isinstance(scene.last(ask), Attached) for ask in asks)


def test_a_rank_whose_data_connection_comes_after_the_engine_died_is_hung_up_on_so_that_it_comes_back() -> None:
    scene = Scene()
    who = scene.last(scene.hello())
    scene.attach(who)
    scene.started()
    scene.engine_dies()
    scene.do(scene.sessions.joined(Join(who.token, who.client), 77))
    assert scene.hung_up == [who.client]
    again = scene.welcome(old=who)
    assert isinstance(scene.last(scene.attach(again, stated=statement(degree=1))), type(None))
    scene.started()
    assert len([m for m in scene.engine if isinstance(m, AddReader)]) == 1


def test_a_new_daemon_takes_a_run_over_from_the_first_statement_and_refuses_one_of_another_run() -> None:
    scene = Scene()
    stranger = Welcome(b"of another daemon", 5, "")
    first = scene.welcome(0, 2, pid=71, old=stranger)
    ask = scene.attach(first, stated=statement(0, 8))
    assert json.loads(scene.starts[-1].checkpoint)["lanes"]["3"]["records"] == 0, "the origin, not where it stands"
    scene.started()
    assert scene.last(ask).owned == [0, 1]
    other = scene.welcome(1, 2, pid=72)
    refused = scene.last(scene.attach(other, stated=statement(1, 8, seed=3)))
    assert refused.kind == "CheckpointMismatch"
    assert all(word in refused.text for word in ("process 71", "process 72", "seed"))
    malformed = scene.last(scene.attach(other, stated="{}"))
    assert malformed.kind == "ProtocolError"


def test_deaths_with_no_batch_delivered_between_end_the_run_and_a_batch_begins_the_count_anew() -> None:
    scene = Scene()
    ranks = scene.running()

    def comes_back(records: int) -> list[int]:
        asks = []
        for group in range(2):
            ranks[group] = scene.welcome(group, 2, old=ranks[group])
            asks.append(scene.attach(ranks[group], stated=statement(group, records if group else 0)))
        if len(scene.starts) > 1:
            scene.started()
        return asks

    for death in range(ENGINE_DEATHS + 1):  # one rank has had a batch each time
        scene.engine_dies()
        assert all(isinstance(scene.last(ask), Attached) for ask in comes_back(2 * death + 2))
    for _ in range(ENGINE_DEATHS - 2):
        scene.engine_dies("killed by signal 11 (SIGSEGV), at work on lane 3")
        assert all(isinstance(scene.last(ask), Attached) for ask in comes_back(2 * ENGINE_DEATHS + 2))
    scene.engine_dies("killed by signal 11 (SIGSEGV), at work on lane 3")
    for ask in comes_back(2 * ENGINE_DEATHS + 2):
        assert scene.last(ask).kind == "RunFailed"
        assert "lane 3" in scene.last(ask).text
    for who in ranks:
        scene.goodbye(who)
    scene.running()


def test_after_so_many_deaths_a_rank_waits_a_while_for_the_word_of_the_others() -> None:
    scene = Scene()
    ranks = scene.running()
    for _ in range(ENGINE_DEATHS):
        scene.engine_dies()
        scene.starts.append(scene.starts[-1])
        ranks[0] = scene.welcome(0, 2, old=ranks[0])
        ask = scene.attach(ranks[0], stated=statement(0, 4))
        scene.started()
    assert not isinstance(scene.last(ask), Refused)
    late = scene.welcome(1, 2, old=ranks[1])
    scene.attach(late, stated=statement(1, 2))
    scene.started()
    assert isinstance(scene.last(ask), Attached), "the other one had a batch"
    for _ in range(ENGINE_DEATHS):
        scene.engine_dies()
        ranks[0] = scene.welcome(0, 2, old=ranks[0])
        ask = scene.attach(ranks[0], stated=statement(0, 4))
        scene.started()
    scene.later(COME_BACK_SECONDS)
    assert scene.last(ask).kind == "RunFailed"


def test_a_run_that_kills_the_engine_at_its_start_is_refused_after_as_many_deaths() -> None:
    scene = Scene()
    ask = scene.attach(scene.welcome())
    for _ in range(ENGINE_DEATHS - 1):
        scene.engine_dies()
        assert scene.last(ask) is None
    scene.engine_dies("exit code 7")
    assert scene.last(ask).kind == "RunFailed"
    assert "exit code 7" in scene.last(ask).text


def test_a_lost_rank_that_dies_is_not_waited_for_and_its_place_stays_used() -> None:
    scene = Scene()
    ranks = [scene.welcome(0, 1, readers=2, pid=70 + n) for n in range(2)]
    for who in ranks:
        scene.attach(who)
    scene.started()
    scene.engine_dies()
    ask = scene.attach(scene.welcome(0, 1, readers=2, old=ranks[0]), stated=statement(degree=1, readers=2))
    scene.started()
    assert isinstance(scene.last(ask), Attached)
    assert [m.group_readers for m in scene.engine if isinstance(m, AddReader)] == [2]
    scene.do(scene.sessions.gone(ranks[1].client, scene.now))
    assert ExpectReaders(scene.starts[-1].message.run, 0, 1) in scene.engine
    newcomer = scene.attach(scene.welcome(0, 1, readers=2))
    assert not isinstance(scene.last(newcomer), Attached), "no rank begins in the middle of another's reading"


def test_when_all_lost_ranks_die_the_next_job_begins_at_once() -> None:
    scene = Scene()
    ranks = scene.running(job="run:0")
    scene.engine_dies()
    ask = scene.hello(0, 2, job="run:1")
    assert scene.last(ask) is None
    for who in ranks:
        scene.do(scene.sessions.gone(who.client, scene.now))
    assert isinstance(scene.last(ask), Welcome)
    scene.attach(scene.last(ask), checkpoint(8))
    assert scene.starts[-1].checkpoint == checkpoint(8)


def test_a_connection_that_alone_broke_is_taken_up_again_in_the_running_run() -> None:
    scene = Scene()
    first, _ = scene.running()
    back = scene.welcome(0, 2, old=first)
    assert DropReader(first.client) in scene.engine
    assert isinstance(scene.last(scene.attach(back, stated=statement(0, 4))), Attached)
    assert len(scene.starts) == 1


def test_a_token_of_another_client_lets_nobody_take_its_place() -> None:
    scene = Scene()
    first, second = scene.running(pid=0)
    ask = scene.hello(0, 2, pid=999, old=Welcome(second.token, first.client, ""))
    assert scene.last(ask) is None
    assert first.client in scene.sessions.clients


def test_a_client_waits_for_others_to_end_no_longer_than_its_own_timeout() -> None:
    scene = Scene()
    scene.welcome(job="a", pid=71)
    asks = [scene.hello(job="b", timeout=5.0), scene.hello(job="a", timeout=5.0)]
    scene.later(5.0)
    assert [scene.last(ask).kind for ask in asks] == ["TopologyError"] * 2


def test_a_token_opens_only_its_own_client() -> None:
    scene = Scene()
    first, second = scene.welcome(0, 2), scene.welcome(1, 2)
    refused = scene.last(scene.attach(Welcome(second.token, first.client, "")))
    assert refused.kind == "DaemonUnavailable"
    scene.do(scene.sessions.goodbye("x", Goodbye(second.token, first.client), 0.0))
    assert scene.told["x"] == [Farewell()]
    assert first.client in scene.sessions.clients


def test_a_client_that_never_opens_its_data_connection_is_given_up() -> None:
    scene = Scene()
    scene.hello()
    assert scene.sessions.needs_ticks
    scene.later(JOIN_SECONDS)
    assert not scene.sessions.clients
    assert not scene.sessions.needs_ticks


@pytest.mark.parametrize("wrong", [{"group": 2, "degree": 2}, {"group": -1}, {"degree": 0}, {"readers": 0}])
def test_impossible_topologies_are_refused_at_hello(wrong: dict[str, int]) -> None:
    scene = Scene()
    assert scene.last(scene.hello(**wrong)).kind in ("TopologyError", "SettingError")


@settings(max_examples=150)
@given(st.data())
def test_every_request_is_answered_once_and_invariants_hold_whatever_happens(data: st.DataObject) -> None:
    scene = Scene(())
    welcomes: list[Welcome] = []
    pending = {"engine": False}
    for _ in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(
            ["hello", "hello", "back", "attach", "attach", "state", "gone", "goodbye", "ready", "started", "refused",
             "died", "later"]))
        known = {w.client: w for w in welcomes}
        if what == "hello":
            job, group = data.draw(st.sampled_from("ab")), data.draw(st.integers(0, 1))
            scene.hello(group, 2, job=job, readers=data.draw(st.integers(1, 2)),
                        pipeline=data.draw(st.sampled_from(["pipeline", "eval"])))
        elif what == "back" and known:
            old = known[data.draw(st.sampled_from(sorted(known)))]
            client = scene.sessions.clients.get(old.client)
            group = client.hello.dp_group_id if client is not None else data.draw(st.integers(0, 1))
            scene.hello(group, 2, job=data.draw(st.sampled_from("aab")), old=old, readers=data.draw(st.integers(1, 2)))
        elif what == "state" and known:
            who = known[data.draw(st.sampled_from(sorted(known)))]
            client = scene.sessions.clients.get(who.client)
            group = client.hello.dp_group_id if client is not None else 0
            seed = data.draw(st.sampled_from([None, None, 3]))
            scene.attach(who, stated=statement(group, data.draw(st.integers(0, 4)), seed=seed))
        elif what == "attach" and known:
            who = known[data.draw(st.sampled_from(sorted(known)))]
            scene.attach(who, data.draw(st.sampled_from(["", checkpoint(8)])))
        elif what in ("gone", "goodbye") and known:
            who = known[data.draw(st.sampled_from(sorted(known)))]
            scene.goodbye(who) if what == "goodbye" else scene.do(scene.sessions.gone(who.client, scene.now))
        elif what == "ready" and not pending["engine"]:
            pending["engine"] = True
            scene.do(scene.sessions.engine_ready(["pipeline", "eval"], scene.now))
        elif what in ("started", "refused") and scene.starts and pending["engine"]:
            run = scene.starts.pop(data.draw(st.integers(0, len(scene.starts) - 1))).message.run
            scene.started(run) if what == "started" else scene.do(scene.sessions.run_refused(run, "RunFailed", "no"))
        elif what == "died" and pending["engine"]:
            pending["engine"] = False
            scene.starts.clear()
            scene.do(scene.sessions.engine_died("exit code 1", scene.now))
        elif what == "later":
            scene.later(data.draw(st.sampled_from([1.0, 12.0])))
        welcomes = [m for told in scene.told.values() for m in told if isinstance(m, Welcome)]
        for w in welcomes:
            if w.client in scene.sessions.clients and not scene.sessions.clients[w.client].joined:
                scene.do(scene.sessions.joined(Join(w.token, w.client), 0))
    # In the end everybody leaves, the engine comes, and time passes: no request stays open, no run stays.
    if not pending["engine"]:
        scene.do(scene.sessions.engine_ready(["pipeline", "eval"], scene.now))
    for _ in range(4):
        for start in scene.starts:
            scene.started(start.message.run)
        scene.starts.clear()
        for client in list(scene.sessions.clients):
            scene.do(scene.sessions.gone(client, scene.now))
        scene.later(SAME_JOB_SECONDS)
    finals = {ask: [m for m in told if not isinstance(m, Patience)] for ask, told in scene.told.items()}
    assert all(len(found) <= 1 for found in finals.values())
    ended = [m.run for m in scene.engine if isinstance(m, EndRun)]
    readers = [m.client for m in scene.engine if isinstance(m, AddReader)]
    assert len(readers) == len(set(readers))
    assert len(ended) == len(set(ended))
    assert not scene.sessions.clients
    assert not scene.sessions.report()["waiting"]
    assert not scene.sessions.needs_ticks


def test_a_process_may_have_several_readers_of_a_group_none_of_which_has_joined_yet():
    scene = Scene()
    for clients in ([1], [1, 2], [2, 3]):  # the third: its group is full, so the answer to one before was lost
        assert isinstance(scene.told[scene.hello(0, pid=7, readers=2)][-1], Welcome)
        assert sorted(scene.sessions.clients) == clients
