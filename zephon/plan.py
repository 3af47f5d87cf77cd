"""The plan: everything that a run fixes once, and its identity.

A plan is resolved from a recipe and, where one was loaded, a checkpoint: settings that the recipe leaves open (lanes,
chunk and window sizes) and the seed come from the checkpoint, all others must agree with it. Two plans of one identity
produce the same records in the same lanes, whatever executes them.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from zephon.columns import Block, IntArray
from zephon.custom_source import CustomSource
from zephon.errors import CheckpointMismatch, DatasetError, SettingError
from zephon.frontiers import Checkpoint
from zephon.lanes import window_at, window_start
from zephon.ops.base import Operator, Stateful, Stateless
from zephon.ops.map_batch import MapBatch
from zephon.same_data import warn_of_same_data
from zephon.schedules import MixtureSchedule, mixture_from
from zephon.stages import LaterStage, cut_into_stages
from zephon.words import many
from zephon.work import Curriculum, MixtureChange, StaticMixtureWorkSource

WINDOW_SAMPLES = 16384
CURRICULA_KEPT = 4
PULLED_CHUNKS = 8
"""Chunks of a window of a user's own work source, unless told otherwise: their lengths are not known beforehand."""

CHANGEABLE = ("datasets", "mixture", "operators", "source")
"""What `allow_changed` may name."""

_COUNTED_IN = ("canonical_replicas", "chunk_size", "flush_every_k_chunks", "microbatch_size")


@dataclass(frozen=True)
class DataSettings:
    """What decides the data, as the recipe says it. None leaves a setting to the checkpoint or to its default."""

    canonical_replicas: int | None = None
    flush_every_k_chunks: int | None = None
    microbatch_size: int = 1
    drop_last: bool = True
    on_error: str = "raise"
    even_ends: bool = True


