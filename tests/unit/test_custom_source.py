"""A user's own work source: what its lanes hold is its own chunks, wherever the run is stopped and resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.corpora import COUNT
from tests.unit.own_sources import ROWS, SOURCES, Adaptive, OwnRecipe, datasets
from tests.unit.small_recipes import (
    STEP_LISTS,
    Lockstep,
    digest,
    examples,
    expected_ends,
    last_stand,
    reference,
)
from zephon import Dataset, Pipeline, WorkChunk, WorkSource
from zephon.columns import Block
from zephon.custom_source import interleaved
from zephon.errors import CheckpointError, CheckpointMismatch, RunFailed, SettingError
from zephon.frontiers import Frontier, frontier_at
from zephon.lane_windows import lane_windows
from zephon.producer import LaneProducer
from zephon.source_state import STATE_LIMIT
from zephon.testing import assert_resumes_exactly
from zephon.verify import verify
from zephon.windows import Front, run_window

TOPOLOGIES = st.sampled_from([8, 4, 3, 2, 1])


@st.composite
def own_recipes(draw: st.DrawFn) -> OwnRecipe:
    return OwnRecipe(
        source=draw(st.sampled_from(sorted(SOURCES))),
        chunks=draw(st.integers(1, 14)),
        seed=draw(st.integers(0, 3)),
        steps=draw(st.sampled_from([steps for steps in STEP_LISTS if "mixture" not in steps])),  # it has none to keep
        lanes=draw(st.sampled_from([1, 2, 3, 4, 8])),
        flush_every=draw(st.integers(1, 4)),
        drop_last=draw(st.booleans()),
        strategy=draw(st.sampled_from(["contiguous", "interleaved"])),
    )


def lanes_of(recipe: OwnRecipe, epoch: int = 0) -> dict[int, Block]:
    """The reference's lanes. One has a record at least: an epoch without any is an error."""
    plan = recipe.plan()
    lanes = {lane: reference(plan, lane, epoch) for lane in range(plan.lanes)}
    assume(any(map(len, lanes.values())))
    return lanes


def assert_lanes(parts: dict[int, list[Block]], lanes: dict[int, Block], ends: dict[int, int]) -> None:
    for lane, whole in lanes.items():
        got = Block.concat(parts[lane])
        assert len(got) == ends[lane], f"lane {lane}"
        assert digest(got) == digest(whole.slice(0, ends[lane])), f"lane {lane}"


@examples(15)
@given(own_recipes(), st.integers(0, 7), st.sampled_from([0, 1]))
def test_a_lane_holds_the_samples_of_its_own_sources_chunks_in_order(recipe, lane, epoch):
    """Asked right here, chunk by chunk, with nothing of ours in between but the order inside a chunk."""
    plan = recipe.plan()
    lane %= plan.lanes
    own = SOURCES[recipe.source](recipe.chunks, recipe.seed).clone_for_lane(lane, plan.lanes)
    own.set_epoch(epoch)
    expected: list[tuple[int, int, int]] = []
    while (chunk := own.next_chunk()) is not None:
        ids = list(own.datasets_by_id)
        flat = [
            tuple(p.tolist()) if isinstance(p, np.ndarray) else (ids.index(p[0]), *p[1:])
            for pointers in chunk.components.values()
            for p in pointers
        ]
        order = interleaved([len(pointers) for pointers in chunk.components.values()], chunk.seed)
        assert sorted(order.tolist()) == list(range(len(flat)))
        expected += [flat[place] for place in order.tolist()]
    windows, found, at = lane_windows(plan, epoch, lane), [], 0
    while (window := windows.next()) is not None:
        assert window.low == at
        at = window.high
        found += [tuple(p) for p in window.pointers.tolist()]
    assert found == expected


LEGS = st.lists(
    st.tuples(TOPOLOGIES, st.integers(1, 4), st.lists(st.integers(0, 7), max_size=25)), min_size=1, max_size=3
)


