"""Cases A, B and H5, embedded: resuming on other topologies, and checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.corpora import COUNT, word_tokenizer, write
from tests.unit.small_recipes import quiet
from zephon import (
    Dataset,
    InMemoryShard,
    MixtureSpec,
    Pipeline,
    SampleBatch,
    StaticMixtureWorkSource,
    load_checkpoint,
    merge_checkpoints,
    save_checkpoint,
)
from zephon.errors import CheckpointError, CheckpointMismatch, TopologyError

ROOT = Path(__file__).parents[2]
Make = Callable[..., Pipeline]
Step = list[tuple[int, tuple[int, ...]]]
"""The ids of each lane's batch."""


def counted(folder: Path, lanes: int, size: int, **options: Any) -> Pipeline:
    source = StaticMixtureWorkSource([Dataset.from_path("count", folder)], None, seed=3)
    return Pipeline(source).batch(size).options(canonical_replicas=lanes, **options)


def run(make: Make, groups: int, steps: int, state: Any = None) -> tuple[list[Step], dict[str, Any]]:
    """So many global steps with `groups` groups side by side, and the state after them (of all groups, merged)."""
    pipelines = [quiet(lambda g=g: _restored(make(dp_degree=groups, dp_group_id=g), state)) for g in range(groups)]
    iterators = [quiet(lambda p=pipeline: iter(p)) for pipeline in pipelines]
    found: list[Step] = []
    for _ in range(steps):
        batches = [batch for iterator in iterators for batch in a_round(iterator)]
        if not batches:
            break
        found.append(sorted((batch.lane, tuple(batch["id"].tolist())) for batch in batches))
    return found, merge_checkpoints([pipeline.checkpoint() for pipeline in pipelines])


def _restored(pipeline: Pipeline, state: Any) -> Pipeline:
    return pipeline if state is None else pipeline.restore(json.loads(json.dumps(state)))


def a_round(batches: Iterator[SampleBatch]) -> Iterator[SampleBatch]:
    for batch in batches:
        yield batch
        if batch.ends_round:
            return


def ids(steps: list[Step]) -> list[int]:
    return [i for step in steps for _, batch in step for i in batch]


# A. Elastic resume


def test_case_A1_fewer_or_more_groups_after_a_resume_see_every_later_step_as_it_was_embedded(count):
    folder = count(1024, 16)
    make = lambda **options: counted(folder, 8, 4, **options)  # noqa: E731
    whole, _ = run(make, 1, 10**6)
    assert len(whole) == 32
    assert sorted(ids(whole)) == list(range(1024))
    for first, second in ((8, 4), (8, 2), (8, 1), (2, 8), (8, 3), (3, 5)):
        before, state = run(make, first, 10)
        after, _ = run(make, second, 10**6, state)
        assert before + after == whole
    _, state = run(make, 8, 10)
    with pytest.raises(TopologyError, match="dp_degree=9.*8 lanes"):
        iter(make(dp_degree=9, dp_group_id=0).restore(state))
    del state["lanes"]["5"]
    for claimed in (True, False):
        with pytest.raises(CheckpointError, match=r"lanes \[5\]"):
            make().restore({**state, "complete": claimed})


def test_case_A3_ranks_that_share_a_group_see_the_same_ids_however_many_they_are_embedded(count):
    """The replicas of a group are readers of one stream here: nothing of them reaches the plan or the position."""
    folder = count(1024, 8)
    make = lambda **options: counted(folder, 4, 4, **options)  # noqa: E731
    seen = []
    for replicas in (1, 2, 4):
        ranks = [run(make, 4, 10) for _ in range(replicas)]
        assert all(rank == ranks[0] for rank in ranks)
        seen.append(ranks[0])
    assert seen[0] == seen[1] == seen[2]
    assert sum(entry["records"] for entry in seen[0][1]["lanes"].values()) == 10 * 16


