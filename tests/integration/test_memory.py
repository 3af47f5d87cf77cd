"""Memory: a budget that is kept or refused with its numbers, records of any size, consumers of any slowness."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.running import Daemon, Ledger, Ranks, counting, mixed, plan_of, python, until, write_recipe, zephon
from zephon.errors import MemoryLimit
from zephon_client import connect
from zephon_daemon.progress import memory_of

MIB = 1 << 20
CGROUPS = Path("/sys/fs/cgroup/memory")


def lines(folder: Path, sizes: list[int]) -> str:
    """A recipe over one file whose rows, one a batch, hold so many characters each."""
    (folder / "lines").mkdir()
    with open(folder / "lines" / "part.jsonl", "w") as file:
        for number, size in enumerate(sizes):
            file.write(json.dumps({"id": number, "text": "abcdefgh"[number % 8] * size}) + "\n")
    return write_recipe(
        folder,
        "source = StaticMixtureWorkSource([Dataset.from_path('lines', HERE / 'lines')], mixture=None, seed=1,"
        " shuffle_shards=False, chunk_size=1)\npipeline = Pipeline(source).batch(1).options(canonical_replicas=1)\n",
    )


def segments(pids: dict[str, int]) -> int:
    """Bytes of the segments that these processes hold, each counted once."""
    found: dict[int, int] = {}
    for pid in pids.values():
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{name}"
            try:
                if "memfd:zephon:zephon-" in os.readlink(path):
                    found[os.stat(path).st_ino] = os.stat(path).st_size
            except OSError:  # closed meanwhile
                continue
    return sum(found.values())


def cpu(pids: dict[str, int]) -> float:
    """Seconds of processor time of these processes."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids.values())


def test_case_E7_records_of_any_size_come_whole_and_the_ring_stays_as_it_is(
    runtime_folder: Path, amount: Callable[[int, int], int]
) -> None:
    sizes = [1000, 2 * MIB, 40 * MIB, amount(70, 300) * MIB, *([1000] * 20)]
    got = []
    with Daemon(lines(runtime_folder, sizes), workers=1) as daemon, connect(daemon.socket, output="numpy") as loader:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for batch in loader:
                text = batch["text"][0].encode()
                got.append((int(batch["id"][0]), len(text), zlib.crc32(text)))
        # What the rank gave back last may still be on its way to the engine.
        until(lambda: all(daemon.engine()["memory"][rings] < 16 * MIB for rings in ("lane_rings", "worker_rings")))
    whole = [b"abcdefgh"[n % 8 : n % 8 + 1] * size for n, size in enumerate(sizes)]
    assert got == [(n, len(text), zlib.crc32(text)) for n, text in enumerate(whole)]


def test_a_trainer_that_keeps_large_records_gets_copies_of_them_and_the_lane_goes_on(runtime_folder: Path) -> None:
    sizes = [1000, *([3 * MIB, 100, 100] * 8)]
    with Daemon(lines(runtime_folder, sizes), workers=1) as daemon, connect(daemon.socket, output="numpy") as loader:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kept = list(loader)
        assert [len(batch["text"][0]) for batch in kept] == sizes


def test_a_record_that_the_budget_cannot_hold_is_refused_by_name_with_both_sizes(runtime_folder: Path) -> None:
    recipe = lines(runtime_folder, [1000, 90 * MIB])
    with Daemon(recipe, workers=1, memory="256M") as daemon, connect(daemon.socket, output="numpy") as loader:
        with pytest.raises(MemoryLimit, match=r"9\d{7} bytes.*memory budget.*--memory"):
            list(loader)
        with pytest.raises(MemoryLimit):
            next(loader)


def test_case_C6_a_budget_that_cannot_be_had_is_refused_at_the_start_with_both_numbers(runtime_folder: Path) -> None:
    recipe = counting(runtime_folder, 64, 1, lanes=1, batch=4)
    with zephon(runtime_folder, "daemon", recipe, "--memory", "900T") as daemon:
        assert daemon.end() == 3
        assert f"{900 << 40} bytes" in daemon.errors
        assert "are free" in daemon.errors
        assert "--memory" in daemon.errors


