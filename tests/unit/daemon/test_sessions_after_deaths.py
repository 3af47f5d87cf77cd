"""Sessions after the engine, the daemon or a rank has died: who comes back, with what, and what ends a run."""
from __future__ import annotations

import json

from tests.unit.daemon.scene import LANES, Scene, checkpoint, statement
from zephon.transport.protocol import (
    AddReader,
    Attached,
    DropReader,
    ExpectReaders,
    Refused,
    Welcome,
)  # fmt: skip
from zephon_daemon.black_box import STARTING
from zephon_daemon.sessions import COME_BACK_SECONDS, ENGINE_DEATHS


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
    scene.join(who)
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
    assert "Look for a record" in scene.last(ask).text


def test_where_all_deaths_were_at_a_runs_start_the_error_does_not_send_one_to_look_for_a_record() -> None:
    scene = Scene()
    ask = scene.attach(scene.welcome())
    for _ in range(ENGINE_DEATHS):
        scene.engine_dies(f"exit code 7, at work on {STARTING} 'pipeline'")
    text = scene.last(ask).text
    assert "Look for a record" not in text
    assert "It died before any record was on its way, where the run takes shape" in text


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


def test_an_engine_is_told_of_groups_whose_ranks_have_all_died_around_the_death_of_the_one_before() -> None:
    def told(when: str, *, closes: bool = False, readers: int = 1) -> list[int]:
        scene = Scene()
        first = scene.welcome(0, 2, readers=readers)
        others = [scene.welcome(1, 2, readers=readers) for _ in range(readers)]
        for who in (first, *others):
            scene.attach(who)
        scene.started()

        def happens(now: str) -> None:
            for who in others if now == when else ():
                scene.goodbye(who) if closes else scene.do(scene.sessions.gone(who.client, scene.now))

        happens("right before")
        scene.engine_dies()
        happens("right after")
        scene.attach(scene.welcome(0, 2, readers=readers, old=first), stated=statement(0, 8, readers=readers))
        scene.started()
        happens("later")
        return [m.readers for m in scene.engine if isinstance(m, ExpectReaders) and m.group == 1]

    for readers in (1, 2):
        assert told("right before", readers=readers) == [0]
        assert told("right after", readers=readers) == [0]
        assert told("later", readers=readers) == [1, 0][-readers:]
    for when in ("right before", "right after", "later"):  # who has closed may have had what others still wait for
        assert 0 not in told(when, closes=True)


def test_a_rank_that_was_taken_for_dead_and_comes_back_is_not_dead() -> None:
    scene = Scene()
    first, second = scene.running()
    scene.engine_dies()
    scene.do(scene.sessions.gone(second.client, scene.now))
    first = scene.welcome(0, 2, old=first)
    scene.attach(first, stated=statement(0, 8))
    scene.started()
    assert [m.readers for m in scene.engine if isinstance(m, ExpectReaders)] == [0]
    scene.attach(scene.welcome(1, 2, old=second), stated=statement(1, 8))
    scene.engine_dies()
    scene.attach(scene.welcome(0, 2, old=first), stated=statement(0, 8))
    scene.started()
    assert not [m for m in scene.engine if isinstance(m, ExpectReaders)]


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
