"""Which engine has which group's lanes, and how the workers are shared out.

All lanes of a group are in one engine, so that a rank has one data connection, and is touched by the death of no engine
but its own. The groups of a node are dealt to its engines as they come: each goes to the engine that has the fewest,
and stays there as long as the session lasts. How they are dealt shows nowhere in the data: a lane is produced from the
plan alone, wherever it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

Group = tuple[str, int]
"""Pipeline and number."""

SHARE_SECONDS = 2.0
"""How long after a rank has come, or the last one of an engine has gone, the workers are shared out anew."""


def share(total: int, parts: int, part: int) -> int:
    """Part number `part` of `total` things in `parts` parts, as even as can be; together they are all of them."""
    return total * (part + 1) // parts - total * part // parts


def shares(total: int, engines: int, in_use: Collection[int]) -> list[int]:
    """How many workers each engine gets: even parts for those that have readers, or for all if none has."""
    having = sorted(in_use) or list(range(engines))
    found = [0] * engines
    for place, engine in enumerate(having):
        found[engine] = share(total, len(having), place)
    return found


class Sharing:
    """When workers move from engine to engine: at once to one that has readers and no worker, else after a while, since
    the ranks of a job do not come at the same moment. Where the last reader has gone all stays as it was. No I/O.
    """

    def __init__(self, workers: int, engines: int) -> None:
        self.shares = shares(workers, engines, ())
        self.due: float | None = None
        """When `shares` are to be looked at again."""
        self._workers, self._in_use = workers, frozenset[int]()

    def look(self, in_use: Collection[int], now: float) -> bool:
        """Take note of the engines that have readers; whether `shares` are others now."""
        if in_use and frozenset(in_use) != self._in_use:
            self._in_use = frozenset(in_use)
            starved = any(not self.shares[engine] for engine in in_use)
            self.due = now if starved else now + SHARE_SECONDS
        if self.due is None or now < self.due:
            return False
        self.due, before = None, self.shares
        self.shares = shares(self._workers, len(before), self._in_use)
        return self.shares != before


class Dealing:
    """The engines that are ready, and the groups that each has."""

    def __init__(self, engines: int) -> None:
        self.ready: set[int] = set()
        self._engines = engines
        self._dealt: dict[Group, int] = {}

    def engine_of(self, group: Group, here: Collection[Group]) -> int:
        """The engine of a group, old or new; `here` are the groups of which there are readers."""
        if not here:
            self._dealt.clear()
        found = self._dealt.get(group)
        if found is None:
            counts = Counter(self._dealt[each] for each in here if each in self._dealt)
            found = self._dealt[group] = min(range(self._engines), key=lambda engine: counts[engine])
        return found
