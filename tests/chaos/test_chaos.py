"""Chaos: a job of four ranks under torchrun, of which anything is killed or stopped at any moment, again and again.

The ranks step together, as training does, save a checkpoint now and then, and note the digest of every batch. A rank
that is killed makes torchrun start all of them again, from the last checkpoint; whatever else is killed, they go on.
In the end every batch of every global step was what the reference execution says, none is missing, and no step had
others.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.running import Ledger, Program, mixed, plan_of, until, zephon

RANKS = 4
RANK = """
import mmap, os, struct, sys, time
from pathlib import Path
from zephon import load_checkpoint, save_checkpoint
from zephon_client import connect

folder, rank, ranks = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
life = os.environ["TORCHELASTIC_RESTART_COUNT"]
with open(folder / "steps", "r+b") as file:
    table = mmap.mmap(file.fileno(), 0)

def number(at, value=None):
    if value is not None:
        struct.pack_into("q", table, 8 * at, value)
    return struct.unpack_from("q", table, 8 * at)[0]

def together(step):  # the collective of a training step
    with open(folder / f"life-{life}-{rank}", "wb", 0) as mine:
        mine.write(b"x" * step)
    while any(not here(other, step) for other in range(ranks)):
        time.sleep(0.004)

def here(other, step):
    try:
        return os.stat(folder / f"life-{life}-{other}").st_size >= step
    except FileNotFoundError:
        return False

step = 0
with connect(output="numpy") as loader, open(folder / f"log-{rank}", "a") as log:
    if (folder / "state.json").exists():
        saved = load_checkpoint(folder / "state.json")
        step = saved.pop("step")
        loader.load_state_dict(saved)
    while step < number(0):
        for batch in loader:
            place = step + 1, loader.epoch, batch.lane, batch.first_record, len(batch)
            print(*place, batch.digest, file=log, flush=True)
            if batch.ends_round:
                step += 1
                together(step)
                number(1 + rank, step)
                if rank == 0 and step % 3 == 0:
                    save_checkpoint(folder / "state.json", {**loader.state_dict(), "step": step})
                if step >= number(0):
                    break
