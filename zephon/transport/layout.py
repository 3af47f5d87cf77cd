"""The bytes of a block in shared memory: of a worker's block, and of a batch in a slot of a lane's ring.

    0        4         8            16                         multiples of 64 from here on
    +--------+---------+------------+----------------+- - - -+---------+- - -+----------------+- - -+--------------
    | "ZB1\\0" | header  | all bytes  | header         |       | samples |     | sample offsets |     | fields' arrays
    |        | u32     | u64        | msgpack        |       | i64     |     | i64, if packed |     |
    +--------+---------+------------+----------------+- - - -+---------+- - -+----------------+- - -+--------------

    header: [records, samples, columns of samples (3 or 4), packed, [[name, kind, dtype, shape], ...]]

    kind            arrays, each at the next multiple of 64      shape
    0 Fixed         values                                       that of values
    1 Ragged        offsets (records + 1, i64), values           [values]
    2 Text          offsets, UTF-8                               [bytes]
    3 Bytes         offsets, bytes                               [bytes]
    4 Objects       one pickle of the list                       [bytes]

No position is written down: arrays follow one another in the order of the header, so that a reader computes every
place and checks it against the buffer, and a corrupt header is a `ProtocolError`, never a view of other memory.
Offsets begin at 0. The writer owns the bytes until it hands over a descriptor; from then on nobody writes them until
the slot is given back.

Pickles travel from workers and engine to the ranks of the same user and never the other way: a daemon unpickles
nothing that a client wrote. They are unpickled when touched, so that a rank which ignores such a field needs none of
its classes.
"""

from __future__ import annotations

import functools
import pickle
import struct
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from zephon.columns import AnyArray, Block, Bytes, Column, Fixed, Objects, Ragged, Text
from zephon.errors import ProtocolError, RunFailed, SettingError

Buffer = npt.NDArray[np.uint8]

_PREFIX = struct.Struct("<4sIQ")
_MAGIC = b"ZB1\0"
_INT64 = np.dtype(np.int64)
_UINT8 = np.dtype(np.uint8)
_FIXED, _RAGGED, _TEXT, _BYTES, _OBJECTS = range(5)
_FEW = 64


def _aligned(position: int) -> int:
    return (position + 63) & ~63


class Layout:
    """Where each array of one block goes. `nbytes` is the number of bytes that `write` fills."""

    __slots__ = ("_arrays", "_header", "nbytes")

    def __init__(self, header: bytes, arrays: list[AnyArray]) -> None:
        position = _PREFIX.size + len(header)
        self._arrays: list[tuple[int, AnyArray]] = []
        for array in arrays:
            position = _aligned(position)
            self._arrays.append((position, array))
            position += array.nbytes
        self.nbytes = position
        self._header = _PREFIX.pack(_MAGIC, len(header), position) + header

    def write(self, buffer: Buffer) -> None:
        """Copies the block into `buffer` (uint8, contiguous, at least `nbytes` bytes)."""
        if len(buffer) < self.nbytes:
            raise ValueError(f"a block of {self.nbytes} bytes does not fit into {len(buffer)}")
        buffer[: len(self._header)] = np.frombuffer(self._header, np.uint8)
        for position, array in self._arrays:
            np.ndarray(array.shape, array.dtype, buffer, position)[...] = array


def measure(block: Block) -> Layout:
    """The layout of a block. It refers to the block's arrays, which must not change before `write`."""
    block = block.compact_samples()
    arrays: list[AnyArray] = [block.samples]
    if block.sample_offsets is not None:
        arrays.append(block.sample_offsets)
    fields = []
    for name, column in block.fields.items():
        if type(name) is not str:
            raise SettingError(f"a field is named {name!r}: names of fields are str")
        if type(column) is Fixed:
            values = column.values
            fields.append((name, _FIXED, values.dtype.str, values.shape))
        elif isinstance(column, (Ragged, Bytes)):
            compact = column.compact()
            values = compact.values
            kind = _RAGGED if isinstance(column, Ragged) else _TEXT if isinstance(column, Text) else _BYTES
            fields.append((name, kind, values.dtype.str, values.shape))
            arrays.append(compact.offsets)
        else:
            values = _pickled(name, column, block)
            fields.append((name, _OBJECTS, values.dtype.str, values.shape))
        if values.dtype.kind in "OVT":
            raise SettingError(f"field {name!r}: arrays of dtype {values.dtype} cannot be laid out; use Objects")
        arrays.append(values)
    head = (len(block), *block.samples.shape, block.sample_offsets is not None, fields)
    return Layout(msgpack.packb(head, unicode_errors="surrogatepass"), arrays)


def _pickled(name: str, column: Column, block: Block) -> Buffer:
    if isinstance(column, PickledObjects) and not column.touched:
        return column.blob
    values = column.to_list()
    try:
        return np.frombuffer(pickle.dumps(values, 5), np.uint8)
    except Exception as error:
        record = next((i for i, v in enumerate(values) if not _can_be_pickled(v)), 0)
        raise RunFailed(
            f"field {name!r} of the record made from (dataset, shard, row) {block.sample_of(record)} holds a "
            f"{type(values[record]).__qualname__} that cannot be pickled to reach another process: {error}. "
            "Return arrays, numbers, str, bytes or objects of importable classes."
        ) from error


def _can_be_pickled(value: Any) -> bool:
    try:
        pickle.dumps(value, 5)
    except Exception:
        return False
    return True


