"""How fast is it? Contestants deliver batches; what they deliver in one common stretch of time is counted.

A contestant is one or several processes. Each calls `deliver(batches)`: it takes a first batch, says "ready", is told
when the stretch begins and ends, and counts the tokens that arrive in it. The clock is the machine's, so processes of
one contestant are counted over the same stretch, start-up left out.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

REPOSITORY = Path(__file__).resolve().parents[2]
FEWEST = 8
"""Batches that are counted at least."""


def environment(**more: str) -> dict[str, str]:
    """For child processes: they find the repository's packages, installed or not, and one thread for each library."""
    paths = [str(REPOSITORY / part) for part in ("", "daemon", "client")]
    inherited = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    quiet = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "FASTOKENS_BPE_THREADS": "1"}
    return {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join([*paths, *inherited]), **more}


def module(name: str, *arguments: object) -> list[str]:
    """The command that runs one of this folder's modules."""
    return [sys.executable, "-m", f"tests.benchmarks.{name}", *map(str, arguments)]


class Player:
    """A child process that talks in JSON lines: it answers what it is told, one line each."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(env), cwd=REPOSITORY
        )

    def hear(self) -> Any:
        """The next line that it says."""
        line = _pipe(self.process.stdout).readline()
        if not line:
            raise RuntimeError(f"{' '.join(self.process.args)} ended with {self.process.wait()}")  # type: ignore[arg-type]
        return json.loads(line)

    def tell(self, what: object) -> None:
        """Say something to it."""
        pipe = _pipe(self.process.stdin)
        pipe.write(json.dumps(what).encode() + b"\n")
        pipe.flush()

    def ask(self, what: object) -> Any:
        self.tell(what)
        return self.hear()

    def end(self) -> None:
        """Let it end by itself, which it does when nobody talks to it any more; kill it if it does not."""
        _pipe(self.process.stdin).close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        _pipe(self.process.stdout).close()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


@contextmanager
def players(commands: Sequence[Sequence[str]], env: Mapping[str, str] | None = None) -> Iterator[list[Player]]:
    """The processes of one contestant, ended on leaving."""
    found: list[Player] = []
    try:
        for command in commands:
            found.append(Player(command, env or environment()))
        yield found
    finally:
        for player in found:
            player.end()


@dataclass(frozen=True)
class Timing:
    """Seconds before the stretch that counts, and its length."""

    warm: float
    seconds: float


def tokens_a_second(those: Sequence[Player], timing: Timing) -> float:
    """The rate of all of them together, once each is ready."""
    for player in those:
        player.hear()
    begin = time.monotonic() + timing.warm
    for player in those:
        player.tell([begin, begin + timing.seconds])
    return float(sum(tokens / seconds for tokens, seconds in [player.hear() for player in those]))


def say(what: object) -> None:
    """In a player: one line to the parent."""
    print(json.dumps(what), flush=True)


def told() -> Any:
    """In a player: what the parent says next; None when it will say no more."""
    line = sys.stdin.readline()
    return json.loads(line) if line else None


def deliver(sizes: Iterable[int]) -> None:
    """The part of a player. `sizes` yields the tokens of each batch as it arrives, without end.

    It says the tokens that came, and in how many seconds: a slow one goes on until it has a few batches to count.
    """
    stream = iter(sizes)
    next(stream)
    say("ready")
    while (stretch := told()) is not None:
        begin, end = stretch
        clock = time.monotonic
        while clock() < begin:
            next(stream)
        began, tokens, batches = clock(), 0, 0
        while clock() < end or batches < FEWEST:
            tokens += next(stream)
            batches += 1
        say([tokens, clock() - began])


@dataclass(frozen=True)
class Compared:
    """Rates of contestants, taken in turn: `rates[name]` has one for each round."""

    rates: dict[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.rates[name])

    def ratio(self, name: str, base: str) -> tuple[float, float, float]:
        """`(median, lowest, highest)` of the ratio, round by round."""
        each = [a / b for a, b in zip(self.rates[name], self.rates[base], strict=True)]
        return statistics.median(each), min(each), max(each)


def in_turn(contestants: Mapping[str, Callable[[], float]], rounds: int) -> Compared:
    """Each contestant once a round, so that whatever else the machine does meets them all alike."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            rates[name].append(run())
            print(f"  {name}: {rates[name][-1] / 1e6:.2f} M tokens/s", file=sys.stderr, flush=True)
    return Compared(rates)