@examples(10)
@given(own_recipes(), LEGS, TOPOLOGIES)
def test_stopped_anywhere_and_resumed_on_any_groups_every_lane_equals_the_reference(recipe, legs, last_dp):
    lanes = lanes_of(recipe)
    totals = {lane: len(block) for lane, block in lanes.items()}
    parts: dict[int, list[Block]] = {lane: [] for lane in lanes}
    state = None
    for dp, size, turns in legs:
        run = Lockstep(recipe, min(dp, recipe.lanes), size, state)
        most = max(run.begins.values())
        run.batches(turns, last_stand(run.plan, totals, most))
        state = json.loads(json.dumps(run.checkpoint()))
        again = Lockstep(recipe, 1, size, state)
        assert json.dumps(again.groups[0].checkpoint()) == json.dumps(state), "saved straight after a load"
        for lane, blocks in run.records.items():
            parts[lane] += blocks
        if state["epoch"] != 0:
            assert_lanes(parts, lanes, expected_ends(run.plan, totals, most))
            return
    last = Lockstep(recipe, min(last_dp, recipe.lanes), 2, state)
    stand = last_stand(last.plan, totals, max(last.begins.values()))
    if len(last.groups) == 1:
        last.to_the_end()
    else:
        last.batches([group for _ in range(100) for group in range(8)], stand)
    for lane, blocks in last.records.items():
        parts[lane] += blocks
    assert_lanes(parts, lanes, expected_ends(last.plan, totals, max(last.begins.values())))


@examples(10)
@given(own_recipes(), st.integers(0, 7), st.integers(0, 60), st.integers(0, 20), st.data())
def test_from_any_frontier_stale_or_not_the_rest_is_the_same(recipe, lane, records, stale, data):
    plan = recipe.plan()
    lane %= plan.lanes
    whole = LaneProducer(plan, 0, lane, Frontier(), 5)
    _produce(whole)
    stream = whole.stream.take(10**6)
    records = min(records, len(stream))
    announced = [a for a in whole.announcements if a.records <= records]
    place = data.draw(st.integers(max(0, len(announced) - 1 - stale), len(announced) - 1))
    frontier = frontier_at(announced[: place + 1], records)
    assert bool(frontier.source) == bool(frontier.chunk), "the state rides with every window but the first"
    again = LaneProducer(recipe.plan(), 0, lane, frontier, 3)
    _produce(again)
    assert digest(again.stream.take(10**6)) == digest(stream.slice(records, len(stream)))
    assert again.announcements == whole.announcements[place:]


def _produce(producer: LaneProducer) -> None:
    front = Front(producer.plan)
    front.setup()
    while (task := producer.next_task()) is not None:
        producer.accept(task[0], front.run(task[1]))


@examples(10)
@given(own_recipes(), st.integers(0, 7), st.integers(0, 5), st.sampled_from([1, 3, 512]))
def test_a_window_computed_alone_equals_the_window_in_its_stream(recipe, lane, number, task_samples):
    plan = recipe.plan()
    lane %= plan.lanes
    before = sum(len(block) for w in range(number) for block in run_window(plan, 0, lane, w))
    alone = Block.concat(list(run_window(recipe.plan(), 0, lane, number, task_samples=task_samples)))
    stream = reference(plan, lane, most=before + len(alone))
    assert digest(alone) == digest(stream.slice(before, before + len(alone)))


@examples(6)
@given(own_recipes(), st.sampled_from(["inline", "threads"]), st.integers(1, 4), st.sampled_from([1, 2, 5, 1000]))
def test_no_execution_setting_shows_in_the_data(recipe, runner, workers, task_samples):
    lanes = lanes_of(recipe)
    run = Lockstep(recipe, 1, runner=runner, workers=workers, task_samples=task_samples)
    try:
        run.to_the_end()
        assert_lanes(run.records, lanes, expected_ends(run.plan, {lane: len(block) for lane, block in lanes.items()}))
    finally:
        run.close()