def test_case_C6_rings_of_a_packed_run_that_do_not_fit_are_refused_before_its_first_batch(runtime_folder: Path) -> None:
    recipe = mixed(runtime_folder, {"pipeline": "8, prefetch_batches=100_000"}, rows=(60, 40))
    wanted = rf"8 lanes .* needs {8 * 100_000 * 4096} bytes .*prefetch_batches"
    with Daemon(recipe, workers=1, memory="64M") as daemon, connect(daemon.socket, output="numpy") as loader:
        assert daemon.report()["engine_state"] == "running"
        with pytest.raises(MemoryLimit, match=wanted):
            loader.state_dict()


def test_case_C6_what_progress_shows_are_all_the_segments_that_there_are(runtime_folder: Path) -> None:
    recipe = counting(runtime_folder, 4000, 2, lanes=4, batch=8)
    with Daemon(recipe, workers=2, memory="300M") as daemon, Ranks(daemon.socket, 2) as ranks:
        ranks.rounds(5)

        def agrees() -> bool:
            memory = daemon.engine()["memory"]
            return bool(0 < memory["segments"] == segments(daemon.pids()) <= memory["budget"] == 300 * MIB)

        until(agrees)


def test_case_C6_a_dev_shm_of_64_mib_changes_nothing(runtime_folder: Path) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root can mount a small /dev/shm")
    small = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*small, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine does not let a mount namespace be made")
    recipe = lines(runtime_folder, [10 * MIB] * 12)
    with Daemon(recipe, workers=1, prefix=small) as daemon, connect(daemon.socket, output="numpy") as loader:
        assert sum(len(batch["text"][0]) for batch in loader) == 120 * MIB


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup (version 1) of 512 MiB; skips where none can be made."""
    folder = CGROUPS / f"zephon-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup of version 1 can be made here: {error}")
    try:
        (folder / "memory.limit_in_bytes").write_text(str(512 * MIB))
    except OSError as error:
        folder.rmdir()
        pytest.skip(f"a memory cgroup cannot be limited here: {error}")
    yield folder
    until(lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()


def test_case_C6_in_a_cgroup_of_512_mib_what_fits_works_and_what_does_not_is_refused(
    runtime_folder: Path, cgroup: Path
) -> None:
    inside = ["sh", "-c", f'echo $$ > {cgroup}/cgroup.procs && exec "$@"', "sh"]
    recipe = counting(runtime_folder, 600, 2, lanes=2, batch=4)
    with zephon(runtime_folder, "daemon", recipe, "--memory", "1G", prefix=inside) as refused:
        assert refused.end() == 3
        assert f"{1 << 30} bytes" in refused.errors
        assert str(cgroup) in refused.errors
    ledger = Ledger(plan_of(recipe))
    with Daemon(recipe, workers=1, prefix=inside) as daemon:
        with Ranks(daemon.socket, 1, ledger=ledger) as ranks:
            ranks.rounds()
        ledger.check()
        assert daemon.engine()["memory"]["budget"] < 256 * MIB
    assert int((cgroup / "memory.failcnt").read_text()) >= 0
    assert "oom_kill 0" in (cgroup / "memory.oom_control").read_text()


FILL = """
import sys
from pathlib import Path
limit, usage, keep = int(sys.argv[1]), Path(sys.argv[2]), []
while int(usage.read_text()) < limit:
    keep.append(b"x" * (1 << 20))
print(len(keep), flush=True)
sys.stdin.read()
"""


def test_case_C6_what_was_reserved_stays_usable_when_another_process_takes_the_rest(
    runtime_folder: Path, cgroup: Path
) -> None:
    inside = ["sh", "-c", f'echo $$ > {cgroup}/cgroup.procs && exec "$@"', "sh"]
    recipe = counting(runtime_folder, 4000, 2, lanes=2, batch=4, more=".shuffle(64)")
    ledger = Ledger(plan_of(recipe))
    rest = [str(512 * MIB - 40 * MIB), str(cgroup / "memory.usage_in_bytes")]
    with Daemon(recipe, workers=1, prefix=inside) as daemon, Ranks(daemon.socket, 1, ledger=ledger) as ranks:
        ranks.rounds(5)
        with python(runtime_folder, FILL, *rest, prefix=inside, stdin=subprocess.PIPE) as filler:
            assert int(filler.line()) > 100
            ranks.rounds()
            report = daemon.report()
        assert report["workers_died"] == 0
        assert report["engine"]["errors"] == []
    ledger.check()
    assert "oom_kill 0" in (cgroup / "memory.oom_control").read_text()


HOARD = """
import sys, warnings
warnings.simplefilter("ignore")
from zephon.errors import BatchesHeld
from zephon_client import connect
kept = []
with connect(output="numpy") as loader:
    try:
        for batch in loader:
            kept.append(batch)
    except BatchesHeld as error:
        print(len(kept), error, flush=True)
    ids = [int(batch["id"][0]) for batch in kept]
    del kept[1:], batch
    for batch in loader:
        ids.append(int(batch["id"][0]))
    print(ids == list(range(len(ids))), len(ids), flush=True)
