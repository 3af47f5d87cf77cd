"""An engine and a worker that speak the protocol and make no data, so that the daemon can be tested by itself.

The name of the recipe's file says how the engine behaves: `refused.py` cannot be loaded, `crash.py` kills it. A run of
the pipeline "deadly" kills it, too. What the daemon has told the engine is in its report.
"""
from __future__ import annotations

import json
import os
import select
import signal
import sys
from typing import Any

from zephon.transport import protocol as p
from zephon.transport.channels import Channel
from zephon.transport.messages import decode, encode
from zephon_daemon.daemon import CannotStart, Settings, serve
from zephon_daemon.supervision import Targets

LANES = 4


def engine(fd: int, recipe: str, settings: dict[str, Any]) -> None:
    """Entry of the fake engine."""
    daemon = Channel.from_fd(fd)
    if recipe.endswith("refused.py"):
        daemon.send(encode(p.RunRefused(-1, "RecipeError", f"{recipe}:7: NameError: name 'x' is not defined")))
        return
    if recipe.endswith("crash.py"):
        os.kill(os.getpid(), signal.SIGSEGV)
    daemon.send(encode(p.EngineReady(["pipeline", "eval", "deadly"], settings["workers"])))
    heard: list[str] = []
    clients: dict[int, Channel] = {}
    while not daemon.closed:
        for ready in select.select([daemon, *clients.values()], [], [])[0]:
            if ready is daemon:
                for data, fds in daemon.receive():
                    _hear(decode(data), fds, daemon, clients, heard, settings)
            elif numbers := [n for n, channel in clients.items() if channel is ready]:  # it may be dropped by now
                number = numbers[0]
                heard += [type(decode(data)).__name__ for data, _ in ready.receive()]
                if ready.closed:
                    del clients[number]
                    ready.close()
                    daemon.send(encode(p.ReaderGone(number)))


def _hear(
    message: Any,
    fds: list[int],
    daemon: Channel,
    clients: dict[int, Channel],
    heard: list[str],
    settings: dict[str, Any],
) -> None:
    heard.append(str(message))
    if isinstance(message, p.StartRun):
        heard.append("checkpoint " + os.pread(fds[0], 1 << 20, 0).decode())
        if message.pipeline == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        starts = [[0, 0, 0, 0]] * LANES
        identity = json.dumps({"canonical_replicas": LANES})
        plan = p.Attached(identity, LANES, [], 2, True, True, False, ["d"], 0, starts, [])
        daemon.send(encode(p.RunStarted(message.run, plan, "contiguous")))
    elif isinstance(message, p.AddReader):
        channel = Channel.from_fd(fds.pop(0))
        heard += ["statement " + os.pread(fd, 1 << 20, 0).decode() for fd in fds]
        channel.send(encode(p.Released(0, 5, True)))
        clients[message.client] = channel
    elif isinstance(message, p.DropReader):
        channel = clients.pop(message.client)
        channel.close()
    elif isinstance(message, p.AddWorker):
        fds.clear()  # the worker's connection stays open as long as this engine lives
    elif isinstance(message, p.Report):
        report = {"runs": [], "workers": [], "errors": [], "heard": heard, "settings": settings}
        daemon.send(encode(p.EngineReport(message.request, report)))
    for fd in fds:
        os.close(fd)


def worker(fd: int, number: int) -> None:
    """Entry of the fake worker: it waits for its engine's end."""
    channel = Channel.from_fd(fd)
    while not channel.closed:
        select.select([channel], [], [])
        channel.receive()


def main() -> int:
    """A daemon with this engine. Its settings are the first argument, as JSON."""
    try:
        return serve(Settings(**json.loads(sys.argv[1]), targets=Targets("fake_engine:engine", "fake_engine:worker")))
    except CannotStart as error:
        print(f"cannot start: {error}", file=sys.stderr)
        return 3
