"""For tests of recipes: a pipeline that is stopped at any batch and restored goes on exactly as if it had not been.

One uninterrupted run, in one thread and as one group, is the measure. Its state is taken before every batch, and each
state restored, also in pieces of other sizes than the measure was made with; then the same run is done by several
groups side by side, out of step with each other, and their merged states are restored by other numbers of groups.
Everything that follows is compared with the measure by digest, across an epoch's end too.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from zephon.batches import Batch
from zephon.columns import Block, canonical
from zephon.cores import allowed_cores
from zephon.embedded import EmbeddedRun
from zephon.errors import SettingError, ZephonError
from zephon.frontiers import Checkpoint, complete_checkpoint, merge_checkpoints
from zephon.pipeline import Pipeline
from zephon.plan import Plan
from zephon.runners import RUNNERS, Pool, make_pool
from zephon.types import SampleBatch
from zephon.verify import Fingerprint, differing_field, fingerprint
from zephon.windows import TASK_SAMPLES, Front
from zephon.words import many

__all__ = ["assert_resumes_exactly"]

_OWN_CHUNK = 64
"""Samples that a chunk of a user's own work source is taken to have, where pieces are to be smaller than a window."""


def assert_resumes_exactly(
    pipeline: Pipeline | Callable[[], Pipeline],
    *,
    batches: int = 16,
    follow: int | None = None,
    topologies: Sequence[int] | None = None,
    runner: str | Sequence[str] | None = None,
) -> None:
    """Save before each of the first `batches` batches, restore each state in a new run, and compare what follows.

    - `pipeline`: given a function that makes one, every restore is into a pipeline that it makes anew; given a
      pipeline, its plan is resolved once and only the runs are new, which takes less time.
    - `follow`: compare at most so many batches after each restore; None: all of the `batches`.
    - `topologies`: numbers of data-parallel groups to restore on; None: 1, 2 and one a lane, as far as the lanes allow.
    - `runner`: "inline", "threads" or "process", or several of them, to run what is compared with the measure; None:
      the pipeline's own.

    Each state that is loaded must also, saved at once, be the same state. `AssertionError` names the first batch, lane
    and field that differ; SettingError is for senseless arguments.
    """
    for name, value in (("batches", batches), ("follow", 1 if follow is None else follow)):
        if type(value) is not int or value < 1:
            raise SettingError(f"assert_resumes_exactly: {name}={value!r}: must be a whole number from 1")
    recipe = _Recipe(pipeline)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what each of many runs says about its end
        with recipe.groups(None, 1, "inline") as alone:
            lanes = alone.plan.lanes
            measure, states = _measure(alone, batches)
        degrees = _degrees(topologies, lanes)
        for name in _runners(runner, recipe.own_runner):
            check = _Check(recipe, name, measure, follow)
            for number, state in enumerate(states):
                check.restored(number, state, 1, set(range(number)))
            for degree in [degree for degree in degrees if degree > 1][:1]:
                check.drifting(degree, degrees)
        recipe.close()


@dataclass(frozen=True)
class _Delivered:
    """One batch and where it stands. `records` are those that went in, which a function on batches may change."""

    epoch: int
    lane: int
    first: int
    records: int
    ends_round: bool
    batch: SampleBatch
    prints: Fingerprint

    @property
    def end(self) -> int:
        return self.first + self.records


class _Measure:
    """What the uninterrupted run delivered."""

    def __init__(self, stream: list[_Delivered]) -> None:
        self.stream = stream
        self._same = {(each.epoch, each.lane, each.first, each.records): each for each in stream}

    def check(self, at: str, found: _Delivered) -> None:
        """Compare a batch with the same records of the measure, as far as those were kept."""
        same = self._same.get((found.epoch, found.lane, found.first, found.records))
        prints = self._cut(found) if same is None else same.prints
        field = None if prints is None else differing_field(prints, found.prints)
        assert field is None, f"{at}: field {field!r} differs (lane {found.lane}, from record {found.first} on)"

    def _cut(self, found: _Delivered) -> Fingerprint | None:
        """Records that the measure has in other batches: lanes that catch up at an epoch's end are cut elsewhere."""
        lane = [each for each in self.stream if (each.epoch, each.lane) == (found.epoch, found.lane) and each.records]
        if not found.records or not lane or found.end > lane[-1].end:
            return None
        if any(each.records != len(each.batch) for each in lane):
            return None
        low = found.first - lane[0].first
        block = canonical(Block.concat([each.batch.block for each in lane]).slice(low, low + found.records))
        return fingerprint(Batch(block, lane=found.lane, first_record=found.first))


