"""Stages: the fronts of runs as the workers get them, pickled into memory that is handed to each worker once.

Runs of the same plan share a stage, and a few that no run uses any more are kept, so that workers stay warm from run to
run: their tokenizers are loaded, their row groups decoded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from zephon.function_pickling import pickled
from zephon.transport.segments import Segment
from zephon.windows import Front

KEPT = 4


@dataclass(frozen=True)
class Stage:
    """A pickled front: `nbytes` at the beginning of `memory`."""

    number: int
    digest: bytes
    nbytes: int
    memory: Segment


class Stages:
    """The stages of one engine, by number."""

    def __init__(self) -> None:
        self._stages: dict[int, Stage] = {}
        self._numbers = 0

    def __getitem__(self, number: int) -> Stage:
        return self._stages[number]

    @property
    def nbytes(self) -> int:
        """Bytes of their memory."""
        return sum(stage.memory.size for stage in self._stages.values())

    def of(self, front: Front, used: Collection[int | None]) -> tuple[int, list[int]]:
        """The stage for this front, one that is known if it is the same byte for byte; and those dropped to make room.

        Stages in `used` are never dropped.
        """
        stage_bytes = pickled(front)
        digest = hashlib.blake2b(stage_bytes).digest()
        for stage in self._stages.values():
            if stage.digest == digest:
                return stage.number, []
        dropped = [number for number in self._stages if number not in used][: 1 - KEPT]
        for number in dropped:
            self._stages.pop(number).memory.close()
        self._numbers += 1
        memory = Segment.create(f"zephon-stage-{self._numbers}", len(stage_bytes))
        memory.array[: len(stage_bytes)] = np.frombuffer(stage_bytes, np.uint8)
        self._stages[self._numbers] = Stage(self._numbers, digest, len(stage_bytes), memory)
        return self._numbers, dropped
