"""Zephon at work: a real daemon on a recipe file, and real ranks, each a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.benchmarks.contest import REPOSITORY, Player, environment, module, players
from tests.benchmarks.corpus import Corpus

ZEPHON = [sys.executable, "-c", "import sys; from zephon_daemon.cli import main; sys.exit(main())"]
END_SECONDS = 20.0

_RECIPE = """
from zephon import Dataset, Pipeline, StaticMixtureWorkSource

source = StaticMixtureWorkSource(
    datasets=[Dataset.from_path(name, path) for name, path in {data!r}], mixture={mixture!r}, seed=42{source}
)
pipeline = (
    Pipeline(source){tokenize}
    {order}{behind}
    .batch(microbatch_size=8)
    .options(canonical_replicas={lanes}{options})
)
"""


@dataclass(frozen=True)
class Recipe:
    """What varies: the workload, lanes, more arguments of the source and of `options`, and more operators.

    Workloads: "text" and "ids" (A and B); "mixed", two datasets of text, best fit and a shuffle; "short" and "long", B
    with documents of other lengths.
    """

    workload: str
    lanes: int = 8
    source: str = ', chunk_size=2048, exhausted_policy="repeat"'
    options: str = ""
    behind: str = ""
    """More operators, the last."""

    def text(self, corpus: Corpus) -> str:
        mixed = self.workload == "mixed"
        folders = {"web": corpus.text, "lines": corpus.lines} if mixed else {"corpus": getattr(corpus, self.workload)}
        tokenize = f'\n    .tokenize(tokenizer_id={str(corpus.tokenizer)!r}, field="text", special_tokens="eos")'
        pack = f".pack_flat(max_length=2049, algorithm={'best_fit' if mixed else 'wrap'!r})"
        return _RECIPE.format(
            data=[(name, str(folder)) for name, folder in folders.items()],
            mixture={"web": 0.7, "lines": 0.3} if mixed else None,
            order=f"{pack}.shuffle(512)" if mixed else pack,
            behind=self.behind,
            tokenize=tokenize if self.workload in ("text", "mixed") else "",
            source=self.source,
            lanes=self.lanes,
            options=self.options,
        )


class Daemon:
    """A running `zephon daemon` and its processes."""

    def __init__(self, process: subprocess.Popen[bytes], socket: Path) -> None:
        self.process, self.socket = process, socket

    def processes(self) -> dict[int, str]:
        """Title by process id, the daemon's own included."""
        daemon = psutil.Process(self.process.pid)
        found = {}
        for each in [daemon, *daemon.children(recursive=True)]:
            try:
                found[each.pid] = " ".join(each.cmdline())
            except psutil.NoSuchProcess:
                continue
        return found

    @contextmanager
    def ranks(self, count: int = 1, readers: int = 1) -> Iterator[list[Player]]:
        """Rank processes: `count` groups with `readers` ranks each."""
        names = [(group, reader) for group in range(count) for reader in range(readers)]
        with players([module("rank", self.socket, count, group, readers) for group, _ in names]) as found:
            yield found


@contextmanager
def recipe_file(recipe: Recipe, corpus: Corpus) -> Iterator[Path]:
    """The recipe as a file, in a folder of its own that also has room for a socket."""
    with tempfile.TemporaryDirectory(prefix="zb", dir="/tmp") as folder:
        path = Path(folder, "recipe.py")
        path.write_text(recipe.text(corpus))
        yield path


@contextmanager
def daemon(recipe: Recipe, corpus: Corpus, *options: str) -> Iterator[Daemon]:
    """A daemon on that recipe, ready; ended on leaving."""
    with recipe_file(recipe, corpus) as path:
        socket = path.parent / "s"
        command = [*ZEPHON, "daemon", str(path), "--socket", str(socket), *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), cwd=REPOSITORY)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the daemon ended with {process.wait()} before it was ready")
            yield Daemon(process, socket)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
