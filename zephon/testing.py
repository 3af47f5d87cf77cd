"""For tests of recipes: a pipeline that is saved at any batch and restored goes on exactly as if it had not been."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from zephon.batches import Batch
from zephon.columns import Block, canonical
from zephon.embedded import EmbeddedRun
from zephon.errors import SettingError
from zephon.frontiers import complete_checkpoint
from zephon.pipeline import Pipeline
from zephon.types import SampleBatch
from zephon.verify import differing_field, fingerprint

__all__ = ["assert_resumes_exactly"]


def assert_resumes_exactly(pipeline: Pipeline | Callable[[], Pipeline], *, batches: int = 16, follow: int = 8) -> None:
    """Save before each of the first `batches` batches, restore each state, and compare the `follow` batches after it.

    After a state taken at a round's end the same batches must come; after one taken inside a round, where lanes catch
    up first, the same records of each lane. Given a function that makes the pipeline, every restore is into a new one.
    It runs as one group. `AssertionError` names the first batch and field that differ.
    """
    for name, value in (("batches", batches), ("follow", follow)):
        if type(value) is not int or value < 1:
            raise SettingError(f"assert_resumes_exactly: {name}={value!r}: must be a whole number from 1")
    run = _run(pipeline, None)
    states: list[str] = []
    stream: list[SampleBatch] = []
    while len(stream) < batches + follow:
        if len(states) < batches:
            states.append(json.dumps(run.checkpoint()))
        batch = run.next_batch()
        if batch is None:
            break
        stream.append(batch.copy())
    run.pool.close()
    assert stream, "the pipeline delivers no batch"
    for number, state in enumerate(states):
        again = _run(pipeline, state)
        assert json.dumps(again.checkpoint()) == state, f"saved after {number} batches and loaded, the state differs"
        _compare(f"restored after {number} batches", stream[:number], stream[number : number + follow], again)
        again.pool.close()


def _run(pipeline: Pipeline | Callable[[], Pipeline], state: str | None) -> EmbeddedRun:
    recipe = pipeline if isinstance(pipeline, Pipeline) else pipeline()
    checkpoint = None if state is None else complete_checkpoint(json.loads(state))
    return recipe.run(recipe.plan(dp_degree=1, checkpoint=checkpoint), dp_degree=1, group=0, checkpoint=checkpoint)


def _compare(where: str, before: Sequence[SampleBatch], after: Sequence[SampleBatch], again: EmbeddedRun) -> None:
    inside = bool(before) and not before[-1].ends_round
    lanes = {batch.lane: [other for other in after if other.lane == batch.lane] for batch in after}
    for number, expected in enumerate(after):
        at, found = f"{where}, batch {len(before) + number}", again.next_batch()
        if found is None:
            left = sum(map(len, after[number:]))
            assert not left, f"{at}: the data ended, {left} records before its end"
            assert inside, f"{at}: the epoch ended, without the restore it has further (empty) batches"
            return
        if not inside:
            for name in ("lane", "first_record", "ends_round"):
                one, other = getattr(expected, name), getattr(found, name)
                assert one == other, f"{at}: batch.{name} is {other}, without the restore {one}"
        same = _records(lanes.get(found.lane, []), found)
        if same is not None:
            field = differing_field(fingerprint(same), fingerprint(found))
            assert field is None, (
                f"{at}: field {field!r} differs (lane {found.lane}, from record {found.first_record} on)"
            )


def _records(lane: Sequence[SampleBatch], found: SampleBatch) -> Batch | None:
    """The records of `lane` that `found` should hold, as a batch; None if they lie beyond what was kept."""
    if not lane or found.first_record + len(found) > lane[-1].first_record + len(lane[-1]):
        return None
    low = found.first_record - lane[0].first_record
    whole = Block.concat([batch.block for batch in lane])
    assert low >= 0, f"lane {found.lane}: record {found.first_record} comes again"
    return Batch(canonical(whole.slice(low, low + len(found))), lane=found.lane, first_record=found.first_record)
