"""What Zephon costs: memory, waits, checkpoints, resuming, starting, idling, and the death of a worker."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise

from tests.benchmarks.contest import REPOSITORY, Player, environment, module, tokens_a_second
from tests.benchmarks.corpus import Corpus
from tests.benchmarks.processes import cpu_seconds, pss
from tests.benchmarks.report import Row, Scale
from tests.benchmarks.zephon_runs import ZEPHON, Daemon, Recipe, daemon, recipe_file

MIB = 1 << 20
A_BATCH = 8 * 2049
WINDOW_2048 = ", chunk_size=256, stop_after_passes=2"
EIGHT_CHUNKS = ", flush_every_k_chunks=8"


def memory(corpus: Corpus, scale: Scale) -> list[Row]:
    """On A at default settings with two workers: after a while, after a longer while, and with four ranks."""
    found = {}
    for ranks in (1, 4):
        with daemon(Recipe("text"), corpus, "--workers", "2") as node, node.ranks(ranks) as those:
            for rank in those:
                rank.hear()
            for moment in ("soon", "later"):
                _all(those, "take", scale.count(3000 // ranks))
                found[ranks, moment] = pss(node.processes()) / MIB
                found[ranks, moment, "client"] = max(_all(those, "memory")) / MIB
    one, later, four = found[1, "soon"], found[1, "later"], found[4, "later"]
    return [
        Row("memory: daemon, engine, 2 workers", later, "MiB", 400, detail=f"PSS, fork server too; 4 ranks {four:.0f}"),
        Row("memory: later to soon", later / one, "×", 1.15, detail="flat over time"),
        Row("memory: four ranks to one", four / later, "×", 1.15, detail="does not grow with ranks"),
        Row("memory: what a client adds", found[1, "later", "client"], "MiB", 25, detail="PSS, its rings included"),
    ]


def next_batch(corpus: Corpus, scale: Scale) -> list[Row]:
    """`next(loader)` where a batch is ready: the trainer takes far longer for a step than the loader for a batch."""
    with daemon(Recipe("text"), corpus) as node, node.ranks() as (rank,):
        rank.hear()
        rank.ask(["paced", 50, 0.01, False])
        asleep = sorted(rank.ask(["paced", scale.count(500), 0.01, False]))
        waits = sorted(rank.ask(["paced", scale.count(2000), 0.002, True]))
    detail = "steps of 2 ms that keep the core busy; after steps of 10 ms asleep {:.0f} µs"
    return [
        Row(f"next(loader), batch ready: {name}", _quantile(waits, share) * 1e6, "µs", limit,
            detail=detail.format(_quantile(asleep, share) * 1e6))
        for name, share, limit in (("p50", 0.5, 50), ("p99", 0.99, 500))
    ]  # fmt: skip


def imported(_: Corpus, scale: Scale) -> list[Row]:
    """`import zephon_client` in a Python that has imported nothing else."""

    def seconds(what: str) -> float:
        code = f"import time; begin = time.perf_counter(); import {what}; print(time.perf_counter() - begin)"
        command = [sys.executable, "-c", code]
        each = [subprocess.run(command, env=environment(), stdout=subprocess.PIPE, check=True) for _ in range(times)]
        return statistics.median(float(done.stdout) for done in each)

    times = scale.count(7)
    seconds("zephon_client.loader")  # compiles what is not compiled yet
    whole = seconds("zephon_client.loader")
    detail = f"{whole * 1e3:.0f} ms with all that connecting needs, numpy and pyzmq among it"
    return [Row("import zephon_client", seconds("zephon_client") * 1e3, "ms", 150, detail=detail)]


def waiting(corpus: Corpus, scale: Scale) -> list[Row]:
    """Four ranks on A, each with a step that lasts a tenth longer than the loader needs for it."""
    with daemon(Recipe("text"), corpus) as node, node.ranks(4) as those:
        for rank in those:
            rank.hear()
            rank.tell(["deliver"])
        rate = tokens_a_second(those, scale.timing)
        for rank in those:
            rank.tell(None)
            rank.hear()
        step = 1.1 * len(those) * A_BATCH / rate
        _all(those, "paced", 50, step, False)
        batches = max(100, int(scale.seconds(8) / step))
        waits = sorted(wait for each in _all(those, "paced", batches, step, False) for wait in each)
    detail = f"steps of {step * 1e3:.1f} ms, p50 {_quantile(waits, 0.5) * 1e3:.2f} ms, longest {waits[-1] * 1e3:.0f} ms"
    return [Row("wait for a batch, 4 ranks on A, trainer slower by a tenth: p99", _quantile(waits, 0.99) * 1e3, "ms", 5,
                detail=detail)]  # fmt: skip


def state(corpus: Corpus, scale: Scale) -> list[Row]:
    """`state_dict()` at 64 lanes, at the first step and much later."""
    with daemon(Recipe("ids", lanes=64), corpus) as node, node.ranks() as (rank,):
        rank.hear()
        rows = []
        for rounds in (1, scale.count(200)):
            at = rank.ask(["rounds", rounds])
            found = [rank.ask(["state"]) for _ in range(scale.count(20))]
            spent = sorted(each["seconds"] for each in found)
            detail = f"round {at}; longest of {len(spent)}: {spent[-1] * 1e3:.1f} ms"
            size = found[-1]["bytes"] / 1024
            rows.append(Row("state_dict(), 64 lanes: time", _quantile(spent, 0.5) * 1e3, "ms", 5, detail=detail))
            rows.append(Row("state_dict(), 64 lanes: size as JSON", size, "KiB", 16, detail=f"round {at}"))
    return rows


def resume(corpus: Corpus, scale: Scale) -> list[Row]:
    """First batch after a resume under a warm daemon, windows of 2048 samples, near both ends of a run.

    States are taken at rounds that follow one another, so that they lie at different places in their windows.
    """
    recipe = Recipe("text", source=WINDOW_2048, options=EIGHT_CHUNKS)
    rounds = 2 * corpus.tokens // (8 * A_BATCH)
    marks = {"1 %": max(2, rounds // 100), "99 %": rounds * 99 // 100 - 10}
    with daemon(recipe, corpus) as node, node.ranks() as (rank,):
        rank.hear()
        states = {}
        for name, mark in marks.items():
            for number in range(scale.count(5)):
                rank.ask(["rounds", mark + 2 * number])
                states[name, number] = rank.ask(["state"])["state"]
        found: dict[str, list[dict[str, float]]] = {name: [] for name in marks}
        for name, number in sorted(states, key=lambda each: each[1]):
            found[name].append(rank.ask(["resume", states[name, number]]))
        fresh = statistics.median(rank.ask(["resume", None])["first"] for _ in range(scale.count(3)))
    rows = []
    for name, each in found.items():
        first = statistics.median(one["first"] for one in each)
        longest, whole = max(one["first"] for one in each), statistics.median(one["round"] for one in each)
        detail = f"longest {longest:.2f} s; a batch of every lane {whole:.2f} s; a new run {fresh:.2f} s"
        rows.append(Row(f"resume at {name} of a run: first batch", first, "s", 0.5, detail=detail))
    return rows


def start(corpus: Corpus, scale: Scale) -> list[Row]:
    """From `zephon launch` to the first batch in a rank without torch, on data that has been indexed."""
    with recipe_file(Recipe("text"), corpus) as path:
        command = [*ZEPHON, "launch", str(path), "--", *module("rank", "first")]

        def seconds() -> float:
            begin = time.monotonic()
            done = subprocess.run(command, env=environment(), cwd=REPOSITORY, stdout=subprocess.PIPE, check=True)
            return float(json.loads(done.stdout.splitlines()[-1])) - begin

        seconds()  # indexes the data
        each = [seconds() for _ in range(scale.count(3))]
    return [Row("start: `zephon launch` to the first batch", statistics.median(each), "s", 3,
                detail=f"{min(each):.2f} to {max(each):.2f} s")]  # fmt: skip


def idle(corpus: Corpus, scale: Scale) -> list[Row]:
    """Processor time of the daemon's processes and of the rank while the trainer does nothing."""
    with daemon(Recipe("text"), corpus) as node, node.ranks() as (rank,):
        rank.hear()
        rank.ask(["take", 100])
        time.sleep(scale.seconds(3))  # until the rings are full
        pids = [*node.processes(), rank.process.pid]
        begin, used = time.monotonic(), cpu_seconds(pids)
        time.sleep(scale.seconds(10))
        share = (cpu_seconds(pids) - used) / (time.monotonic() - begin)
    return [Row("idle, trainer paused: all processes", share * 100, "% of a core", 2)]


