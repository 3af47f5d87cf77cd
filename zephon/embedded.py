"""A pipeline run in this very process, as one data-parallel group of any number: the same batches and the same
checkpoints as under the daemon.

With one group all lanes are here, so a finite run ends evenly: a round is delivered once every lane is known to reach
it. One group of several cannot see the others' lanes; unless arithmetic alone gives all totals it ends with its own
lanes, and says so once.
"""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from zephon.arguments import recipe_level
from zephon.errors import RunFailed
from zephon.frontiers import Checkpoint, Frontier, beginnings, furthest, steps_done
from zephon.lanes import RoundRobin, epoch_end_report, owned_lanes, released_rounds
from zephon.plan import Plan
from zephon.producer import LaneProducer
from zephon.runners import Pool
from zephon.skips import FirstReports, Skips, skips_in
from zephon.types import SampleBatch
from zephon.windows import TASK_SAMPLES, Outcome

T = TypeVar("T")

_log = logging.getLogger("zephon.embedded")


class LaneRun:
    """One lane from a frontier on, produced by a pool as far as it is asked for."""

    def __init__(self, producer: LaneProducer, pool: Pool, first: FirstReports) -> None:
        self.producer, self._pool, self._first = producer, pool, first
        self._in_work: deque[tuple[int, Future[Outcome]]] = deque()

    @property
    def produced(self) -> int:
        return self.producer.stream.produced

    def reach(self, records: int) -> None:
        """Produce until the lane has come to that many records, or ends."""
        while self.produced < records and not self.producer.ended:
            self.step()

    def step(self) -> None:
        """Produce what one task gives. Not to be called at the lane's end."""
        while len(self._in_work) < self._pool.ahead and (task := self.producer.next_task()) is not None:
            self._in_work.append((task[0], self._pool.submit(task[1])))
        number, future = self._in_work[0]
        outcome = future.result()
        self._in_work.popleft()
        self.producer.accept(number, outcome)
        self._first.say([*outcome.reports, *self.producer.unsaid])
        self.producer.unsaid = []

    def drop(self) -> None:
        """Give up what is in work."""
        for _, future in self._in_work:
            future.cancel()


