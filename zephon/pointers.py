"""Pointers as bytes, for tasks that carry their own: three columns, each as narrow as its largest number allows.

    byte 0..2   bytes of one number of dataset, shard and row: 1, 2, 4 or 8
    then        all datasets, all shards, all rows, little-endian and unsigned

A task of 512 samples takes 2 to 4 KiB where plain int64 would take 12.
"""

from __future__ import annotations

import numpy as np

from zephon.columns import IntArray

_WIDTHS = (1, 2, 4, 8)


def packed(pointers: IntArray) -> bytes:
    """Pointers (`[m, 3]`: dataset, shard, row, none below 0) as bytes; at least 3."""
    widths, columns = [], []
    for column in pointers.T:
        largest = int(column.max()) if len(column) else 0
        width = next(width for width in _WIDTHS if largest < 1 << 8 * width)
        widths.append(width)
        columns.append(column.astype(f"<u{width}").tobytes())
    return bytes(widths) + b"".join(columns)


def unpacked(data: bytes) -> IntArray:
    """What `packed` was given, as int64 `[m, 3]`."""
    widths = data[:3]
    count = (len(data) - 3) // sum(widths)
    out = np.empty((count, 3), np.int64)
    at = 3
    for place, width in enumerate(widths):
        out[:, place] = np.frombuffer(data, f"<u{width}", count, at)
        at += count * width
    return out
