"""A curriculum: the arithmetic from a lane's chunk, or any global position, to samples.

    lane, chunk --routing--> positions --proportions--> (dataset, index) --order--> (dataset, shard, row)

Routing. In round r of `lanes` chunks, lane l gets chunk `r*lanes + perm_r(l)`, a seeded permutation for each round
(or l itself: "modulo"). The last, incomplete round is dealt evenly: one piece for each lane, in the same order, of
sizes that differ by at most one, the larger ones to the lowest lanes.

Order. Index i of a dataset lies in pass `i // rows`. Within a pass, rows are permuted inside blocks, then the shards
are put in the pass's order, then rows are permuted inside their shard; each step may be off. Each pass has its own
keys, or those of the epoch's first pass where a dataset is not to be reshuffled.

Guarantees: pure and picklable, holds only names and row counts; every position is found directly; lanes partition the
positions.
Memory: the shard order of the passes used last, 16 bytes a shard; nothing with a "global" block.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from zephon.permutations import mix, permute
from zephon.proportions import Apportioned

I64 = NDArray[np.int64]
BlockSize = int | Literal["auto", "global"] | None

_LAYOUTS_KEPT = 4
_LAYOUT_CELLS = 2**22
_POSITIONS_END = 2**62
_FEW_ROUNDS = 16


@dataclass(frozen=True)
class Shuffling:
    """How the rows of a pass are ordered. A block is that many consecutive rows, "auto" eight of the largest shard."""

    shards: bool = True
    within_shard: bool = False
    block_size: BlockSize = None


class RowOrder:
    """The order of one dataset's rows: `locate` maps sample numbers 0, 1, 2, … (pass after pass) to rows.

    Every pass has an order of its own, unless `reshuffle` is False.
    """

    def __init__(self, counts: I64, shuffling: Shuffling, key: int, reshuffle: bool = True) -> None:
        counts = np.asarray(counts, dtype=np.int64)
        self._shards: I64 = np.flatnonzero(counts)
        self._counts: I64 = counts[self._shards]
        self._ends: I64 = np.cumsum(self._counts)
        self.rows = int(self._ends[-1]) if len(self._ends) else 0
        self._key, self._reshuffle = key, reshuffle
        whole = shuffling.block_size == "global"  # a uniform shuffle of all rows leaves nothing to the other two
        self._shuffle_shards = shuffling.shards and not whole and len(self._shards) > 1
        self._shuffle_within = shuffling.within_shard and not whole
        self._block = self._block_rows(shuffling.block_size)
        self._layouts: dict[tuple[int, ...], tuple[I64, I64]] = {}

    def _block_rows(self, size: BlockSize) -> int:
        if size is None or not self.rows:
            return 1  # each row a block of its own: the order stays
        if size == "global":
            return self.rows
        return min(self.rows, 8 * int(self._counts.max()) if size == "auto" else int(size))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_layouts": {}}

    def locate(self, index: I64) -> tuple[I64, I64]:
        """(shard, row), both int64 of the length of `index`."""
        passes, within = np.divmod(index, np.int64(self.rows))
        if not self._reshuffle:
            passes = np.zeros_like(passes)
        if (passes == passes[:1]).all():
            distinct, which = passes[:1], np.zeros(1, dtype=np.int64)
        else:
            distinct, which = np.unique(passes, return_inverse=True)
        permuted = self._block != 1 or self._shuffle_within
        keys: Any = mix(self._key, distinct)[which] if permuted else None
        within = within if self._block == 1 else self._permuted_in_blocks(within, keys)
        slot, row = self._laid_out(within, distinct, which)
        shard = self._shards[slot]
        if self._shuffle_within:
            row = permute(row, self._counts[slot], mix(keys, "rows", shard))
        return shard, row

    def _permuted_in_blocks(self, within: I64, keys: Any) -> I64:
        if self._block == self.rows:
            return permute(within, self.rows, mix(keys, "block", 0))
        block, offset = np.divmod(within, np.int64(self._block))
        first = block * self._block
        return first + permute(offset, np.minimum(self._block, self.rows - first), mix(keys, "block", block))

    def _laid_out(self, within: I64, distinct: I64, which: I64) -> tuple[I64, I64]:
        """(number of the shard among those that hold rows, row) where the pass's shards stand one after another."""
        if not self._shuffle_shards:
            slot: I64 = np.searchsorted(self._ends, within, side="right")
            return slot, within - (self._ends - self._counts)[slot]
        step = max(1, _LAYOUT_CELLS // len(self._shards))
        if len(distinct) > step:
            slot, row = np.empty_like(within), np.empty_like(within)
            for low in range(0, len(distinct), step):
                part = np.flatnonzero((which >= low) & (which < low + step))
                slot[part], row[part] = self._laid_out(within[part], distinct[low : low + step], which[part] - low)
            return slot, row
        order, ends = self._layout(distinct)
        shifted = within + which * self.rows
        place = np.searchsorted(ends, shifted, side="right")
        slot = order[place]
        return slot, shifted - ends[place] + self._counts[slot]

    def _layout(self, passes: I64) -> tuple[I64, I64]:
        """The shards of these passes in order, pass after pass, and the running total of rows at the end of each."""
        name = tuple(passes.tolist()) if len(passes) <= 2 else ()
        known = self._layouts.get(name)
        if known is None:
            shards = len(self._shards)
            order = permute(np.arange(shards)[None, :], shards, mix(self._key, passes, "shards")[:, None]).ravel()
            known = order, np.cumsum(self._counts[order])
        if name:  # least recently used first; a new dict each time, so that threads never see one half changed
            kept = [(other, layout) for other, layout in self._layouts.items() if other != name]
            self._layouts = dict([*kept[-(_LAYOUTS_KEPT - 1) :], (name, known)])
        return known


class Curriculum:
    """One epoch's samples: positions 0 to `total` (None: endless). Lanes and a lane's chunks are numbered from 0.

    Datasets named in `same_order` have the order of the epoch's first pass in every pass.
    """

    def __init__(
        self,
        datasets: Sequence[tuple[str, I64]],
        proportions: Apportioned,
        total: int | None,
        shuffling: Shuffling,
        *,
        seed: int,
        epoch: int,
        lanes: int,
        chunk_size: int,
        permute_lanes: bool,
        same_order: Collection[str] = (),
    ) -> None:
        self.proportions, self.total = proportions, total
        self.lanes, self.chunk_size = lanes, chunk_size
        self._orders = [
            RowOrder(counts, shuffling, mix(seed, "order", epoch, name), name not in same_order)
            for name, counts in datasets
        ]
        self._lane_key = mix(seed, "lanes", epoch) if permute_lanes else None
        self._full_rounds: int | None = None
        self._piece, self._larger = 0, 0  # the last round's pieces: size of the smaller, number of the larger
        if total is not None:
            self._full_rounds, left = divmod(total, lanes * chunk_size)
            self._piece, self._larger = divmod(left, lanes)

    def lane_chunks(self, lane: int) -> int | None:
        """Chunks of this lane, its piece of the last round included unless empty; None when endless."""
        self._check_lane(lane)
        return None if self._full_rounds is None else self._full_rounds + (self._piece_length(lane) > 0)

    def lane_samples(self, lane: int) -> int | None:
        """Samples of this lane; None when endless."""
        self._check_lane(lane)
        return None if self._full_rounds is None else self._full_rounds * self.chunk_size + self._piece_length(lane)

    def chunk_length(self, lane: int, n: int) -> int:
        """Samples in the lane's chunk `n`. IndexError beyond its last one."""
        self._check_lane(lane)
        length = self.chunk_size
        if self._full_rounds is not None and n >= self._full_rounds:
            length = self._piece_length(lane) if n == self._full_rounds else 0
        if n < 0 or not length:
            raise IndexError(f"lane {lane} has no chunk {n}: it has {self.lane_chunks(lane)}, numbered from 0")
        return length

    def positions(self, lane: int, n: int) -> range:
        """The global positions of the lane's chunk `n`."""
        length = self.chunk_length(lane, n)
        first = n * self.lanes * self.chunk_size
        if length == self.chunk_size and n != self._full_rounds:
            start = first + self._places(n, lane) * self.chunk_size
        else:
            place = self._places(n, lane)
            larger_before = int(np.count_nonzero(self._places(n, np.arange(self._larger)) < place))
            start = first + int(place) * self._piece + larger_before
        return range(int(start), int(start) + length)

    def pointers(self, lane: int, n: int) -> I64:
        """The samples of the lane's chunk `n`: int64 [count, 3] of (dataset, shard, row)."""
        here = self.positions(lane, n)
        return self.pointers_at(np.arange(here.start, here.stop, dtype=np.int64))

    def lane_pointers(self, lane: int, low: int, high: int) -> I64:
        """The lane's samples `low` to `high`, numbered along its chunks: int64 [high - low, 3] as `pointers`."""
        samples = self.lane_samples(lane)
        if low < 0 or (samples is not None and high > samples):
            raise IndexError(f"lane {lane} has no samples {low} to {high}: it has {samples}, numbered from 0")
        if low >= high:
            return np.empty((0, 3), dtype=np.int64)
        first, last = low // self.chunk_size, (high - 1) // self.chunk_size
        if last - first < _FEW_ROUNDS:
            starts = np.array([self._start(lane, n) for n in range(first, last + 1)], dtype=np.int64)
        else:
            rounds = np.arange(first, last + 1, dtype=np.int64)
            starts = (rounds * self.lanes + self._places(rounds, np.full_like(rounds, lane))) * self.chunk_size
            starts[-1] = self._start(lane, last)
        chunk, within = np.divmod(np.arange(low, high, dtype=np.int64), np.int64(self.chunk_size))
        return self.pointers_at(starts[chunk - first] + within)

    def passes(self, lane: int, places: I64) -> I64:
        """How often the row at each place of a lane (int64 [m]) has been drawn before in the epoch: int64 [m]."""
        chunk, within = np.divmod(np.asarray(places, dtype=np.int64), np.int64(self.chunk_size))
        distinct, which = np.unique(chunk, return_inverse=True)
        starts = np.array([self._start(lane, n) for n in distinct.tolist()], dtype=np.int64)
        passes = np.empty(len(within), dtype=np.int64)
        for component, where, index in self.proportions.groups(self._checked(starts[which] + within)):
            passes[where] = index // self._orders[component].rows
        return passes

    def place(self, lane: int, n: int) -> int:
        """Where the lane's chunk `n` stands among the chunks of its round, which lie side by side in the data."""
        return lane if self._lane_key is None else int(_round_of_chunks(self._lane_key, self.lanes, n)[lane])

    def _start(self, lane: int, n: int) -> int:
        """The global position at which the lane's chunk `n` begins."""
        if self._full_rounds is not None and n >= self._full_rounds:
            return self.positions(lane, n).start
        return (n * self.lanes + self.place(lane, n)) * self.chunk_size

    def pointers_at(self, positions: I64) -> I64:
        """The samples at any global positions [m]: int64 [m, 3] of (dataset, shard, row)."""
        positions = self._checked(positions)
        out = np.empty((len(positions), 3), dtype=np.int64)
        for component, where, index in self.proportions.groups(positions):
            out[where, 0] = component
            out[where, 1], out[where, 2] = self._orders[component].locate(index)
        return out

    def components(self, positions: I64) -> I64:
        """The number of the dataset drawn at each global position: int64 [m]."""
        return self.proportions.locate(self._checked(positions))[0]

    def _piece_length(self, lane: int) -> int:
        return self._piece + (lane < self._larger)

    def _places(self, round_number: Any, lanes: Any) -> Any:
        """The place of each lane among the chunks of a round."""
        if self._lane_key is None:
            return lanes
        return permute(lanes, self.lanes, mix(self._lane_key, round_number))

    def _check_lane(self, lane: int) -> None:
        if not 0 <= lane < self.lanes:
            raise IndexError(f"there is no lane {lane}: lanes are numbered from 0 to {self.lanes - 1}")

    def _checked(self, positions: I64) -> I64:
        positions = np.asarray(positions, dtype=np.int64)
        end = _POSITIONS_END if self.total is None else min(self.total, _POSITIONS_END)
        if len(positions) and not (positions.min() >= 0 and positions.max() < end):
            raise IndexError(f"positions must lie in [0, {end}), got {positions.min()} to {positions.max()}")
        return positions


@lru_cache(maxsize=64)
def _round_of_chunks(key: int, lanes: int, n: int) -> I64:
    """The place of every lane in round `n`: lanes are read side by side, so one round is asked for again and again."""
    return permute(np.arange(lanes), lanes, mix(key, n))
