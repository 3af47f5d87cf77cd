"""Sessions over several engines: where a group's ranks go, what each engine is told, and what one's death concerns."""

from __future__ import annotations

from tests.unit.daemon.scene import Scene, checkpoint, statement
from zephon.transport.protocol import (
    AddReader,
    Attached,
    DropReader,
    EndRun,
    GroupsElsewhere,
    LanesTold,
    LaneTotal,
    TellLanes,
    Welcome,
)  # fmt: skip
from zephon_daemon.sessions import ENGINE_DEATHS


def running(scene: Scene) -> list[Welcome]:
    """A run of two groups, each in its engine."""
    ranks = [scene.welcome(group, 2) for group in range(2)]
    for engine, who in enumerate(ranks):
        scene.attach(who)
        scene.started(engine=engine)
    return ranks


def test_each_group_has_an_engine_and_the_second_engine_starts_from_what_the_first_came_to() -> None:
    scene = Scene(engines=2)
    first, second = (scene.welcome(group, 2) for group in range(2))
    asks = scene.attach(first), scene.attach(second)
    assert [(start.engine, start.message.groups, start.checkpoint) for start in scene.starts] == [(0, [0], "")]
    scene.started(engine=0)
    assert [start.engine for start in scene.starts] == [0, 1]
    assert '"epoch": 0' in scene.starts[1].checkpoint, "seed, lanes and estimates are not drawn again"
    assert scene.starts[1].message.groups == [1]
    assert isinstance(scene.last(asks[0]), Attached)
    assert scene.last(asks[1]) is None
    scene.started(engine=1)
    assert scene.last(asks[1]).owned == [2, 3]
    added = [(engine, m.client, m.group) for engine, m in scene.heard if isinstance(m, AddReader)]
    assert added == [(0, first.client, 0), (1, second.client, 1)]


def test_a_loaded_checkpoint_goes_to_every_engine_with_the_changes_that_are_allowed() -> None:
    scene = Scene(engines=2)
    ranks = [scene.welcome(group, 2) for group in range(2)]
    for engine, who in enumerate(ranks):
        scene.attach(who, checkpoint(8), allow=("mixture",))
        scene.started(engine=engine)
    assert {start.checkpoint for start in scene.starts} == {checkpoint(8)}
    assert {tuple(start.message.allow_changed) for start in scene.starts} == {("mixture",)}


def test_engines_of_one_run_tell_each_other_and_know_which_groups_read_elsewhere() -> None:
    scene = Scene(engines=2)
    ranks = running(scene)
    assert [engine for engine, m in scene.heard if isinstance(m, TellLanes)] == [0, 1]
    assert [(engine, m.groups) for engine, m in scene.heard if isinstance(m, GroupsElsewhere)] == [(1, [0]), (0, [1])]
    told = LanesTold(1, totals=[LaneTotal(0, 0, 12, 0)])
    scene.heard.clear()
    scene.do(scene.sessions.lanes_told(told, 0))
    assert scene.heard == [(1, told)]
    scene.do(scene.sessions.lanes_told(LanesTold(99), 0))
    scene.goodbye(ranks[1])
    assert (0, GroupsElsewhere(1, [])) in scene.heard
    scene.goodbye(ranks[0])
    assert [engine for engine, m in scene.heard if isinstance(m, EndRun)] == [0, 1]


def test_an_engine_is_told_of_groups_that_have_lost_theirs_until_they_are_back() -> None:
    scene = Scene(engines=2)
    ranks = running(scene)
    scene.heard.clear()
    scene.do(scene.sessions.engine_died("killed", scene.now, 0))
    assert (1, GroupsElsewhere(1, [], [0])) in scene.heard
    scene.goodbye(ranks[0])
    assert (1, GroupsElsewhere(1, [], [])) in scene.heard


def test_a_run_that_has_one_engine_for_itself_is_told_of_no_other() -> None:
    scene = Scene(engines=2)
    scene.attach(scene.welcome())
    scene.started()
    assert [type(m) for _, m in scene.heard if not isinstance(m, AddReader)] == [type(scene.starts[0].message)]
    scene.do(scene.sessions.lanes_told(LanesTold(1), 0))
    assert not [m for _, m in scene.heard if isinstance(m, (LanesTold, TellLanes, GroupsElsewhere))]


def test_the_death_of_one_engine_concerns_its_own_clients_and_the_run_goes_on_there_from_their_statements() -> None:
    scene = Scene(engines=2)
    ranks = running(scene)
    scene.engine_dies(engine=1)
    assert scene.last(scene.attach(ranks[0])).owned == [0, 1], "still attached"
    assert scene.last(scene.attach(ranks[1])).kind == "DaemonUnavailable"
    back = scene.welcome(1, 2, old=ranks[1])
    assert scene.sessions.clients[back.client].engine == 1
    ask = scene.attach(back, stated=statement(1, 4))
    assert (scene.starts[-1].engine, scene.starts[-1].message.groups, scene.starts[-1].message.careful) == (1, [], True)
    assert [engine for engine, m in scene.heard if isinstance(m, TellLanes)] == [0, 1], "all is told once more"
    scene.started(engine=1)
    assert isinstance(scene.last(ask), Attached)
    assert scene.stated[-1] == statement(1, 4)


def test_an_engine_that_comes_to_another_plan_is_refused_and_the_run_goes_on_where_it_is() -> None:
    scene = Scene(engines=2)
    ranks = [scene.welcome(group, 2) for group in range(2)]
    asks = [scene.attach(who) for who in ranks]
    scene.started(engine=0)
    scene.started(engine=1, lanes=6)
    assert scene.last(asks[1]).kind == "RecipeError"
    assert "engine 1 comes to another plan" in scene.last(asks[1]).text
    assert isinstance(scene.last(asks[0]), Attached)
    assert (1, EndRun(1)) in scene.heard
    scene.attach(ranks[1])
    scene.started(engine=1)
    assert (1, ranks[1].client) in [(engine, m.client) for engine, m in scene.heard if isinstance(m, AddReader)]


def test_a_run_that_one_engine_cannot_keep_has_failed_for_the_ranks_of_all() -> None:
    scene = Scene(engines=2)
    ranks = running(scene)
    for _ in range(ENGINE_DEATHS):
        scene.engine_dies(engine=1)
        ranks[1] = scene.welcome(1, 2, old=ranks[1])
        ask = scene.attach(ranks[1], stated=statement(1, 0))
        if scene.starts[-1].engine == 1 and scene.last(ask) is None:
            scene.started(engine=1)
    assert scene.last(ask).kind == "RunFailed"
    assert (0, DropReader(ranks[0].client)) in scene.heard, "it comes back, and hears why"
    again = scene.welcome(0, 2, old=ranks[0])
    assert scene.last(scene.attach(again, stated=statement(0, 0))).kind == "RunFailed"


def test_lanes_of_a_group_that_is_here_are_begun_before_its_ranks_attach_in_whatever_engine() -> None:
    scene = Scene(engines=2)
    first, second = (scene.welcome(group, 2) for group in range(2))
    scene.attach(first)
    scene.started(engine=0)
    assert [(start.engine, start.message.groups) for start in scene.starts] == [(0, [0]), (1, [1])]
    scene.started(engine=1)
    scene.goodbye(second)
    scene.goodbye(first)
    assert [engine for engine, m in scene.heard if isinstance(m, EndRun)] == [0, 1]
