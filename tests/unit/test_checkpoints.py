"""A checkpoint file is the old one or the new one, whole, whatever kills the writer."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import zephon
from zephon.errors import CheckpointError
from zephon.frontiers import Checkpoint, Frontier

ROOT = Path(__file__).parents[2]


def state_of(step: int, lanes: int = 64) -> dict[str, object]:
    """A state in which every number says which save it belongs to."""
    return Checkpoint(
        {"canonical_replicas": lanes, "seed": step}, step, {n: Frontier(step, step, step) for n in range(lanes)}
    ).to_json()


def test_what_is_saved_is_loaded(tmp_path):
    for step in (0, 5):
        zephon.save_checkpoint(tmp_path / "state.json", state_of(step))
        assert zephon.load_checkpoint(tmp_path / "state.json") == state_of(step)
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_state_that_cannot_be_written_leaves_the_one_before(tmp_path):
    path = tmp_path / "state.json"
    zephon.save_checkpoint(path, state_of(1))
    with pytest.raises(TypeError):
        zephon.save_checkpoint(path, {**state_of(2), "identity": {"canonical_replicas": 64, "what": object()}})
    assert zephon.load_checkpoint(path) == state_of(1)
    assert os.listdir(tmp_path) == ["state.json"]


def test_writers_that_meet_leave_a_whole_file(tmp_path):
    path = tmp_path / "state.json"
    states = [state_of(step) for step in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda state: zephon.save_checkpoint(path, state), states * 10))
    assert zephon.load_checkpoint(path) in states
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_partial_file_is_refused_by_name_wherever_it_was_cut(tmp_path):
    path = tmp_path / "state.json"
    zephon.save_checkpoint(path, state_of(3, lanes=2))
    whole = path.read_bytes()
    for length in range(len(whole.rstrip(b"}\n "))):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"state\.json: .*part of one"):
            zephon.load_checkpoint(path)


@pytest.mark.parametrize(
    "content, named",
    [
        (b"\xff\xfe\x00", "not a checkpoint"),
        (b"[]", "mapping"),
        (b'{"format": 2}', "format 2"),
        (json.dumps({**state_of(0, lanes=2), "lanes": {"0": {}}}).encode(), "lane 0"),
    ],
)
def test_a_file_that_holds_something_else_is_refused_by_name(tmp_path, content, named):
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        zephon.load_checkpoint(path)
    assert str(path) in str(caught.value)
    assert named in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere\.json: cannot read"):
        zephon.load_checkpoint(tmp_path / "nowhere.json")


SAVER = """
import sys
from tests.unit.test_checkpoints import state_of
import zephon
path, lanes = sys.argv[1], int(sys.argv[2])
for step in range(1, 10**6):
    zephon.save_checkpoint(path, state_of(step, lanes))
    print(step, flush=True)
"""


def test_case_B14_killed_while_saving_the_newest_file_is_a_complete_one(tmp_path, amount):
    drawn = random.Random(14)
    for number in range(amount(4, 60)):
        path = tmp_path / f"state-{number}.json"
        lanes = drawn.choice([64, 4096])
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(
            [sys.executable, "-c", SAVER, str(path), str(lanes)], stdout=subprocess.PIPE, text=True, env=environment
        ) as saver:
            assert saver.stdout is not None
            for _ in range(drawn.randrange(1, 4)):
                said = int(saver.stdout.readline())
            burn = sum(range(drawn.randrange(200_000)))  # somewhere inside the next save
            assert burn >= 0
            saver.send_signal(signal.SIGKILL)
            said = max([said, *map(int, saver.stdout.read().split())])
        found = zephon.load_checkpoint(path)
        assert found in (state_of(said, lanes), state_of(said + 1, lanes))
        zephon.save_checkpoint(path, state_of(said + 2, lanes))  # what the killed one left aside is in nobody's way
        assert zephon.load_checkpoint(path) == state_of(said + 2, lanes)