def test_case_A4_packing_and_a_resume_in_mid_epoch_repeat_no_token_embedded():
    rows = [{"input_ids": [i] * (i % 7 + 1)} for i in range(2000)]
    shards = {str(n): InMemoryShard(rows[n * 500 : n * 500 + 500]) for n in range(4)}

    def make(**options: Any) -> Pipeline:
        source = StaticMixtureWorkSource([Dataset.from_dict("docs", shards)], None, chunk_size=16)
        packed = Pipeline(source).pack_flat(16, algorithm="wrap", pad_token_id=2000).batch(2)
        return packed.options(canonical_replicas=4, flush_every_k_chunks=4, **options)

    whole = [batch["input_ids"].tobytes() for batch in make()]
    tokens = [token for batch in make() for token in batch["input_ids"].ravel().tolist() if token < 2000]
    assert all(tokens.count(i) <= i % 7 + 1 for i in range(0, 2000, 17))
    for runner, workers in (("inline", 1), ("threads", 1), ("threads", 8)):
        pipeline = make(runner=runner, max_workers=workers)
        before = [batch["input_ids"].tobytes() for batch in islice(iter(pipeline), 5 * 4)]
        state = pipeline.checkpoint()
        pipeline.close()
        resumed = make(runner=runner, max_workers=workers).restore(state)
        after = [batch["input_ids"].tobytes() for batch in islice(iter(resumed), 20 * 4)]
        resumed.close()
        assert before + after == whole[: 25 * 4]


SEEDED = """
import sys
from zephon import Dataset, MixtureSpec, Pipeline, StaticMixtureWorkSource
folder = sys.argv[1]
datasets = [Dataset.from_path(name, f"{folder}/{name}") for name in ("web pages", "code")]
source = StaticMixtureWorkSource(datasets, MixtureSpec({"web pages": 0.7, "code": 0.3}), seed=1)
def words(row):
    return {**row, "words": {word: len(word) for word in set(row["text"].split()) if word}["row"]}
pipeline = Pipeline(source).map_transform(words).shuffle(32).batch(2).options(canonical_replicas=4)
print(pipeline.plan().identity)
for batch, _ in zip(pipeline, range(400)):
    print(batch.lane, batch.digest, batch.samples)
"""