"""


class Job:
    """`zephon launch RECIPE -- torchrun rank.py`, and what can be killed of it."""

    def __init__(self, folder: Path, recipe: str) -> None:
        self.folder = folder
        (folder / "rank.py").write_text(RANK)
        (folder / "steps").write_bytes(struct.pack(f"{1 + RANKS}q", 1 << 40, *[0] * RANKS))
        with open(folder / "steps", "r+b") as file:
            self._table = mmap.mmap(file.fileno(), 0)
        torchrun = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}",
            "--max-restarts=10000", "--monitor-interval=0.1", str(folder / "rank.py"), str(folder),
        ]  # fmt: skip
        quiet = {"TORCHELASTIC_ERROR_FILE": None, "OMP_NUM_THREADS": "1"}
        self.program: Program = zephon(
            folder, "launch", recipe, "--workers", "2", "--", *torchrun, environment=quiet, start_new_session=True
        )

    @property
    def step(self) -> int:
        """The step that every rank has done, in this life or an earlier one."""
        return min(struct.unpack_from(f"{RANKS}q", self._table, 8))

    def end_after(self, steps: int) -> int:
        """Has the ranks end some steps after the furthest of them; at which."""
        last = max(struct.unpack_from(f"{RANKS}q", self._table, 8)) + steps
        struct.pack_into("q", self._table, 0, last)
        return last

    def processes(self, kind: str) -> list[int]:
        """Living processes of a kind."""
        title = str(self.folder / "rank.py") if kind == "rank" else f"zephon {kind}"
        found = []
        with suppress(psutil.NoSuchProcess):
            for each in psutil.Process(self.program.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    line = " ".join(each.cmdline())
                    if line.startswith(title) or (kind == "rank" and title in line and "torch.distributed" not in line):
                        found.append(each.pid)
        return sorted(found)

    def close(self) -> None:
        self._table.close()
        self.program.__exit__(None)


@pytest.fixture
def job(runtime_folder: Path, leaves_nothing_behind: None) -> Iterator[Job]:
    """A job on tokenised, packed and shuffled data, small enough that it goes through its epochs."""
    found = Job(runtime_folder, mixed(runtime_folder, {"pipeline": "2, prefetch_batches=2"}, (300, 200)))
    yield found
    found.close()


HANG = 60.0
"""Seconds within which every rank has to have the next batches, whatever was killed, on a machine that is busy."""

DOZEN = ["worker"] * 5 + ["engine"] * 4 + ["daemon"] * 2 + ["rank"]
STOPS = 2
"""Of a dozen kills who is killed, and how often something is stopped meanwhile. A worker is back in no time, a daemon
and the ranks, all of which start again with any of them, cost the most."""


def blows(chance: random.Random, kills: int) -> Iterator[tuple[str, int]]:
    """What is done to whom, in any order."""
    killed = 0
    while killed < kills:
        dozen = [(kind, signal.SIGKILL) for kind in DOZEN]
        dozen += [(kind, signal.SIGSTOP) for kind in chance.sample(sorted(set(DOZEN)), STOPS)]
        for kind, number in chance.sample(dozen, len(dozen)):
            if killed < kills:
                killed += number == signal.SIGKILL
                yield kind, number


def strike(job: Job, chance: random.Random, kind: str, number: int) -> None:
    """Once there is such a process: kills it, or stops it for a while."""

    def struck() -> int:
        with suppress(ProcessLookupError, IndexError):
            pid = chance.choice(job.processes(kind))
            os.kill(pid, number)
            return pid
        return 0

    pid = until(struck)
    if number == signal.SIGSTOP:
        threading.Event().wait(chance.uniform(0.05, 0.8))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("kills", "seed"),
    [
        pytest.param(60, 1, marks=pytest.mark.timeout(400), id="60 kills"),
        pytest.param(500, 2, marks=[pytest.mark.soak, pytest.mark.timeout(3600)], id="500 kills"),
    ],
)
def test_whatever_is_killed_every_global_step_is_that_of_a_quiet_run(job: Job, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    try:
        for kind, number in blows(chance, kills):
            # `step` is that of an earlier life while ranks that were killed come up to it again.
            wanted = job.step + chance.randrange(1, 4)
            until(lambda wanted=wanted: job.step >= wanted or job.program.process.poll() is not None, HANG)
            assert job.program.process.poll() is None, "the job has ended"
            strike(job, chance, kind, number)
        last = job.end_after(10)
        assert job.program.end(90) == 0
    except BaseException:
        print(f"at step {job.step}; the job said:\n{job.program.errors[-6000:]}")
        raise
    check(job.folder, last)


def check(folder: Path, last: int) -> None:
    """Every batch of steps 1 to `last` is there, and is what the reference says, however often it was delivered."""
    ledger = Ledger(plan_of(str(folder / "recipe.py")))
    size = ledger.plan.microbatch_size
    expected = {}
    epoch, first, ends = 0, 0, ledger.ends(0)[0]
    for step in range(1, last + 1):
        if first == ends:
            epoch, first, ends = epoch + 1, 0, ledger.ends(epoch + 1)[0]
        expected.update({(step, lane): (epoch, first) for lane in range(ledger.plan.lanes)})
        first += size
    seen = set()
    for rank in range(RANKS):
        for line in (folder / f"log-{rank}").read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                continue  # its rank was killed while it wrote
            *numbers, digest = line.split()
            step, epoch, lane, first, count = map(int, numbers)
            assert expected[step, lane] == (epoch, first), line
            assert digest == ledger.digest(epoch, lane, first, count), line
            assert count == size
            seen.add((step, lane))
    assert seen == set(expected)
