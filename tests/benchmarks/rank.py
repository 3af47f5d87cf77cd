"""One rank of a benchmark: a light process with numpy and `zephon_client`, no torch. It does what it is told, and says
what came of it.

    python -m tests.benchmarks.rank SOCKET DP_DEGREE DP_GROUP_ID GROUP_READERS
    python -m tests.benchmarks.rank first      takes one batch of $ZEPHON_SOCKET and says when it came
    python -m tests.benchmarks.rank survive engine|daemon TIMES
                                               kills it so often, and says how long each time it waited for a batch
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.benchmarks.contest import deliver, say, told
from tests.benchmarks.processes import pss

BEFORE = pss([os.getpid()])
AFTER_A_KILL = 200
"""Batches, more than all rings hold."""


class Rank:
    """A connected rank and the orders that it knows. Each method's arguments are the order's, its result the answer."""

    def __init__(self, socket: str, dp_degree: int, group: int, readers: int) -> None:
        from zephon_client import connect

        self._connect: Callable[[], Any] = lambda: connect(
            socket, dp_degree=dp_degree, dp_group_id=group, group_readers=readers, output="numpy"
        )
        self.loader = self._connect()

    def sizes(self) -> Iterator[int]:
        """Tokens of each batch as it arrives."""
        while True:
            yield next(self.loader)["input_ids"].size

    def deliver(self) -> str:
        """Be counted; see `contest.deliver`."""
        deliver(self.sizes())
        return "done"

    def take(self, batches: int) -> int:
        """Take so many batches; the tokens in them."""
        sizes = self.sizes()
        return sum(next(sizes) for _ in range(batches))

    def rounds(self, until: int) -> int:
        """Take batches up to the end of that round."""
        while self.loader.rounds < until:
            next(self.loader)
        return int(self.loader.rounds)

    def paced(self, batches: int, seconds: float, busy: bool) -> list[float]:
        """Take batches as a trainer does whose step lasts so long; the seconds that each was waited for."""
        waits = []
        for _ in range(batches):
            _step(seconds, busy)
            begin = time.perf_counter()
            batch = next(self.loader)
            waits.append(time.perf_counter() - begin)
            batch["input_ids"]
        return waits

    def gaps(self, seconds: float) -> list[list[float]]:
        """Take batches as fast as they come; when each came, by the machine's clock, and its tokens."""
        came, sizes = [], self.sizes()
        end = time.monotonic() + seconds
        while not came or came[-1][0] < end:
            tokens = next(sizes)
            came.append([time.monotonic(), tokens])
        return came

    def state(self) -> dict[str, Any]:
        """A checkpoint, the seconds that it took, and its size as JSON."""
        begin = time.perf_counter()
        state = self.loader.state_dict()
        spent = time.perf_counter() - begin
        return {"state": state, "seconds": spent, "bytes": len(json.dumps(state))}

    def resume(self, state: dict[str, Any] | None) -> dict[str, float]:
        """Connect anew, with a checkpoint if there is one; seconds to the first batch, and to one of each lane."""
        self.loader.close()
        self.loader = self._connect()
        begin = time.perf_counter()
        if state is not None:
            self.loader.load_state_dict(state)
        batch = next(self.loader)
        first = time.perf_counter() - begin
        while not batch.ends_round:
            batch = next(self.loader)
        return {"first": first, "round": time.perf_counter() - begin}

    def memory(self) -> int:
        """Bytes that the loader has added to this process."""
        return pss([os.getpid()]) - BEFORE


def _step(seconds: float, busy: bool) -> None:
    """A training step, which keeps this core busy or waits for a device."""
    if not busy:
        return time.sleep(seconds)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def first() -> None:
    """Take one batch and say when it came."""
    from zephon_client import connect

    with connect(output="numpy") as loader:
        next(loader)["input_ids"]
        say(time.monotonic())


def survive(victim: str, times: int) -> None:
    """Kill the engine or the daemon while batches come as fast as they are taken; the longest wait of each time."""
    from zephon_client import connect

    waits = []
    with connect(output="numpy") as loader:
        for _ in range(times):
            for _ in range(AFTER_A_KILL):
                next(loader)
            report = loader.progress()
            os.kill({"daemon": report["daemon"]["pid"], **report["processes"]}[victim], signal.SIGKILL)
            longest, last = 0.0, time.monotonic()
            for _ in range(AFTER_A_KILL):  # more than were here already
                next(loader)
                now = time.monotonic()
                longest, last = max(longest, now - last), now
            waits.append(longest)
        say(waits)


def main(arguments: list[str]) -> None:
    if arguments == ["first"]:
        return first()
    if arguments[0] == "survive":
        return survive(arguments[1], int(arguments[2]))
    socket, *numbers = arguments
    rank = Rank(socket, *map(int, numbers))
    say("connected")
    while (order := told()) is not None:
        name, *given = order
        say(getattr(rank, name)(*given))
    rank.loader.close()


if __name__ == "__main__":
    assert np.ndarray  # numpy is part of BEFORE
    main(sys.argv[1:])