def test_case_A9_the_stream_does_not_depend_on_pythons_hash_seed_embedded(tmp_path):
    COUNT(600, 3, tmp_path / "web pages")
    COUNT(300, 2, tmp_path / "code")
    said = set()
    for seed in ("0", "12345", None):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "ZEPHON_CACHE": str(tmp_path / "cache")}
        environment.pop("PYTHONHASHSEED", None)
        if seed is not None:
            environment["PYTHONHASHSEED"] = seed
        done = subprocess.run(
            [sys.executable, "-c", SEEDED, str(tmp_path)], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.count("\n") > 300
        said.add(done.stdout)
    assert len(said) == 1


def test_case_A11_the_number_of_workers_does_not_change_the_stream_embedded(count):
    folder = count(2000, 10)

    def make(runner: str, workers: int) -> Pipeline:
        source = StaticMixtureWorkSource([Dataset.from_path("count", folder)], None, seed=3)
        made = Pipeline(source).map_transform(lambda row: row if row["id"] % 5 else None).shuffle(64).batch(4)
        return made.options(canonical_replicas=4, runner=runner, max_workers=workers)

    whole = [batch.digest for batch in make("inline", 1)]
    first = make("threads", 2)
    before = [batch.digest for batch in islice(iter(first), 57)]
    state = first.checkpoint()
    first.close()
    for runner, workers in (("inline", 1), ("threads", 1), ("threads", 8), ("threads", 3)):
        resumed = make(runner, workers).restore(state)
        assert before + [batch.digest for batch in resumed] == whole
        resumed.close()


# B. Checkpoints


def test_case_B1_resumed_again_and_again_the_segments_join_embedded(count, tmp_path):
    folder = count(2000, 4)
    make = lambda **options: counted(folder, 4, 5, **options)  # noqa: E731
    whole, _ = run(make, 1, 10**6)
    assert len(whole) == 100
    joined: list[Step] = []
    path = tmp_path / "state.json"
    for stop in (30, 40, 41, 70, 10**6):
        state = load_checkpoint(path) if joined else None
        if state is not None:
            assert _restored(make(), state).checkpoint() == state  # straight after the load, without a pull
            save_checkpoint(tmp_path / "again.json", make().restore(state).checkpoint())
            assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
        part, after = run(make, 1, stop - len(joined), state)
        joined += part
        save_checkpoint(path, after)
    assert joined == whole


def test_case_B2_whether_the_iterator_or_the_state_comes_first_the_same_batches_follow_embedded(count):
    folder = count(2000, 4)
    make = lambda: counted(folder, 4, 5)  # noqa: E731
    saved = make()
    list(islice(iter(saved), 12))
    state = saved.checkpoint()
    expected = [batch.digest for batch in islice(iter(saved), 5)]
    after = saved.checkpoint()

    def load_then_iterate(pipeline: Pipeline) -> Iterator[SampleBatch]:
        pipeline.restore(state)
        return iter(pipeline)

    def iterate_then_load(pipeline: Pipeline) -> Iterator[SampleBatch]:
        batches = iter(pipeline)
        pipeline.restore(state)
        return batches

    def pull_then_load(pipeline: Pipeline) -> Iterator[SampleBatch]:
        batches = iter(pipeline)
        next(batches)
        pipeline.restore(state)
        return batches

    for order in (load_then_iterate, iterate_then_load, pull_then_load):
        pipeline = make()
        batches = order(pipeline)
        assert [next(batches).digest for _ in range(5)] == expected, order.__name__
        moved = {lane: entry["records"] for lane, entry in pipeline.checkpoint()["lanes"].items()}
        assert moved == {lane: entry["records"] for lane, entry in after["lanes"].items()}


@pytest.mark.parametrize("groups", [1, 2])
def test_case_B3_a_state_at_the_end_of_an_epoch_loses_no_epoch_embedded(count, groups):
    folder = count(96, 4)
    make = lambda **options: counted(folder, 8, 4, **options)  # noqa: E731

    def epochs(state: Any) -> tuple[list[int], list[int]]:
        """Steps of each epoch to the end of epoch 3, and the epochs' numbers."""
        pipelines = [_restored(make(dp_degree=groups, dp_group_id=g), state) for g in range(groups)]
        lengths, numbers = [], []
        while (number := pipelines[0].epoch) < 4:
            numbers.append(number)
            each = {sum(batch.ends_round for batch in pipeline) for pipeline in pipelines}
            assert len(each) == 1
            lengths += each
        return lengths, numbers

    def state_after(steps: int, seen_end: bool = False) -> Any:
        pipelines = [make(dp_degree=groups, dp_group_id=g) for g in range(groups)]
        for pipeline in pipelines:
            batches = iter(pipeline)
            for _ in range(min(steps, 3)):
                assert list(a_round(batches))
            if seen_end or steps > 3:
                assert next(batches, None) is None
            for _ in range(steps - 3):
                assert list(a_round(iter(pipeline)))
        return merge_checkpoints([pipeline.checkpoint() for pipeline in pipelines])

    assert epochs(None) == ([3, 3, 3, 3], [0, 1, 2, 3])
    assert epochs(state_after(3)) == ([3, 3, 3], [1, 2, 3])
    assert epochs(state_after(3, seen_end=True)) == ([3, 3, 3], [1, 2, 3])
    assert epochs(state_after(4)) == ([2, 3, 3], [1, 2, 3])


def test_case_B4_epochs_after_a_resume_in_mid_epoch_are_whole_embedded(count):
    folder = count(128, 4)
    make = lambda **options: counted(folder, 2, 1, **options)  # noqa: E731
    _, state = run(make, 1, 61)
    pipeline = make().restore(state)
    assert [sum(batch.ends_round for batch in pipeline) for _ in range(3)] == [3, 64, 64]


def test_case_B11_other_data_under_an_old_checkpoint_are_refused_by_name_embedded(tmp_path):
    COUNT(400, 4, tmp_path / "web")
    COUNT(200, 2, tmp_path / "code")
    words = word_tokenizer(tmp_path / "words.json", ["row", *map(str, range(400))])

    def make(root: Path = tmp_path, weight: float = 0.7, tokenizer: Path = words) -> Pipeline:
        datasets = [Dataset.from_path(name, root / name) for name in ("web", "code")]
        source = StaticMixtureWorkSource(datasets, MixtureSpec({"web": weight, "code": 1 - weight}))
        made = Pipeline(source).tokenize(tokenizer_id=tokenizer, field="text", special_tokens="none")
        return made.batch(2).options(canonical_replicas=4)

    pipeline = make()
    list(islice(iter(pipeline), 24))
    state = json.loads(json.dumps(pipeline.checkpoint()))
    expected = [batch.digest for batch in islice(iter(pipeline), 8)]

    def refused(setting: str, named: str, **arguments: Any) -> None:
        with pytest.raises(CheckpointMismatch) as caught:
            make(**arguments).restore(state)
        assert named in str(caught.value)
        assert f"allow_changed=['{setting}']" in str(caught.value)
        next(iter(make(**arguments).restore(state, allow_changed=[setting])))

    other = word_tokenizer(tmp_path / "other.json", ["row", *map(str, range(399))])
    refused("operators", "steps[tokenize].tokenizer", tokenizer=other)
    refused("mixture", "mixture.web", weight=0.6)
    (tmp_path / "web").rename(tmp_path / "moved")  # (c): only the name of the folder changes
    (tmp_path / "all").mkdir()
    for name, now in (("moved", "web"), ("code", "code")):
        (tmp_path / name).rename(tmp_path / "all" / now)
    root = tmp_path / "all"
    assert [batch.digest for batch in islice(iter(make(root=root).restore(state)), 8)] == expected
    rewritten = root / "web" / "part-00002.jsonl"
    rewritten.write_text(rewritten.read_text().replace("row 250 ", "row 251 "))
    refused("datasets", "datasets[web].digest", root=root)
    write(root / "web" / "part-00004.jsonl", [{"id": 400, "text": "row 1"}])
    refused("datasets", "datasets[web].shards", root=root)
    with pytest.raises(CheckpointMismatch, match=r"datasets\[web\]\.rows: checkpoint 400, recipe 401"):
        make(root=root).restore(state)


def test_case_H5_a_checkpoint_is_as_small_at_step_10000_as_at_step_1_embedded(amount):
    datasets = [
        Dataset.from_dict(f"d{n}", {str(s): InMemoryShard([{"id": s}]) for s in range(1000)}) for n in range(10)
    ]
    weights = MixtureSpec({f"d{n}": n + 1 for n in range(10)})

    def make() -> Pipeline:
        source = StaticMixtureWorkSource(datasets, weights, exhausted_policy="repeat", shuffle_block_size="global")
        return Pipeline(source).shuffle(10_000).batch(1).options(canonical_replicas=4)

    pipeline = make()
    batches, sizes = iter(pipeline), {}
    last = amount(400, 10_000)
    for step in range(1, last + 1):
        for _ in range(4):
            next(batches)
        if step in (1, 100, last):
            sizes[step] = len(json.dumps(pipeline.checkpoint()))
    assert max(sizes.values()) < 16_384
    assert max(sizes.values()) < 1.2 * min(sizes.values())


def test_a_checkpoint_of_64_lanes_is_under_16_kib():
    datasets = [Dataset.from_dict(name, {"a": InMemoryShard([{"id": 1}] * 5000)}) for name in ("web", "code", "books")]
    source = StaticMixtureWorkSource(datasets, MixtureSpec({"web": 5, "code": 3, "books": 2}))
    pipeline = Pipeline(source).shuffle(100).batch(3).options(canonical_replicas=64)
    list(islice(iter(pipeline), 64 * 20 + 5))
    assert len(json.dumps(pipeline.checkpoint(), indent=1)) < 16 * 1024


# K. Many ranks


def test_case_K6_fewer_shards_than_ranks_change_nothing_embedded(count):
    """Lanes are cut by record, not by shard."""

    def steps(shards: int) -> list[Step]:
        source = StaticMixtureWorkSource([Dataset.from_path("count", count(1000, shards))], None, shuffle_shards=False)
        pipeline = lambda **options: Pipeline(source).batch(4).options(canonical_replicas=8, **options)  # noqa: E731
        return run(pipeline, 8, 10)[0]

    assert steps(1) == steps(3) == steps(8)
