"""What Zephon costs beside a trainer: processor time at rest, memory, and the import of the client.

All of it is the kernel's own accounting, of processor time and not of the clock on the wall, so that a busy machine
changes little. The bounds are those that we promise; `make bench` says how far below them we are.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.running import Daemon, Program, mixed, python, until

MIB = 1 << 20
AT_REST_SECONDS = 3.0

RANK = """
import sys
import numpy

def pss():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))

before = pss()
from zephon_client import connect
with connect(sys.argv[1], dp_degree=1, dp_group_id=0, output="numpy") as loader:
    for _ in range(64):
        batch = next(loader)
        batch.to_training(return_labels=True)
    print(pss() - before, flush=True)
    sys.stdin.read()
"""

IMPORT = """
import time
began = time.process_time()
import zephon_client
print(time.process_time() - began)
"""


def processor_seconds(pids: Iterable[int]) -> float:
    """What all threads of these processes have run so far."""
    threads = [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int(Path(task, "schedstat").read_text().split()[0]) for task in threads) / 1e9


def pss(pid: int) -> int:
    """Bytes of memory, pages that several processes share counted by share."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return next(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))


def test_beside_a_trainer_that_pauses_zephon_takes_little_memory_and_next_to_no_processor_time(
    runtime_folder: Path,
) -> None:
    recipe = mixed(runtime_folder, {"pipeline": "4"}, rows=(3000, 2000))
    with (
        Daemon(recipe, workers=2).all_started() as daemon,
        python(runtime_folder, RANK, daemon.socket, stdin=-1) as rank,
    ):
        added = int(rank.line())
        assert added < 25 * MIB, f"the client takes {added / MIB:.1f} MiB"
        until(lambda: all(lane["waits_for"] == "the trainer" for lane in daemon.lanes()))
        pids = daemon.pids()
        taken = {name: pss(pid) for name, pid in pids.items()}
        assert sum(taken.values()) < 400 * MIB, {name: f"{size / MIB:.0f} MiB" for name, size in taken.items()}
        assert {"daemon", "engine"} < set(taken)
        assert len(taken) >= 4
        made = [pid for name, pid in pids.items() if name.startswith(("engine", "worker"))]
        assert {os.sched_getscheduler(pid) for pid in made} == {os.SCHED_BATCH}, "they take no core from a trainer"
        # A worker that had nothing to do so far may still be loading what it needs.
        spent = next((s for s in stretches([*pids.values(), rank.pid]) if s < 0.02 * AT_REST_SECONDS), math.inf)
        assert spent < 0.02 * AT_REST_SECONDS, "more than 2 % of a core at rest"
        assert rank.process.stdin is not None
        rank.process.stdin.close()
        rank.process.stdin = None
        assert rank.end() == 0


def stretches(pids: list[int]) -> Iterator[float]:
    """Processor seconds that the processes use in a few stretches of time in which nobody wants anything of them."""
    for _ in range(3):
        before = processor_seconds(pids)
        threading.Event().wait(AT_REST_SECONDS)
        yield processor_seconds(pids) - before


def test_a_rank_imports_the_client_in_a_fraction_of_a_second(runtime_folder: Path) -> None:
    def seconds() -> float:
        with Program([sys.executable, "-c", IMPORT], runtime_folder) as program:
            return float(program.line())

    seconds()  # compiles what is not compiled yet
    assert min(seconds() for _ in range(3)) < 0.15
