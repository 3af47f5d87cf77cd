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
    5 Positions     offsets, lengths of runs                     [runs, width]

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
from typing import Any, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from zephon.columns import HIDDEN, AnyArray, Block, Bytes, Column, Fixed, Objects, Ragged, Text
from zephon.errors import ProtocolError, RunFailed, SettingError
from zephon.positions import Positions

Buffer = npt.NDArray[np.uint8]

_PREFIX = struct.Struct("<4sIQ")
_MAGIC = b"ZB1\0"
_INT64 = np.dtype(np.int64)
_UINT8 = np.dtype(np.uint8)
_FIXED, _RAGGED, _TEXT, _BYTES, _OBJECTS, _POSITIONS = range(6)
_OF_OFFSETS: dict[int, type[Ragged | Text | Bytes]] = {_RAGGED: Ragged, _TEXT: Text, _BYTES: Bytes}
_DTYPES: dict[int, np.dtype[Any]] = {_TEXT: _UINT8, _BYTES: _UINT8, _OBJECTS: _UINT8, _POSITIONS: np.dtype(np.int32)}
_FEW = 64
_FORMS, _FEW_FIELDS, _SMALL = 128, 32, 1024  # forms that are kept: those of few fields, of small headers


class _Array(NamedTuple):
    """Where one array lies."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    position: int


class _Form(NamedTuple):
    """What a header says. Batches of a lane differ in little more than their bytes, so forms are kept."""

    head: Buffer
    records: int
    samples: _Array
    sample_offsets: _Array | None
    fields: tuple[tuple[str, int, _Array | None, _Array, tuple[int, ...]], ...]
    """Of each: its name, its kind, its offsets, its values, its shape."""
    positions: tuple[int, ...]
    """Of all arrays, in their order."""
    nbytes: int


class Layout:
    """Where each array of one block goes. `nbytes` is the number of bytes that `write` fills."""

    __slots__ = ("_arrays", "_form", "nbytes")

    def __init__(self, form: _Form, arrays: list[AnyArray]) -> None:
        self._form, self._arrays, self.nbytes = form, arrays, form.nbytes

    def write(self, buffer: Buffer) -> None:
        """Copies the block into `buffer` (uint8, contiguous, at least `nbytes` bytes)."""
        if len(buffer) < self.nbytes:
            raise ValueError(f"a block of {self.nbytes} bytes does not fit into {len(buffer)}")
        buffer[: len(self._form.head)] = self._form.head
        for position, array in zip(self._form.positions, self._arrays, strict=True):
            np.ndarray(array.shape, array.dtype, buffer, position)[...] = array


def measure(block: Block) -> Layout:
    """The layout of a block. It refers to the block's arrays, which must not change before `write`."""
    block = block.compact_samples()
    arrays: list[AnyArray] = [block.samples]
    if block.sample_offsets is not None:
        arrays.append(block.sample_offsets)
    fields = []
    for name, column in block.fields.items():
        if type(name) is not str:  # asked here, since equal names find one form
            raise SettingError(f"a field is named {name!r}: names of fields are str")
        shape = None
        if type(column) is Fixed:
            kind, values = _FIXED, column.values
        elif type(column) is Positions and not column.touched:
            runs = column.runs.compact()
            kind, values, shape = _POSITIONS, runs.values, (len(runs.values), column.width)
            arrays.append(runs.offsets)
        elif isinstance(column, Fixed):
            kind, values = _FIXED, column.values
        elif isinstance(column, (Ragged, Bytes)):
            compact = column.compact()
            kind = _RAGGED if isinstance(column, Ragged) else _TEXT if isinstance(column, Text) else _BYTES
            values = compact.values
            arrays.append(compact.offsets)
        else:
            kind, values = _OBJECTS, _pickled(name, column, block)
        fields.append((name, kind, values.dtype, shape or values.shape))
        arrays.append(values)
    samples, width = block.samples.shape
    form_of = _kept_form_of if len(fields) <= _FEW_FIELDS else _form_of
    return Layout(form_of(len(block), samples, width, block.sample_offsets is not None, tuple(fields)), arrays)


