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
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tests.benchmarks.contest import REPOSITORY, Player, environment, module, tokens_a_second
from tests.benchmarks.corpus import Corpus
from tests.benchmarks.processes import cpu_seconds, pss
from tests.benchmarks.report import Row, Scale
from tests.benchmarks.zephon_runs import ZEPHON, Daemon, Recipe, daemon, recipe_file
from zephon.lanes import window_containing, window_start

MIB = 1 << 20
SEQUENCE = 2049
A_BATCH = 8 * SEQUENCE
MUCH_LATER = 1_000_000
WINDOW = 2048
CHUNKS = 8
WINDOW_2048 = f", chunk_size={WINDOW // CHUNKS}, stop_after_passes=2"
EIGHT_CHUNKS = f", flush_every_k_chunks={CHUNKS}"
ONE_WINDOW = 1.15
"""Windows hold the same number of samples, and so a few percent more or less tokens than the mean."""


def memory(corpus: Corpus, scale: Scale) -> list[Row]:
    """On A at default settings with two workers: after a while, after a longer while, and with four ranks."""
    found: dict[tuple[int, str], dict[str, float]] = {}
    clients: dict[tuple[int, str], list[float]] = {}
    for ranks in (1, 4):
        with daemon(Recipe("text"), corpus, "--workers", "2") as node, node.ranks(ranks) as those:
            for rank in those:
                rank.hear()
            for moment in ("soon", "later"):
                _all(those, "take", scale.count(3000 // ranks))
                found[ranks, moment] = {_kind(title): pss([pid]) / MIB for pid, title in node.processes().items()}
                clients[ranks, moment] = [each / MIB for each in _all(those, "memory")]
    one, later, four = (sum(found[each].values()) for each in ((1, "soon"), (1, "later"), (4, "later")))
    each_of = ", ".join(f"{title} {size:.0f}" for title, size in sorted(found[1, "later"].items()))
    soon, (client,), of_four = clients[1, "soon"][0], clients[1, "later"], max(clients[4, "later"])
    early = max(clients[4, "soon"])
    growth = f"flat over time: with one rank {soon:.1f} sooner; with four {of_four:.1f} at most, {early:.1f} sooner"
    return [
        Row("memory: daemon, engine, 2 workers", later, "MiB", 400, detail=f"PSS: {each_of}"),
        Row("memory: later to soon", later / one, "×", 1.15, detail="flat over time"),
        Row("memory: four ranks to one", four / later, "×", 1.15, detail="does not grow with ranks"),
        Row("memory: what a client adds", max(client, of_four), "MiB", 25, detail="PSS, its rings included"),
        Row("memory: what a client adds, later to soon", client - soon, "MiB more", 2, detail=growth),
    ]


def _kind(title: str) -> str:
    """What a process is, by its title."""
    words = title.split()  # a title of its own is filled up with spaces
    return " ".join(words[1:3] if words[1:2] == ["worker"] else words[1:2])


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
    """`state_dict()` at 64 lanes: at the first step, two hundred later, and with the numbers of a millionth step."""
    with daemon(Recipe("ids", lanes=64, options=EIGHT_CHUNKS), corpus) as node, node.ranks() as (rank,):
        rank.hear()
        rows = []
        found: list[dict[str, Any]] = []
        for when, rounds in (("", 1), (", later", scale.count(200)), (", a million steps later", 0)):
            if rounds:
                rank.ask(["rounds", rounds])
            else:
                rank.ask(["resume", _moved(found[-1]["state"])])
            found = [rank.ask(["state"]) for _ in range(scale.count(20))]
            spent = sorted(each["seconds"] for each in found)
            detail = f"longest of {len(spent)}: {spent[-1] * 1e3:.1f} ms"
            size = found[-1]["bytes"] / 1024
            rows.append(Row(f"state_dict(), 64 lanes{when}: time", _quantile(spent, 0.5) * 1e3, "ms", 5, detail=detail))
            rows.append(Row(f"state_dict(), 64 lanes{when}: size as JSON", size, "KiB", 16))
    return rows


def _moved(state: dict[str, Any]) -> dict[str, Any]:
    """The same state as a million windows later: what it would be of a run of so many batches and more."""
    count = len(state["lanes"])
    for lane, at in state["lanes"].items():
        window = window_containing(int(lane), count, CHUNKS, at["chunk"]) + MUCH_LATER
        at["chunk"] = window_start(int(lane), count, CHUNKS, window)
        at["records"] += 8 * MUCH_LATER
    return state


def resume(corpus: Corpus, scale: Scale) -> list[Row]:
    """First batch after a resume under a warm daemon, windows of 2048 samples, near both ends of a run.

    States are taken at rounds that follow one another, so that they lie at different places in their windows. Full
    speed is that between the first of them and the last.
    """
    recipe = Recipe("text", source=WINDOW_2048, options=EIGHT_CHUNKS)
    rounds = 2 * corpus.tokens // (8 * A_BATCH)
    marks = {"1 %": max(2, rounds // 100), "99 %": rounds * 99 // 100 - 10}
    with daemon(recipe, corpus) as node, node.ranks() as (rank,):
        rank.hear()
        states = {}
        for name, mark in marks.items():
            for number in range(scale.count(5)):
                at = mark + 2 * number
                rank.ask(["rounds", at])
                states[name, number] = rank.ask(["state"])["state"]
                if (name, number) == ("1 %", 0):
                    first, began = at, time.monotonic()
        full_speed = (at - first) * 8 * A_BATCH / (time.monotonic() - began)
        found: dict[str, list[_Resumed]] = {name: [] for name in marks}
        for name, number in sorted(states, key=lambda each: each[1]):
            state = states[name, number]
            again = [lane["offset"] * SEQUENCE for lane in state["lanes"].values()]
            found[name].append(_Resumed(again, **rank.ask(["resume", state])))
        fresh = statistics.median(rank.ask(["resume", None])["first"] for _ in range(scale.count(3)))
    window = WINDOW * (corpus.tokens / corpus.documents + 1)
    return [row for name, each in found.items() for row in _resumed(name, each, window, full_speed, fresh)]


@dataclass(frozen=True)
class _Resumed:
    """A resume: tokens of each lane that were worked through again, seconds to the first batch, and to one of each."""

    again: list[int]
    first: float
    round: float


def _resumed(name: str, found: Sequence[_Resumed], window: float, full_speed: float, fresh: float) -> list[Row]:
    """The rows of resumes at one place in a run. `window` is the tokens of a window, more or less."""
    longest, whole = max(one.first for one in found), statistics.median(one.round for one in found)
    detail = f"longest {longest:.2f} s; a batch of every lane {whole:.2f} s; a new run {fresh:.2f} s"
    tokens = [sum(one.again) for one in found]
    expected = [one.round / (0.3 + sum(one.again) / full_speed) for one in found]
    speed = f"{min(tokens) / 1e6:.1f} to {max(tokens) / 1e6:.1f} M tokens again, full speed {full_speed / 1e6:.1f} M/s"
    most = max(max(one.again) for one in found) / window
    at = f"resume at {name} of a run"
    return [
        Row(f"{at}: first batch", statistics.median(one.first for one in found), "s", 0.5, detail=detail),
        Row(f"{at}: a batch of every lane, to 0.3 s and the tokens again at full speed", statistics.median(expected),
            "×", 1, detail=speed),
        Row(f"{at}: the most that a lane works through again", most, "windows", ONE_WINDOW,
            detail="of 2048 samples, reckoned in tokens"),
    ]  # fmt: skip


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
