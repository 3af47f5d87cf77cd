"""Nothing that anybody writes to a daemon's sockets harms it, or is felt by the ranks that it serves."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.chaos.hostile import Hostile
from tests.corpora import COUNT
from tests.running import Daemon, Ledger, plan_of, until, write_recipe
from zephon.errors import DaemonUnavailable
from zephon_client import connect

RECIPE = """
def make(seed, **options):
    source = StaticMixtureWorkSource([Dataset.from_path("count", HERE / "count")], mixture=None, seed=seed)
    return Pipeline(source).shuffle(8).batch(4).options(**options)
pipeline = make(5, canonical_replicas=4)
mine = make(6, canonical_replicas=2)
spare = make(7, canonical_replicas=2)
"""


@pytest.fixture
def recipe(runtime_folder: Path) -> str:
    COUNT(4000, 4, runtime_folder / "count")
    return write_recipe(runtime_folder, RECIPE)


def _honest(socket: str, ledger: Ledger, group: int, go_on: Callable[[], bool]) -> int:
    """A rank of two that reads its epochs to the end as long as it is to go on."""
    epochs = 0
    with connect(socket, dp_degree=2, dp_group_id=group, output="numpy") as loader:
        while True:
            epoch = loader.epoch
            for batch in loader:
                ledger.enter(epoch, batch)
            epochs += 1
            if not go_on():
                return epochs


def _footprint(pids: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Descriptors and memory of each process."""
    return {name: (len(os.listdir(f"/proc/{pid}/fd")), psutil.Process(pid).memory_info().rss)
            for name, pid in pids.items() if not name.startswith("worker")}  # fmt: skip


def _pids(daemon: Daemon) -> dict[str, int] | None:
    """The daemon's processes; None while it has other things to answer."""
    assert daemon.process.poll() is None, daemon.errors
    try:
        return daemon.pids()
    except DaemonUnavailable:
        return None


def test_malformed_oversized_and_untimely_messages_to_every_socket_are_felt_by_nobody_else(
    runtime_folder: Path, recipe: str, amount: Callable[[int, int], int]
) -> None:
    ledger = Ledger(plan_of(recipe))
    storming = True
    with Daemon(recipe, workers=1) as daemon, ThreadPoolExecutor(2) as threads:
        daemon.all_started()
        pids, before = daemon.pids(), _footprint(daemon.pids())
        ranks = [threads.submit(_honest, daemon.socket, ledger, group, lambda: storming) for group in (0, 1)]
        try:
            hostile = Hostile(daemon.socket, "mine", seed=amount(1, 2))
            try:
                hostile.clings()
                until(lambda: all(client["pipeline"] != "mine" for client in daemon.report()["clients"]))
                hostile.storm(amount(1500, 100_000))
                until(lambda: hostile.joined() or hostile.answers["Attached"])
            finally:
                hostile.close()
        finally:
            storming = False
        epochs = [rank.result() for rank in ranks]
        for epoch in range(min(epochs)):  # when to stop, one may have heard an epoch later
            ledger.check(epoch)
        assert until(lambda: _pids(daemon)) == pids, daemon.errors
        assert hostile.answers["Refused"] > 0
        assert hostile.answers["Attached"] > 0
        assert {"garbage request", "strange request", "raw bytes", "before joining", "attached"} <= {*hostile.sent}
        for name, (descriptors, memory) in _footprint(pids).items():
            assert descriptors < before[name][0] + 64, (name, before[name], descriptors)
            assert memory < before[name][1] + (96 << 20), (name, before[name], memory)
        assert "Traceback" not in daemon.errors
        print(f"sent {dict(hostile.sent)}, answers {dict(hostile.answers)}, epochs {epochs}")