class _Groups:
    """All groups of a run, side by side in this process."""

    def __init__(
        self, plan: Plan, pool: Pool, degree: int, strategy: str, checkpoint: Checkpoint | None, task_samples: int
    ) -> None:
        self.plan = plan
        self.runs = [
            EmbeddedRun(
                plan,
                pool,
                dp_degree=degree,
                group=group,
                strategy=strategy,
                checkpoint=checkpoint,
                task_samples=task_samples,
            )
            for group in range(degree)
        ]

    @property
    def alone(self) -> bool:
        return len(self.runs) == 1

    def state(self) -> str:
        """The state of the whole run, as it is written to a file."""
        parts = [run.checkpoint() for run in self.runs]
        return json.dumps(parts[0] if self.alone else merge_checkpoints(parts))


class _Recipe:
    """Where runs come from: one pipeline, or a function that makes a new one for each."""

    def __init__(self, pipeline: Pipeline | Callable[[], Pipeline]) -> None:
        self._given = pipeline
        self._plans: dict[bool, Plan] = {}  # of a given pipeline: of a new run, and of a restored one
        self._pools: dict[str, Pool] = {}
        self.own_runner = "auto"

    @contextmanager
    def groups(self, state: str | None, degree: int, runner: str, cuts: int = 0) -> Iterator[_Groups]:
        """A run from a state, or from the beginning. `cuts` chooses the size of the pieces it is produced in."""
        given = self._given
        pipeline = given if isinstance(given, Pipeline) else given()
        self.own_runner = pipeline.execution.runner
        checkpoint = None if state is None else complete_checkpoint(json.loads(state))
        restored = checkpoint is not None
        plan = self._plans.get(restored) or pipeline.plan(dp_degree=1, checkpoint=checkpoint)
        pool = self._pools.get(runner)
        if pool is None:
            workers = pipeline.execution.max_workers or allowed_cores().count
            pool = make_pool(runner, Front(plan), workers)
        if isinstance(given, Pipeline):
            self._plans[restored], self._pools[runner] = plan, pool
        window = plan.flush_every * (plan.chunk_size or _OWN_CHUNK)
        task_samples = (TASK_SAMPLES, min(31, -(-window // 3)), min(96, -(-window // 2)))[cuts % 3]
        try:
            yield _Groups(plan, pool, degree, pipeline.topology.mapping_strategy, checkpoint, task_samples)
        finally:
            if runner not in self._pools:
                pool.close()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


class _Check:
    """States of one run, restored and followed, in one runner."""

    def __init__(self, recipe: _Recipe, runner: str, measure: _Measure, follow: int | None) -> None:
        self.recipe, self.runner, self.measure, self.follow = recipe, runner, measure, follow

    def restored(self, number: int, state: str, degree: int, done: set[int]) -> None:
        """Restore a state on `degree` groups; `done` are the places of the batches that were delivered before it."""
        where = self._where(f"restored after {many(len(done), 'batch', 'batches')}", degree)
        after = [batch for place, batch in enumerate(self.measure.stream) if place not in done][: self.follow]
        with _failing(where), self.recipe.groups(state, degree, self.runner, cuts=number + 1) as groups:
            loaded = groups.state()
            assert loaded == state, f"{where} and saved at once: the state differs: {loaded}, loaded {state}"
            for run in groups.runs:
                run.settle()
                mine = [batch for batch in after if batch.lane in run.lanes]
                behind = any(stand < run.turns.most for stand in run.turns.stands.values())
                if degree == 1 and not behind:
                    self._as_it_was(where, len(done), groups, run, mine)
                else:
                    self._lane_by_lane(where, groups, run, mine)

    def drifting(self, degree: int, restore_on: Sequence[int]) -> None:
        """The first epoch by several groups out of step, each of their states restored."""
        stream = self.measure.stream
        left = [n for n, batch in enumerate(stream) if batch.epoch == stream[0].epoch and batch.records]
        done = {n for n, batch in enumerate(stream) if batch.epoch == stream[0].epoch and not batch.records}
        where = self._where("not restored", degree)
        with _failing(where), self.recipe.groups(None, degree, self.runner, cuts=1) as groups:
            for number in range(len(left)):
                self.restored(number, groups.state(), restore_on[number % len(restore_on)], done)
                behind = [run for run in groups.runs if any(stream[n].lane in run.lanes for n in left)]
                run = behind[(number * number // 3) % len(behind)]
                at = f"{where}, batch {number}"
                while (found := _next(run)) is not None and not found.records:
                    pass
                assert found is not None, f"{at}: the epoch ended, for one group it goes on"
                same = next((n for n in left if (stream[n].lane, stream[n].first) == (found.lane, found.first)), None)
                assert same is not None, f"{at}: record {found.first} of lane {found.lane} is none that was to come"
                self.measure.check(at, found)
                left.remove(same)
                done.add(same)

    def _as_it_was(
        self, where: str, number: int, groups: _Groups, run: EmbeddedRun, expected: Sequence[_Delivered]
    ) -> None:
        """After a whole round, the same batches in the same order, empty ones included."""
        for wanted in expected:
            _reach_epoch(where, groups, run, wanted.epoch)
            found, at = _next(run), f"{where}, batch {number}"
            assert found is not None, f"{at}: the epoch ended before record {wanted.first} of lane {wanted.lane}"
            for name in ("lane", "first", "records", "ends_round"):
                one, other = getattr(wanted, name), getattr(found, name)
                assert one == other, f"{at}: {name} is {other}, without the restore {one}"
            self.measure.check(at, found)
            number += 1

    def _lane_by_lane(self, where: str, groups: _Groups, run: EmbeddedRun, expected: Sequence[_Delivered]) -> None:
        """The same records in every lane: inside a round, lanes that are behind catch up first."""
        for epoch in dict.fromkeys(batch.epoch for batch in expected):
            goals = {batch.lane: batch.end for batch in expected if batch.epoch == epoch and batch.records}
            if goals:
                _reach_epoch(where, groups, run, epoch)
            while behind := [lane for lane, goal in goals.items() if run.turns.records[lane] < goal]:
                stood, found = dict(run.turns.records), _next(run)
                at = f"{where}, lane {behind[0]} at record {stood[behind[0]]}"
                assert found is not None, f"{at}: the epoch ended, without the restore it goes on"
                assert found.first == stood[found.lane], f"{at}: lane {found.lane} goes on at record {found.first}"
                self.measure.check(at, found)

    def _where(self, what: str, degree: int) -> str:
        groups = "" if degree == 1 else f" on {degree} groups"
        return f"{what}{groups}" + ("" if self.runner in ("auto", "inline") else f" (runner {self.runner})")


def _measure(groups: _Groups, batches: int) -> tuple[_Measure, list[str]]:
    """The first batches of an uninterrupted run, and the state before each."""
    (run,) = groups.runs
    stream: list[_Delivered] = []
    states: list[str] = []
    while len(stream) < batches:
        states.append(groups.state())
        batch = _next(run)
        if batch is not None:
            stream.append(batch)
            continue
        ended = states.pop()
        if not stream or stream[-1].epoch != run.epoch:
            break
        run.end_epoch()
        assert groups.state() == ended, f"the state at the end of epoch {stream[-1].epoch} does not begin the next"
    assert stream, "the pipeline delivers no batch"
    return _Measure(stream), states


def _next(run: EmbeddedRun) -> _Delivered | None:
    batch = run.next_batch()
    if batch is None:
        return None
    records = run.turns.records[batch.lane] - batch.first_record
    return _Delivered(run.epoch, batch.lane, batch.first_record, records, batch.ends_round, batch, fingerprint(batch))


def _reach_epoch(where: str, groups: _Groups, run: EmbeddedRun, epoch: int) -> None:
    """Bring a group that has delivered its part of an epoch to the next one, and see that the epoch is over."""
    while run.epoch < epoch:
        knows_the_end = groups.alone or (groups.plan.settings.even_ends and groups.plan.lane_totals(run.epoch))
        while knows_the_end and (more := _next(run)) is not None:
            assert not more.records, f"{where}: epoch {run.epoch} goes on with lane {more.lane}, record {more.first}"
        run.end_epoch()
    assert run.epoch == epoch, f"{where}: epoch {epoch} ended too early"


def _degrees(topologies: Sequence[int] | None, lanes: int) -> list[int]:
    """The numbers of groups to restore on, each once, in the order in which states take turns with them."""
    if topologies is None:
        return [degree for degree in dict.fromkeys((2, 1, lanes)) if degree <= lanes]
    for degree in topologies:
        if type(degree) is not int or not 1 <= degree <= lanes:
            given = f"assert_resumes_exactly: topologies={list(topologies)!r}"
            raise SettingError(f"{given}: each must be a whole number from 1 to {lanes}, the number of lanes")
    return list(dict.fromkeys(topologies))


def _runners(runner: str | Sequence[str] | None, own: str) -> list[str]:
    names = [own] if runner is None else [runner] if isinstance(runner, str) else list(runner)
    for name in names:
        if name not in RUNNERS:
            raise SettingError(f"assert_resumes_exactly: runner={name!r}: must be one of {', '.join(RUNNERS)}")
    return names


@contextmanager
def _failing(where: str) -> Iterator[None]:
    """An error of a run, where the measure had none, is a difference too."""
    try:
        yield
    except ZephonError as error:
        raise AssertionError(f"{where}: it failed, without the restore it did not: {error}") from error
