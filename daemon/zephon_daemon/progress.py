"""`zephon progress`: the daemon's part of the report, asking for it, and its text."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from socket import SOCK_STREAM
from typing import Any, TextIO

import psutil
import zmq

from zephon import errors
from zephon.errors import DaemonUnavailable, ZephonError
from zephon.skips import in_words
from zephon.transport.channels import answers
from zephon.transport.endpoints import control_path, running_daemons
from zephon.transport.messages import decode, encode
from zephon.transport.protocol import Patience, Progress, ProgressReport, Refused
from zephon.words import many

ANSWER_SECONDS = 10.0
WATCH_SECONDS = 1.0
LONGEST_RATE = 5.0
"""Seconds over which a rate is taken, at most; less where reports come faster."""

FULL = 0.9
"""Of a core, from which on an engine is said to be full."""

_CLEAR = "\033[H\033[J"

_READY = ("the trainer", "its ranks")
"""How the reasons begin for which a lane waits for training, and not for data."""


class Rates:
    """Delivered records a second of each run, and how busy each engine is, between two reports."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, int]] = {}
        self._engines: dict[tuple[int, int], tuple[float, float]] = {}

    def add(self, report: dict[str, Any], now: float, engines: Iterable[dict[str, Any]] = ()) -> None:
        """Adds `records_per_second` and `over_seconds` to the runs of the engines' report, and to each engine `busy`:
        its part of a core.
        """
        for engine in engines:
            key_of_engine, seconds = (engine["engine"], engine["pid"] or 0), engine["cpu_seconds"]
            then, used = self._engines.setdefault(key_of_engine, (now, seconds))
            if now > then:
                engine["busy"] = (seconds - used) / (now - then)
            if now - then >= LONGEST_RATE:
                self._engines[key_of_engine] = now, seconds
        for number, run in enumerate(report.get("runs") or []):
            key = f"{number} {run.get('pipeline')}"
            delivered = sum(lane.get("delivered", 0) for lane in run.get("lanes") or [])
            then, before = self._before.get(key, (now, delivered))
            if now > then and delivered >= before:
                run["records_per_second"] = (delivered - before) / (now - then)
                run["over_seconds"] = now - then
            if now - then >= LONGEST_RATE or key not in self._before or delivered < before:
                self._before[key] = now, delivered


def memory_of(pids: Mapping[str, int]) -> dict[str, int]:
    """Bytes of memory that each process has to itself, shared pages counted by share (PSS). Ended ones are left out."""
    found = {}
    for name, pid in pids.items():
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
                line = next(line for line in file if line.startswith(b"Pss:"))
            found[name] = int(line.split()[1]) * 1024
        except (OSError, StopIteration):
            try:
                found[name] = psutil.Process(pid).memory_info().rss
            except psutil.Error:
                continue
    return found


def cpu_seconds(pid: int) -> float:
    """Seconds of CPU time that a process has used; 0 once it has ended."""
    try:
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    except psutil.Error:
        return 0.0


def ask(socket: str | None, timeout: float = ANSWER_SECONDS) -> dict[str, Any]:
    """The report of the daemon on `socket`, else on $ZEPHON_SOCKET, else of the user's only running daemon."""
    path = _find(socket)
    if not answers(path, SOCK_STREAM):
        raise DaemonUnavailable(f"no daemon listens on {path}. Start one, or name another with --socket.")
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    try:
        dealer.connect(f"ipc://{path}")
        dealer.send_multipart([b"1", encode(Progress())])
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            if not dealer.poll(int(left * 1000) + 1):
                continue
            answer = decode(dealer.recv_multipart()[1], expect=(ProgressReport, Patience, Refused))
            if isinstance(answer, ProgressReport):
                return answer.report
            if isinstance(answer, Refused):
                kind = getattr(errors, answer.kind, ZephonError)
                raise kind(answer.text) if issubclass(kind, ZephonError) else ZephonError(answer.text)
    finally:
        dealer.close()
        context.term()
    raise DaemonUnavailable(f"no daemon answered on {path} within {timeout:g} s. Is it running?")


def show(socket: str | None, as_json: bool) -> str:
    """The report, as `zephon progress` prints it."""
    report = ask(socket)
    return json.dumps(report, indent=1) if as_json else text(report)


def watch(socket: str | None, as_json: bool, out: TextIO) -> None:
    """Writes the report again and again, over the last one on a terminal, until the daemon has ended.

    As JSON, each report is one line.
    """
    path = _find(socket)
    report = ask(path)
    while True:
        if as_json:
            out.write(json.dumps(report) + "\n")
        else:
            out.write(f"{_CLEAR if out.isatty() else ''}{text(report)}\n")
        out.flush()
        time.sleep(WATCH_SECONDS)
        try:
            report = ask(path)
        except DaemonUnavailable as error:
            out.write("" if as_json else f"{error}\n")
            return


