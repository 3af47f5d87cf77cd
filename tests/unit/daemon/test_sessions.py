"""Sessions: who is let in, who is refused and how, which runs start and end. No sockets, no processes, no clock."""
from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.daemon.scene import Scene, checkpoint, statement
from zephon.transport.protocol import (
    AddReader,
    Attached,
    DropReader,
    EndRun,
    Farewell,
    Goodbye,
    Patience,
    Refused,
    Welcome,
)  # fmt: skip
from zephon_daemon.asked import SAME_JOB_SECONDS, UNWANTED_SECONDS
from zephon_daemon.sessions import JOIN_SECONDS, OTHER_JOB_SECONDS


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
    scene.join(who)
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
    scene.later(2.0)
    assert scene.told[ask] == [Patience("the run before to end: process 72 (group 1)", others=True)]
    scene.later(SAME_JOB_SECONDS)
    assert scene.last(ask).kind == "TopologyError"
    assert "process 72" in scene.last(ask).text
    assert "start all ranks together from the last checkpoint" in scene.last(ask).text


def test_a_run_that_the_engine_refuses_is_refused_to_all_who_wait_and_may_be_tried_again() -> None:
    scene = Scene()
    first, second = scene.welcome(0, 2), scene.welcome(1, 2)
    asks = scene.attach(first), scene.attach(second)
    scene.do(scene.sessions.run_refused(1, "CheckpointMismatch", "seed differs", scene.now))
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


def orphaned(engines: int = 1) -> Scene:
    """A run takes shape whose only rank, process 71, has been killed."""
    scene = Scene(engines=engines)
    who = scene.welcome(pid=71)
    scene.attach(who)
    scene.do(scene.sessions.gone(who.client, scene.now))
    return scene


@pytest.mark.parametrize("ends", ["takes shape", "is refused", "its engine dies"])
@pytest.mark.parametrize(("degree", "state"), [(2, ""), (1, checkpoint(8))])
def test_who_brings_another_shape_waits_until_a_run_that_nobody_wants_any_more_has_ended(
    ends: str, degree: int, state: str
) -> None:
    scene = orphaned()
    asks = [scene.attach(scene.welcome(group, degree), state) for group in range(degree)]
    assert len(scene.starts) == 1
    scene.later(1.0)
    reason = "the run before to end, which still takes shape: process 71 (group 0) wanted it, and has left"
    assert [scene.told[ask] for ask in asks] == [[Patience(reason)]] * degree
    if ends == "takes shape":
        scene.started()
        assert scene.engine == [EndRun(1)]
    elif ends == "is refused":
        scene.do(scene.sessions.run_refused(1, "RunFailed", "its setup failed", scene.now))
    else:
        scene.engine_dies()
    assert [start.message.run for start in scene.starts] == [1, 2]
    assert (scene.starts[1].message.dp_degree, scene.starts[1].checkpoint) == (degree, state)
    scene.started()
    assert all(isinstance(scene.last(ask), Attached) for ask in asks)


def test_nobody_waits_for_ever_for_a_run_that_nobody_wants_any_more() -> None:
    scene = orphaned()
    ask = scene.attach(scene.welcome(), checkpoint(8))
    scene.later(UNWANTED_SECONDS)
    assert scene.last(ask).kind == "DaemonUnavailable"
    assert "process 71" in scene.last(ask).text


def test_a_run_that_was_left_and_is_wanted_again_is_that_of_who_wants_it_now() -> None:
    scene = orphaned()
    waits = scene.attach(scene.welcome(1, 2, pid=73))
    wants = scene.welcome(pid=72)
    ask = scene.attach(wants)
    scene.started()
    assert isinstance(scene.last(ask), Attached)
    assert scene.engine == [AddReader(1, wants.client, 0, 1)]
    assert "process 73 (group 1) and process 72 (group 0)" in scene.last(waits).text
    assert "dp_degree=2 and dp_degree=1" in scene.last(waits).text


