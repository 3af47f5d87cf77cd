"""A lane's output as one stream of records, and the batches cut from it.

Batching is no operator: a batch is the next records of one lane, straight across windows, so the batch size may change
on resume. A batch leaves here in its canonical form, which depends on its records alone.
"""

from __future__ import annotations

from collections import deque

from zephon.columns import Block, canonical, settled, visible


class LaneStream:
    """Records of one lane that are produced but not yet cut into batches. `first` is the number of the first of
    them.
    """

    def __init__(self, first: int, drop: int = 0, empty: Block | None = None) -> None:
        """`drop` records at the beginning are left out; `empty` is what a batch without any record looks like."""
        self.first = first
        self._empty = Block.empty() if empty is None else empty
        self._drop = drop
        self._blocks: deque[tuple[Block, bool]] = deque()  # with whether its records are in their final form
        self._used = 0
        self._held = 0

    def __len__(self) -> int:
        return self._held

    @property
    def produced(self) -> int:
        """The number of records that the lane has come to, those already taken included."""
        return self.first + self._held

    @property
    def to_drop(self) -> int:
        """Replayed records that were delivered before and are still to come."""
        return self._drop

    def append(self, block: Block) -> None:
        """Add the lane's next records. The first `drop` of a replay are left out."""
        if self._drop:
            left_out = min(self._drop, len(block))
            self._drop -= left_out
            block = block.slice(left_out, len(block))
        if len(block):
            block = visible(block)
            self._blocks.append((block, settled(block)))
            self._held += len(block)

    def take(self, count: int) -> Block:
        """The next `count` records as a batch (fewer only if fewer are held). Views where they lie in one block."""
        parts: list[Block] = []
        missing = min(count, self._held)
        self._held -= missing
        self.first += missing
        while missing:
            block, final = self._blocks[0]
            part = min(missing, len(block) - self._used)
            parts.append(block.slice(self._used, self._used + part))
            self._used += part
            missing -= part
            if self._used == len(block):
                self._blocks.popleft()
                self._used = 0
        if len(parts) == 1 and final:
            return parts[0].compact_samples()
        return canonical(Block.concat(parts or [self._empty]))
