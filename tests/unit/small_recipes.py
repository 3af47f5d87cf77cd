"""Recipes for property tests over whole pipelines, small enough that a hundred of them run in seconds.

`recipes()` draws work sources and operators; `reference` is what the lanes of one are, window by window; `Lockstep`
runs all data-parallel groups of one side by side, one batch of one group at a time.
"""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from tests.corpora import word_tokenizer
from zephon import Dataset, InMemoryShard, MixtureSpec, Pipeline, StaticMixtureWorkSource, merge_checkpoints
from zephon.batches import Batch
from zephon.columns import Block, canonical
from zephon.embedded import EmbeddedRun
from zephon.frontiers import Checkpoint, complete_checkpoint
from zephon.lanes import released_rounds
from zephon.plan import Plan
from zephon.runners import make_pool
from zephon.windows import TASK_SAMPLES, Front, run_window, window_of

WORDS = [f"w{i}" for i in range(40)]


def folder_of_this_process(prefix: str) -> Path:
    """A folder that is removed when this process ends."""
    folder, process = Path(mkdtemp(prefix=prefix)), os.getpid()
    atexit.register(lambda: os.getpid() == process and rmtree(folder, ignore_errors=True))  # not a forked child's end
    return folder


@lru_cache(maxsize=1)
def tokenizer() -> str:
    """A word-level tokenizer in a folder of this process."""
    return str(word_tokenizer(folder_of_this_process("zephon-words-") / "tokenizer.json", WORDS))


def row_of(name: str, number: int) -> dict[str, Any]:
    """A row that says where it is from; texts have 0 to 12 words."""
    return {"id": number, "of": name, "text": " ".join(WORDS[(number * 5 + j) % 40] for j in range(number * 7 % 13))}


