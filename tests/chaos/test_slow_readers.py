"""A reader that is stopped or killed with its ring full is named and holds up nobody else."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from tests.running import Daemon, Program, Ranks, counting, plan_of, python, until
from tests.unit.small_recipes import reference
from zephon.batches import Batch
from zephon.columns import canonical
from zephon.plan import Plan
from zephon_daemon.progress import text

READER = """
import sys
from zephon_client import connect
with connect(sys.argv[1], dp_degree=4, dp_group_id=2, output="numpy") as loader:
    for batch in loader:
        print(batch.lane, batch.first_record, len(batch), batch.digest, flush=True)
        if sys.stdin.readline() == "":
            break
"""
LANES, ROWS = 8, 512


class Reader:
    """The rank of group 2, in a process of its own, which takes a batch whenever it is told to."""

    def __init__(self, program: Program, plan: Plan) -> None:
        self._program, self._plan = program, plan
        self._lanes = {lane: reference(plan, lane, 0) for lane in (4, 5)}
        self.at = dict.fromkeys(self._lanes, 0)

    def take(self, count: int) -> None:
        """So many batches, each the next one of its lane."""
        assert self._program.process.stdin is not None
        for _ in range(count):
            lane, first, records, digest = self._program.line().split()
            at = int(lane)
            assert int(first) == self.at[at], "none is lost and none repeated"
            self.at[at] += int(records)
            block = canonical(self._lanes[at].slice(int(first), self.at[at]))
            names = self._plan.dataset_names
            assert digest == Batch(block, lane=at, first_record=int(first), dataset_names=names, packed=False).digest
            self._program.process.stdin.write(b"\n")
            self._program.process.stdin.flush()


def test_case_D1_a_reader_that_is_stopped_or_killed_is_named_and_the_others_keep_their_rate(
    runtime_folder: Path,
) -> None:
    recipe = counting(
        runtime_folder, ROWS * LANES, 4, lanes=LANES, batch=4, options="prefetch_batches=4, even_ends=False"
    )
    with Daemon(recipe, more=["--stall-seconds", "2"]) as daemon, Ranks(daemon.socket, 4) as ranks:
        ranks.loaders.pop(2).close()
        until(lambda: len(daemon.report()["clients"]) == 3)
        with python(runtime_folder, READER, daemon.socket, stdin=subprocess.PIPE) as program:
            reader = Reader(program, plan_of(recipe))
            reader.take(6)
            ranks.take([6, 6, 6])
            os.kill(program.pid, signal.SIGSTOP)
            full = until(lambda: [lane for lane in daemon.lanes() if lane["group"] == 2 and not lane["ring_free"]])
            assert [lane["waits_for"] for lane in full] == ["the trainer"] * len(full)
            ranks.take([60, 60, 60])  # of 256 that they have: many times what a ring holds
            shown = text(daemon.report())
            assert f"group 2 (process {program.pid}, stopped)" in shown
            assert "stalled" not in shown
            os.kill(program.pid, signal.SIGCONT)
            reader.take(30)
            until(lambda: len([lane for lane in daemon.lanes() if lane["group"] == 2 and not lane["ring_free"]]) == 2)
            program.stop(signal.SIGKILL)
            assert [client["group"] for client in until(lambda: gone(daemon))] == [0, 1, 3]
            ranks.take([60, 60, 60])
            assert daemon.errors == ""


def gone(daemon: Daemon) -> list[dict[str, int]]:
    """The clients, once one of four has been forgotten."""
    clients = daemon.report()["clients"]
    return sorted(clients, key=lambda client: client["group"]) if len(clients) == 3 else []