class PickledObjects(Objects):
    """Python objects that are still a pickle; unpickled when touched."""

    __slots__ = ("_count", "_list", "_name", "blob")

    def __init__(self, name: str, blob: Buffer, count: int) -> None:
        self._name, self.blob, self._count = name, blob, count
        self._list: list[Any] | None = None

    @property
    def values(self) -> list[Any]:  # type: ignore[override]
        if self._list is None:
            try:
                found = pickle.loads(self.blob.data)
            except Exception as error:
                raise ProtocolError(
                    f"field {self._name!r}: its Python objects cannot be rebuilt in this process: "
                    f"{type(error).__name__}: {error}. Make their classes importable here, or return arrays, numbers, "
                    "str or bytes from the recipe."
                ) from error
            if type(found) is not list or len(found) != self._count:
                raise ProtocolError(f"field {self._name!r}: its pickle does not hold a list of {self._count} objects")
            self._list = found
        return self._list

    @property
    def touched(self) -> bool:
        """Whether the objects exist, and so may have been changed in place."""
        return self._list is not None

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return len(self.blob)

    def copy(self) -> Objects:
        if self.touched:
            return super().copy()
        return PickledObjects(self._name, self.blob.copy(), self._count)

    def __reduce__(self) -> tuple[Any, ...]:
        return Objects, (self.values,)


class _Reader:
    """Takes arrays one after another out of a buffer, never beyond `end`."""

    __slots__ = ("buffer", "end", "position")

    def __init__(self, buffer: Buffer, position: int, end: int) -> None:
        self.buffer, self.position, self.end = buffer, position, end

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> AnyArray:
        size = dtype.itemsize
        for length in shape:
            if type(length) is not int or length < 0:
                raise ProtocolError(f"corrupt block: an array has the shape {shape}")
            size *= length
        start = _aligned(self.position)
        self.position = start + size
        if self.position > self.end and size:
            raise ProtocolError(f"corrupt block: an array of {size} bytes at {start} ends beyond {self.end} bytes")
        return np.ndarray(shape, dtype, self.buffer, start if size else 0)

    def offsets(self, records: int, total: int) -> AnyArray:
        """int64 `[records + 1]` that rise from 0 to `total`."""
        offsets = self.array((records + 1,), _INT64)
        if records < _FEW:  # of a batch: Python is done with so few before numpy has begun
            found = offsets.tolist()
            rise = found[0] == 0 and found[-1] == total and found == sorted(found)
        else:
            rise = offsets[0] == 0 and offsets[-1] == total and not (offsets[1:] < offsets[:-1]).any()
        if not rise:
            raise ProtocolError(f"corrupt block: the offsets of {records} records do not rise from 0 to {total}")
        return offsets


def read(buffer: Buffer) -> Block:
    """The block in `buffer` (uint8, contiguous), as views: nothing is copied, and each array keeps `buffer` alive.

    Views are as writable as `buffer` is, and aligned if it begins at a multiple of 64. Numpy links a view of a view to
    the array at the bottom, so `buffer` counts as alive with them only if it is no plain view of another array: make it
    with `np.frombuffer`.
    """
    if buffer.dtype != _UINT8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise ValueError("a block is read from a contiguous one-dimensional uint8 array")
    try:
        return _read(buffer)
    except ProtocolError:
        raise
    except Exception as error:  # what a corrupt header may make of msgpack and numpy
        raise ProtocolError(f"corrupt block: {type(error).__name__}: {error}") from error


def _read(buffer: Buffer) -> Block:
    if len(buffer) < _PREFIX.size:
        raise ProtocolError(f"corrupt block: {len(buffer)} bytes are less than a header")
    magic, size, total = _PREFIX.unpack_from(buffer.data)
    start = _PREFIX.size + size
    if magic != _MAGIC or not start <= total <= len(buffer):
        raise ProtocolError(f"no block begins here: {magic!r}, {size} bytes of header, {total} of {len(buffer)} bytes")
    header = msgpack.unpackb(buffer[_PREFIX.size : start], unicode_errors="surrogatepass")
    records, samples, width, packed, described = header
    reader = _Reader(buffer, start, total)
    if type(records) is not int or records < 0 or type(packed) is not bool or (not packed and samples != records):
        raise ProtocolError(f"corrupt block: {records!r} records of {samples!r} samples")
    if width not in (3, 4):
        raise ProtocolError(f"corrupt block: samples of {width!r} columns")
    sample_rows = reader.array((samples, width), _INT64)
    sample_offsets = reader.offsets(records, samples) if packed else None
    fields: dict[str, Column] = {}
    for name, kind, dtype, shape in described:
        if type(name) is not str or name in fields:
            raise ProtocolError(f"corrupt block: a field is named {name!r}")
        fields[name] = _column(reader, records, name, kind, _dtype(dtype), tuple(shape))
    return Block(fields, sample_rows, sample_offsets)


def _column(
    reader: _Reader, records: int, name: str, kind: int, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> Column:
    if kind == _FIXED:
        if not shape or shape[0] != records:
            raise ProtocolError(f"corrupt block: field {name!r} has the shape {shape} in {records} records")
        return Fixed(reader.array(shape, dtype))
    (length,) = shape
    if kind == _OBJECTS:
        return PickledObjects(name, reader.array(shape, _UINT8), records)
    offsets = reader.offsets(records, length)
    if kind == _RAGGED:
        return Ragged(reader.array(shape, dtype), offsets)
    if kind not in (_TEXT, _BYTES):
        raise ProtocolError(f"corrupt block: field {name!r} is of no known kind ({kind!r})")
    return (Text if kind == _TEXT else Bytes)(reader.array(shape, _UINT8), offsets)


@functools.lru_cache(64)
def _dtype(code: Any) -> np.dtype[Any]:
    if type(code) is not str:
        raise ProtocolError(f"corrupt block: {code!r} is no dtype")
    dtype = np.dtype(code)
    if dtype.kind in "OVT":
        raise ProtocolError(f"corrupt block: arrays of {dtype} are not laid out")
    return dtype
