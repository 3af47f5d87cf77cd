"""Real daemons, launches and ranks for tests. Every wait has a limit, and nothing waits for time to pass.

`Daemon` is `zephon daemon` as a process; `launch` starts `zephon launch`, `python` any program of a test. `Ranks` are
all ranks of a run in this process, each with a Loader and a thread of its own; what they deliver goes into a `Ledger`,
which compares it with the reference execution (`zephon.windows.run_window`).
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import psutil

from tests.corpora import COUNT, byte_tokenizer
from tests.unit.small_recipes import expected_ends, reference
from zephon import merge_checkpoints
from zephon.batches import Batch
from zephon.columns import Block, canonical
from zephon.errors import ZephonError
from zephon.plan import Plan
from zephon.recipe import load_recipe
from zephon_client import connect
from zephon_client.loader import Loader
from zephon_daemon.bootstrap import command
from zephon_daemon.progress import ask

SECONDS = 40.0
"""The limit of every wait."""

SOURCES = [str(Path(__file__).parents[1] / folder) for folder in (".", "client", "daemon")]
T = TypeVar("T")
State = dict[str, Any]
Here = Callable[..., tuple[int, str, str]]
"""The fixture `here`: the command line in this process; exit status, stdout, stderr."""


def until(condition: Callable[[], T], seconds: float = SECONDS) -> T:
    """Waits for a condition of another process or thread; its value."""
    end = time.monotonic() + seconds
    nothing = threading.Event()
    while not (found := condition()):
        assert time.monotonic() < end, "it did not come to that in time"
        nothing.wait(0.02)
    return found


def living(pids: Iterable[int]) -> list[int]:
    """Those of the processes that have not ended."""
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


# Recipes

HEAD = """
from pathlib import Path
from zephon import Dataset, MixtureSpec, Pipeline, StaticMixtureWorkSource
HERE = Path(__file__).parent
"""


def write_recipe(folder: Path, text: str, name: str = "recipe.py") -> str:
    """A recipe file; `HERE` in it is its folder."""
    path = folder / name
    path.write_text(HEAD + text)
    return str(path)


def counting(
    folder: Path, rows: int, shards: int, lanes: int, batch: int, more: str = "", source: str = "", options: str = ""
) -> str:
    """A recipe over COUNT(rows, shards) with `pipeline` alone; `more` are its other operators, `.shuffle(8)` say."""
    COUNT(rows, shards, folder / "count")
    return write_recipe(
        folder,
        "pipeline = (Pipeline(StaticMixtureWorkSource([Dataset.from_path('count', HERE / 'count')], mixture=None,"
        f" seed=5{source and ', ' + source})){more}"
        f".batch({batch}).options(canonical_replicas={lanes}{options and ', ' + options}))\n",
    )


MIXED = """
def mixed(size, pack="wrap", drop_last=True, lanes=8, web=0.6, **options):
    data = [Dataset.from_path("web", HERE / "web"), Dataset.from_path("code", HERE / "code")]
    mixture = MixtureSpec({"web": web, "code": 1 - web})
    source = StaticMixtureWorkSource(data, mixture, seed=11, chunk_size=8, shuffle_within_shard=True)
    pipeline = Pipeline(source).tokenize(tokenizer_id=str(HERE / "tokenizer.json"), field="text", special_tokens="eos")
    pipeline.pack_flat(33, algorithm=pack).shuffle(24, seed=2).batch(size, drop_last=drop_last)
    return pipeline.options(canonical_replicas=lanes, flush_every_k_chunks=2, **options)
