"""A rank that waits says what holds it up, and asks the daemon before it takes a silent engine for dead."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from zephon.errors import DaemonUnavailable, RunFailed
from zephon_client import waiting
from zephon_client.waiting import Limits, Waiting


class SilentFeed:
    """A connection on which nothing arrives; each sleep takes its time on a clock of this test's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heard = self.moved = 0
        self.reason = self.stall = ""
        self.waits_for: Any = None
        self.told: list[Any] = []
        self.now = 0.0
        monkeypatch.setattr(waiting.time, "monotonic", lambda: self.now)

    def hungry(self, lane: int, epoch: int, stands: int) -> None:
        self.waits_for = lane, epoch, stands
        self.told.append(self.waits_for)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def says(self, reason: str, stall: str = "") -> None:
        self.heard += 1
        self.reason, self.stall = reason, stall


@pytest.fixture
def feed(monkeypatch: pytest.MonkeyPatch) -> SilentFeed:
    return SilentFeed(monkeypatch)


def wait(feed: Any, ask: Any, stalled: float = 60.0, heard: Any = lambda: None) -> tuple[Exception, list[str], float]:
    """Waits in vain: the error, what was warned of, and for how long it was."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        one = Waiting(feed, Limits(stalled), "/run/d.sock", 3, 0, 0, ask)
        try:
            while True:
                one.step()
                heard()
        except (DaemonUnavailable, RunFailed) as error:
            return error, [str(each.message) for each in said], feed.now


def test_the_engine_is_told_of_each_lane_that_is_waited_for_and_once_of_one_wait(feed: SilentFeed) -> None:
    places = [(0, 0, 16), (1, 0, 16), (1, 0, 24)]
    for place in places:  # batches come in between, and nothing goes back of them
        one = Waiting(feed, Limits(60.0), "/run/d.sock", *place)  # type: ignore[arg-type]
        for _ in range(5):
            one.step()
    assert feed.told == places


def test_an_engine_of_which_the_daemon_knows_nothing_is_given_up_after_its_silence(feed: SilentFeed) -> None:
    error, _, seconds = wait(feed, lambda: "")
    assert isinstance(error, DaemonUnavailable)
    assert seconds == 11.0


def test_an_engine_that_is_in_a_users_function_is_waited_for_as_long_as_for_anything_that_does_not_move(
    feed: SilentFeed,
) -> None:
    asked = []

    def ask() -> str:
        asked.append(feed.now)
        return f"the engine has not answered for {feed.now:.0f} s; it stands in sleeps (recipe.py:3)"

    error, said, seconds = wait(feed, ask)
    assert isinstance(error, RunFailed)
    assert seconds == 60.0
    assert [each for each in asked if each < 60] == [11.0, 21.0, 31.0, 41.0, 51.0]
    assert "has not answered for 60 s; it stands in sleeps" in str(error)
    assert said == ["no batch for 11 s: the engine has not answered for 11 s; it stands in sleeps (recipe.py:3)"]


def test_a_stall_that_the_engine_reports_is_warned_of_once_and_is_in_the_error(feed: SilentFeed) -> None:
    def heard() -> None:
        feed.says("lane 3 waits for reading on worker 2", "lane 3 is stalled: worker 2" if feed.now > 20 else "")

    error, said, seconds = wait(feed, lambda: "", heard=heard)
    assert isinstance(error, RunFailed)
    assert seconds == 60.0
    assert said[0] == "no batch for 10 s: lane 3 waits for reading on worker 2"
    assert [each for each in said if "stalled" in each] == ["no batch for 21 s: lane 3 is stalled: worker 2"]
    assert "lane 3 waits for reading on worker 2. lane 3 is stalled: worker 2" in str(error)


def test_a_stall_that_is_past_when_a_wait_begins_is_not_told(feed: SilentFeed) -> None:
    feed.says("lane 3 waits for reading", "lane 3 is stalled: worker 2")
    _, said, _ = wait(feed, lambda: "", heard=lambda: feed.says("lane 3 waits for reading") if feed.now >= 1 else None)
    assert not [each for each in said if "stalled" in each]


def test_of_a_lane_in_another_engine_that_hangs_the_daemon_says_so(feed: SilentFeed) -> None:
    def heard() -> None:
        feed.says("lane 3 waits for lane 5 of another group")

    error, said, seconds = wait(feed, lambda: "the engine has not answered for 58 s (engine 1)", heard=heard)
    assert isinstance(error, RunFailed)
    assert seconds == 60.0
    assert said == ["no batch for 10 s: lane 3 waits for lane 5 of another group"]
    assert "lane 5 of another group. The engine has not answered for 58 s (engine 1)" in str(error)