def dataset(name: str, rows: int, shards: int) -> Dataset:
    bounds = [rows * shard // shards for shard in range(shards + 1)]
    return Dataset.from_dict(
        name,
        {
            f"{name}-{shard}": InMemoryShard([row_of(name, i) for i in range(bounds[shard], bounds[shard + 1])])
            for shard in range(shards)
        },
    )


def keep_most(row: dict[str, Any]) -> dict[str, Any] | None:
    """A filter."""
    return None if row["id"] % 5 == 0 else {**row, "twice": row["id"] * 2}


def keep_odd_places(row: dict[str, Any]) -> dict[str, Any] | None:
    return row if row["id"] % 3 else None


@dataclass(frozen=True)
class Recipe:
    """The settings of a pipeline; `pipeline()` makes a new one."""

    rows: tuple[int, ...] = (60,)
    weights: tuple[int, ...] = (1,)
    source: tuple[tuple[str, Any], ...] = ()
    steps: tuple[str, ...] = ()
    lanes: int = 4
    flush_every: int = 2
    drop_last: bool = True
    even_ends: bool = True
    strategy: str = "contiguous"

    def pipeline(self, microbatch_size: int = 2, **options: Any) -> Pipeline:
        datasets = [dataset(f"d{i}", rows, 1 + rows % 3) for i, rows in enumerate(self.rows)]
        mixture = MixtureSpec({f"d{i}": weight for i, weight in enumerate(self.weights)})
        pipeline = Pipeline(StaticMixtureWorkSource(datasets, mixture, **dict(self.source)))
        for step in self.steps:
            STEPS[step](pipeline)
        pipeline.batch(microbatch_size, drop_last=self.drop_last)
        return pipeline.options(
            canonical_replicas=self.lanes,
            flush_every_k_chunks=self.flush_every,
            even_ends=self.even_ends,
            mapping_strategy=self.strategy,
            **options,
        )

    def plan(self, microbatch_size: int = 2) -> Plan:
        return self.pipeline(microbatch_size).plan()


STEPS: dict[str, Callable[[Pipeline], Pipeline]] = {
    "filter": lambda p: p.map_transform(keep_most),
    "late_filter": lambda p: p.map_transform(keep_odd_places),
    "shuffle": lambda p: p.shuffle(buffer_size=7, seed=3),
    "tokenize": lambda p: p.tokenize(tokenizer_id=tokenizer(), field="text", special_tokens="eos", eos_token_id=42),
    "split": lambda p: p.tokenize(
        tokenizer_id=tokenizer(), field="text", special_tokens="none", max_length=4, split_long_samples=True
    ),
    "wrap": lambda p: p.pack_flat(16, algorithm="wrap"),
    "first_fit": lambda p: p.pack_flat(16, algorithm="first_fit", num_bins=3),
    "best_fit": lambda p: p.pack_flat(16, algorithm="best_fit", num_bins=3),
    "apart": lambda p: p.pack_flat(16, algorithm="best_fit_wrap", num_bins=3, homogeneity="full", shuffle_seed=1),
    "whole": lambda p: p.pack_sequences(16, algorithm="best_fit", num_bins=2, candidate_pool_size=3),
    "mixture": lambda p: p.ensure_mixture(max_buffer_size=9),
}

STEP_LISTS: list[tuple[str, ...]] = [
    (),
    ("shuffle",),
    ("filter",),
    ("shuffle", "late_filter"),
    ("filter", "shuffle", "late_filter", "shuffle"),
    ("tokenize",),
    ("split", "shuffle"),
    ("filter", "tokenize", "wrap", "shuffle"),
    ("tokenize", "first_fit"),
    ("shuffle", "tokenize", "best_fit", "shuffle"),
    ("tokenize", "wrap"),
    ("mixture", "filter"),
    ("tokenize", "apart", "mixture", "shuffle"),
    ("tokenize", "whole"),
]

ENDS: list[dict[str, Any]] = [
    {},
    {"stop_after_passes": 2},
    {"exhausted_policy": "stop"},
    {"exhausted_policy": "repeat"},
]


@st.composite
def recipes(draw: st.DrawFn, **fixed: Any) -> Recipe:
    rows = tuple(draw(st.lists(st.integers(20, 90), min_size=1, max_size=2)))
    source = {
        "chunk_size": draw(st.sampled_from([1, 3, 5, 8])),
        "seed": draw(st.integers(0, 3)),
        "shuffle_shards": draw(st.booleans()),
        "shuffle_block_size": draw(st.sampled_from([None, 7, "global"])),
        "lane_assignment": draw(st.sampled_from(["permute", "modulo"])),
        **draw(st.sampled_from(ENDS)),
    }
    settings = {
        "rows": rows,
        "weights": tuple(draw(st.integers(1, 3)) for _ in rows),
        "source": tuple(source.items()),
        "steps": draw(st.sampled_from(STEP_LISTS)),
        "lanes": draw(st.sampled_from([1, 2, 3, 4, 8])),
        "flush_every": draw(st.integers(1, 4)),
        "drop_last": draw(st.booleans()),
        "strategy": draw(st.sampled_from(["contiguous", "interleaved"])),
    }
    return Recipe(**{**settings, **fixed})


def reference(plan: Plan, lane: int, epoch: int = 0, most: int = 10**9) -> Block:
    """The lane's first `most` records as `run_window` has them."""
    blocks: list[Block] = []
    held = number = 0
    while held < most and window_of(plan, epoch, lane, number) is not None:
        blocks += run_window(plan, epoch, lane, number)
        held = sum(map(len, blocks))
        number += 1
    whole = Block.concat(blocks)
    return whole.slice(0, min(most, len(whole)))


def last_stand(plan: Plan, totals: dict[int, int], most: int = 0) -> int:
    """Where every lane stands at the end of an epoch that goes on from a state with at most `most` records."""
    size, drop_last = plan.microbatch_size, plan.settings.drop_last
    return most + released_rounds(totals, totals, most, size, drop_last)[0] * size


def expected_ends(plan: Plan, totals: dict[int, int], most: int = 0) -> dict[int, int]:
    """The record at which each lane's delivery ends then."""
    return {lane: min(total, last_stand(plan, totals, most)) for lane, total in totals.items()}


def digest(block: Block) -> str:
    """Of the records alone."""
    return Batch(canonical(block), lane=0, first_record=0).digest


def quiet(run: Callable[[], Any]) -> Any:
    """`run()` without the warnings that uneven splits and groups' own ends give."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return run()


class Lockstep:
    """All groups of a run, in this process."""

    def __init__(
        self,
        recipe: Recipe,
        dp: int,
        microbatch_size: int = 2,
        state: dict[str, Any] | None = None,
        *,
        runner: str = "inline",
        workers: int = 1,
        task_samples: int = TASK_SAMPLES,
    ) -> None:
        self.pipeline = recipe.pipeline(microbatch_size)
        checkpoint: Checkpoint | None = complete_checkpoint(state) if state else None
        self.plan = self.pipeline.plan(checkpoint=checkpoint)
        self.pools = [make_pool(runner, Front(self.plan), workers) for _ in range(dp)]
        self.groups: list[EmbeddedRun] = [
            quiet(
                lambda group=group: EmbeddedRun(
                    self.plan,
                    self.pools[group],
                    dp_degree=dp,
                    group=group,
                    strategy=recipe.strategy,
                    checkpoint=checkpoint,
                    task_samples=task_samples,
                )
            )
            for group in range(dp)
        ]
        self.records: dict[int, list[Block]] = {lane: [] for lane in range(self.plan.lanes)}
        self.begins: dict[int, int] = {
            lane: (checkpoint.lanes[lane].records if checkpoint else 0) for lane in self.records
        }

    def take(self, group: int) -> bool:
        """One batch of a group; False at its end."""
        batch = self.groups[group].next_batch()
        if batch is None:
            return False
        assert batch.lane in self.groups[group].lanes
        assert batch.first_record == self.begins[batch.lane] + sum(map(len, self.records[batch.lane]))
        self.records[batch.lane].append(batch.block)
        return True

    def rounds(self, most: int) -> int:
        """Whole rounds of all groups, at most `most`. Returns how many there were."""
        for number in range(most):
            for group, run in enumerate(self.groups):
                while run.turns.rounds == number:
                    if not self.take(group):
                        return number
        return most

    def batches(self, turns: Iterable[int], last: int) -> None:
        """One batch at a time of the groups named, no lane beyond where it stands at `last`."""
        for turn in turns:
            run = self.groups[turn % len(self.groups)]
            if run.turns.turn()[2] <= last:
                self.take(turn % len(self.groups))

    def to_the_end(self) -> None:
        for group in range(len(self.groups)):
            while self.take(group):
                pass

    def lane(self, number: int) -> Block:
        return Block.concat(self.records[number])

    def checkpoint(self) -> dict[str, Any]:
        return merge_checkpoints([run.checkpoint() for run in self.groups])

    def close(self) -> None:
        for pool in self.pools:
            pool.close()


def examples(quick: int) -> settings:
    """So many drawn examples in `make test`, half of them in CI, and thirty times as many in `make soak`."""
    usual = settings.default.max_examples
    return settings(max_examples=30 * quick if usual >= 1000 else quick if usual > 10 else -(-quick // 2))