def _form_of(
    records: int, samples: int, width: int, packed: bool, fields: tuple[tuple[str, int, Any, tuple[int, ...]], ...]
) -> _Form:
    """The form of a block that is to be written."""
    for name, _, dtype, _ in fields:
        if dtype.kind in "OVT":
            raise SettingError(f"field {name!r}: arrays of dtype {dtype} cannot be laid out; use Objects")
    described = [(name, kind, dtype.str, shape) for name, kind, dtype, shape in fields]
    return _form(msgpack.packb((records, samples, width, packed, described), unicode_errors="surrogatepass"))


_kept_form_of = functools.lru_cache(_FORMS)(_form_of)


def _pickled(name: str, column: Column, block: Block) -> Buffer:
    if isinstance(column, PickledObjects) and not column.touched:
        return column.blob
    values = column.to_list()
    try:
        return np.frombuffer(pickle.dumps(values, 5), np.uint8)
    except Exception as error:
        record = next((i for i, v in enumerate(values) if not _can_be_pickled(v)), 0)
        raise RunFailed(
            f"{_shown(name)} of the record made from (dataset, shard, row) {block.sample_of(record)} holds a "
            f"{type(values[record]).__qualname__} that cannot be pickled to reach another process: {error}. "
            "Return arrays, numbers, str, bytes or objects of importable classes."
        ) from error


def _shown(name: str) -> str:
    """A field for an error message. Of the hidden ones, the metas' tags alone have objects of a user's."""
    return "the tags of the records' metas" if name.startswith(HIDDEN) else f"field {name!r}"


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
                    f"{_shown(self._name)}: its Python objects cannot be rebuilt in this process: "
                    f"{type(error).__name__}: {error}. Put the module that defines their classes where this process "
                    "finds it (PYTHONPATH), or return arrays, numbers, str or bytes from the recipe."
                ) from error
            if type(found) is not list or len(found) != self._count:
                raise ProtocolError(f"{_shown(self._name)}: its pickle does not hold a list of {self._count} objects")
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


def read(buffer: Buffer) -> Block:
    """The block in `buffer` (uint8, contiguous), as views: nothing is copied, and each array keeps `buffer` alive.

    Views are as writable as `buffer` is, and aligned if it begins at a multiple of 64. Numpy links a view of a view to
    the array at the bottom, so `buffer` counts as alive with them only if it is no plain view of another array: make it
    with `np.frombuffer`.
    """
    if buffer.dtype != _UINT8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise ValueError("a block is read from a contiguous one-dimensional uint8 array")
    lying = LyingBlock(buffer)
    return Block(lying.fields, lying.samples, lying.sample_offsets)