class EmbeddedRun:
    """The batches of one group, epoch after epoch. `checkpoint()` at any point."""

    def __init__(
        self,
        plan: Plan,
        pool: Pool,
        *,
        dp_degree: int = 1,
        group: int = 0,
        strategy: str = "contiguous",
        checkpoint: Checkpoint | None = None,
        task_samples: int = TASK_SAMPLES,
        tell: Callable[[str], object] = _log.warning,
    ) -> None:
        """`tell` is told of bad records that are left out, of the first ones each."""
        self.plan, self.pool = plan, pool
        self._first = FirstReports(tell)
        self.end: Callable[[], object] = pool.close
        """Ends what runs its tasks."""
        self.lanes = owned_lanes(plan.lanes, dp_degree, group, strategy)
        self._alone = dp_degree == 1
        self._groups = dp_degree, group, strategy
        self._task_samples = task_samples
        self._failure: Exception | None = None
        self._runs: dict[int, LaneRun] = {}
        self._said_own_end = False
        self._past = checkpoint.past if checkpoint else 0
        self._begin(checkpoint.epoch if checkpoint else 0, plan.beginning(checkpoint) if checkpoint else None)

    def _begin(self, epoch: int, checkpoint: Checkpoint | None) -> None:
        for run in self._runs.values():
            run.drop()
        self.epoch = epoch
        self._delivered = False
        self._starts = checkpoint.lanes if checkpoint else self._beginnings()
        self._totals = self.plan.lane_totals(epoch) if self.plan.settings.even_ends else None
        self.turns = RoundRobin(
            {lane: self._starts[lane].records for lane in self.lanes},
            furthest(self._starts.values()),
            self.plan.microbatch_size,
            {lane: self._starts[lane].stands for lane in self.lanes},
        )
        self._runs = {}
        for lane in self.lanes:
            producer = LaneProducer(self.plan, epoch, lane, self._starts[lane], self._task_samples)
            self._runs[lane] = LaneRun(producer, self.pool, self._first)
        unknown = self._totals is None and self.plan.settings.even_ends and not self._alone
        if unknown and self.plan.ends(epoch) is not False and not self._said_own_end:
            self._said_own_end = True
            _warn_own_end(self)

    def settle(self) -> int:
        """The epoch to deliver from. A state that turns out to be at its epoch's end begins the next one at once."""
        if self.turns.most and not self._delivered and self.at_end() and self._others_at_end():
            self._begin_next()
        return self.epoch

    @property
    def steps(self) -> int:
        """Rounds delivered since the run's beginning."""
        return steps_done(self._past, self.turns.most, self.turns.rounds, self.plan.microbatch_size)

    @property
    def skips(self) -> Skips:
        """Bad records left out in this epoch, of all windows that were produced, which go beyond what was delivered."""
        return skips_in(run.producer.counters for run in self._runs.values())

    @property
    def _reached(self) -> int:
        """The records of each lane that the epoch's rounds so far have come to."""
        return self.turns.most + self.turns.rounds * self.plan.microbatch_size

    def _begin_next(self) -> None:
        self._past += self._reached
        self._begin(self.epoch + 1, None)

    def _others_at_end(self) -> bool:
        """Whether no other group has anything left of the epoch either, so that all groups begin the next one.

        After a stop inside the last round one may have, and then all end the epoch before they begin another.
        """
        if self._alone or not self.plan.settings.even_ends:
            return True
        degree, own, strategy = self._groups
        state = Checkpoint(self.plan.identity, self.epoch, dict(self._starts), self._past)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            others = (
                EmbeddedRun(
                    self.plan,
                    self.pool,
                    dp_degree=degree,
                    group=group,
                    strategy=strategy,
                    checkpoint=state,
                    task_samples=self._task_samples,
                    tell=lambda _: None,
                )
                for group in range(degree)
                if group != own
            )
            return all(other.at_end() for other in others)

    def next_batch(self) -> SampleBatch | None:
        """The next batch, or None at the end of the epoch. After an error every further call raises it again."""
        lane = self._guarded(self._next_lane)
        return None if lane is None else self._guarded(self._take)

    def end_epoch(self) -> None:
        """Go on to the next epoch."""
        known = {lane: run.produced for lane, run in self._runs.items()}
        skipped = sum(run.producer.skipped for run in self._runs.values())
        size, lanes = self.plan.microbatch_size, self.plan.lanes
        report = epoch_end_report(self.epoch, known, self._reached, size, lanes, skipped)
        if report is not None:
            warnings.warn(report, stacklevel=4)
        self._begin_next()

    def _guarded(self, step: Callable[[], T]) -> T:
        """Do a step of production. One that fails or is interrupted leaves lanes half-way, so it is the last."""
        if self._failure is not None:
            raise self._failure
        try:
            return step()
        except Exception as error:
            self._failure = error
            raise
        except BaseException as interrupt:
            self._failure = RunFailed(
                f"the run was interrupted ({type(interrupt).__name__}) while it made a batch: go on from its "
                "checkpoint(), which is whole, with restore(...)"
            )
            raise

    def _next_lane(self) -> int | None:
        """The lane of the next batch; None at the epoch's end."""
        while True:
            lane, _, until, round_, _ = self.turns.turn()
            if not self._is_due(round_):
                return None
            producer = self._runs[lane].producer
            self._runs[lane].reach(until)
            if not self.turns.is_void(lane, producer.stream.produced - self.turns.records[lane]):
                return lane
            self.turns.deliver(0)

    def _take(self) -> SampleBatch:
        lane, _, until, _, _ = self.turns.turn()
        first = self.turns.records[lane]
        producer = self._runs[lane].producer
        block = producer.take(until - first)
        ends = self.turns.deliver(producer.stream.first - first)
        self._delivered = True
        return SampleBatch(
            block,
            lane=lane,
            first_record=first,
            ends_round=ends,
            dataset_names=self.plan.dataset_names,
            packed=self.plan.packed,
        )

    def _is_due(self, round_number: int) -> bool:
        """Whether that round is one to deliver: every lane that has to reach it does."""
        most, size, drop_last = self.turns.most, self.plan.microbatch_size, self.plan.settings.drop_last
        if self._totals is not None:
            return round_number <= released_rounds(self._totals, self._totals, most, size, drop_last)[0]
        self._look_for_records()
        for run in self._runs.values():
            run.reach(most + round_number * size)
        produced = {lane: run.produced for lane, run in self._runs.items()}
        ended = [lane for lane, run in self._runs.items() if run.producer.ended]
        return round_number <= released_rounds(produced, ended, most, size, drop_last)[0]

    def _look_for_records(self) -> None:
        """Until a lane has a record go on with all of them side by side, so that none is searched in vain alone."""
        lanes = [run for run in self._runs.values() if not run.producer.ended]
        while lanes and not any(run.produced for run in self._runs.values()):
            for run in lanes:
                run.step()
            lanes = [run for run in lanes if not run.producer.ended]

    def at_end(self) -> bool:
        """Whether the epoch has no further batch. An error on the way to it is left to whoever asks for that batch."""
        try:
            return self._guarded(self._next_lane) is None
        except Exception:
            return False

    def checkpoint(self) -> dict[str, Any]:
        """The state: of the whole run if all lanes are here, or else of this group's lanes.

        Until a batch was delivered it is the state that the run began with. At an epoch's end a whole state begins the
        next epoch; a group's own says where its lanes stand, since other groups may still be inside the last round.
        """
        epoch, lanes, past = self.epoch, dict(self._starts), self._past
        if self._delivered and self._alone and self.at_end():
            epoch, lanes, past = epoch + 1, self._beginnings(), past + self._reached
        elif self._delivered:
            records, stands = self.turns.records, self.turns.stands
            lanes = {n: run.producer.frontier(records[n], stands[n]) for n, run in self._runs.items()}
        return Checkpoint(self.plan.identity, epoch, lanes, past).to_json()

    def _beginnings(self) -> dict[int, Frontier]:
        return beginnings(self.plan.lanes, self.plan.settings.drop_last)


def _warn_own_end(run: EmbeddedRun) -> None:
    warnings.warn(
        f"this group sees lanes {run.lanes} only, so its epoch ends with them; other groups may end at another step. "
        "Run under the daemon for one end on all ranks, or set even_ends=False if that is meant.",
        stacklevel=recipe_level(),
    )


class EpochBatches(Iterator[SampleBatch]):
    """The rest of an epoch of whatever run `current()` is; at its end the next epoch is begun.

    Where another state is loaded meanwhile, it goes on from that. An error is raised at every further call, and never
    looks like an end.
    """

    def __init__(self, current: Callable[[], EmbeddedRun]) -> None:
        self._current = current
        self._run: EmbeddedRun | None = None
        self._epoch = 0
        self._ended = False

    def __next__(self) -> SampleBatch:
        if self._ended:
            raise StopIteration
        run = self._current()
        if run is not self._run:
            self._run, self._epoch = run, run.settle()
        batch = run.next_batch() if run.epoch == self._epoch else None
        if batch is None:
            self._ended = True
            if run.epoch == self._epoch:
                run.end_epoch()
            raise StopIteration
        return batch