"""


def test_a_trainer_that_never_lets_go_is_told_so_at_the_budget_and_loses_nothing(runtime_folder: Path) -> None:
    recipe = lines(runtime_folder, [MIB] * 150)
    environment = {"ZEPHON_SOCKET": str(runtime_folder / "d.sock"), "LOCAL_WORLD_SIZE": "4"}
    with Daemon(recipe, workers=1, memory="256M"), python(runtime_folder, HOARD, environment=environment) as rank:
        held, said = rank.line().split(" ", 1)
        assert 60 <= int(held) <= 75
        assert "64.0 MiB" in said
        assert "--memory" in said
        assert rank.line() == "True 150"
        assert rank.end() == 0, rank.errors


@pytest.mark.soak
def test_case_H4_a_slow_consumer_fills_rings_and_nothing_else(
    runtime_folder: Path, amount: Callable[[int, int], int]
) -> None:
    recipe = counting(runtime_folder, 3000, 2, lanes=4, batch=4, more=".shuffle(64)")
    ledger = Ledger(plan_of(recipe))
    with Daemon(recipe, workers=2) as daemon, Ranks(daemon.socket, 1, ledger=ledger) as ranks:
        daemon.all_started()
        ranks.rounds(2)
        until(lambda: all(lane["ring_free"] == 0 and not lane["in_work"] for lane in daemon.lanes()))
        pids = daemon.pids()
        before, spent, began = memory_of(pids), cpu(pids), time.monotonic()
        time.sleep(amount(2, 120))  # the trainer's pause is what is looked at
        share = (cpu(pids) - spent) / (time.monotonic() - began)
        after = memory_of(pids)
        assert share < 0.02, f"{share:.1%} of a core while nothing is to be done"
        assert sum(after.values()) < sum(before.values()) + 4 * MIB
        ranks.rounds()
    ledger.check()


IDLE = """
import sys
from zephon_client import connect
with connect(dp_degree=int(sys.argv[2]), dp_group_id=int(sys.argv[1]), output="numpy") as loader:
    batch = next(loader)
    print("here", flush=True)
    sys.stdin.readline()
    for batch in loader:
        pass
"""


@pytest.mark.soak
def test_case_H6_and_I6_clients_cost_little_memory_and_wait_without_work(
    runtime_folder: Path, amount: Callable[[int, int], int]
) -> None:
    recipe = counting(runtime_folder, 16_000, 4, lanes=8, batch=4)
    totals = {}
    for count in (1, 4, 8, 2)[: amount(2, 4)]:
        with Daemon(recipe, workers=2) as daemon:
            daemon.all_started()
            environment = {"ZEPHON_SOCKET": daemon.socket}
            ranks = [
                python(runtime_folder, IDLE, str(n), str(count), environment=environment, stdin=subprocess.PIPE)
                for n in range(count)
            ]
            try:
                assert [rank.line() for rank in ranks] == ["here"] * count
                until(lambda: all(lane["ring_free"] == 0 and not lane["in_work"] for lane in daemon.lanes()))
                pids = {**daemon.pids(), **{f"rank {n}": rank.pid for n, rank in enumerate(ranks)}}
                totals[count] = sum(memory_of(pids).values())
                rings = daemon.engine()["memory"]["lane_rings"]
                spent, began = cpu(pids), time.monotonic()
                time.sleep(amount(2, 60))  # ranks that train are what is looked at
                share = (cpu(pids) - spent) / (time.monotonic() - began)
                assert share < 0.02 if count > 1 else share < 0.05, f"{count} clients: {share:.1%} of a core"
                for rank in ranks:
                    assert rank.process.stdin is not None
                    rank.process.stdin.write(b"\n")
                    rank.process.stdin.flush()
                assert [rank.end() for rank in ranks] == [0] * count
            finally:
                for rank in ranks:
                    rank.__exit__(None)
    print({count: f"{total / MIB:.0f} MiB" for count, total in totals.items()})
    least = min(totals)
    for count, total in totals.items():
        assert total <= totals[least] + (count - least) * (rings / 8 + 60 * MIB), totals
