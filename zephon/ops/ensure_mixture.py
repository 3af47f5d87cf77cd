"""`ensure_mixture`: the records of a lane in an order in which the output keeps the mixture.

Records are held in a buffer. When more than `max_buffer_size` are held, some leave, down to `drain_target_ratio` of
that, always the one that the mixture wants most of those that are there (`zephon.ops.fair_order`): as long as the
buffer holds something of every dataset, the output keeps the mixture to within about a record of each. What came too
much of leaves all the same once the buffer is full of it. At a window's end everything leaves, in the same order.

With `max_buffer_size=None` the output is strict: a record waits, up to the window's end, until its turn has come, and
what is left then, the surplus, is dropped and counted. Such a buffer may grow to a whole window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from zephon.columns import Block
from zephon.errors import RunFailed, SettingError
from zephon.function_digest import digest_of
from zephon.lanes import window_at, window_start
from zephon.ops.base import Accumulator, Faults, Stateful, WindowKey
from zephon.ops.fair_order import Charge, FairOrder
from zephon.ops.held_records import HeldRecords
from zephon.ops.mixture_weights import SAMPLES, TOKENS, WeightBy, weighed
from zephon.ops.token_fields import AUTO
from zephon.schedules import MixtureSpec

if TYPE_CHECKING:
    from zephon.custom_source import CustomSource
    from zephon.plan import Plan
    from zephon.work import StaticMixtureWorkSource

_LARGEST = 2**31 - 1


class EnsureMixture(Stateful):
    """Reorders so that the output keeps the mixture, within a buffer of `max_buffer_size` records (None: strict).

    - `mixture`: weights by dataset name; None: the work source's own, as it is in each window.
    - `weight_by`: what the weights count. "samples"; the name of a field, whose number or whose value's length it is; a
      function of the payload that returns a number; or "auto": what the work source's weights count, and with a
      `mixture` of its own tokens where a record has them, else samples.
    - `drain_target_ratio`: how far a full buffer is emptied, 0 to 1.
    - `warn_tolerance`: a share, such as 0.05: a window whose output is further than that (and than one record) from
      the mixture is reported, with both numbers.
    """

    name = "ensure_mixture"

    def __init__(
        self,
        *,
        max_buffer_size: int | None = 1000,
        weight_by: str | Callable[[dict[str, Any]], float] = "auto",
        warn_tolerance: float | None = None,
        mixture: MixtureSpec | Mapping[str, int | float] | None = None,
        drain_target_ratio: float = 0.8,
    ) -> None:
        if max_buffer_size is not None and (type(max_buffer_size) is not int or not 1 <= max_buffer_size <= _LARGEST):
            raise SettingError(
                f"ensure_mixture: max_buffer_size={max_buffer_size!r}: must be None or a whole number from 1 to "
                f"{_LARGEST}"
            )
        if weight_by == "" or not (isinstance(weight_by, str) or callable(weight_by)):
            raise SettingError(
                f"ensure_mixture: weight_by={weight_by!r}: must be 'auto', 'samples', the name of a field, or a "
                "function"
            )
        if warn_tolerance is not None and not (_is_share(warn_tolerance) and warn_tolerance):
            raise SettingError(f"ensure_mixture: warn_tolerance={warn_tolerance!r}: must be None or above 0, up to 1")
        if not _is_share(drain_target_ratio):
            raise SettingError(f"ensure_mixture: drain_target_ratio={drain_target_ratio!r}: must be from 0 to 1")
        self.max_buffer_size, self.weight_by, self.warn_tolerance = max_buffer_size, weight_by, warn_tolerance
        self.drain_target_ratio = float(drain_target_ratio)
        self.mixture = mixture if mixture is None or isinstance(mixture, MixtureSpec) else MixtureSpec(mixture)
        self.changes_counts, self.users_code = max_buffer_size is None, callable(weight_by)
        if isinstance(weight_by, str) and weight_by not in ("auto", SAMPLES):
            self.needs = (weight_by,)

    def describe(self) -> dict[str, Any]:
        described: dict[str, Any] = {
            "max_buffer_size": self.max_buffer_size,
            "weight_by": self.weight_by if isinstance(self.weight_by, str) else digest_of(self.weight_by),
            "mixture": None if self.mixture is None else self.mixture.describe(),
        }
        if self.max_buffer_size is not None:
            described["drain_target_ratio"] = self.drain_target_ratio
        return described

    def check(self, source: StaticMixtureWorkSource | CustomSource) -> None:
        names = {dataset.name for dataset in source.datasets}
        if self.mixture is None:
            if not hasattr(source, "mixture"):
                raise SettingError("ensure_mixture: a work source of your own has no mixture to keep: give mixture={…}")
            return
        for problem, which in (
            ("names datasets that there are not", set(self.mixture.weights) - names),
            ("lacks datasets", names - set(self.mixture.weights)),
        ):
            if which:
                raise SettingError(
                    f"ensure_mixture: mixture {problem}: {sorted(which)}. Allowed: one weight for each of "
                    f"{sorted(names)}, 0 for those that are not wanted."
                )

    def requires(self, downstream: frozenset[str] | None) -> frozenset[str] | None:
        if downstream is None or callable(self.weight_by):
            return None
        own = {"auto": (*AUTO, "sequence_length"), SAMPLES: ()}.get(self.weight_by, (self.weight_by,))
        return downstream | frozenset(own)

    def accumulator(self, key: WindowKey) -> Accumulator:
        return _Buffer(self, key)

    def by(self, plan: Plan | None) -> WeightBy:
        """What weights count in a run."""
        if not isinstance(self.weight_by, str) or self.weight_by == SAMPLES:
            return self.weight_by
        if self.weight_by != "auto":
            return f"field:{self.weight_by}"
        return SAMPLES if self.mixture is None and (plan is None or plan.estimates is None) else TOKENS

    def shares(self, plan: Plan | None, names: Sequence[str], key: WindowKey) -> list[float]:
        """The weight of each dataset, by number, in one window."""
        if self.mixture is not None:
            return [float(self.mixture.weights.get(name, 0)) for name in names]
        if plan is None:
            raise RunFailed("ensure_mixture: outside a run there is no work source whose mixture could be kept")
        curriculum = plan.curriculum(key.epoch)
        counts = curriculum.proportions
        number = window_at(key.lane, plan.lanes, plan.flush_every, key.chunk)
        end = window_start(key.lane, plan.lanes, plan.flush_every, number + 1)
        positions = [chunk * plan.lanes * plan.chunk_size for chunk in (key.chunk, end)]
        if curriculum.total is not None:  # the epoch's last window may reach beyond its end
            positions[1] = min(positions[1], curriculum.total)
        shares = [float(b - a) for a, b in zip(*(counts.counts(position) for position in positions), strict=True)]
        weights = getattr(counts, "weights", None)
        shares = shares if weights is None else [float(weight) for weight in weights]
        if self.weight_by != SAMPLES and plan.estimates is not None:
            shares = [share * plan.estimates[name] for share, name in zip(shares, names)]
        return shares


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


class _Buffer(Accumulator):
    """The records of one window that wait."""

    def __init__(self, settings: EnsureMixture, key: WindowKey) -> None:
        super().__init__()
        self.settings, self.key = settings, key
        self.held = HeldRecords()
        self.order: FairOrder | None = None
        self.by: WeightBy = SAMPLES
        self.names: list[str] = []
        self.charges: dict[int, Charge] = {}  # of the records held, where a report needs them
        self.owners: dict[int, int] = {}
        self.sent: np.ndarray[Any, np.dtype[np.float64]] = np.empty(0)

    def push(self, block: Block, faults: Faults) -> list[Block]:
        order = self._ready(faults)
        good, owners, charges = weighed(block, self.by, order.shares, self.settings, faults)
        numbers = self.held.add(block if len(good) == len(block) else block.take(good))
        limit, out = self.settings.max_buffer_size, []
        if self.settings.warn_tolerance is not None:
            self.charges.update(zip(numbers.tolist(), charges))
            self.owners.update(zip(numbers.tolist(), owners))
        if limit is None:
            out = order.come_strictly(numbers.tolist(), owners, charges)
        else:
            down_to = int(limit * self.settings.drain_target_ratio)
            for number, owner, charge in zip(numbers.tolist(), owners, charges):
                order.add(number, owner, charge)
                if order.held > limit:
                    out += order.leave(down_to)
        return self._out(out)

    def flush(self, faults: Faults) -> list[Block]:
        if self.order is None:
            return []
        out: list[Block] = []
        if self.settings.max_buffer_size is not None:
            out = self._out(self.order.leave(0))
        else:
            self._drop(self.order.waiting)
        self._report(faults)
        return out

    def _ready(self, faults: Faults) -> FairOrder:
        """The order, whose shares the plan may have to say."""
        if self.order is None:
            plan = None if faults.scope is None else faults.scope.plan
            known = [dataset.name for dataset in faults.datasets]
            own = self.settings.mixture
            self.names = known or [str(number) for number in range(0 if own is None else len(own.weights))]
            shares = self.settings.shares(plan, self.names, self.key)
            self.by = self.settings.by(plan)
            self.order, self.sent = FairOrder(shares), np.zeros(len(shares))
        return self.order

    def _out(self, numbers: list[int]) -> list[Block]:
        if not numbers:
            return []
        if self.charges:
            for number in numbers:
                owner, charge = self.owners.pop(number), self.charges.pop(number)
                for dataset, weight in [(owner, charge)] if isinstance(charge, float) else charge:
                    self.sent[dataset] += weight
        return [self.held.take(np.array(numbers, np.int64))]

    def _drop(self, charges: list[Charge]) -> None:
        self.count("dropped_records", len(charges))
        if self.by == TOKENS:
            parts = [w for c in charges for w in ([c] if isinstance(c, float) else [weight for _, weight in c])]
            self.count("dropped_tokens", int(sum(parts)))

    def _report(self, faults: Faults) -> None:
        """One line if the window's output is not what the mixture says."""
        tolerance, total = self.settings.warn_tolerance, float(self.sent.sum())
        if tolerance is None or not total or self.order is None:
            return
        wanted = np.array(self.order.shares)
        off = np.abs(self.sent / total - wanted)
        worst = int(np.argmax(off))
        if off[worst] > max(tolerance, self.order.largest / total):
            faults.reports.append(
                f"ensure_mixture: lane {self.key.lane}, the window from chunk {self.key.chunk}: dataset "
                f"{self.names[worst]!r} has {self.sent[worst] / total:.1%} of the output, the mixture says "
                f"{wanted[worst]:.1%} (warn_tolerance={tolerance:g}). A larger max_buffer_size holds more to choose "
                "from; a mixture that the work source keeps needs none."
            )
