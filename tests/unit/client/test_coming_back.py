"""The connection ends, and the rank comes back: over a new one, where it was, or with an error that says why not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.client.peer import Peer, Shape, ids
from zephon.errors import CheckpointMismatch, DaemonUnavailable, RunFailed, TopologyError
from zephon.transport import protocol as p
from zephon.transport.statement import decode_statement
from zephon_client import absence

Make = Callable[..., Peer]
Join = Callable[..., Any]


def test_after_the_engines_death_a_rank_says_who_it_was_and_how_far_it_is_and_goes_on(
    make_peer: Make, join: Join
) -> None:
    peer = make_peer(lanes=2, microbatch=2, slots=2)
    loader = join(peer)
    got: dict[int, list[int]] = {0: [], 1: []}
    for death in range(3):
        for _ in range(7):
            batch = next(loader)
            got[batch.lane] += batch["id"].tolist()
        counts = {lane: entry["records"] for lane, entry in loader.state_dict()["lanes"].items()}
        peer.cut(client=death)
        assert {lane: entry["records"] for lane, entry in loader.state_dict()["lanes"].items()} == counts
    while len(peer.heard(p.Hello)) < 4:
        batch = next(loader)
        got[batch.lane] += batch["id"].tolist()
    assert got == {lane: ids(lane, 0, len(each)) for lane, each in got.items()}
    assert [(hello.client, hello.token) for hello in peer.heard(p.Hello)] == [
        (-1, b""), (0, b"token"), (1, b"token"), (2, b"token"),
    ]  # fmt: skip
    stated = [decode_statement(attach.statement) for attach in peer.heard(p.Attach) if attach.statement]
    assert [sum(each.stands.values()) for each in stated] == sorted(sum(each.stands.values()) for each in stated)
    assert stated[0].origin.lanes[0].records == 0
    assert [begin.epoch for begin in peer.heard(p.Begin)] == [0, 0, 0, 0]


def test_a_rank_comes_back_in_a_later_epoch_with_what_it_was_told_of_the_earlier_ones(
    make_peer: Make, join: Join
) -> None:
    peer = make_peer(lanes=2, microbatch=2, totals=[6, 7], slots=1)
    loader = join(peer)
    assert len(list(loader)) == 6
    assert next(loader)["id"].tolist() == ids(0, 0, 2, epoch=1)
    peer.cut()
    assert [batch["id"].tolist() for batch in loader][-1] == ids(1, 4, 6, epoch=1)
    assert (loader.epoch, loader.rounds) == (2, 6)
    stated = decode_statement(peer.heard(p.Attach)[-1].statement)
    assert (stated.origin.epoch, stated.at.epoch) == (0, 1)
    assert {(r.epoch, r.rounds, r.final) for r in stated.released} >= {(0, 3, True), (1, 3, True)}
    assert {(t.epoch, t.lane, t.records) for t in stated.totals} >= {(0, 0, 6), (0, 1, 7), (1, 1, 7)}


def test_batches_in_hand_stay_what_they_were_when_the_connection_is_another(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=1, microbatch=2, slots=4)
    loader = join(peer)
    kept = [next(loader) for _ in range(2)]
    peer.cut()
    for _ in range(12):
        next(loader)
    assert len(peer.heard(p.Hello)) == 2
    assert [batch["id"].tolist() for batch in kept] == [ids(0, 0, 2), ids(0, 2, 4)]


def gone(make_peer: Make, join: Join, supervisor: str = "", **settings: Any) -> Any:
    """A loader whose daemon has ended."""
    peer = make_peer(lanes=1, microbatch=2, slots=2)
    peer.supervisor = supervisor
    loader = join(peer, **settings)
    next(loader)
    peer.close()
    return loader


def had(loader: Any) -> int:
    return int(loader.state_dict()["lanes"]["0"]["records"])


def test_a_daemon_that_comes_back_at_its_socket_is_found_even_after_a_ctrl_c_in_the_wait(
    make_peer: Make, join: Join, runtime_folder: Path
) -> None:
    loader = gone(make_peer, join, supervisor="systemd", timeout=30.0)
    timer = threading.Timer(0.5, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            next(loader)
    timer.join()
    before = had(loader)
    assert before > 0
    again = Peer(runtime_folder, Shape(lanes=1, microbatch=2, slots=2), name="d0.sock")
    try:
        assert next(loader)["id"].tolist() == ids(0, before, before + 2)
    finally:
        loader.close()
        again.close()


def test_any_number_of_ctrl_cs_in_the_wait_for_a_daemon_are_no_ends_of_connections(
    make_peer: Make, join: Join, runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = gone(make_peer, join, supervisor="systemd", timeout=30.0)

    def wait(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(absence.Absence, "wait", wait)
        for _ in range(absence.LOSSES + 1):
            with pytest.raises(KeyboardInterrupt):
                while True:
                    next(loader)
    before = had(loader)
    again = Peer(runtime_folder, Shape(lanes=1, microbatch=2, slots=2), name="d0.sock")
    try:
        assert next(loader)["id"].tolist() == ids(0, before, before + 2)
    finally:
        loader.close()
        again.close()


def test_a_daemon_that_nobody_starts_again_is_waited_for_a_moment_and_one_with_a_supervisor_for_the_timeout(
    make_peer: Make, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absence, "UNSUPERVISED_SECONDS", 0.2)
    loader = gone(make_peer, join)
    with pytest.raises(DaemonUnavailable, match=r"d0\.sock.*nobody has started it again within 0\.2 s"):
        while True:
            next(loader)
    loader = gone(make_peer, join, supervisor="systemd", timeout=1.0)
    for _ in range(2):
        with pytest.raises(DaemonUnavailable, match=r"d1\.sock.*systemd has not started it again within 1 s"):
            while True:
                next(loader)


def test_a_daemon_whose_launcher_has_ended_is_not_waited_for(make_peer: Make, join: Join) -> None:
    launcher = subprocess.Popen(["true"])
    os.waitid(os.P_PID, launcher.pid, os.WEXITED | os.WNOWAIT)  # ended, and still to be waited for
    loader = gone(make_peer, join, supervisor=f"launch {launcher.pid}", timeout=1e6)
    with pytest.raises(DaemonUnavailable, match="launcher.*has ended"):
        while True:
            next(loader)
    launcher.wait()
    with pytest.raises(DaemonUnavailable, match="launcher.*has ended"):
        next(loader)


@pytest.mark.parametrize(
    ("kind", "expected", "stays"),
    [
        ("RunFailed", RunFailed, True),
        ("CheckpointMismatch", CheckpointMismatch, True),
        ("TopologyError", TopologyError, False),
    ],
)
def test_what_the_daemon_refuses_a_rank_with_that_comes_back_is_raised_and_stays_unless_others_are_in_the_way(
    make_peer: Make, join: Join, kind: str, expected: type[Exception], stays: bool
) -> None:
    peer = make_peer(lanes=1, microbatch=2, slots=1)
    loader = join(peer)
    next(loader)
    peer.answers[p.Attach] = lambda message: [p.Refused(kind, "died 3 times")]
    peer.cut()
    with pytest.raises(expected, match="died 3 times"):
        while True:
            next(loader)
    before = had(loader)
    del peer.answers[p.Attach]
    if stays:
        with pytest.raises(expected, match="died 3 times"):
            next(loader)
    else:
        assert next(loader)["id"].tolist() == ids(0, before, before + 2)


def test_a_daemon_that_comes_back_with_another_recipe_is_refused(
    make_peer: Make, join: Join, runtime_folder: Path
) -> None:
    loader = gone(make_peer, join, supervisor="systemd")
    again = Peer(runtime_folder, Shape(lanes=1, microbatch=3, slots=2), name="d0.sock")
    try:
        for _ in range(2):
            with pytest.raises(CheckpointMismatch, match="microbatch_size"):
                while True:
                    next(loader)
    finally:
        loader.close()
        again.close()


def test_a_connection_that_ends_again_and_again_before_a_batch_comes_is_given_up(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=1, microbatch=2, slots=1)
    loader = join(peer)
    next(loader)
    peer.answers[p.Attach] = lambda message: [p.Refused("DaemonUnavailable", "the engine died once more")]
    peer.cut()
    with pytest.raises(DaemonUnavailable, match="20 times.*died once more"):
        while True:
            next(loader)
    assert len(peer.heard(p.Hello)) > 20


def test_a_rank_whose_first_attach_is_cut_off_attaches_again(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=1, microbatch=2)
    loader = join(peer)

    def cut(message: p.Attach) -> list[Any]:
        peer.until_joined(message.client)
        peer.cut_now(message.client)
        del peer.answers[p.Attach]
        return [None]

    peer.answers[p.Attach] = cut
    assert next(loader)["id"].tolist() == ids(0, 0, 2)
    assert [attach.statement for attach in peer.heard(p.Attach)] == ["", ""]
    assert json.loads(json.dumps(loader.state_dict()))["complete"]


def test_readers_that_are_left_are_counted_in_the_statement(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=1, microbatch=2, slots=1)
    loaders = [join(peer, group_readers=2) for _ in range(2)]
    for loader in loaders:
        loader._begun()
    next(loaders[0])
    peer.send(p.ReadersLeft(1), 0)
    loaders[0].progress()
    statement = loaders[0]._run.statement()
    assert (statement.readers, loaders[1]._run.statement().readers) == (1, 2)


def test_a_daemon_that_ends_whenever_it_is_attached_to_is_given_up_in_the_end(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=1, microbatch=2)
    loader = join(peer)

    def cut(message: p.Attach) -> list[Any]:
        peer.until_joined(message.client)
        peer.cut_now(message.client)
        return [None]

    peer.answers[p.Attach] = cut
    loader._losses = absence.LOSSES - 2  # each takes a second, in which a last word might still come
    with pytest.raises(DaemonUnavailable, match="times since the last batch"):
        next(loader)
