"""Training runs as processes: `zephon launch recipe.py -- torchrun …`, or `torchrun …` alone for the usual loader.

Each has a session of its own, so that a terminal's Ctrl-C reaches the demo alone, which then ends what runs in order.
Should the demo be killed, the kernel tells the run, and its launcher ends the rest. What a run prints is kept in a log
beside its steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil

from zephon_daemon.bootstrap import command
from zephon_daemon.lifelines import describe_end, die_with

END_SECONDS = 20.0
"""How long a run has for its own end before it is killed."""


@dataclass(frozen=True)
class Step:
    """What rank 0 wrote down of one global step."""

    step: int
    loss: float
    digest: str


@dataclass(frozen=True)
class Training:
    """One run: over which loader ("zephon" or "usual"), on how many ranks, to which step, from and to which state."""

    name: str
    loader: str
    ranks: int
    last: int
    save_at: int | None = None
    save: Path | None = None
    resume: Path | None = None


class TrainingFailed(Exception):
    """A run ended before its last step. The message says how, and shows the end of its log."""


def train(folder: Path, training: Training, tell: Callable[[str], None]) -> list[Step]:
    """Run it in the demo's folder; `tell` gets what rank 0 prints at each step. Returns the steps of this run."""
    out, log = (folder / "runs" / f"{training.name}.{suffix}" for suffix in ("jsonl", "log"))
    if training.save is not None:
        training.save.mkdir(parents=True, exist_ok=True)
    demo = os.getpid()
    with log.open("wb") as kept:
        process = subprocess.Popen(
            _command(folder, training, out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(folder),
            start_new_session=True,
            preexec_fn=lambda: die_with(demo, signal.SIGTERM) or os._exit(1),  # noqa: PLW1509  the demo has one thread
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                kept.write(line)
                if line.startswith(b"step "):
                    tell(line.decode().strip())
            status = process.wait()
        finally:
            end(process)
    steps = [Step(**json.loads(line)) for line in out.read_text().splitlines()] if out.exists() else []
    if status != 0 or not steps or steps[-1].step != training.last:
        lines = log.read_text(errors="replace").splitlines()[-25:]
        reached = f"after step {steps[-1].step}" if steps else "before its first step"
        raise TrainingFailed(
            f"the run {training.name!r} ended {reached} of {training.last}: {describe_end(status)}. "
            f"The end of its log, {log}:\n" + "\n".join(f"  | {line}" for line in lines)
        )
    return steps


def end(process: subprocess.Popen[bytes]) -> None:
    """Make sure that nothing of a run is left: asked first, killed with all that it started if it takes too long."""
    if process.poll() is None:
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_SECONDS)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):  # interrupted again: no more patience
            process.kill()
            process.wait()
            for other in below:
                with contextlib.suppress(psutil.NoSuchProcess):
                    other.kill()
    if process.stdout is not None:
        process.stdout.close()


def _command(folder: Path, training: Training, out: Path) -> list[str]:
    beside = []
    if training.loader == "zephon":
        beside = [*command("zephon_daemon.cli:main", "launch", str(folder / "recipe.py")), "--"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost"]
    script = [f"--nproc-per-node={training.ranks}", str(Path(__file__).with_name("train.py"))]
    options = ["--loader", training.loader, "--folder", str(folder), "--out", str(out), "--last", str(training.last)]
    if training.save is not None:
        options += ["--save", str(training.save), "--save-at", str(training.save_at)]
    if training.resume is not None:
        options += ["--resume", str(training.resume)]
    return [*beside, *torchrun, *script, *options]


def _environment(folder: Path) -> dict[str, str]:
    """One thread a rank, its peers on this machine, the packages of this process, and indexes in the demo's folder."""
    specs = [find_spec(name) for name in ("zephon", "zephon_daemon", "zephon_client")]
    folders = dict.fromkeys(str(Path(spec.origin).resolve().parent.parent) for spec in specs if spec and spec.origin)
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*folders, *inherited]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
        "ZEPHON_CACHE": str(folder / "cache"),
    }