"""


def mixed(folder: Path, pipelines: Mapping[str, str], rows: tuple[int, int] = (600, 400)) -> str:
    """A recipe over JSON lines and Parquet, tokenised, packed and shuffled; `pipelines` are arguments of `mixed`."""
    COUNT(rows[0], 3, folder / "web")
    function = lambda i: {"id": i, "text": f"def f{i}(): return {i * i}"}  # noqa: E731
    COUNT(rows[1], 2, folder / "code", suffix=".parquet", row=function)
    byte_tokenizer(folder / "tokenizer.json")
    return write_recipe(folder, MIXED + "".join(f"{name} = mixed({how})\n" for name, how in pipelines.items()))


def plan_of(recipe: str, pipeline: str = "pipeline") -> Plan:
    return load_recipe(recipe).pipeline(pipeline).plan()


# Processes


class Program:
    """A process of a test. What it says on stderr goes to a file, so that it never waits for a reader."""

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str | None] | None = None,
        prefix: Sequence[str] = (),
        **more: Any,
    ) -> None:
        number = len(list(folder.glob("err-*")))
        self._errors = folder / f"err-{number}"
        given = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES), **(environment or {})}
        with open(self._errors, "wb") as errors:
            self.process = subprocess.Popen(
                [*prefix, *arguments],
                env={name: value for name, value in given.items() if value is not None},
                stdout=subprocess.PIPE,
                stderr=errors,
                **more,
            )
        self.pid = self.process.pid
        self._said = b""

    def line(self, seconds: float = SECONDS) -> str:
        """The next line of its stdout; empty at its end."""
        assert self.process.stdout is not None
        end = time.monotonic() + seconds
        while b"\n" not in self._said:
            left = end - time.monotonic()
            ready = select.select([self.process.stdout], [], [], max(0.0, left))[0]
            assert ready, f"it said nothing in {seconds:g} s; stderr: {self.errors}"
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                break
            self._said += data
        line, _, self._said = self._said.partition(b"\n")
        return line.decode()

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def end(self, seconds: float = SECONDS) -> int:
        """Waits for its end: its exit status. `output` then has what was left to read."""
        try:
            self.output = (self._said + self.process.communicate(timeout=seconds)[0]).decode()
        except subprocess.TimeoutExpired as error:
            self.process.kill()
            self.process.communicate()
            raise AssertionError(f"it did not end in {seconds:g} s; stderr: {self.errors}") from error
        return self.process.returncode

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.end()

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.end()
        if kind is not None and self.errors:
            print(f"process {self.pid} ended with {self.process.returncode} and said:\n{self.errors}")
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Daemon(Program):
    """`zephon daemon`, ready."""

    def __init__(
        self,
        recipe: str,
        *,
        workers: int = 2,
        socket: str | None = None,
        environment: Mapping[str, str | None] | None = None,
        ready: bool = True,
        memory: str | None = None,
        prefix: Sequence[str] = (),
        more: Sequence[str] = (),
    ) -> None:
        folder = Path(recipe).parent
        self.recipe, self.workers = recipe, workers
        self.socket = socket or str(folder / "d.sock")
        options = ["--socket", self.socket, "--workers", str(workers)]
        options += ["--memory", memory] if memory else []
        options += more
        super().__init__(command("zephon_daemon.cli:main", "daemon", recipe, *options), folder, environment, prefix)
        if ready:
            line = self.line()
            assert line.startswith("zephon daemon ready"), f"{line!r}, {self.errors}"

    def all_started(self) -> Daemon:
        """With all its workers."""
        until(lambda: len(self.report()["processes"]) == 2 + self.workers)
        return self

    def report(self) -> dict[str, Any]:
        return ask(self.socket)

    def pids(self) -> dict[str, int]:
        """The daemon's processes by name, itself included."""
        return {"daemon": self.pid, **self.report()["processes"]}

    def engine(self) -> dict[str, Any]:
        """What its engines report, once they have the time to: the daemon waits for a busy one only so long."""
        return until(lambda: self.report()["engine"])

    def lanes(self) -> list[dict[str, Any]]:
        """The engines' report of the lanes of all runs."""
        return [lane for run in self.engine()["runs"] for lane in run["lanes"]]


def zephon(folder: Path, *arguments: str, **more: Any) -> Program:
    """The command line."""
    return Program(command("zephon_daemon.cli:main", *arguments), folder, **more)


def python(folder: Path, code: str, *arguments: str, **more: Any) -> Program:
    """A Python program, such as a rank."""
    return Program([sys.executable, "-c", code, *arguments], folder, **more)


def launch(recipe: str, code: str, *arguments: str, workers: int = 1, **more: Any) -> Program:
    """`zephon launch RECIPE -- python -c code`, in a process group of its own, as a shell starts a job."""
    run = ["--workers", str(workers), "--", "env", sys.executable, "-c", code, *arguments]
    folder = Path(recipe).parent
    return zephon(folder, "launch", recipe, *run, start_new_session=True, **more)


# Ranks


