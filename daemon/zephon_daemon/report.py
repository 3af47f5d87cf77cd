"""What the engine says of its runs when somebody asks how far they are."""

from __future__ import annotations

from typing import Any

from zephon.skips import skips_in, without_skips
from zephon_daemon.composed import slowest
from zephon_daemon.lane import Lane
from zephon_daemon.run import Run

DATASETS_REPORTED = 256


def own_lanes(run: Run) -> list[Lane]:
    """Those of a run that are this engine's: not those that stood in here for ranks which read from another one now."""
    return [lane for lane in run.lanes.values() if lane.group not in run.others.groups]


def drawn(run: Run) -> dict[str, dict[str, int]]:
    """Samples and tokens of each dataset that this engine has put through, in the epochs that the lanes are in.

    As they come out of reading and the leading stateless operators, before packing; replayed ones included.
    """
    counts = [lane.producer.drawn for lane in own_lanes(run)]
    return {
        name: {
            "samples": sum(int(each.samples[number]) for each in counts),
            "tokens": sum(int(each.tokens[number]) for each in counts),
        }
        for number, name in enumerate(run.plan.dataset_names[:DATASETS_REPORTED])
    }


def run_report(name: str, run: Run, rings_bytes: int, failed: str | None) -> dict[str, Any]:
    """One run, lane by lane, as plain data."""
    counters = {lane.number: lane.producer.counters for lane in run.lanes.values()}
    lanes = [
        {
            "lane": lane.number,
            "group": lane.group,
            "epoch": lane.epoch,
            "produced": lane.producer.stream.produced,
            "delivered": lane.written
            - (lane.ring.in_flight * run.plan.microbatch_size if lane.ring is not None else 0),
            "samples": lane.producer.samples,
            "skipped": lane.producer.skipped,
            "in_work": lane.producer.outstanding,
            "ring_free": lane.ring.free if lane.ring is not None else 0,
            "ring_slots": lane.ring.generation.slots if lane.ring is not None else 0,
            "waits_for": run.waits_for(lane.number),
            "counters": without_skips(counters[lane.number]),
        }
        for lane in own_lanes(run)
    ]
    readers = []
    for reader in run.readers.values():
        rounds, steps, of_epoch = run.rounds(reader)
        at = {"epoch": reader.epoch, "rounds": rounds, "steps": steps, "rounds_of_epoch": of_epoch}
        readers.append({"client": reader.client, "group": reader.group, **at})
    return {
        "pipeline": name,
        **slowest(readers),
        "even_ends": run.plan.settings.even_ends,
        "left_out": {str(epoch): records for epoch, records in run.left_out().items() if records},
        "lanes": lanes,
        "mixture": run.plan.identity["mixture"],
        "skips": skips_in(counters.values()),
        "drawn": drawn(run),
        "readers": readers,
        "rings_bytes": rings_bytes,
        "failed": failed,
    }