def text(report: Mapping[str, Any]) -> str:
    """The report for people. Keys that are not there are left out."""
    daemon = report.get("daemon") or {}
    lines = [
        f"zephon daemon {daemon.get('pid', '?')}, up {_duration(daemon.get('uptime', 0))}: {daemon.get('recipe', '?')}",
        f"  control socket {daemon.get('socket', '?')}",
    ]
    clients = report.get("clients") or []
    if clients:
        names = ", ".join(
            f"group {c.get('group')} (process {c.get('pid')}{', stopped' if c.get('stopped') else ''}"
            f"{'' if c.get('attached') else ', not attached yet'})"
            for c in clients
        )
        lines.append(f"  {many(len(clients), 'client')}: {names}")
    else:
        lines.append("  no clients")
    lines += [f"  waits: {reason}" for reason in report.get("waiting") or []]
    if report.get("engine_stall"):
        lines.append(f"  stalled: the engine {report['engine_stall']}")
    engine = report.get("engine")
    if engine is None:
        lines.append(f"  engine: {report.get('engine_state', 'no report')}")
    engines = report.get("engines") or []
    lines += _engines(engines)
    for run in (engine or {}).get("runs") or []:
        lines += _run(run, engines)
    lines += [f"stalled: {each.get('text')}" for each in (engine or {}).get("stalls") or []]
    lines += _workers(report, engine or {})
    memory = report.get("memory") or {}
    if memory:
        shares = ", ".join(f"{name} {_size(size)}" for name, size in _grouped(memory))
        lines.append(f"memory: {_size(sum(memory.values()))} ({shares})")
    found = (engine or {}).get("errors") or []
    lines += [f"error: {' '.join(str(each).split())[:300]}" for each in found]
    return "\n".join(lines)