@dataclass(frozen=True)
class Plan:
    """A resolved run. `front` are the leading stateless operators, `back` the rest, in parts where an operator runs in
    two places.
    """

    source: StaticMixtureWorkSource | CustomSource
    operators: tuple[Operator, ...]
    seed: int
    lanes: int
    chunk_size: int
    """Samples; 0 where chunks have lengths of their own."""
    flush_every: int
    settings: DataSettings
    identity: dict[str, Any] = field(compare=False)
    mixture_changes: tuple[MixtureChange, ...] = ()
    changed_at: int | None = None
    """The sample of every lane at which the mixture changes, where this very resolution changed it."""
    estimates: Mapping[str, float] | None = None
    """Mean tokens a sample by dataset name, where weights mean tokens."""
    source_changed: bool = False
    """Whether this very resolution accepted another work source or other datasets than the checkpoint's."""
    accepted: bool = False
    """Whether this very resolution accepted any difference from the checkpoint's identity."""
    derived: dict[tuple[str, int], Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Facts that others in this process have worked out from the plan, by what they are and the epoch."""
    _curricula: dict[int, Curriculum] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def front(self) -> tuple[Stateless, ...]:
        return tuple(op for op in self.operators[: self._split] if isinstance(op, Stateless))

    @property
    def back(self) -> tuple[Operator, ...]:
        return tuple(part for operator in self.operators[self._split :] for part in operator.parts)

    @property
    def chain(self) -> tuple[Operator, ...]:
        """Of `back`, what comes before the first later stage."""
        return cut_into_stages(self.back)[0]

    @property
    def later(self) -> tuple[LaterStage, ...]:
        """Of `back`, the stages that run on workers, each with what comes behind it."""
        return cut_into_stages(self.back)[1]

    @property
    def lane_by_lane(self) -> tuple[Operator, ...]:
        """The operators that run where lanes are produced, and not on workers."""
        return self.chain + tuple(operator for stage in self.later for operator in stage.chain)

    @property
    def on_workers(self) -> tuple[Stateless, ...]:
        """The operators that run on workers, of all stages."""
        return self.front + tuple(operator for stage in self.later for operator in stage.operators)

    @property
    def on_batches(self) -> tuple[MapBatch, ...]:
        """What is done to each batch, after it was cut."""
        return tuple(op for op in self.operators if isinstance(op, MapBatch))

    @property
    def _split(self) -> int:
        stateful = [i for i, op in enumerate(self.operators) if isinstance(op, Stateful)]
        return stateful[0] if stateful else len(self.operators)

    @property
    def grain(self) -> int:
        """Tasks are cut at multiples of this in a lane's samples, and at the ends of windows."""
        return max((op.grain for op in self.front), default=1)

    @property
    def microbatch_size(self) -> int:
        return self.settings.microbatch_size

    @property
    def counts_are_arithmetic(self) -> bool:
        """Whether each sample becomes exactly one record and their number is known before a lane starts."""
        if isinstance(self.source, CustomSource) or self.settings.on_error != "raise":
            return False
        return not any(op.changes_counts for op in self.operators)

    @property
    def packed(self) -> bool:
        """Whether a record may be made from several samples."""
        return any(op.joins_samples for op in self.operators)

    @property
    def fields(self) -> frozenset[str] | None:
        """The fields to read from the datasets; None means all of them."""
        needed: frozenset[str] | None = None
        for operator in reversed(self.operators):
            needed = operator.requires(needed)
        return needed

    @property
    def empty(self) -> Block:
        """A batch without records, with the fields that the operators' settings say it has."""
        block = Block.empty()
        for operator in self.operators:
            block = operator.empty(block)
        return block

    @property
    def sample_bytes(self) -> float:
        """The mean size of a sample as it is stored."""
        rows = sum(dataset.total for dataset in self.source.datasets)
        return sum(dataset.raw_bytes for dataset in self.source.datasets) / max(rows, 1)

    @property
    def dataset_names(self) -> tuple[str, ...]:
        return tuple(dataset.name for dataset in self.source.datasets)

    def curriculum(self, epoch: int) -> Curriculum:
        """Which sample each place of each lane holds in one epoch. A source that is pulled has none."""
        assert isinstance(self.source, StaticMixtureWorkSource)
        known = self._curricula.get(epoch)
        if known is None:
            if len(self._curricula) >= CURRICULA_KEPT:
                self._curricula.clear()
            known = self.source.curriculum(
                self.seed, epoch, self.lanes, self.chunk_size, self.mixture_changes, self.estimates
            )
            self._curricula[epoch] = known
        return known

    def ends(self, epoch: int) -> bool | None:
        """Whether the epoch has an end. None where that is found out only when a lane comes to it."""
        if isinstance(self.source, CustomSource):
            return False if self.source.endless else None
        return self.curriculum(epoch).total is not None

    def passes(self, epoch: int, lane: int, places: IntArray) -> IntArray:
        """How often the samples at these places of a lane were drawn before in the epoch.

        Of a source that is pulled nobody knows: then a number that tells each draw of the epoch from all others.
        """
        if isinstance(self.source, CustomSource):
            return places * self.lanes + lane
        return self.curriculum(epoch).passes(lane, places)

    def beginning(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint that this plan was resolved with, as its lanes begin from it.

        With a change that was accepted, lanes that had run out may have more records: these catch up.
        """
        return checkpoint.without_stands() if self.accepted else checkpoint

    def lane_totals(self, epoch: int) -> dict[int, int] | None:
        """The number of records of each lane, where arithmetic alone says it; None if not, or if the run is endless."""
        if not self.counts_are_arithmetic:
            return None
        curriculum = self.curriculum(epoch)
        totals = {lane: curriculum.lane_samples(lane) for lane in range(self.lanes)}
        return None if None in totals.values() else {lane: total or 0 for lane, total in totals.items()}


def resolve(
    source: StaticMixtureWorkSource | CustomSource,
    operators: tuple[Operator, ...],
    settings: DataSettings,
    *,
    dp_degree: int = 1,
    checkpoint: Checkpoint | None = None,
    allow_changed: Collection[str] = (),
) -> Plan:
    """Fix what a run fixes once. Raises `CheckpointMismatch` listing every difference that `allow_changed` does not
    name.
    """
    for dataset in source.datasets:
        if dataset.total == 0:
            raise DatasetError(f"dataset {dataset.name!r} has no rows: {dataset.location}")
    warn_of_same_data(source.datasets)
    for operator in operators:
        operator.check(source)
    saved = checkpoint.identity if checkpoint else {}
    seed = int(saved.get("seed", source.seed))
    if seed != source.seed:
        warnings.warn(f"the run keeps the checkpoint's seed {seed}, not the recipe's {source.seed}", stacklevel=2)
    lanes = settings.canonical_replicas or int(saved.get("canonical_replicas", 0))
    if not lanes:
        lanes = dp_degree
        warnings.warn(
            f"canonical_replicas is not set: this run has {many(lanes, 'lane')}, one for each data-parallel group, and "
            "can never use more groups than that. Set options(canonical_replicas=...) to the largest number you may "
            "want.",
            stacklevel=2,
        )
    chunk_size = 0 if isinstance(source, CustomSource) else _chunk_size(source, lanes, saved)
    stateful = any(isinstance(op, Stateful) for op in operators)
    flush_every = settings.flush_every_k_chunks
    if flush_every == 0 and stateful:
        raise SettingError("flush_every_k_chunks=0: an operator holds records, so windows must end; use 1 or more")
    if not stateful and (chunk_size or flush_every == 0):
        flush_every = 1
    several = max(8, -(-WINDOW_SAMPLES // chunk_size)) if chunk_size else PULLED_CHUNKS
    flush_every = flush_every or saved.get("flush_every_k_chunks") or several
    identity = _identity(source, operators, seed, lanes, chunk_size, int(flush_every))
    if any(isinstance(op, MapBatch) for op in operators):
        identity["microbatch_size"] = settings.microbatch_size
    changed_at, source_changed, accepted = None, False, False
    changes = [MixtureChange(*change) for change in saved.get("mixture_changes", ())]
    if checkpoint:
        _check_identity(saved, identity, allow_changed)
        source_changed = any(saved.get(name) != identity[name] for name in ("source", "datasets"))
        accepted = any(saved.get(name) != value for name, value in identity.items() if name != "seed")
        if not accepted:
            checkpoint.check_stands(settings.microbatch_size)
        if isinstance(source, StaticMixtureWorkSource) and saved.get("mixture") != identity["mixture"]:
            changes.append(_mixture_change(checkpoint, source, chunk_size, int(flush_every)))
            changed_at = changes[-1].position // lanes
    estimates = None
    if isinstance(source, StaticMixtureWorkSource) and source.token_estimation is not None:
        estimates = identity["token_estimates"] = _estimates(source, operators, settings, seed, saved)
    if changes:
        identity["mixture_changes"] = [[c.epoch, c.position, dict(c.before)] for c in changes]
    return Plan(
        source,
        operators,
        seed,
        lanes,
        chunk_size,
        int(flush_every),
        settings,
        identity,
        tuple(changes),
        changed_at,
        estimates=estimates,
        source_changed=source_changed,
        accepted=accepted,
    )


def _chunk_size(source: StaticMixtureWorkSource, lanes: int, saved: dict[str, Any]) -> int:
    given = source.chunk_size if source.chunk_size != "auto" else saved.get("chunk_size")
    return int(given or source.auto_chunk_size(lanes))


def _estimates(
    source: StaticMixtureWorkSource,
    operators: tuple[Operator, ...],
    settings: DataSettings,
    seed: int,
    saved: Mapping[str, Any],
) -> dict[str, float]:
    """Tokens a sample of each dataset: the checkpoint's, and measured for datasets that it does not know."""
    known = {name: float(mean) for name, mean in saved.get("token_estimates", {}).items()}
    drawn = set(source.drawn())
    new = [dataset for dataset in source.datasets if dataset.name in drawn and dataset.name not in known]
    if new and source.token_estimation is not None:
        known |= source.token_estimation.estimates(new, operators, seed, settings.on_error)
    return known


def _mixture_change(
    checkpoint: Checkpoint, source: StaticMixtureWorkSource, chunk_size: int, flush_every: int
) -> MixtureChange:
    """Where a knowingly changed mixture begins: at one round of chunks, after the windows that the lanes are in.

    Up to there the lanes go on with the old mixture, so that what was delivered of a window is still what it was; from
    there on every dataset continues from its own position.
    """
    lanes = checkpoint.canonical_replicas
    before = checkpoint.identity["mixture"]
    if before is None:
        before = {entry["name"]: entry["rows"] for entry in checkpoint.identity["datasets"]}
    old = mixture_from(before)
    unknown = sorted((set() if old is None else old.names) - {dataset.name for dataset in source.datasets})
    if isinstance(source.mixture, MixtureSchedule) and source.mixture.by_fractions:
        raise CheckpointMismatch(
            "the mixture cannot change to a schedule by fractions inside an epoch, whose length would change with it: "
            "write the schedule's positions as whole numbers of samples"
        )
    if unknown:
        raise CheckpointMismatch(f"the mixture cannot change: the recipe lacks datasets {unknown} of the checkpoint")
    first_new = 0
    for lane, frontier in checkpoint.lanes.items():
        window = window_at(lane, lanes, flush_every, frontier.chunk)
        first_new = max(first_new, window_start(lane, lanes, flush_every, window + 2))
    return MixtureChange(checkpoint.epoch, first_new * lanes * chunk_size, before)


def _identity(
    source: StaticMixtureWorkSource | CustomSource,
    operators: tuple[Operator, ...],
    seed: int,
    lanes: int,
    chunk_size: int,
    flush_every: int,
) -> dict[str, Any]:
    described = dict(source.describe())
    for resolved in ("seed", "chunk_size"):
        described.pop(resolved, None)
    mixture = described.pop("mixture", None)
    steps = [{"operator": op.name, **op.describe()} for op in operators]
    identity = {
        "seed": seed,
        "canonical_replicas": lanes,
        "flush_every_k_chunks": flush_every,
        "chunk_size": chunk_size,
        "datasets": [
            {"name": d.name, "rows": int(d.total), "shards": int(d.shard_count), "digest": d.digest}
            for d in source.datasets
        ],
        "mixture": mixture,
        "source": described,
        "steps": steps,
        "operators": hashlib.blake2b(json.dumps(steps, sort_keys=True).encode(), digest_size=16).hexdigest(),
    }
    return json.loads(json.dumps(identity))  # type: ignore[no-any-return]


def _check_identity(saved: dict[str, Any], now: dict[str, Any], allow_changed: Collection[str]) -> None:
    if isinstance(allow_changed, str):
        raise SettingError(f"allow_changed={allow_changed!r}: must be a list of names, such as [{allow_changed!r}]")
    unknown = [name for name in allow_changed if name not in CHANGEABLE]
    if unknown:
        why = ": a checkpoint counts in it" if unknown[0] in _COUNTED_IN else ""
        raise SettingError(f"allow_changed: {unknown[0]!r} cannot be changed{why}. Allowed: {', '.join(CHANGEABLE)}.")
    differences: dict[str, tuple[object, object]] = {}
    for name, value in now.items():
        if name not in ("seed", "operators") and _setting(name) not in allow_changed and saved.get(name) != value:
            differences.update(_differences(name, saved.get(name), value))
    if "operators" not in allow_changed and saved.get("operators") != now["operators"] and not differences:
        differences["operators"] = (saved.get("operators"), now["operators"])
    if differences:
        lines = "; ".join(f"{name}: checkpoint {a!r}, recipe {b!r}" for name, (a, b) in differences.items())
        names = sorted({_setting(name) for name in differences})
        if fixed := [name for name in names if name in _COUNTED_IN]:
            hint = f"A run keeps its {', '.join(fixed)}: leave that to the checkpoint, or start a new run."
        else:
            hint = (
                "Use the recipe and data it was taken with, or accept the change knowingly: load_state_dict(state, "
                f"allow_changed={names!r})"
            )
        raise CheckpointMismatch(f"the checkpoint belongs to another run: {lines}. {hint}", differences)


def _setting(difference: str) -> str:
    """The name that `allow_changed` has for the place of a difference."""
    top = difference.split("[", maxsplit=1)[0].split(".", maxsplit=1)[0]
    return "operators" if top == "steps" else top


def _differences(name: str, saved: object, now: object) -> dict[str, tuple[object, object]]:
    """Every place in which two JSON values differ, by its path."""
    if isinstance(saved, dict) and isinstance(now, dict):
        out: dict[str, tuple[object, object]] = {}
        for key in {**saved, **now}:
            if saved.get(key) != now.get(key):
                out.update(_differences(f"{name}.{key}", saved.get(key), now.get(key)))
        return out
    if isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        out = {}
        for number, (a, b) in enumerate(zip(saved, now, strict=True)):
            if a != b:
                label = next(
                    (str(v[k]) for v in (b,) for k in ("name", "operator") if isinstance(v, dict) and k in v), number
                )
                out.update(_differences(f"{name}[{label}]", a, b))
        return out
    return {name: (saved, now)}
