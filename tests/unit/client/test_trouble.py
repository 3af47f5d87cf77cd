"""What a rank sees when something fails, stalls, dies or is interrupted: a named error, and a state that is right."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.client.peer import Peer, ids
from zephon.errors import (
    CheckpointMismatch,
    DaemonUnavailable,
    RecordError,
    RunFailed,
    TokenizerError,
    TopologyError,
    ZephonError,
)
from zephon.transport import protocol as p
from zephon_client import absence
from zephon_client.waiting import Limits

Make = Callable[..., Peer]
Join = Callable[..., Any]
ROOT = Path(__file__).parents[3]
IMPATIENT = Limits(stalled=0.8, hungry=0.4)


def test_a_failure_is_raised_as_the_named_error_after_what_was_ready_and_again_when_asked_again(
    make_peer: Make, join: Join
) -> None:
    peer = make_peer(lanes=1, microbatch=2, slots=4)
    peer.hold = {0}
    loader = join(peer)
    loader._begun()
    peer.let_go(0)
    peer.until(lambda: peer.rings and not peer.rings[0].writer.free)
    peer.hold = {0}
    peer.send(p.Failed("RecordError", "text", ["web", "part-3.jsonl", "77", "tokenize", "missing field"]))
    assert [next(loader)["id"].tolist() for _ in range(4)] == [ids(0, n, n + 2) for n in (0, 2, 4, 6)]
    for _ in range(2):
        with pytest.raises(RecordError, match="missing field") as caught:
            next(loader)
        error = caught.value
        assert (error.dataset, error.shard, error.row, error.operator) == ("web", "part-3.jsonl", 77, "tokenize")
    assert loader.state_dict()["lanes"]["0"]["records"] == 8


@pytest.mark.parametrize(
    "kind, expected", [("TokenizerError", TokenizerError), ("RunFailed", RunFailed), ("NoSuchError", ZephonError)]
)
def test_other_failures_keep_their_class_and_text(
    make_peer: Make, join: Join, kind: str, expected: type[Exception]
) -> None:
    peer = make_peer(lanes=1)
    peer.hold = {0}
    loader = join(peer)
    loader._begun()
    peer.until(lambda: peer.heard(p.Begin))
    peer.send(p.Failed(kind, "worker 3 ended: signal 9", []))
    with pytest.raises(expected, match="signal 9") as caught:
        next(loader)
    assert type(caught.value) is expected


def test_the_end_of_the_connection_is_an_error_that_names_the_socket_and_a_state_can_still_be_taken(
    make_peer: Make, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absence, "UNSUPERVISED_SECONDS", 0.2)
    peer = make_peer(lanes=2, microbatch=2)
    loader = join(peer)
    next(loader), next(loader)
    peer.close()
    with pytest.raises(DaemonUnavailable) as caught:
        for _ in range(20):
            next(loader)
    assert peer.path in str(caught.value)
    state = loader.state_dict()
    assert state["complete"]
    with pytest.raises(DaemonUnavailable, match="d0.sock"):
        loader.progress()
    loader.close()
    assert loader.state_dict() == state


def test_a_wait_goes_on_while_the_engine_says_that_it_works(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=1, microbatch=2)
    peer.hold = {0}
    loader = join(peer)
    loader._limits = Limits(stalled=1.2, hungry=0.1, look=0.1)
    hungry: list[Any] = []

    def works() -> None:
        while len(hungry) < 18:  # far longer than the limit, as the client's own signs show
            peer.until(lambda: len(peer.heard(p.Hungry)) > len(hungry) or len(hungry) > 0)
            hungry.append(1)
            peer.send(p.Alive(True, "workers"))
            threading.Event().wait(0.1)
        peer.let_go(0)

    helper = threading.Thread(target=works)
    helper.start()
    assert next(loader)["id"].tolist() == ids(0, 0, 2)
    helper.join()
    assert peer.heard(p.Hungry)[0] == p.Hungry(0, 0, 0)


@pytest.mark.parametrize(
    "reason, expected, says",
    [
        ("lane 0 waits for groups [1, 3] to attach", TopologyError, "even_ends=False"),
        ("lane 0 waits for 1 more ranks of group 0 to attach", TopologyError, "1 more ranks of group 0"),
        ("lane 0 waits for groups [1], whose ranks have left the run", TopologyError, "end all ranks and start them"),
        ("lane 0 waits for workers", RunFailed, "stalled: .*lane 0 waits for workers"),
        ("lane 0 waits for lane 5 of another group", RunFailed, "lane 5"),
    ],
)
def test_a_wait_in_which_nothing_moves_ends_with_its_reason_and_may_be_tried_again(
    make_peer: Make, join: Join, reason: str, expected: type[Exception], says: str
) -> None:
    peer = make_peer(lanes=1, microbatch=2)
    peer.hold, peer.alive = {0}, [p.Alive(False, reason)]
    loader = join(peer)
    loader._limits = IMPATIENT
    with pytest.raises(expected, match=says):
        next(loader)
    peer.let_go(0)
    assert next(loader)["id"].tolist() == ids(0, 0, 2)


def test_an_engine_that_gives_no_sign_of_life_is_unavailable(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=1)
    peer.hold, peer.alive = {0}, []
    loader = join(peer)
    loader._limits = IMPATIENT
    with pytest.raises(DaemonUnavailable, match="no sign of life"):
        next(loader)


def test_slots_that_come_free_while_a_batch_is_awaited_are_returned_and_hunger_is_told_again(
    make_peer: Make, join: Join
) -> None:
    peer = make_peer(lanes=2, microbatch=2)
    loader = join(peer, timeout=5.0)
    loader._limits = Limits(stalled=5.0, hungry=0.05, look=0.05)
    peer.hold = {1}
    kept = [next(loader)["id"]]

    def drop() -> None:
        peer.until(lambda: peer.heard(p.Hungry))
        kept.clear()
        peer.until(lambda: len(peer.heard(p.Hungry)) > 1)
        peer.let_go(1)

    helper = threading.Thread(target=drop)
    helper.start()
    assert next(loader).lane == 1
    helper.join()
    waited = [type(message) for message in peer.said if isinstance(message, (p.Hungry, p.Returned))]
    assert waited[:3] == [p.Hungry, p.Returned, p.Hungry]


# Interrupts


def test_case_J5_ctrl_c_in_a_wait_loses_and_repeats_nothing(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=2, microbatch=2)
    loader = join(peer)
    assert next(loader)["id"].tolist() == ids(0, 0, 2)
    peer.hold = {0, 1}

    def interrupt() -> None:
        peer.until(lambda: peer.heard(p.Hungry))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    loader._limits = Limits(stalled=10.0, hungry=0.02, look=5.0)
    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            next(loader)
    helper.join()
    done = {int(lane): entry["records"] for lane, entry in loader.state_dict()["lanes"].items()}
    peer.let_go(0, 1)
    batch = next(loader)
    assert batch["id"].tolist() == ids(batch.lane, done[batch.lane], done[batch.lane] + 2)


# Ends of processes


def test_a_forked_child_cannot_use_its_parents_loader_and_leaves_it_untouched(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=1, microbatch=2)
    loader = join(peer)
    batch = next(loader)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert batch["id"].tolist() == ids(0, 0, 2)
            del batch
            for use in (lambda: next(loader), loader.state_dict, loader.progress, lambda: loader.lanes):
                with pytest.raises(ZephonError, match="forked child"):
                    use()
            loader.close()
            loader._ending()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert [next(loader)["id"].tolist() for _ in range(8)] == [ids(0, n, n + 2) for n in range(2, 18, 2)]
    assert not peer.heard(p.Goodbye)


def test_closing_says_goodbye_and_may_be_done_again(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=1, microbatch=2)
    with join(peer) as loader:
        batch = next(loader)
    loader.close()
    assert len(peer.heard(p.Goodbye)) == 1
    assert batch["id"].tolist() == ids(0, 0, 2)
    assert loader.state_dict()["lanes"]["0"]["records"] == 2
    assert (loader.lanes, loader.rounds, loader.epoch) == ([0], 1, 0)
    for use in (lambda: next(loader), loader.progress, lambda: loader.load_state_dict({})):
        with pytest.raises(ZephonError, match="closed"):
            use()


def test_closing_does_not_wait_for_a_daemon_that_does_not_answer(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=1)
    peer.answers[p.Goodbye] = lambda message: []
    loader = join(peer)
    next(loader)
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 30  # a hang would be minutes


SCRIPT = """
    import sys
    from zephon_client import connect
    loader = connect(sys.argv[1], output="numpy")
    kept = []
    for number, batch in enumerate(loader):
        kept.append(batch["id"])
        if number == 2:
            {end}
"""


@pytest.mark.parametrize(
    "end, code, says", [("break", 0, ""), ("sys.exit(3)", 3, ""), ("raise ValueError('mine')", 1, "ValueError: mine")]
)
def test_case_C12_a_script_that_ends_in_any_way_adds_no_noise(
    make_peer: Make, end: str, code: int, says: str
) -> None:
    peer = make_peer(lanes=4)
    script = textwrap.dedent(SCRIPT).format(end=end)
    found = subprocess.run(
        [sys.executable, "-W", "default", "-c", script, peer.path],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}"}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert found.returncode == code, found.stderr
    lines = found.stderr.splitlines()
    assert lines == [] if not says else (lines[-1] == says and sum("Error" in line for line in lines) <= 2)
    peer.until(lambda: peer.heard(p.Goodbye))


def test_a_refused_attach_is_raised_as_the_error_it_names(make_peer: Make, join: Join) -> None:
    peer = make_peer(lanes=1)
    peer.answers[p.Attach] = lambda message: [p.Patience("indexing"), p.Refused("CheckpointMismatch", "seed: 1, 2")]
    loader = join(peer)
    for _ in range(2):
        with pytest.raises(CheckpointMismatch, match="seed"):
            loader.state_dict()