def test_who_comes_late_into_a_run_that_takes_shape_in_another_engine_goes_on_once_nobody_wants_it() -> None:
    scene = Scene(engines=2)
    ranks = [scene.welcome(group, 2) for group in range(2)]
    for who in ranks:
        scene.attach(who)
    scene.started(engine=0)
    scene.goodbye(ranks[0])
    ask = scene.attach(scene.welcome(0, 2))
    scene.goodbye(ranks[1])
    assert [(start.message.run, start.engine) for start in scene.starts] == [(1, 0), (1, 1)]
    scene.started(engine=1)
    assert [engine for engine, m in scene.heard if isinstance(m, EndRun)] == [0, 1]
    scene.started(run=2, engine=0)
    assert isinstance(scene.last(ask), Attached)


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
    engines = data.draw(st.sampled_from([1, 2]))
    scene = Scene((), engines)
    welcomes: list[Welcome] = []
    alive: set[int] = set()
    for _ in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(
            ["hello", "hello", "again", "back", "attach", "attach", "state", "gone", "goodbye", "ready", "started",
             "refused", "died", "later"]))
        known = {w.client: w for w in welcomes}
        if what == "hello":
            job, group = data.draw(st.sampled_from("ab")), data.draw(st.integers(0, 1))
            scene.hello(group, 2, job=job, readers=data.draw(st.integers(1, 2)),
                        pipeline=data.draw(st.sampled_from(["pipeline", "eval"])))
        elif what == "again" and scene.hellos:
            scene.say_again(data.draw(st.integers(0, len(scene.hellos) - 1)))
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
        elif what == "ready" and len(alive) < engines:
            engine = data.draw(st.sampled_from(sorted(set(range(engines)) - alive)))
            alive.add(engine)
            scene.do(scene.sessions.engine_ready(["pipeline", "eval"], scene.now, engine))
        elif what in ("started", "refused") and scene.starts:
            start = scene.starts.pop(data.draw(st.integers(0, len(scene.starts) - 1)))
            run, engine = start.message.run, start.engine
            if what == "started":
                scene.started(run, engine)
            else:
                scene.do(scene.sessions.run_refused(run, "RunFailed", "no", scene.now, engine))
        elif what == "died" and alive:
            engine = data.draw(st.sampled_from(sorted(alive)))
            alive.discard(engine)
            scene.starts = [start for start in scene.starts if start.engine != engine]
            scene.do(scene.sessions.engine_died("exit code 1", scene.now, engine))
        elif what == "later":
            scene.later(data.draw(st.sampled_from([1.0, 12.0])))
        welcomes = [m for told in scene.told.values() for m in told if isinstance(m, Welcome)]
        for w in welcomes:
            if w.client in scene.sessions.clients and not scene.sessions.clients[w.client].joined:
                scene.join(w)
    # In the end everybody leaves, the engine comes, and time passes: no request stays open, no run stays.
    for engine in set(range(engines)) - alive:
        scene.do(scene.sessions.engine_ready(["pipeline", "eval"], scene.now, engine))
    for _ in range(4):
        for start in scene.starts:
            scene.started(start.message.run, start.engine)
        scene.starts.clear()
        for client in list(scene.sessions.clients):
            scene.do(scene.sessions.gone(client, scene.now))
        scene.later(SAME_JOB_SECONDS)
    finals = {ask: [m for m in told if not isinstance(m, Patience)] for ask, told in scene.told.items()}
    assert all(len(found) <= 1 for found in finals.values())
    ended = [(engine, m.run) for engine, m in scene.heard if isinstance(m, EndRun)]
    readers = [m.client for m in scene.engine if isinstance(m, AddReader)]
    assert len(readers) == len(set(readers))
    assert len(ended) == len(set(ended))
    assert not scene.sessions.clients
    assert not scene.sessions.report()["waiting"]
    assert not scene.sessions.needs_ticks


def test_a_process_may_have_several_readers_of_a_group_none_of_which_has_joined_yet() -> None:
    scene = Scene()
    first, second = (scene.last(scene.hello(0, pid=7, readers=2)) for _ in range(2))
    assert sorted(scene.sessions.clients) == [first.client, second.client]
    third = scene.hello(0, pid=7, readers=2)
    assert scene.last(third) is None, "one of them may have been given up by its process"
    for who in (first, second):
        scene.join(who)
    assert scene.last(third).kind == "TopologyError"


@pytest.mark.parametrize("joined", [False, True])
def test_a_hello_said_again_is_the_same_reader_and_its_first_connection_is_forgotten(joined: bool) -> None:
    scene = Scene()
    first = scene.last(scene.hello(pid=7, nonce=b"mine"))
    if joined:
        scene.join(first)
    again = scene.last(scene.hello(pid=7, nonce=b"mine"))
    assert isinstance(again, Welcome)
    assert scene.forgotten == [first.client]
    assert list(scene.sessions.clients) == [again.client]


def test_a_hello_said_again_after_the_run_took_shape_keeps_its_place() -> None:
    scene = Scene()
    first, _ = scene.running()
    lost = scene.last(scene.hello(0, 2, nonce=b"mine", old=first))
    back = scene.welcome(0, 2, nonce=b"mine", old=first)
    assert lost.client not in scene.sessions.clients
    assert isinstance(scene.last(scene.attach(back, stated=statement(0, 4))), Attached)
    assert len(scene.starts) == 1


def test_a_process_whose_connect_was_interrupted_comes_in_once_the_first_is_given_up() -> None:
    scene = Scene()
    scene.hello(pid=7)
    second = scene.hello(pid=7)
    scene.later(JOIN_SECONDS)
    assert isinstance(scene.last(second), Welcome)


def test_readers_by_the_thousand_are_counted_where_they_are_named_and_given_up_together() -> None:
    scene = Scene()
    asks = [scene.hello(pid=7, readers=500) for _ in range(1200)]
    report = scene.sessions.report()
    assert len(report["clients"]) == 500
    assert len(report["waiting"]) == 1
    assert report["waiting"][0].endswith("and 492 more (700 requests)")
    scene.later(JOIN_SECONDS)
    assert isinstance(scene.last(asks[999]), Welcome)
    assert isinstance(scene.last(asks[1000]), Patience)
    assert sorted(scene.sessions.clients) == list(range(501, 1001)), "those who waited longest"
