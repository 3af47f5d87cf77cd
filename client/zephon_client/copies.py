"""Private copies of batches: what a rank gets when it holds more batches than its rings have slots to spare.

Their memory is counted until the last array over it dies, as slots are. Past the limit the next batch is refused with
BatchesHeld, before it is taken from its slot: once the training loop has let go of some, it is delivered.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from zephon.errors import BatchesHeld
from zephon.transport.headroom import BUDGET_SETTING
from zephon.transport.rings import LeaseKeeper, SlotKey
from zephon.words import many

Bytes = npt.NDArray[np.uint8]

_MIB = 1 << 20


class Copies:
    """Used by one thread; arrays may die in any. `limit` in bytes, 0 for none."""

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self.nbytes = 0
        """Bytes of the copies that were alive when it was last looked."""
        self._keeper = LeaseKeeper()
        self._sizes: dict[SlotKey, int] = {}
        self._numbers = 0

    def make_room(self, nbytes: int) -> None:
        """Raises BatchesHeld where a copy of `nbytes` more would exceed the limit."""
        if self.limit and self._alive() + nbytes > self.limit:
            gc.collect()  # what is held by nobody but a cycle is not held
            if self._alive() + nbytes > self.limit:
                held = many(len(self._sizes), "batch", "batches")
                raise BatchesHeld(
                    f"the training loop holds {held} in private copies of {self.nbytes} bytes "
                    f"({self.nbytes / _MIB:.1f} MiB), and one of {nbytes} more would exceed this rank's part of the "
                    f"memory budget, {self.limit} bytes ({self.limit / _MIB:.1f} MiB). Let go of batches that are not "
                    f"needed any more (a list of them, a loss that keeps its graph), or raise {BUDGET_SETTING}."
                )

    def copy(self, data: Bytes, into: Callable[[Bytes], Bytes] = np.array) -> Bytes:
        """The same bytes in memory of their own, counted as long as any array over them lives."""
        copied = into(data)
        key = -1, 0, self._numbers
        self._numbers += 1
        leased = self._keeper.lease(copied, 0, len(data), key)
        self._sizes[key] = len(data)
        self.nbytes += len(data)
        return leased

    def _alive(self) -> int:
        for key in self._keeper.drain():
            self.nbytes -= self._sizes.pop(key)
        return self.nbytes


def share_of_a_rank(memory: int) -> int:
    """A rank's part of the budget of its node, where torchrun says how many ranks that has."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return memory // max(1, int(ranks)) if ranks.isdecimal() else memory
