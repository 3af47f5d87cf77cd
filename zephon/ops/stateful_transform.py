"""`stateful_transform`: a user's functions with a state, one for each window of each lane.

    state = init_state()
    for each group of the window's records:     state, out = push(state, group)
                                                if should_flush(state): out += flush(state); state = init_state()
    at the flush sentinel:                      out = flush(state)
    whatever comes out, list by list:           transform(out), with `parallelism` on workers

A flush ends a state: the next one begins anew, whether `flush` emptied it or not. Groups are those of
`zephon.ops.grouping`: every 64 records of the window, and fewer at its end.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from zephon.columns import Block
from zephon.errors import RunFailed, SettingError
from zephon.function_digest import digest_of
from zephon.ops.base import Accumulator, Faults, WindowKey, said
from zephon.ops.custom import lane_of, of_group
from zephon.ops.divided import Divided
from zephon.ops.grouping import GROUP, GroupedAccumulator
from zephon.ops.records import block_of, call, copied, records_of, taken, tried
from zephon.ops.sending import sendable
from zephon.randomness import Draws, drawing
from zephon.types import SampleRecord

Records = list[SampleRecord]


class StatefulTransform(Divided):
    """`push(state, records) -> (state, records)` over the records of each window of each lane."""

    changes_counts = True
    users_code = True

    def __init__(
        self,
        name: str,
        *,
        init_state: Any,
        push: Callable[[Any, Records], tuple[Any, Records]],
        flush: Callable[[Any], Records] | None = None,
        should_flush: Callable[[Any], bool] | None = None,
        transform: Callable[[Records], Records] | None = None,
        preserves_cursor_order: bool = True,
    ) -> None:
        if type(name) is not str or not name:
            raise SettingError(f"stateful_transform: name={name!r}: must be a str that is not empty")
        for what, function, needed in (
            ("push", push, True), ("flush", flush, False), ("should_flush", should_flush, False),
            ("transform", transform, False),
        ):  # fmt: skip
            if not callable(function) and (needed or function is not None):
                raise SettingError(
                    f"stateful_transform {name!r}: {what} must be a function, not {type(function).__name__}"
                )
        if should_flush is not None and flush is None:
            raise SettingError(f"stateful_transform {name!r}: should_flush without flush would lose what is held")
        self.name = f"stateful_transform {name!r}"
        self.init_state, self.push, self.flush = init_state, push, flush
        self.should_flush, self.transform = should_flush, transform
        self.preserves_cursor_order = bool(preserves_cursor_order)
        if not callable(init_state):
            self._tried("init_state cannot be copied for each window", lambda: copy.deepcopy(init_state))

    def describe(self) -> dict[str, Any]:
        functions = (self.init_state, self.push, self.flush, self.should_flush, self.transform)
        return {"functions": [digest_of(function) for function in functions], "group": GROUP}

    def requires(self, downstream: frozenset[str] | None) -> frozenset[str] | None:
        return None

    @property
    def divides(self) -> bool:
        return self.transform is not None and (self.parallelism or 1) > 1

    def holding(self, key: WindowKey) -> Accumulator:
        return self._window(key, whole=False)

    def accumulator(self, key: WindowKey) -> Accumulator:
        return self._window(key, whole=True)

    def on_list(self, block: Block, faults: Faults) -> Block:
        assert self.transform is not None
        records = records_of(block, faults)
        where = of_group(records, faults)
        with drawing(Draws(self, faults.scope, block, "transform")):
            out = self.guarded("transform", where, self.transform, records)
        return block_of(self.checked("transform", out, where, faults), block)

    def _window(self, key: WindowKey, *, whole: bool) -> Accumulator:
        where = f"lane {key.lane}, the window that begins with chunk {key.chunk}"
        return _Window(self, where, whole and self.transform is not None)

    def fresh(self) -> Any:
        """A state of nobody's."""
        return call(self.init_state) if callable(self.init_state) else copy.deepcopy(self.init_state)

    def checked(self, what: str, result: Any, where: str, faults: Faults) -> Records:
        records = taken(result, what, lane_of(faults))
        if isinstance(records, str):
            raise RunFailed(f"{self.name}: {where}: {records}")
        return records

    def guarded(self, what: str, where: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """A call of a user's function. One that fails leaves a state that nobody knows, so it ends the run."""
        return tried(f"{self.name}: {where}: {what}", function, *arguments)

    def _tried(self, what: str, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except Exception as error:
            raise SettingError(f"{self.name}: {what}: {said(error)}; give a function that makes one") from error


class _Window(GroupedAccumulator):
    """The state of one window of one lane."""

    def __init__(self, operator: StatefulTransform, where: str, transforms: bool) -> None:
        super().__init__()
        self._operator, self._where, self._transforms = operator, where, transforms
        self._like = Block.empty()
        self._given: Records = []
        self.state = self._operator.guarded("init_state", where, operator.fresh)

    def group(self, block: Block, faults: Faults) -> list[Block]:
        operator = self._operator
        self._like = block.slice(0, 0).copy()
        block, records = copied(lambda whole: records_of(whole, faults), block, operator.name, faults)
        where = of_group(records, faults)
        with drawing(Draws(operator, faults.scope, block)):
            pair = operator.guarded("push", where, operator.push, self.state, records)
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise RunFailed(
                    f"{operator.name}: {where}: push returned {type(pair).__name__}, expected (state, records)"
                )
            self.state, out = pair
            made = self._given_out("push", out, where, faults)
            if operator.should_flush is not None and self._operator.guarded(
                "should_flush", where, lambda: bool(operator.should_flush(self.state))  # type: ignore[misc]
            ):
                made += self._flushed(where, faults)
                self.state = self._operator.guarded("init_state", where, operator.fresh)
        return made

    def end(self, faults: Faults) -> list[Block]:
        with drawing(Draws(self._operator, faults.scope, self._like)):
            return self._flushed(self._where, faults)

    def left_behind(self) -> int:
        if self._operator.flush is None:
            return 0
        again = self._operator.guarded("flush", self._where, self._operator.flush, self.state)
        given = set(map(id, self._given))  # a flush that leaves the state as it was gives the same ones: none is lost
        return sum(id(record) not in given for record in again)

    def _flushed(self, where: str, faults: Faults) -> list[Block]:
        if self._operator.flush is None:
            return []
        out = self._operator.guarded("flush", where, self._operator.flush, self.state)
        self._given = list(out) if isinstance(out, list) else []
        return self._given_out("flush", out, where, faults)

    def _given_out(self, what: str, out: Any, where: str, faults: Faults) -> list[Block]:
        """A list that a function gave out, as a block; transformed, if that is done here."""
        records = self._operator.checked(what, out, where, faults)
        if not records:
            return []
        made = block_of(records, self._like)
        if self._transforms:
            made = sendable(made, self._operator.name, faults)  # as where another process transforms it
            made = self._operator.on_list(made, faults) if len(made) else made
        return [made]
