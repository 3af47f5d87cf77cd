"""A pipeline run in this very process, as one data-parallel group of any number: the same batches and the same
checkpoints as under the daemon.

With one group all lanes are here, so a finite run ends evenly: a round is delivered once every lane is known to reach
it. One group of several cannot see the others' lanes; unless arithmetic alone gives all totals it ends with its own
lanes, and says so once.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from zephon.errors import ZephonError
from zephon.frontiers import Checkpoint, Frontier
from zephon.lanes import RoundRobin, owned_lanes, released_rounds
from zephon.plan import Plan
from zephon.producer import LaneProducer
from zephon.runners import Pool
from zephon.types import SampleBatch
from zephon.windows import TASK_SAMPLES, Outcome


class LaneRun:
    """One lane from a frontier on, produced by a pool as far as it is asked for."""

    def __init__(self, producer: LaneProducer, pool: Pool) -> None:
        self.producer, self._pool = producer, pool
        self._in_work: deque[tuple[int, Future[Outcome]]] = deque()

    @property
    def produced(self) -> int:
        return self.producer.stream.produced

    def reach(self, records: int) -> None:
        """Produce until the lane has come to that many records, or ends."""
        while self.produced < records and not self.producer.ended:
            while len(self._in_work) < self._pool.ahead and (task := self.producer.next_task()) is not None:
                self._in_work.append((task[0], self._pool.submit(task[1])))
            number, future = self._in_work[0]
            outcome = future.result()
            self._in_work.popleft()
            self.producer.accept(number, outcome)

    def drop(self) -> None:
        """Give up what is in work."""
        for _, future in self._in_work:
            future.cancel()


class EmbeddedRun:
    """The batches of one group, epoch after epoch. Iterate it; `checkpoint()` at any point."""

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
    ) -> None:
        self.plan, self.pool = plan, pool
        self.lanes = owned_lanes(plan.lanes, dp_degree, group, strategy)
        self._alone = dp_degree == 1
        self._task_samples = task_samples
        self._failure: ZephonError | None = None
        self._begin(checkpoint.epoch if checkpoint else 0, checkpoint)
        self._fresh = True  # whether the next epoch to deliver from was not begun by a caller's iteration

    def _begin(self, epoch: int, checkpoint: Checkpoint | None) -> None:
        self.epoch = epoch
        self._starts = checkpoint.lanes if checkpoint else {lane: Frontier() for lane in range(self.plan.lanes)}
        self._totals = self.plan.lane_totals(epoch) if self.plan.settings.even_ends else None
        most = max(frontier.records for frontier in self._starts.values())
        self.turns = RoundRobin(
            {lane: self._starts[lane].records for lane in self.lanes}, most, self.plan.microbatch_size
        )
        self._runs = {
            lane: LaneRun(LaneProducer(self.plan, epoch, lane, self._starts[lane], self._task_samples), self.pool)
            for lane in self.lanes
        }
        blind = not self._alone and self._totals is None and self.plan.settings.even_ends
        if blind and self.plan.curriculum(epoch).total is not None:
            _warn_own_end(self)

    def next_batch(self) -> SampleBatch | None:
        """The next batch, or None at the end of the epoch. After an error every further call raises it again."""
        if self._failure is not None:
            raise self._failure
        try:
            return self._next_batch()
        except ZephonError as error:
            self._failure = error
            raise

    def _next_batch(self) -> SampleBatch | None:
        lane = self.turns.turn()
        if not self._reached(self.turns.round_of(lane)):
            return None
        run, until = self._runs[lane], self.turns.until(lane)
        run.reach(until)
        first = self.turns.records[lane]
        block = run.producer.stream.take(until - first)
        ends = self.turns.deliver(lane, len(block))
        return SampleBatch(
            block,
            lane=lane,
            first_record=first,
            ends_round=ends,
            dataset_names=self.plan.dataset_names,
            packed=self.plan.packed,
        )

    def _reached(self, round_number: int) -> bool:
        """Whether that round is one to deliver: every lane that has to reach it does."""
        most, size, drop_last = self.turns.most, self.plan.microbatch_size, self.plan.settings.drop_last
        if self._totals is not None:
            return round_number <= released_rounds(self._totals, self._totals, most, size, drop_last)[0]
        for run in self._runs.values():
            run.reach(most + round_number * size)
        produced = {lane: run.produced for lane, run in self._runs.items()}
        ended = [lane for lane, run in self._runs.items() if run.producer.ended]
        return round_number <= released_rounds(produced, ended, most, size, drop_last)[0]

    def at_end(self) -> bool:
        """Whether the epoch has no further round."""
        return self.turns.at_round_end and not self._reached(self.turns.rounds + 1)

    def epoch_batches(self) -> Iterator[SampleBatch]:
        """The rest of this epoch; at its end the next epoch is begun. A run restored at an epoch's end starts the
        next.
        """
        if self._fresh and self.turns.most and self.at_end():
            self._begin(self.epoch + 1, None)
        self._fresh = False
        while (batch := self.next_batch()) is not None:
            yield batch
        if not self.turns.rounds and not self.turns.most:
            warnings.warn(self._nothing(), stacklevel=2)
        self._begin(self.epoch + 1, None)

    def checkpoint(self) -> dict[str, Any]:
        """The state: of the whole run if all lanes are here, or else of this group's lanes."""
        untouched = self.turns.rounds == 0 and self.turns.at_round_end
        if untouched or (self.turns.stands == {lane: self._starts[lane].records for lane in self.lanes}):
            lanes = dict(self._starts)
        else:
            if self.at_end():
                return Checkpoint(
                    self.plan.identity, self.epoch + 1, {lane: Frontier() for lane in range(self.plan.lanes)}
                ).to_json()
            lanes = {lane: run.producer.frontier(self.turns.records[lane]) for lane, run in self._runs.items()}
        return Checkpoint(self.plan.identity, self.epoch, lanes).to_json()

    def _nothing(self) -> str:
        made = sum(run.produced for run in self._runs.values())
        return (
            f"epoch {self.epoch} has no full round: {made} records on lanes {self.lanes}, and a round takes "
            f"{self.plan.microbatch_size} from every lane. Use fewer lanes, a smaller microbatch_size, or "
            "batch(..., drop_last=False)."
        )


def _warn_own_end(run: EmbeddedRun) -> None:
    warnings.warn(
        f"this group sees lanes {run.lanes} only, so its epoch ends with them; other groups may end at another step. "
        "Run under the daemon for one end on all ranks, or set even_ends=False if that is meant.",
        stacklevel=4,
    )
