"""Ranks that read for long, slowly or as fast as they can: little processor time, none of it lost, memory flat.

Shares and latencies are the kernel's accounting of processor time, which a busy machine changes little.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.integration.test_costs import MIB, processor_seconds
from tests.running import Daemon, Program, counting, python

RANK = """
import statistics, sys, time
from zephon_client import connect

group, degree, quick, steps = map(int, sys.argv[2:])
def batches(loader):
    while True:
        yield from loader

with connect(sys.argv[1], dp_degree=degree, dp_group_id=group, output="numpy") as loader:
    endless = batches(loader)
    if quick:
        taken = []
        for _ in range(quick):
            began = time.thread_time()
            next(endless)
            taken.append(time.thread_time() - began)
        print(statistics.median(taken), flush=True)
        sys.stdin.readline()
        while sys.stdin.readline() == "step\\n":
            next(endless)
    for part in range(10 if steps else 0):
        for _ in range(steps // 10):
            while not next(endless).ends_round:
                pass
        print("tenth", flush=True)
        sys.stdin.readline()
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    folder = Path(tempfile.mkdtemp(prefix="z", dir="/tmp"))
    with Daemon(counting(folder, 4000, 2, lanes=8, batch=4, more=".shuffle(16)"), workers=2) as running:
        yield running.all_started()
    shutil.rmtree(folder)


def tell(rank: Program, line: str) -> None:
    assert rank.process.stdin is not None
    rank.process.stdin.write(line.encode() + b"\n")
    rank.process.stdin.flush()


def test_case_I6_at_full_speed_a_batch_is_had_at_once_and_at_one_a_second_nobody_is_busy(
    daemon: Daemon, runtime_folder: Path, amount: Callable[[int, int], int]
) -> None:
    count, seconds = amount(2, 8), amount(3, 60)
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                python(
                    runtime_folder, RANK, daemon.socket, str(group), str(count), str(amount(200, 3000)), "0",
                    stdin=subprocess.PIPE,
                )
            )
            for group in range(count)
        ]  # fmt: skip
        latencies = [float(rank.line()) for rank in ranks]
        assert max(latencies) < 0.001, latencies
        for rank in ranks:
            tell(rank, "slowly now")
        pids = [*daemon.pids().values(), *(rank.pid for rank in ranks)]
        before = processor_seconds(pids)
        for _ in range(seconds):
            for rank in ranks:
                tell(rank, "step")
            threading.Event().wait(1.0)  # between two steps of a training
        share = (processor_seconds(pids) - before) / seconds
        for rank in ranks:
            tell(rank, "enough")
            assert rank.process.stdin is not None
            rank.process.stdin.close()
            rank.process.stdin = None
            assert rank.end() == 0, rank.errors
    assert share < 0.10, f"{count} ranks at one batch a second: {share:.1%} of a core"


def test_over_the_steps_of_a_day_in_fast_motion_memory_and_descriptors_stay_what_they_were(
    daemon: Daemon, runtime_folder: Path, amount: Callable[[int, int], int]
) -> None:
    steps = amount(1500, 86_400)
    with python(
        runtime_folder, RANK, daemon.socket, "0", "1", "0", str(steps), stdin=subprocess.PIPE
    ) as rank:  # fmt: skip
        found = []
        for _ in range(10):
            assert rank.line(600) == "tenth"
            pids = {**daemon.pids(), "rank": rank.pid}
            # Not the proportional size, which is another when others on the machine load or leave the same libraries.
            memory = {name: psutil.Process(pid).memory_info().rss for name, pid in pids.items()}
            found.append({name: (memory[name], len(list(Path(f"/proc/{pids[name]}/fd").iterdir()))) for name in pids})
            tell(rank, "on")
        assert rank.process.stdin is not None
        rank.process.stdin.close()
        rank.process.stdin = None
        assert rank.end() == 0, rank.errors
    early, late = found[4], found[-1]
    assert early.keys() == late.keys(), "nobody died"
    for name, (size, descriptors) in late.items():
        assert size < early[name][0] + 2 * MIB, (name, [each[name][0] // 1024 for each in found])
        assert descriptors <= early[name][1] + 1, (name, [each[name][1] for each in found])
