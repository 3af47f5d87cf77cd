"""Everything is killed, and the run goes on from the last checkpoint as if nothing had happened."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.running import Daemon, Ledger, Ranks, counting, living, plan_of, until
from zephon import load_checkpoint, save_checkpoint


def kill(daemon: Daemon) -> None:
    """The daemon and all its processes, with SIGKILL."""
    pids = list(daemon.pids().values())
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    daemon.end()
    until(lambda: not living(pids))


def test_case_B1_killed_and_resumed_again_and_again(runtime_folder: Path) -> None:
    recipe = counting(runtime_folder, 2000, 4, lanes=4, batch=5, more=".shuffle(16)")
    ledger, saved = Ledger(plan_of(recipe)), runtime_folder / "state.json"
    state = None
    for dp, step in ((4, 30), (2, 40), (1, 41), (4, 70), (2, 100)):
        with Daemon(recipe, workers=1) as daemon, Ranks(daemon.socket, dp, state, ledger=ledger) as ranks:
            at = min(lane["records"] for lane in state["lanes"].values()) // 5 if state else 0
            assert set(ranks.rounds(step - at)) == {step - at}
            save_checkpoint(saved, ranks.state(dp - 1))
            if step < 100:
                kill(daemon)
        state = load_checkpoint(saved)
    ledger.check()
    assert state["epoch"] == 1


def test_case_B10_what_is_ready_but_not_delivered_comes_again(runtime_folder: Path) -> None:
    """Delivered is what `next` has returned, so a batch in hand counts and those behind it in the ring do not."""
    recipe = counting(runtime_folder, 320, 4, lanes=1, batch=8, options="prefetch_batches=16")
    with Daemon(recipe, workers=1) as daemon, Ranks(daemon.socket, 1) as ranks:
        ranks.rounds(3)
        until(lambda: daemon.lanes()[0]["produced"] >= 8 * (3 + 13) and daemon.lanes()[0]["ring_free"] == 0)
        after_three = ranks.state()
        fourth = next(ranks.loaders[0])
        in_hand = ranks.state()
        assert fourth.first_record == 24
        del fourth
        kill(daemon)
    with Daemon(recipe, workers=1) as daemon:
        for state, first in ((after_three, 24), (in_hand, 32)):
            with Ranks(daemon.socket, 1, state) as ranks:
                assert next(ranks.loaders[0]).first_record == first


def test_a_state_can_be_taken_after_the_daemon_has_died(runtime_folder: Path) -> None:
    recipe = counting(runtime_folder, 600, 4, lanes=4, batch=5, more=".shuffle(16)")
    ledger = Ledger(plan_of(recipe))
    with Daemon(recipe, workers=1) as daemon, Ranks(daemon.socket, 2, ledger=ledger) as ranks:
        ranks.rounds(6)
        before = ranks.state(0)
        kill(daemon)
        states = [ranks.state(rank) for rank in range(2)]
    assert all(state["complete"] for state in states)
    assert {at["records"] for state in (before, *states) for at in state["lanes"].values()} == {30}
    with Daemon(recipe, workers=1) as daemon, Ranks(daemon.socket, 4, states[1], ledger=ledger) as ranks:
        ranks.rounds()
    ledger.check()