def _engines(engines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where there are several: what each one has, and how much of its core it needs."""
    if len(engines) < 2:
        return []
    lines = []
    for each in engines:
        busy = f", {each['busy']:.0%} busy" if "busy" in each else ""
        lines.append(f"  engine {each['engine']}: {each['state']}, {many(each['workers'], 'worker')}{busy}")
    return lines


def _limits(lanes: Sequence[Mapping[str, Any]], engines: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a run's speed depends on: one line, and one for each engine where they differ or one of them is full."""
    full = {each["engine"]: each["busy"] for each in engines if each.get("busy", 0.0) >= FULL}
    parts: dict[int, list[Mapping[str, Any]]] = {}
    for lane in lanes:
        parts.setdefault(lane.get("engine", 0), []).append(lane)
    lines = [f"  limit: {limit(lanes)}"]
    kinds = {limit(part).partition(":")[0] for part in parts.values()}
    if len(parts) == 1 and parts.keys() <= full.keys():
        lines[0] += f"; its engine is full ({full[next(iter(parts))]:.0%} of a core)"
    elif len(parts) > 1 and (parts.keys() & full.keys() or len(kinds) > 1):
        for number, part in sorted(parts.items()):
            more = f"; the engine is full ({full[number]:.0%} of a core)" if number in full else ""
            lines.append(f"    engine {number}: {limit(part)}{more}")
    return lines


def _run(run: Mapping[str, Any], engines: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    lanes = run.get("lanes") or []
    rate = run.get("records_per_second")
    speed = f", {rate:.1f} records/s over the last {run.get('over_seconds', 0):.0f} s" if rate is not None else ""
    epochs = sorted({lane.get("epoch", 0) for lane in lanes})
    epoch = ", ".join(map(str, epochs)) or "?"
    of_epoch = run.get("rounds_of_epoch")
    done, steps = run.get("rounds", 0), run.get("steps", 0)
    rounds = f"{done} of {many(of_epoch, 'round')}" if of_epoch is not None else many(done, "round")
    if steps > done:
        rounds += f" ({steps} since the run's beginning)"
    lines = [f"{run.get('pipeline', 'pipeline')}: epoch {epoch}, {rounds}, {many(len(lanes), 'lane')}{speed}"]
    for number, count in (run.get("left_out") or {}).items():
        lines.append(f"  epoch {number} leaves out {many(count, 'record')}: the shortest lane ends it")
    if run.get("mixture"):
        lines.append(f"  mixture: {json.dumps(run['mixture'])}")
    lines += _drawn(run.get("drawn") or {})
    if lanes:
        lines.append("  lane  delivered   produced    samples  skipped  in work  slots free  waits for")
    lines += [
        f"  {lane.get('lane', '?'):>4} {lane.get('delivered', 0):>10} {lane.get('produced', 0):>10} "
        f"{lane.get('samples', 0):>10} {lane.get('skipped', 0):>8} {lane.get('in_work', 0):>8} "
        f"{lane.get('ring_free', 0):>5}/{lane.get('ring_slots', 0):<5} {lane.get('waits_for') or '-'}"
        for lane in lanes
    ]
    counters: Counter[str] = Counter()
    for lane in lanes:
        counters.update(lane.get("counters") or {})
    if counters:
        lines.append("  operators: " + ", ".join(f"{name} {count}" for name, count in sorted(counters.items())))
    if run.get("skips"):
        lines.append(f"  bad records left out: {in_words(run['skips'])}")
    if run.get("failed"):
        lines.append(f"  failed: {run['failed']}")
    elif lanes:
        lines += _limits(lanes, engines)
    spent = {cause: seconds for cause, seconds in (run.get("waited") or {}).items() if seconds}
    if spent:
        total = sum(spent.values())
        shares = sorted(spent.items(), key=lambda item: -item[1])
        lines.append("  lanes waited so far for: " + ", ".join(f"{name} {part / total:.0%}" for name, part in shares))
    return lines


def _drawn(counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """What each dataset's share of samples and of tokens is so far."""
    samples, tokens = (sum(each.get(kind, 0) for each in counts.values()) for kind in ("samples", "tokens"))
    if not samples:
        return []
    lines = []
    for name, each in counts.items():
        line = f"  drawn from {name}: {many(each.get('samples', 0), 'sample')} ({each.get('samples', 0) / samples:.1%})"
        if tokens:
            line += f", {many(each.get('tokens', 0), 'token')} ({each.get('tokens', 0) / tokens:.1%})"
        lines.append(line)
    return lines


def limit(lanes: Iterable[Mapping[str, Any]]) -> str:
    """What a run's speed depends on now, from what its lanes wait for, and for how long the longest has.

    Ranks take turns: lanes of which little is ready hold up those that have batches, however many these are.
    """
    found = [(each.get("cause") or each.get("waits_for") or "nothing", each) for each in lanes]
    short = [cause for cause, each in found if not cause.startswith((*_READY, "nothing")) and _is_half_empty(each)]
    common, count = Counter(short or (cause for cause, _ in found)).most_common(1)[0]
    alike = [each for cause, each in found if cause == common]
    longest = max(alike, key=lambda each: each.get("waits_seconds", 0.0))
    reason = longest.get("waits_for") or common
    words = reason if common == "ranks" else common
    waited = longest.get("waits_seconds")
    seconds = "" if waited is None else f", lane {longest.get('lane', '?')} for {waited:.0f} s"
    share, wait = f"{count} of {many(len(found), 'lane')}", "waits" if count == 1 else "wait"
    if common.startswith(_READY) or reason.startswith(_READY):
        ready = "has batches ready and waits" if count == 1 else "have batches ready and wait"
        return f"training: {share} {ready} for {words}{seconds}"
    if common == "ranks" or "attach" in common:
        return f"ranks: {share} {wait} for {words}{seconds}"
    return f"data: {share} {wait} for {words}{seconds}"


def _is_half_empty(lane: Mapping[str, Any]) -> bool:
    return 2 * int(lane.get("ring_free", 0)) >= int(lane.get("ring_slots", 0))


def _workers(report: Mapping[str, Any], engine: Mapping[str, Any]) -> list[str]:
    workers = engine.get("workers") or []
    died = report.get("workers_died", 0)
    if not workers and not died:
        return []
    tasks = sum(worker.get("tasks", 0) for worker in workers)
    busy = sum(worker.get("busy_seconds", 0.0) for worker in workers)
    ended = many(died, "died and was", "died and were")
    return [f"{many(len(workers), 'worker')}: {many(tasks, 'task')}, {busy:.1f} s at work, {ended} replaced"]


def _find(socket: str | None) -> str:
    given = socket or os.environ.get("ZEPHON_SOCKET")
    if given:
        return control_path(given)
    found = running_daemons()
    if len(found) == 1:
        return found[0].control_path
    if not found:
        raise DaemonUnavailable("no daemon of this user is running. Start one with `zephon daemon` or `zephon launch`.")
    names = "; ".join(f"{each.control_path} ({each.recipe})" for each in found)
    raise DaemonUnavailable(f"several daemons are running; name one with --socket or ZEPHON_SOCKET: {names}")


def _grouped(memory: Mapping[str, int]) -> list[tuple[str, int]]:
    sizes: Counter[str] = Counter()
    for name, size in memory.items():
        kind = name.partition(" ")[0]  # where there are several engines, each of their processes has its number
        sizes[f"{kind}s" if kind != name else name] += size
    return list(sizes.items())


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
