"""A training loop may hold batches as long as it likes: they stay what they were, and cost no descriptors."""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.running import SECONDS, Daemon, Ranks, counting, python
from zephon.batches import Batch
from zephon_client import connect
from zephon_client.waiting import Limits


def test_case_C9_a_batch_outlives_its_slot_its_loader_and_the_daemon(runtime_folder: Path) -> None:
    recipe = counting(runtime_folder, 2000, 4, lanes=1, batch=8, options="prefetch_batches=4")
    with Daemon(recipe, workers=1) as daemon:
        loader = connect(daemon.socket, output="numpy")
        first = next(loader)
        ids, digest, texts = first["id"], first.digest, list(first["text"])
        kept = ids.copy()
        others = [next(loader)["id"][:1] for _ in range(20)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(30):
                next(loader)
        assert (first.digest, list(first["text"])) == (digest, texts)
        loader.close()
        assert first.digest == digest
        del loader, first
        gc.collect()
        daemon.stop()
        assert np.array_equal(ids, kept)
        assert len({int(each[0]) for each in others}) == 20


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """25 batches in one lane, whose ring has 8 slots."""
    folder = Path(tempfile.mkdtemp(prefix="z", dir="/tmp"))
    with Daemon(counting(folder, 200, 2, lanes=1, batch=8, options="prefetch_batches=8"), workers=1) as daemon:
        daemon.all_started()
        yield daemon
    shutil.rmtree(folder)


def test_readers_of_one_group_that_keep_different_batches_get_copies_and_go_on(daemon: Daemon) -> None:
    with Ranks(daemon.socket, 1, readers=2) as ranks:
        for loader in ranks.loaders:
            loader._limits = Limits(stalled=SECONDS, hungry=0.1, look=0.1)
        held: list[list[Batch]] = [[], []]

        def train(rank: int) -> list[int]:
            ids = []
            for number, batch in enumerate(ranks.loaders[rank]):
                ids += batch["id"].tolist()
                if number // 5 % 2 == rank:
                    held[rank].append(batch)
            return ids

        with pytest.warns(UserWarning, match="ring has 8 slots for 2 ranks"):
            got = ranks.each(train)
        assert got[0] == got[1]
        assert sorted(got[0]) == list(range(200))
        for rank, batches in enumerate(held):
            kept = [id for batch in batches for id in batch["id"].tolist()]
            assert kept == [id for place, id in enumerate(got[0]) if place // 40 % 2 == rank]


def test_a_batch_that_is_pickled_or_copied_is_the_same_and_private(daemon: Daemon) -> None:
    with connect(daemon.socket, output="numpy") as loader:
        batch = next(loader)
        for twin in (batch.copy(), pickle.loads(pickle.dumps(batch))):
            assert (twin.digest, twin.lane, twin.samples) == (batch.digest, batch.lane, batch.samples)
            twin["id"][0] = -1
        assert int(batch["id"][0]) >= 0


HOARD = """
import os, resource, sys, warnings
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
warnings.simplefilter("ignore")
from zephon_client import connect
kept = []
with connect(output="numpy") as loader:
    for batch in loader:
        kept.append(batch)
        if len(kept) == 10:
            print(len(os.listdir("/proc/self/fd")), flush=True)
            sys.stdin.readline()
        if len(kept) == int(sys.argv[1]):
            break
    print(len(os.listdir("/proc/self/fd")), len({int(i) for batch in kept for i in batch["id"]}), flush=True)
    sys.stdin.readline()
"""


def test_case_C11_kept_batches_hold_no_descriptors(runtime_folder: Path, amount: Callable[[int, int], int]) -> None:
    import subprocess

    batches = amount(2_000, 10_000)
    recipe = counting(runtime_folder, 2 * batches + 10, 5, lanes=4, batch=2)
    environment = {"ZEPHON_SOCKET": str(runtime_folder / "d.sock")}
    with Daemon(recipe, workers=1) as daemon, python(
        runtime_folder, HOARD, str(batches), environment=environment, stdin=subprocess.PIPE
    ) as rank:
        assert rank.process.stdin is not None
        before = int(rank.line())
        ours = {name: _descriptors(pid) for name, pid in daemon.pids().items()}
        rank.process.stdin.write(b"\n")
        rank.process.stdin.flush()
        after, ids = map(int, rank.line().split())
        assert ids == 2 * batches
        assert after <= before + 10
        for name, pid in daemon.pids().items():
            assert _descriptors(pid) <= ours[name] + 10, name
        assert rank.end() == 0, rank.errors


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
