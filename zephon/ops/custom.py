"""`add_op`: a user's operator on lists of records, stateless on workers or with an accumulator in lane order.

`Custom` is the stateless form, `CustomStateful` the one with an accumulator (or, behind a stateful operator, with the
same groups as one would have). Both drive a `BaseOp`; functions that are given one by one become one.

When `process_many` fails on a list, each of its records is tried alone, so that the error names the one that is bad,
and `on_error="skip"` leaves out that one and not its neighbours. What comes out is still a function of the group.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from zephon.columns import Block
from zephon.errors import RunFailed, SettingError
from zephon.function_digest import digest_of
from zephon.ops.authoring import (
    Accumulator,
    BaseOp,
    CountingAccumulator,
    OpContext,
    OpTraits,
    PassthroughAccumulator,
)
from zephon.ops.base import Accumulator as Internal
from zephon.ops.base import Faults, Operator, Stateless, WindowKey, said
from zephon.ops.divided import Divided
from zephon.ops.grouping import GROUP, GroupedAccumulator, groups_of
from zephon.ops.interrupts import is_interrupt
from zephon.ops.records import block_of, call, copied, records_of, taken, tried
from zephon.ops.sending import sendable
from zephon.randomness import Draws, begin_again, drawing
from zephon.types import SampleRecord
from zephon.words import many

Records = list[SampleRecord]


class FunctionOp(BaseOp):
    """An operator made of functions."""

    def __init__(
        self,
        name: str,
        *,
        process_many: Callable[[Records], Records] | None = None,
        process_one: Callable[[SampleRecord], Records] | None = None,
        accumulator: Accumulator | Callable[[], Accumulator] | None = None,
        setup: Callable[[OpContext], None] | None = None,
        teardown: Callable[[], None] | None = None,
        validation_samples: Callable[[], Sequence[SampleRecord]] | None = None,
        traits: OpTraits | None = None,
    ) -> None:
        given: dict[str, Any] = {
            "process_many": process_many, "process_one": process_one, "setup": setup, "teardown": teardown,
            "validation_samples": validation_samples,
        }  # fmt: skip
        for what, function in given.items():
            if function is not None and not callable(function):
                raise SettingError(f"add_op {name!r}: {what} must be a function, not {type(function).__name__}")
        if process_many is None and process_one is None:
            raise SettingError(f"add_op {name!r}: give process_many, a function of a list of records")
        if accumulator is not None and not isinstance(accumulator, Accumulator) and not callable(accumulator):
            raise SettingError(
                f"add_op {name!r}: accumulator must be a zephon.ops.Accumulator or a function that makes one, not "
                f"{type(accumulator).__name__}"
            )
        self.name, self.functions, self.made_by = name, given, accumulator
        self._traits = traits or OpTraits()

    def setup(self, ctx: OpContext) -> None:
        if self.functions["setup"] is not None:
            self.functions["setup"](ctx)

    def teardown(self) -> None:
        if self.functions["teardown"] is not None:
            self.functions["teardown"]()

    def traits(self) -> OpTraits:
        return self._traits

    def accumulator(self, *, deterministic: bool, ctx: OpContext) -> Accumulator:
        if isinstance(self.made_by, Accumulator):
            return copy.deepcopy(self.made_by)
        made: Accumulator = self.made_by() if self.made_by else super().accumulator(deterministic=True, ctx=ctx)
        return made

    def process_many(self, records: Records) -> Records:
        given = self.functions["process_many"]
        made: Records = super().process_many(records) if given is None else given(records)
        return made

    def process_one(self, record: SampleRecord) -> Records:
        given = self.functions["process_one"]
        made: Records = super().process_one(record) if given is None else given(record)
        return made

    def validation_samples(self) -> Sequence[SampleRecord]:
        given = self.functions["validation_samples"]
        found: Sequence[SampleRecord] = () if given is None else given()
        return found


def custom(op: BaseOp, *, behind: bool) -> Operator:
    """The operator that runs `op`; `behind` says whether a stateful operator stands before it."""
    if not isinstance(op, BaseOp):
        raise SettingError(f"add_op: expected an instance of zephon.ops.BaseOp or a name, not {op!r}")
    if isinstance(op, FunctionOp):
        stateful, alone = op.made_by is not None, op.functions["process_many"] is None
    else:
        kind = type(op)
        if kind.process_many is BaseOp.process_many and kind.process_one is BaseOp.process_one:
            raise SettingError(f"add_op: {kind.__name__} has neither process_many nor process_one")
        stateful, alone = kind.accumulator is not BaseOp.accumulator, kind.process_many is BaseOp.process_many
    name = op.name or type(op).__name__
    traits = op.traits()
    if not isinstance(traits, OpTraits):
        raise SettingError(f"add_op {name!r}: traits() returned {type(traits).__name__}, expected OpTraits")
    if type(traits.parallelism) is not int or traits.parallelism < 1:
        raise SettingError(f"add_op {name!r}: parallelism={traits.parallelism!r}: must be a whole number from 1")
    if stateful or traits.requires_serial_state or (behind and not alone):
        return CustomStateful(name, op, traits)
    return Custom(name, op, traits, alone=alone)


class Driven:
    """A `BaseOp` and the copy of it that works in this process."""

    users_code = True
    changes_counts = True

    def __init__(self, name: str, op: BaseOp, traits: OpTraits) -> None:
        self.name, self.op, self.traits = f"add_op {name!r}", op, traits
        self.parallelism = traits.parallelism if traits.parallelism > 1 else None
        self._digest = digest_of((op.functions, op.made_by) if isinstance(op, FunctionOp) else op)
        self._reset()

    def describe(self) -> dict[str, Any]:
        return self.described()

    def requires(self, downstream: frozenset[str] | None) -> frozenset[str] | None:
        return None

    def setup(self) -> None:
        self.live()

    def teardown(self) -> None:
        self.end()

    def _reset(self) -> None:
        self._live: BaseOp | None = None
        self._starting = threading.Lock()
        self._places = threading.BoundedSemaphore(self.traits.parallelism)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_live", "_starting", "_places")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    def described(self) -> dict[str, Any]:
        return {"op": self._digest, "group": GROUP}  # parallelism is no data setting

    @property
    def has_setup(self) -> bool:
        """Whether the operator has anything to set up."""
        if isinstance(self.op, FunctionOp):
            return self.op.functions["setup"] is not None
        return type(self.op).setup is not BaseOp.setup

    def live(self) -> BaseOp:
        """The instance that works here, set up. What `setup` sets never reaches the recipe's own instance."""
        with self._starting:
            if self._live is None:
                made = copy.copy(self.op)
                tried(f"{self.name}: setup", made.setup, OpContext(self.name))
                self._live = made
            return self._live

    def end(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            tried(f"{self.name}: teardown", live.teardown)

    def processed(self, op: BaseOp, records: Records, again: Callable[[int], SampleRecord], faults: Faults) -> Records:
        """What `process_many` makes of a group, without its bad records. `again(i)` is record `i` as it was."""
        wrong, made = self._attempt(op, records, faults)
        if wrong is None:
            return made
        if self.traits.requires_serial_state:
            raise RunFailed(f"{self.name}: {of_group(records, faults)}: {_text(wrong)}") from _cause(wrong)
        good: list[int] = []
        reasons: dict[int, str | BaseException] = {}
        for number in range(len(records)):
            alone = wrong if len(records) == 1 else self._attempt(op, [again(number)], faults)[0]
            if alone is None:
                good.append(number)
            else:
                reasons[number] = alone

        def payload(number: int) -> dict[str, Any]:
            return again(number).payload

        for number, reason in reasons.items():
            faults.bad(_sample(records[number]), self.name, reason, partial(payload, number))
        if reasons:
            rest = [again(number) for number in good]
            wrong, made = self._attempt(op, rest, faults) if rest else (None, [])
        if wrong is not None:
            together = f"{_text(wrong)} (in a list of {len(good)} records, of which none fails alone)"
            for number in good:
                faults.bad(_sample(records[number]), self.name, together)
            made = []
        return made

    def _attempt(self, op: BaseOp, records: Records, faults: Faults) -> tuple[str | BaseException | None, Records]:
        """What is wrong, if anything, and what came of it."""
        begin_again()
        try:
            with self._places:
                made = call(op.process_many, list(records))
        except BaseException as error:
            if is_interrupt(error):
                raise
            return error, []
        given = taken(made, "process_many", lane_of(faults))
        return (given, []) if isinstance(given, str) else (None, given)


class Custom(Driven, Stateless):
    """A custom operator without an accumulator, on groups of records or, with `alone`, on each record."""

    def __init__(self, name: str, op: BaseOp, traits: OpTraits, *, alone: bool) -> None:
        super().__init__(name, op, traits)
        self.alone = alone
        self.grain = 1 if alone else GROUP

    def process(self, block: Block, faults: Faults) -> Block:
        op, out = self.live(), Records()
        block, records = copied(lambda whole: records_of(whole, faults), block, self.name, faults)
        bounds = [(i, i + 1) for i in range(len(block))] if self.alone else groups_of(block)
        with drawing(Draws(self, faults.scope, block)) as draws:
            for low, high in bounds:
                draws.turn_to(low if self.alone else -1)

                def again(number: int, low: int = low) -> SampleRecord:
                    return records_of(block.slice(low + number, low + number + 1), faults)[0]

                out += self.processed(op, records[low:high], again, faults)
        return block_of(out, block)


class CustomStateful(Driven, Divided):
    """A custom operator that is driven in lane order, with an accumulator for each window."""

    @property
    def divides(self) -> bool:
        return self.parallelism is not None and not self.traits.requires_serial_state

    def holding(self, key: WindowKey) -> Internal:
        return self._window(key, divided=True)

    def accumulator(self, key: WindowKey) -> Internal:
        return self._window(key, divided=False)

    def on_list(self, block: Block, faults: Faults) -> Block:
        def again(number: int) -> SampleRecord:
            return records_of(block.slice(number, number + 1), faults)[0]

        with drawing(Draws(self, faults.scope, block)):
            return block_of(self.processed(self.live(), records_of(block, faults), again, faults), block)

    def _window(self, key: WindowKey, *, divided: bool) -> Internal:
        op = self.live()
        if self.traits.requires_serial_state:
            op = self._for_a_window(op)
        ctx = OpContext(self.name, key.seed, key.epoch, key.lane, key.chunk)
        holding = tried(f"{self.name}: accumulator", lambda: op.accumulator(deterministic=True, ctx=ctx))
        if not isinstance(holding, Accumulator):
            raise RunFailed(
                f"{self.name}: accumulator returned {type(holding).__name__}, expected a zephon.ops.Accumulator"
            )
        return _Window(self, op, holding, divided)

    def _for_a_window(self, live: BaseOp) -> BaseOp:
        """A copy of the instance whose attributes are as the recipe made them, and those of `setup` shared."""
        made = copy.copy(live)
        for name, value in vars(self.op).items():
            if vars(live).get(name) is value:
                setattr(made, name, copy.deepcopy(value))
        return made


class _Window(GroupedAccumulator):
    """One window of one lane of a custom operator."""

    def __init__(self, operator: CustomStateful, op: BaseOp, holding: Accumulator, divided: bool) -> None:
        super().__init__()
        self._operator, self._op, self._holding, self._divided = operator, op, holding, divided
        self._like = Block.empty()
        self._handed_on = type(holding) in (PassthroughAccumulator, CountingAccumulator)

    def group(self, block: Block, faults: Faults) -> list[Block]:
        self._like = block.slice(0, 0).copy()
        block, records = copied(lambda whole: records_of(whole, faults), block, self._operator.name, faults)
        with drawing(Draws(self._operator, faults.scope, block)):
            where = of_group(records, faults)
            return self._made(self._groups("push_many", lambda: self._holding.push_many(records), where), faults)

    def end(self, faults: Faults) -> list[Block]:
        with drawing(Draws(self._operator, faults.scope, self._like)):
            where = f"lane {lane_of(faults)}, at the end of a window"
            out = self._made(self._groups("flush", lambda: self._holding.flush(reset=True), where), faults)
            if self._holding.has_pending_data():
                raise RunFailed(
                    f"{self._operator.name}: {where}: the accumulator still has data after flush(reset=True). A flush "
                    "gives out all that is held, so that no record is lost"
                )
        return out

    def left_behind(self) -> int:
        return sum(map(len, self._holding.flush()))

    def _groups(self, what: str, function: Callable[[], Any], where: str) -> list[Records]:
        name = self._operator.name
        groups = tried(f"{name}: {where}: {what}", function)
        if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
            raise RunFailed(f"{name}: {where}: {what} returned {type(groups).__name__}, expected a list of lists")
        return groups

    def _made(self, groups: list[Records], faults: Faults) -> list[Block]:
        out: list[Block] = []
        for group in groups:
            records = taken(group, "the accumulator", lane_of(faults))
            if isinstance(records, str):
                raise RunFailed(f"{self._operator.name}: {records}")
            if records:
                out.append(self._done(records, faults))
        return [block for block in out if len(block)]

    def _done(self, group: Records, faults: Faults) -> Block:
        """What becomes of a group, or the group itself if something is done to it elsewhere."""
        if self._divided:
            return block_of(group, self._like)
        if not self._operator.traits.requires_serial_state and (faults.on_error == "skip" or not self._handed_on):
            # The records may be somebody else's still, or be tried again as they are now.
            made = sendable(block_of(group, self._like), self._operator.name, faults)
            return self._operator.on_list(made, faults) if len(made) else made
        return block_of(self._operator.processed(self._op, group, group.__getitem__, faults), self._like)


def lane_of(faults: Faults) -> int:
    return 0 if faults.scope is None else faults.scope.lane


def of_group(records: Sequence[SampleRecord], faults: Faults) -> str:
    """Where a list of records is from, in words."""
    if not records:
        return f"lane {lane_of(faults)}, an empty list"
    (name, shard, row), (last_name, last_shard, last_row) = (records[i].meta.sample_id for i in (0, -1))
    return (
        f"lane {lane_of(faults)}, {many(len(records), 'record')}, the first of dataset {name!r}, shard {shard}, row "
        f"{row}, the last of dataset {last_name!r}, shard {last_shard}, row {last_row}"
    )


def _sample(record: SampleRecord) -> tuple[int, int, int]:
    """The first sample of a record, as the run numbers it."""
    assert record.meta._origin is not None
    dataset, shard, row = record.meta._origin[0][:3]
    return dataset, shard, row


def _text(wrong: str | BaseException) -> str:
    return wrong if isinstance(wrong, str) else said(wrong)


def _cause(wrong: str | BaseException) -> BaseException | None:
    return None if isinstance(wrong, str) else wrong