class LyingBlock(Block):
    """The block in `buffer`, as `read` gives it, each part of it read when it is first asked for.

    A rank that only wants its tokens need not pay for views of the samples' names.
    """

    __slots__ = ("_buffer", "_form")
    _form: _Form

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    def __len__(self) -> int:
        return self._form.records

    def __getattr__(self, name: str) -> Any:  # of slots that are empty
        try:
            if name == "_form":
                self._form = _form_in(self._buffer)
            elif name == "fields":
                self.fields = _fields(self._buffer, self._form)
            elif name in ("samples", "sample_offsets"):
                form, of_records = self._form, None
                samples = _array(self._buffer, form.samples)
                if form.sample_offsets is not None:
                    of_records = _offsets(self._buffer, form.sample_offsets, len(samples))
                self.samples, self.sample_offsets = samples, of_records
            else:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        except (ProtocolError, AttributeError):
            raise
        except Exception as error:  # what a corrupt header may make of msgpack and numpy
            raise ProtocolError(f"corrupt block: {type(error).__name__}: {error}") from error
        return getattr(self, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return Block, (self.fields, self.samples, self.sample_offsets)


def _form_in(buffer: Buffer) -> _Form:
    """The form of the block, whose arrays lie within `buffer`."""
    if len(buffer) < _PREFIX.size:
        raise ProtocolError(f"corrupt block: {len(buffer)} bytes are less than a header")
    data = buffer.data
    magic, size, total = _PREFIX.unpack_from(data)
    start = _PREFIX.size + size
    if magic != _MAGIC or not start <= total <= len(buffer):
        raise ProtocolError(f"no block begins here: {magic!r}, {size} bytes of header, {total} of {len(buffer)} bytes")
    header = data[_PREFIX.size : start].tobytes()
    form = _kept_form(header) if size <= _SMALL else _form(header)
    if form.nbytes > total:
        raise ProtocolError(f"corrupt block: its arrays end at byte {form.nbytes}, beyond its {total} bytes")
    return form


def _fields(buffer: Buffer, form: _Form) -> dict[str, Column]:
    fields: dict[str, Column] = {}
    for name, kind, offsets, (size, dtype, position), shape in form.fields:
        array = np.ndarray(size, dtype, buffer, position)
        if kind == _FIXED:
            fields[name] = Fixed(array)
        elif offsets is None:
            fields[name] = PickledObjects(name, array, form.records)
        elif kind == _POSITIONS:
            fields[name] = Positions(Ragged(array, _offsets(buffer, offsets, len(array))), shape[1])
        else:
            fields[name] = _OF_OFFSETS[kind](array, _offsets(buffer, offsets, len(array)))
    return fields


def _array(buffer: Buffer, at: _Array) -> AnyArray:
    return np.ndarray(at.shape, at.dtype, buffer, at.position)


def _offsets(buffer: Buffer, at: _Array, total: int) -> AnyArray:
    """int64 `[records + 1]` that rise from 0 to `total`."""
    offsets = _array(buffer, at)
    if len(offsets) <= _FEW:  # of a batch: Python is done with so few before numpy has begun
        found = offsets.tolist()
        rise = found[0] == 0 and found[-1] == total and found == sorted(found)
    else:
        rise = offsets[0] == 0 and offsets[-1] == total and not (offsets[1:] < offsets[:-1]).any()
    if not rise:
        raise ProtocolError(f"corrupt block: the offsets of {len(offsets) - 1} records do not rise from 0 to {total}")
    return offsets


def _form(header: bytes) -> _Form:
    """What a header says, checked as far as it can be without the bytes that follow."""
    records, samples, width, packed, described = msgpack.unpackb(header, unicode_errors="surrogatepass")
    if type(records) is not int or records < 0 or type(packed) is not bool or (not packed and samples != records):
        raise ProtocolError(f"corrupt block: {records!r} records of {samples!r} samples")
    if width not in (3, 4):
        raise ProtocolError(f"corrupt block: samples of {width!r} columns")
    position = _PREFIX.size + len(header)
    positions: list[int] = []

    def placed(shape: tuple[int, ...], dtype: np.dtype[Any] = _INT64) -> _Array:
        nonlocal position
        size = dtype.itemsize
        for length in shape:
            if type(length) is not int or length < 0:
                raise ProtocolError(f"corrupt block: an array has the shape {shape}")
            size *= length
        start = (position + 63) & ~63
        position = start + size
        positions.append(start if size else 0)
        return _Array(shape, dtype, positions[-1])

    rows = placed((samples, width))
    of_records = placed((records + 1,)) if packed else None
    fields: dict[str, tuple[str, int, _Array | None, _Array, tuple[int, ...]]] = {}
    for name, kind, code, shape in described:
        if type(name) is not str or name in fields:
            raise ProtocolError(f"corrupt block: a field is named {name!r}")
        if type(kind) is not int or not _FIXED <= kind <= _POSITIONS:
            raise ProtocolError(f"corrupt block: field {name!r} is of no known kind ({kind!r})")
        if not shape or (shape[0] != records if kind == _FIXED else len(shape) != 1 + (kind == _POSITIONS)):
            raise ProtocolError(f"corrupt block: field {name!r} has the shape {shape} in {records} records")
        offsets = placed((records + 1,)) if kind in _OF_OFFSETS or kind == _POSITIONS else None
        dtype = _DTYPES.get(kind) or _dtype(code)
        size = tuple(shape) if kind == _FIXED else shape[:1]
        fields[name] = name, kind, offsets, placed(size, dtype), tuple(shape)
    head = np.frombuffer(_PREFIX.pack(_MAGIC, len(header), position) + header, np.uint8)
    return _Form(head, records, rows, of_records, tuple(fields.values()), tuple(positions), position)


_kept_form = functools.lru_cache(_FORMS)(_form)


@functools.lru_cache(64)
def _dtype(code: Any) -> np.dtype[Any]:
    if type(code) is not str:
        raise ProtocolError(f"corrupt block: {code!r} is no dtype")
    dtype = np.dtype(code)
    if dtype.kind in "OVT":
        raise ProtocolError(f"corrupt block: arrays of {dtype} are not laid out")
    return dtype