def worker(corpus: Corpus, scale: Scale) -> list[Row]:
    """One of two workers is killed while a rank takes batches as fast as they come."""
    lost, longest = [], []
    watched = scale.seconds(2.5)
    with daemon(Recipe("text"), corpus, "--workers", "2") as node, node.ranks() as (rank,):
        rank.hear()
        rank.ask(["take", 200])
        for _ in range(scale.count(3)):
            rank.tell(["gaps", 2 * watched])
            time.sleep(watched)
            killed = time.monotonic()
            os.kill(_worker_of(node), signal.SIGKILL)
            came = rank.hear()
            before = [one for one in came if killed - 0.8 * watched <= one[0] < killed]
            after = [one for one in came if killed <= one[0] < killed + 0.8 * watched]
            rate = sum(tokens for _, tokens in before) / (0.8 * watched)
            lost.append(0.8 * watched - sum(tokens for _, tokens in after) / rate)
            times = [killed, *(moment for moment, _ in after), killed + 0.8 * watched]
            longest.append(max(b - a for a, b in pairwise(times)))
    detail = f"of production; longest wait for a batch {statistics.median(longest):.2f} s"
    return [Row("a killed worker costs", max(0.0, statistics.median(lost)), "s", 1, detail=detail)]


def _worker_of(node: Daemon) -> int:
    return min(pid for pid, title in node.processes().items() if title.startswith("zephon worker"))


def _all(those: Sequence[Player], *order: object) -> list:  # type: ignore[type-arg]
    """All ranks do the same at once; what came of it, rank by rank."""
    for rank in those:
        rank.tell(order)
    return [rank.hear() for rank in those]


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
