"""Freed memory: kept warm while data flows, given back to the kernel after loading.

Touching a new page costs about as much as decoding a row group into it does, so engine and workers use the memory of
one block again for the next. What loading a recipe and its tokenizers took for a moment is given back once.
"""

from __future__ import annotations

import contextlib
import ctypes

KEEP = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    # Of Arrow's pools the one with the fewest gaps between decoded row groups, which are each of another size.
    "ARROW_DEFAULT_MEMORY_POOL": "jemalloc",
    # What it has free goes back after ten seconds, not one: row groups come and go more slowly than that.
    "JE_ARROW_MALLOC_CONF": "narenas:1,dirty_decay_ms:10000",
}
"""Environment in which freed memory is kept. It is read when a process starts."""


def give_back() -> None:
    """Give the free memory of the C heap back to the kernel, where the C library can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