class Ranks:
    """All ranks of a run in this process, `readers` for each of `dp` groups. Rank `i` is of group `i // readers`."""

    def __init__(
        self,
        socket: str,
        dp: int,
        state: State | None = None,
        *,
        readers: int = 1,
        pipeline: str = "pipeline",
        ledger: Ledger | None = None,
        allow_changed: Sequence[str] = (),
    ) -> None:
        self.ledger = ledger
        self.loaders: list[Loader] = []
        self._threads = ThreadPoolExecutor(dp * readers)
        for rank in range(dp * readers):
            loader = connect(
                socket, dp_degree=dp, dp_group_id=rank // readers, group_readers=readers, pipeline=pipeline,
                output="numpy", timeout=SECONDS,
            )  # fmt: skip
            self.loaders.append(loader)
            if state is not None:
                loader.load_state_dict(state, allow_changed=allow_changed)
        self.batches: list[list[Batch]] = [[] for _ in self.loaders]
        """Copies of what each rank got."""

    def each(self, act: Callable[[int], T]) -> list[T]:
        """`act(rank)` for every rank at once."""
        futures = [self._threads.submit(act, rank) for rank in range(len(self.loaders))]
        return [future.result(SECONDS * 2) for future in futures]

    def rounds(self, count: int = 10**9) -> list[int]:
        """Rounds of every rank, at most `count` or to the epoch's end; how many each had."""

        def act(rank: int) -> int:
            done = 0
            while done < count:
                batch = self._take(rank)
                if batch is None:
                    return done
                done += batch.ends_round
            return done

        return self.each(act)

    def refused(self, rank: int, kind: type[ZephonError]) -> ZephonError:
        """The error that a rank gets, now or after some batches."""
        try:
            while self._take(rank) is not None:
                pass
        except kind as error:
            return error
        raise AssertionError(f"rank {rank} came to the end of its data")

    def take(self, counts: Sequence[int]) -> None:
        """So many batches of each rank."""
        self.each(lambda rank: [self._take(rank) for _ in range(counts[rank])])

    def state(self, rank: int = 0) -> State:
        """That rank's state, as it is read back from a file."""
        return json.loads(json.dumps(self.loaders[rank].state_dict()))

    def merged(self) -> State:
        """The parts of all ranks joined, for a stop inside a round."""
        return merge_checkpoints([self.state(rank) for rank in range(len(self.loaders))])

    def _take(self, rank: int) -> Batch | None:
        epoch = self.loaders[rank].epoch
        batch = next(self.loaders[rank], None)
        if batch is None:
            return None
        assert batch.lane in self.loaders[rank].lanes
        mine = batch.copy()
        self.batches[rank].append(mine)
        if self.ledger is not None:
            self.ledger.enter(epoch, mine)
        return mine

    def ids(self, rank: int) -> list[int]:
        return [int(i) for batch in self.batches[rank] if len(batch) for i in batch["id"]]

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()
        self._threads.shutdown()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_LANES: dict[tuple[str, int, int], Block] = {}
"""Whole lanes, by their run's identity, epoch and number: a run's reference is worked out once."""


class Ledger:
    """Everything that was delivered of a run, over its stops, against the reference execution of its plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._identity = json.dumps(plan.identity)
        self._entries: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._lock = threading.Lock()

    def enter(self, epoch: int, batch: Batch) -> None:
        """A batch: it must hold what the reference says, in samples and bytes."""
        with self._lock:
            expected = self._expected(epoch, batch.lane, batch.first_record, len(batch))
            place = f"epoch {epoch}, lane {batch.lane}, records {batch.first_record} to +{len(batch)}"
            assert batch.digest == expected.digest, place
            assert batch.samples == expected.samples, place
            self._entries.setdefault((epoch, batch.lane), []).append((batch.first_record, len(batch)))

    def total(self, epoch: int, lane: int) -> int:
        """The lane's records."""
        return len(self._lane(epoch, lane))

    def ends(self, epoch: int = 0) -> dict[int, int]:
        """The record at which each lane's delivery ends."""
        return expected_ends(self.plan, {lane: self.total(epoch, lane) for lane in range(self.plan.lanes)})

    def check(self, epoch: int = 0, ends: Mapping[int, int] | None = None) -> None:
        """Every lane was delivered from its first record to its end, each record once."""
        for lane, end in (self.ends(epoch) if ends is None else ends).items():
            at = 0
            for first, count in sorted(self._entries.get((epoch, lane), [])):
                assert first == at, f"epoch {epoch}, lane {lane}: record {at} is due, {first} came"
                at += count
            assert at == end, f"epoch {epoch}, lane {lane} ends at {at}, not at {end}"

    def digest(self, epoch: int, lane: int, first: int, count: int) -> str:
        """Of these records, as the reference says."""
        return self._expected(epoch, lane, first, count).digest

    def _lane(self, epoch: int, lane: int) -> Block:
        key = self._identity, epoch, lane
        if key not in _LANES:
            _LANES[key] = reference(self.plan, lane, epoch)
        return _LANES[key]

    def _expected(self, epoch: int, lane: int, first: int, count: int) -> Batch:
        block = canonical(self._lane(epoch, lane).slice(first, first + count))
        return Batch(
            block, lane=lane, first_record=first, dataset_names=self.plan.dataset_names, packed=self.plan.packed
        )


def run_to_the_end(socket: str, dp: int = 1, pipeline: str = "pipeline") -> dict[tuple[int, int], str]:
    """The digest of every batch of one epoch by lane and first record."""
    with Ranks(socket, dp, pipeline=pipeline) as ranks:
        ranks.rounds()
        return {(b.lane, b.first_record): b.digest for batches in ranks.batches for b in batches}