@pytest.mark.parametrize("source", sorted(SOURCES))
def test_every_epoch_begins_with_fresh_sources_which_are_told_its_number(source):
    recipe = OwnRecipe(source=source, chunks=6)
    run = Lockstep(recipe, 1)
    for epoch in range(3):
        run.records = {lane: [] for lane in run.records}
        run.to_the_end()
        lanes = lanes_of(recipe, epoch)
        assert_lanes(run.records, lanes, expected_ends(run.plan, {lane: len(block) for lane, block in lanes.items()}))
        run.groups[0].end_epoch()
    assert digest(lanes_of(recipe, 0)[0]) != digest(lanes_of(recipe, 1)[0])


@pytest.mark.parametrize("source", sorted(SOURCES))
def test_verify_and_the_public_checker_accept_a_source_with_state(source):
    recipe = OwnRecipe(source=source, chunks=12, steps=("filter", "shuffle"))
    assert verify(recipe.pipeline(), dp=[4, 2, 1], steps=8).ok
    assert_resumes_exactly(recipe.pipeline, batches=10)


def test_a_frontier_has_the_state_as_the_source_gave_it_and_the_lanes_count_of_samples():
    run = Lockstep(OwnRecipe(source="generated", chunks=12, flush_every=2, lanes=2), 1)
    run.rounds(12)
    state = run.checkpoint()
    for lane, entry in state["lanes"].items():
        source = entry["source"]
        own = SOURCES["generated"](12, 0).clone_for_lane(int(lane), 2)
        own.set_epoch(0)
        samples = 0
        while own.done < entry["chunk"]:
            samples += sum(map(len, own.next_chunk().components.values()))
        assert source["state"] == own.state_dict()
        assert source["samples"] == samples
    assert json.loads(json.dumps(state)) == state


# Identity


class Fixed(WorkSource):
    """Told what to do: hands out `chunks`, whatever they are."""

    def __init__(self, chunks: list[Any], *, state: Any = None, endless: bool = False) -> None:
        self.datasets_by_id = datasets()
        self.chunks, self.state, self.endless, self.done = chunks, state, endless, 0

    def clone_for_lane(self, lane_id: int, canonical_replicas: int) -> WorkSource:
        return Fixed(self.chunks, state=self.state, endless=self.endless)

    def next_chunk(self) -> Any:
        if self.done == len(self.chunks):
            return None
        self.done += 1
        chunk = self.chunks[self.done - 1]
        if isinstance(chunk, Exception):
            raise chunk
        return chunk

    def state_dict(self) -> Any:
        return {"done": self.done} if self.state is None else self.state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.done = state["done"]


class Described(Fixed):
    def describe(self) -> dict[str, Any]:
        return {"chunks": len(self.chunks)}


def identity(source: WorkSource) -> dict[str, Any]:
    return Pipeline(source).batch(1).options(canonical_replicas=2).plan().identity


def test_the_identity_covers_code_and_settings_but_neither_paths_nor_what_was_read(tmp_path):
    def of(chunks: int, folder: str) -> dict[str, Any]:
        by_id = {"d": Dataset.from_path("d", COUNT(40, 2, tmp_path / folder))}
        return identity(Adaptive(by_id, chunks))

    one = of(3, "one")
    assert of(3, "other") == one
    assert of(4, "one")["source"] != one["source"]
    assert one["mixture"] is None
    assert [(entry["name"], entry["rows"]) for entry in one["datasets"]] == [("d", 40)]
    assert identity(Described([]))["source"]["settings"] == {"chunks": 0, "seed": 0}
    assert identity(Described([1]))["source"]["digest"] == identity(Described([]))["source"]["digest"]
    assert identity(Fixed([]))["source"] != identity(Described([]))["source"]


def test_the_identity_is_that_of_the_source_as_it_was_given_even_if_it_changes_while_lanes_are_made():
    class Counts(Fixed):
        def clone_for_lane(self, lane_id: int, canonical_replicas: int) -> WorkSource:
            self.state = {"asked": lane_id}
            return Fixed([CHUNK] * 3)

    pipeline = Pipeline(Counts([])).batch(1).options(canonical_replicas=2)
    batches = iter(pipeline)
    next(batches)
    state = pipeline.checkpoint()
    rest = [batch.digest for batch in batches]
    assert [batch.digest for batch in pipeline.restore(state)] == rest


