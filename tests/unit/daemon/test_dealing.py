"""Which engine has which group, and how workers are shared out: arithmetic, and a clock that the test moves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zephon_daemon.dealing import SHARE_SECONDS, Dealing, Sharing, share, shares

ENGINES = st.integers(1, 9)


@given(st.integers(0, 500), ENGINES)
def test_shares_are_all_there_is_and_as_even_as_can_be(total: int, parts: int) -> None:
    found = [share(total, parts, part) for part in range(parts)]
    assert sum(found) == total
    assert max(found) - min(found) <= 1


@given(st.integers(1, 128), ENGINES, st.sets(st.integers(0, 8)))
def test_only_engines_that_have_readers_have_workers_and_together_they_have_all(
    total: int, engines: int, chosen: set[int]
) -> None:
    in_use = {engine for engine in chosen if engine < engines}
    found = shares(total, engines, in_use)
    assert sum(found) == total
    assert not in_use or not any(found[engine] for engine in range(engines) if engine not in in_use)


@given(ENGINES, st.lists(st.tuples(st.sampled_from(["pipeline", "eval"]), st.integers(0, 20)), max_size=40))
def test_groups_that_stay_are_spread_evenly_and_none_ever_moves(engines: int, coming: list[tuple[str, int]]) -> None:
    dealing = Dealing(engines)
    here: dict[tuple[str, int], int] = {}
    for group in coming:
        found = dealing.engine_of(group, here.keys())
        assert here.setdefault(group, found) == found
        counts = [list(here.values()).count(engine) for engine in range(engines)]
        assert max(counts) - min(counts) <= 1


def test_a_group_that_comes_back_while_others_are_here_has_its_engine_and_a_new_session_is_dealt_anew() -> None:
    dealing = Dealing(2)
    first, second, third = ("pipeline", 0), ("pipeline", 1), ("pipeline", 2)
    assert [dealing.engine_of(group, here) for group, here in ((first, []), (second, [first]))] == [0, 1]
    assert dealing.engine_of(first, [second]) == 0, "its lanes are there"
    assert dealing.engine_of(third, [second]) == 0
    assert dealing.engine_of(second, []) == 0, "nobody was left"


def test_workers_move_a_while_after_ranks_came_and_at_once_where_there_are_none() -> None:
    sharing = Sharing(8, 2)
    assert sharing.shares == [4, 4]
    assert not sharing.look({0}, 0.0)
    assert sharing.due == SHARE_SECONDS
    assert not sharing.look({0, 1}, 1.0), "the other ranks are only later"
    assert not sharing.look({0, 1}, 1.0 + SHARE_SECONDS), "as they are"
    assert not sharing.look({0}, 10.0)
    assert sharing.look({0}, 10.0 + SHARE_SECONDS)
    assert sharing.shares == [8, 0]
    assert not sharing.look(set(), 20.0), "where nobody is left all stays"
    assert sharing.due is None
    assert sharing.look({1}, 30.0)
    assert sharing.shares == [0, 8]