def test_a_workers_copy_of_a_plan_leaves_the_users_source_behind():
    class Heavy(Fixed):
        def __reduce__(self):
            raise TypeError("cannot be pickled")

    plan = Pipeline(Heavy([CHUNK])).batch(1).options(canonical_replicas=1).plan()
    front = cloudpickle.loads(cloudpickle.dumps(Front(plan)))
    assert front.plan.dataset_names == tuple(ROWS)


def test_a_pipeline_that_was_pickled_whole_runs_with_its_source():
    pipeline = OwnRecipe().pipeline()
    again = cloudpickle.loads(cloudpickle.dumps(pipeline))
    assert [batch.digest for batch in again] == [batch.digest for batch in pipeline]


def test_a_checkpoint_of_another_source_is_refused_unless_that_is_allowed():
    state = _state_of(Fixed([CHUNK] * 9))
    with pytest.raises(CheckpointMismatch, match=r"source\.digest"):
        _pipeline(Fixed([CHUNK] * 8)).restore(state)
    changed = _pipeline(Fixed([CHUNK] * 4 + [OTHER] * 3)).restore(state, allow_changed=["source"])
    assert len(list(changed)) == 2 * 7 * 2 - 8 * 2


# What a source may do wrong


CHUNK = WorkChunk({"all": [("a", 0, 1), ("b", 0, 2)]})
OTHER = WorkChunk({"all": [("b", 0, 3), ("c", 0, 2)]})


def _pipeline(source: WorkSource, **options: Any) -> Pipeline:
    return Pipeline(source).batch(1).options(**{"canonical_replicas": 2, "flush_every_k_chunks": 2, **options})


def _state_of(source: WorkSource, batches: int = 16) -> dict[str, Any]:
    pipeline = _pipeline(source)
    stream = iter(pipeline)
    for _ in range(batches):
        next(stream)
    return pipeline.checkpoint()


@pytest.mark.parametrize(
    ("chunk", "said"),
    [
        ("no chunk", "next_chunk returned 'no chunk'"),
        (WorkChunk([("a", 0, 0)]), "next_chunk returned a WorkChunk of"),
        (WorkChunk({}), "it has no sample"),
        (WorkChunk({"x": [], "y": []}), "it has no sample"),
        (WorkChunk({"x": np.empty((0, 3), np.int64)}), "it has no sample"),
        (WorkChunk({"x": [("a", 0, 1), ("z", 0, 1)]}), "component 'x' names the dataset 'z'; .* 'a', 'b', 'c'"),
        (WorkChunk({"x": [("c", 0, 0), ("c", 0, 7)]}), "row 7 of shard 0 of dataset 'c', which has .* rows"),
        (WorkChunk({"x": [("a", 9, 0)]}), "shard 9 of dataset 'a', which has 3"),
        (WorkChunk({"x": [("a", -1, 0)]}), "shard -1 of dataset 'a'"),
        (WorkChunk({"x": [("a", 0, -1)]}), "row -1 of shard 0"),
        (WorkChunk({"x": np.array([[3, 0, 0]])}), "dataset number 3"),
        (WorkChunk({"x": [("a", 0, 0), ("a", 0)]}), r"component 'x': pointer 1 is \('a', 0\)"),
        (WorkChunk({"x": [("a", 0, 1.5)]}), "pointer 0 is"),
        (WorkChunk({"x": [("a", 0, "1")]}), "pointer 0 is"),
        (WorkChunk({"x": ["abc"]}), "pointer 0 is|names the dataset 'a'"),
        (WorkChunk({"x": 5}), "component 'x': its pointers are 5"),
        (WorkChunk({"x": np.zeros((2, 2), np.int64)}), "an array of int64"),
        (WorkChunk({"x": np.zeros((2, 3))}), "an array of float64"),
        (WorkChunk({"x": [("a", 0, 1)]}, seed="s"), "its seed is 's'"),
        (KeyError("lost"), r"next_chunk raised KeyError: 'lost' \(.*test_custom_source.py:\d+\)"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_a_wrong_chunk_is_an_error_that_names_the_lane_and_the_chunk(chunk, said):
    with pytest.raises(RunFailed, match=f"Fixed: lane 0, chunk 1 of epoch 0: .*(?:{said})"):
        list(_pipeline(Fixed([CHUNK, chunk]), canonical_replicas=1))


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ([], r"it is \[\], not a dict"),
        ({1: 2}, "it has the key 1, which JSON would give back as a str"),
        ({"a": {"b": (1, 2)}}, r"\['a'\]\['b'\] is of type tuple: use a list"),
        ({"a": [0, np.int64(3)]}, r"\['a'\]\[1\] is of type int64: use item\(\)"),
        ({"a": np.arange(3)}, r"\['a'\] is of type ndarray: use tolist\(\)"),
        ({"a": float("nan")}, "nan, which JSON does not have"),
        ({"a": "x" * STATE_LIMIT}, f"bytes of JSON, and at most {STATE_LIMIT}"),
    ],
    ids=["list", "key", "tuple", "scalar", "array", "nan", "large"],
)
def test_a_state_that_a_checkpoint_would_not_give_back_is_an_error_before_the_first_batch(state, said):
    with pytest.raises(RunFailed, match=f"Fixed: lane 0, chunk 0 of epoch 0: .*{said}"):
        next(iter(_pipeline(Fixed([CHUNK], state=state))))


def test_a_source_that_forgets_part_of_its_state_is_found_out_when_it_is_resumed():
    class Forgets(Adaptive):
        def clone_for_lane(self, lane_id: int, canonical_replicas: int) -> Forgets:
            return Forgets(self.datasets_by_id, self.chunks, lane_id, canonical_replicas)

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.done = state["done"]

    state = _state_of(Forgets(datasets(), 20), 40)
    assert all(entry["chunk"] for entry in state["lanes"].values())
    with pytest.raises(CheckpointMismatch, match=r"lane 0, chunks \d+ to \d+: Forgets hands out other samples"):
        _pipeline(Forgets(datasets(), 20)).restore(state)


def test_a_state_that_is_lost_or_that_the_source_refuses_is_a_checkpoint_error():
    state = _state_of(Fixed([CHUNK] * 9))
    lost = json.loads(json.dumps(state))
    del lost["lanes"]["1"]["source"]
    with pytest.raises(CheckpointError, match=r"lane 1: the checkpoint lacks the state of Fixed .*: lanes\.1\.source"):
        _pipeline(Fixed([CHUNK] * 9)).restore(lost)
    odd = json.loads(json.dumps(state))
    odd["lanes"]["0"]["source"]["state"] = {}
    with pytest.raises(CheckpointError, match="lane 0: Fixed.load_state_dict raised KeyError: 'done'"):
        _pipeline(Fixed([CHUNK] * 9)).restore(odd)
    odd["lanes"]["0"]["source"] = [1]
    with pytest.raises(CheckpointError, match="malformed checkpoint: lane 0: the work source's state"):
        _pipeline(Fixed([CHUNK] * 9)).restore(odd)


def test_a_clone_that_is_no_source_or_the_source_itself_is_refused():
    class Itself(Fixed):
        def clone_for_lane(self, lane_id: int, canonical_replicas: int) -> WorkSource:
            return self

    class Nothing(Fixed):
        def clone_for_lane(self, lane_id: int, canonical_replicas: int) -> Any:
            return None

    class Raises(Fixed):
        def clone_for_lane(self, lane_id: int, canonical_replicas: int) -> WorkSource:
            raise ValueError("no lanes")

    for source, said in ((Itself, "itself"), (Nothing, "None"), (Raises, "ValueError: no lanes")):
        with pytest.raises(RunFailed, match=rf"{source.__name__}.clone_for_lane.*\(0, 2\).* {said}"):
            next(iter(_pipeline(source([CHUNK]))))


def test_what_is_no_work_source_is_refused_when_the_pipeline_is_made():
    class Bare(Fixed):
        def __init__(self, by_id: Any) -> None:
            if by_id is not None:
                self.datasets_by_id = by_id

    with pytest.raises(SettingError, match=r"Pipeline\(work_source\) is 5"):
        Pipeline(5)
    for by_id in (None, {}, {"a": 1}, [next(iter(datasets().values()))]):
        with pytest.raises(SettingError, match=r"Bare\.datasets_by_id is"):
            Pipeline(Bare(by_id))
    one = next(iter(datasets().values()))
    with pytest.raises(SettingError, match=r"datasets_by_id has \['a'\] more than once"):
        Pipeline(Bare({"x": one, "y": one}))
    with pytest.raises(TypeError, match="abstract"):
        WorkSource()


# Ends


def test_a_source_that_promises_to_be_endless_makes_nothing_wait_and_must_keep_its_word():
    plan = _pipeline(Fixed([CHUNK], endless=True)).plan()
    assert plan.ends(0) is False
    with pytest.raises(RunFailed, match="chunk 1 of epoch 0: next_chunk returned None, but the source says"):
        list(_pipeline(Fixed([CHUNK], endless=True)))
    assert _pipeline(Fixed([CHUNK])).plan().ends(0) is None


def test_a_source_that_goes_on_for_ever_while_no_record_passes_is_an_error():
    class Round(Fixed):
        def clone_for_lane(self, lane_id: int, canonical_replicas: int) -> WorkSource:
            return Round([])

        def next_chunk(self) -> WorkChunk:
            self.done += 1
            return WorkChunk({"all": [("a", 0, row % 10) for row in range(500)]})

    pipeline = Pipeline(Round([])).map_transform(lambda row: None).batch(1).options(canonical_replicas=1)
    with pytest.raises(RunFailed, match="records passed map_transform, and the work source has not come to an end"):
        next(iter(pipeline))


def test_a_lane_without_any_chunk_ends_the_run_evenly_at_once():
    class FirstLane(Fixed):
        def clone_for_lane(self, lane_id: int, canonical_replicas: int) -> WorkSource:
            return Fixed([CHUNK] * 3 if lane_id == 0 else [])

    with pytest.warns(UserWarning, match="has no full round"):
        assert list(_pipeline(FirstLane([]))) == []
    padded = Pipeline(FirstLane([])).batch(2, drop_last=False).options(canonical_replicas=2)
    assert [(batch.lane, len(batch)) for batch in padded] == [(0, 2), (1, 0)] * 3


def test_explain_says_what_is_known_of_a_users_source():
    text = _pipeline(Fixed([CHUNK])).explain(dp_degree=2)
    assert "work source Fixed" in text
    assert "as many samples an epoch as the work source hands out" in text
    assert "known only when the source of a lane comes to its end" in text
    assert "2 chunks, each as long as the source makes it" in text
    assert "ends: never" in _pipeline(Fixed([CHUNK], endless=True)).explain()


# The order inside a chunk


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any), st.one_of(st.none(), st.integers()))
def test_interleaving_keeps_every_sample_and_without_a_seed_also_each_components_order_and_share(counts, seed):
    order = interleaved(counts, seed)
    assert sorted(order.tolist()) == list(range(sum(counts)))
    assert np.array_equal(order, interleaved(counts, seed))
    if seed is None:
        component = np.searchsorted(np.cumsum(counts), order, side="right")
        for which, count in enumerate(counts):
            places = np.flatnonzero(component == which)
            assert (np.diff(order[places]) == 1).all()
            share = np.arange(1, len(order) + 1) * count / sum(counts)
            assert np.abs(np.cumsum(component == which) - share).max() < 1.5


def test_a_seed_decides_the_order_of_a_chunk():
    orders = {tuple(interleaved([20, 10], seed).tolist()) for seed in (0, 1, 2, None)}
    assert len(orders) == 4
