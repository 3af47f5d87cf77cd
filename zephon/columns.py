"""Columns and blocks: how records are held, between operators, in shared memory and in a batch.

A `Block` is a group of records as columns; a `Column` is one field of all of them. Built-in operators work on the
arrays inside; Python objects per record are made only for a user's own function.

The kind of a column (`Fixed`, `Ragged`, `Text`, `Bytes`, `Objects`) is an execution detail while records travel in
blocks: one block may hold a field as `Fixed` and the next, with an odd record in it, as `Objects`. What a rank sees
must not depend on how records were cut into blocks, so a finished batch goes through `canonical`, which is a function
of its records' values alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
AnyArray = npt.NDArray[Any]


class _Missing:
    """The value of a field that a record does not have."""

    _only: _Missing | None = None

    def __new__(cls) -> _Missing:
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only

    def __repr__(self) -> str:
        return "MISSING"

    def __reduce__(self) -> str:
        return "MISSING"

    def __bool__(self) -> bool:
        return False


MISSING = _Missing()

HIDDEN = "\0zephon "
"""What the names of fields begin with that operators keep for one another: longer than what data may well have."""


class Column(ABC):
    """One field of `len(column)` records."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def take(self, index: IntArray) -> Column:
        """The records at `index` (int64 `[k]`), copied."""

    @abstractmethod
    def slice(self, low: int, high: int) -> Column:
        """Records `low` to `high`, as a view."""

    @abstractmethod
    def to_list(self) -> list[Any]:
        """One Python value a record: scalars as Python numbers, the rest as arrays, `str`, `bytes` or the object."""

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    @abstractmethod
    def copy(self) -> Column:
        """The same records in memory of their own."""

    def joined(self, others: Sequence[Column]) -> Column | None:
        """These records and those of the others, end to end; None if they are not all of one kind and dtype."""
        return None


class Fixed(Column):
    """Every record has one shape and dtype: `values` is `[n, ...]`."""

    __slots__ = ("values",)

    def __init__(self, values: AnyArray) -> None:
        self.values = values

    @property
    def shape(self) -> tuple[int, ...]:
        """That of `values`."""
        return self.values.shape

    def __len__(self) -> int:
        return len(self.values)

    def take(self, index: IntArray) -> Fixed:
        return Fixed(self.values.take(index, axis=0))

    def slice(self, low: int, high: int) -> Fixed:
        return Fixed(self.values[low:high])

    def to_list(self) -> list[Any]:
        if self.values.ndim > 1:
            return list(self.values)
        if self.values.dtype in _PYTHON_DTYPES:
            return self.values.tolist()  # type: ignore[no-any-return]
        return list(self.values)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def copy(self) -> Fixed:
        return Fixed(self.values.copy())

    def joined(self, others: Sequence[Column]) -> Column | None:
        form = self.values.dtype, self.shape[1:]
        alike = [c.values for c in others if isinstance(c, Fixed) and (c.values.dtype, c.shape[1:]) == form]
        return Fixed(np.concatenate([self.values, *alike])) if len(alike) == len(others) else None


_NUMPY_TWINS = {np.int64, np.float64, np.bool_}  # scalars that travel as their Python twins
_PLAIN = "biufcmMSU"  # kinds of dtype whose values are their bytes, and whose arrays join without a change of dtype
_PYTHON_DTYPES = tuple(np.dtype(t) for t in _NUMPY_TWINS)

_R = TypeVar("_R", bound="_Offsets")
_LONG = 64  # values a record from which copying record by record is cheaper than an index for each value


class _Offsets(Column):
    """Records of varying length, laid end to end: record `i` is `values[offsets[i]:offsets[i + 1]]`.

    `offsets` (int64 `[n + 1]`) need not begin at 0: a slice shares its values with the column it came from.
    """

    __slots__ = ("offsets", "values")

    def __init__(self, values: AnyArray, offsets: IntArray) -> None:
        self.values, self.offsets = values, offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> IntArray:
        """int64 `[n]`."""
        return self.offsets[1:] - self.offsets[:-1]

    def take(self: _R, index: IntArray) -> _R:
        starts, lengths = self.offsets[:-1].take(index), self.lengths.take(index)
        offsets = np.zeros(len(index) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        if offsets[-1] > _LONG * len(index):
            return type(self)(laid(cut(self.values, starts, lengths), self.values.dtype), offsets)
        return type(self)(self.values.take(spans(starts, lengths, offsets)), offsets)

    def slice(self: _R, low: int, high: int) -> _R:
        return type(self)(self.values, self.offsets[low : max(high, low) + 1])

    def compact(self: _R) -> _R:
        """The same records with offsets from 0 and no values beyond them (a view where possible)."""
        first, last = int(self.offsets[0]), int(self.offsets[-1])
        if first == 0 and last == len(self.values):
            return self
        return type(self)(self.values[first:last], self.offsets - first)

    @property
    def nbytes(self) -> int:
        return int(self.offsets[-1] - self.offsets[0]) * self.values.itemsize + self.offsets.nbytes

    def copy(self: _R) -> _R:
        compact = self.compact()
        return type(self)(compact.values.copy(), compact.offsets.copy())

    def joined(self, others: Sequence[Column]) -> Column | None:
        parts = [self.compact()]
        for other in others:
            if type(other) is not type(self) or other.values.dtype != self.values.dtype:
                return None
            parts.append(other.compact())
        bases = np.cumsum([len(part.values) for part in parts])
        offsets = [part.offsets[1:] + base for part, base in zip(parts[1:], bases.tolist(), strict=False)]
        return type(self)(np.concatenate([p.values for p in parts]), np.concatenate([parts[0].offsets, *offsets]))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} records, {self.values.dtype})"


class Ragged(_Offsets):
    """One-dimensional arrays of varying length; `[i]` is a view."""

    __slots__ = ()

    def __getitem__(self, index: int) -> AnyArray:
        index = _checked(index, len(self))
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[AnyArray]:
        return iter(self.to_list())

    def to_list(self) -> list[Any]:
        bounds = self.offsets.tolist()
        return [self.values[a:b] for a, b in pairwise(bounds)]


class Bytes(_Offsets):
    """A sequence of `bytes`; `values` is uint8."""

    __slots__ = ()

    def __getitem__(self, index: int) -> Any:
        index = _checked(index, len(self))
        return self.values[self.offsets[index] : self.offsets[index + 1]].tobytes()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.to_list())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (Bytes, list, tuple)):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def to_list(self) -> list[Any]:
        first, bounds = int(self.offsets[0]), self.offsets.tolist()
        data = self.values[first : bounds[-1]].tobytes()
        return [data[a - first : b - first] for a, b in pairwise(bounds)]


class Text(Bytes):
    """A sequence of `str`, kept as UTF-8 and decoded when touched (lone surrogates survive)."""

    __slots__ = ()

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index).decode("utf-8", "surrogatepass")

    def to_list(self) -> list[Any]:
        return [value.decode("utf-8", "surrogatepass") for value in super().to_list()]


class Objects(Column):
    """Anything else, one Python object a record."""

    __slots__ = ("values",)

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def take(self, index: IntArray) -> Objects:
        return Objects([self.values[i] for i in index.tolist()])

    def slice(self, low: int, high: int) -> Objects:
        return Objects(self.values[low:high])

    def to_list(self) -> list[Any]:
        return list(self.values)

    @property
    def nbytes(self) -> int:
        return 64 * len(self.values)

    def copy(self) -> Objects:
        return Objects(list(self.values))


def _checked(index: int, length: int) -> int:
    if not -length <= index < length:
        raise IndexError(f"record {index} of {length}")
    return index % length if length else index


def spans(starts: IntArray, lengths: IntArray, offsets: IntArray | None = None) -> IntArray:
    """The indices `starts[i] .. starts[i] + lengths[i] - 1` of every span, end to end: int64 `[sum(lengths)]`.

    `offsets` are the running sums of `lengths` from 0, if the caller has them.
    """
    if offsets is None:
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
    out = np.arange(int(offsets[-1]), dtype=np.int64)
    out += np.repeat(starts - offsets[:-1], lengths)
    return out


def cut(values: AnyArray, starts: IntArray, lengths: IntArray) -> list[memoryview]:
    """The runs `values[starts[i]:starts[i] + lengths[i]]` as views of their bytes."""
    data, size = np.ascontiguousarray(values).view(np.uint8).data, values.itemsize
    return [data[low:high] for low, high in zip((size * starts).tolist(), (size * (starts + lengths)).tolist())]


def laid(parts: Sequence[bytes | memoryview], dtype: npt.DTypeLike) -> AnyArray:
    """Bytes end to end, as an array that owns them. For each part it costs a third of `np.concatenate`."""
    return np.frombuffer(bytearray().join(parts), dtype)


def joined(values: Sequence[bytes]) -> tuple[AnyArray, IntArray]:
    """`(uint8 data, int64 offsets)` of byte strings laid end to end."""
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(v) for v in values], out=offsets[1:])
    return np.frombuffer(b"".join(values), np.uint8), offsets


def column_of(values: Sequence[Any]) -> Column:
    """The narrowest kind that gives these very values back; `Objects` where they differ in type.

    Lists stay lists: a user's function must see the same type whatever other records share its block.
    """
    if not values:
        return Objects([])
    values = _plain(values)
    kinds = set(map(type, values))
    if len(kinds) == 1:
        kind = kinds.pop()
        column = _of_one_type(kind, values)
        if column is not None:
            return column
    return Objects(list(values))


def _plain(values: Sequence[Any]) -> Sequence[Any]:
    """The values in the one form in which they leave any kind of column, so that no value tells how it travelled:
    numpy's twins of Python scalars as those, arrays of no dimension as scalars, arrays in the machine's byte order."""
    kinds = set(map(type, values))
    if np.memmap in kinds:
        values = [np.asarray(v) if type(v) is np.memmap else v for v in values]
        kinds = set(map(type, values))
    if np.ndarray in kinds and any(type(v) is np.ndarray and not (v.ndim and v.dtype.isnative) for v in values):
        values = [_plain_array(v) if type(v) is np.ndarray else v for v in values]
        kinds = set(map(type, values))
    if kinds & _NUMPY_TWINS:
        values = [v.item() if type(v) in _NUMPY_TWINS else v for v in values]
    return values


def _plain_array(array: AnyArray) -> Any:
    native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    return native if native.ndim else native[()]


def _of_one_type(kind: type, values: Sequence[Any]) -> Column | None:
    if kind is str:
        return Text(*joined([v.encode("utf-8", "surrogatepass") for v in values]))
    if kind is bytes:
        return Bytes(*joined(values))
    if kind is bool or kind is float:
        return Fixed(np.array(values))
    if kind is int:
        return Fixed(np.array(values, np.int64)) if all(-(2**63) <= v < 2**63 for v in values) else None
    if kind is np.ndarray:
        return _of_arrays(values)
    if issubclass(kind, np.generic) and not issubclass(kind, np.flexible):
        dtype = values[0].dtype  # times of several units share a type
        return Fixed(np.array(values)) if dtype.kind in _PLAIN and all(v.dtype == dtype for v in values) else None
    return None


def _list_array(value: list[Any]) -> AnyArray | None:
    """A list of integers or of floats as an array, else None. An empty list is an empty array."""
    kinds = set(map(type, value))
    if kinds <= {int}:
        try:
            return np.array(value, np.int64)
        except OverflowError:
            return None
    return np.array(value) if kinds == {float} else None


def _of_arrays(arrays: Sequence[AnyArray]) -> Column | None:
    first = arrays[0]
    if first.dtype.kind not in _PLAIN or any(a.dtype != first.dtype or a.ndim != first.ndim for a in arrays):
        return None
    if first.ndim == 1:
        offsets = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum([len(a) for a in arrays], out=offsets[1:])
        return Ragged(np.concatenate(arrays), offsets)
    if all(a.shape == first.shape for a in arrays):
        return Fixed(np.stack(arrays))
    return None


def _concat(columns: list[Column]) -> Column:
    """Columns end to end: the same kind if they all agree, else `Objects`."""
    if len(columns) == 1:
        return columns[0]
    together = columns[0].joined(columns[1:])
    return Objects([value for column in columns for value in column.to_list()]) if together is None else together


class Block:
    """A group of records as columns, with the samples that each was made from.

    `fields` maps a field's name to its column. `samples` is int64 `[m, 3]`, rows of (dataset, shard, row) as numbers,
    or `[m, 4]` with the sample's place in its lane (0 for the lane's first sample of the epoch), which records keep
    until they are packed. With `sample_offsets` None record `i` was made from exactly `samples[i]`; else (after
    packing) from `samples[sample_offsets[i]:sample_offsets[i + 1]]`.

    A field whose name begins with `HIDDEN` belongs to operators alone: no user's function and no rank sees it.
    """

    __slots__ = ("fields", "sample_offsets", "samples")

    def __init__(self, fields: dict[str, Column], samples: IntArray, sample_offsets: IntArray | None = None) -> None:
        self.fields, self.samples, self.sample_offsets = fields, samples, sample_offsets

    def __len__(self) -> int:
        return len(self.samples) if self.sample_offsets is None else len(self.sample_offsets) - 1

    def __repr__(self) -> str:
        return f"Block({len(self)} records: {', '.join(f'{k} {type(v).__name__}' for k, v in self.fields.items())})"

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in self.fields.values()) + self.samples.nbytes

    def take(self, index: IntArray) -> Block:
        """The records at `index` (int64 `[k]`), copied."""
        fields = {name: column.take(index) for name, column in self.fields.items()}
        if self.sample_offsets is None:
            return Block(fields, self.samples.take(index, axis=0))
        starts, lengths = self.sample_offsets[:-1].take(index), np.diff(self.sample_offsets).take(index)
        offsets = np.zeros(len(index) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return Block(fields, self.samples.take(spans(starts, lengths, offsets), axis=0), offsets)

    def slice(self, low: int, high: int) -> Block:
        """Records `low` to `high`, as views."""
        fields = {name: column.slice(low, high) for name, column in self.fields.items()}
        if self.sample_offsets is None:
            return Block(fields, self.samples[low:high])
        return Block(fields, self.samples, self.sample_offsets[low : max(high, low) + 1])

    def select(self, names: Iterable[str]) -> Block:
        """The same records with only these fields (those that exist) and the hidden ones."""
        wanted = {n: self.fields[n] for n in names if n in self.fields}
        return Block({**wanted, **self.hidden}, self.samples, self.sample_offsets)

    @property
    def hidden(self) -> dict[str, Column]:
        """The fields that operators keep for one another."""
        return {name: column for name, column in self.fields.items() if name.startswith(HIDDEN)}

    def with_fields(self, fields: dict[str, Column]) -> Block:
        """The same records with other columns."""
        return Block(fields, self.samples, self.sample_offsets)

    def copy(self) -> Block:
        """The same records in memory of their own."""
        compact = self.compact_samples()
        return Block(
            {n: c.copy() for n, c in self.fields.items()},
            compact.samples.copy(),
            None if compact.sample_offsets is None else compact.sample_offsets.copy(),
        )

    def compact_samples(self) -> Block:
        """The same block whose `sample_offsets` begin at 0 and cover all of `samples`."""
        if self.sample_offsets is None:
            return self
        first, last = int(self.sample_offsets[0]), int(self.sample_offsets[-1])
        if first == 0 and last == len(self.samples):
            return self
        return Block(self.fields, self.samples[first:last], self.sample_offsets - first)

    def sample_of(self, record: int) -> tuple[int, int, int]:
        """(dataset, shard, row) of the first sample that a record was made from: what an error message names."""
        row = record if self.sample_offsets is None else int(self.sample_offsets[record])
        dataset, shard, number = self.samples[row, :3].tolist()
        return dataset, shard, number

    @staticmethod
    def empty() -> Block:
        """No record and no field."""
        return Block({}, np.empty((0, 3), np.int64))

    @staticmethod
    def concat(blocks: Sequence[Block]) -> Block:
        """Blocks end to end. A field that some of them lack holds `MISSING` there."""
        blocks = [b for b in blocks if len(b)] or list(blocks[:1])
        if not blocks:
            return Block.empty()
        if len(blocks) == 1:
            return blocks[0]
        names = dict.fromkeys(name for block in blocks for name in block.fields)
        fields = {
            n: _concat([b.fields[n] if n in b.fields else Objects([MISSING] * len(b)) for b in blocks]) for n in names
        }
        if all(b.sample_offsets is None for b in blocks):
            return Block(fields, np.concatenate([b.samples for b in blocks]))
        offsets, parts, base = [np.zeros(1, np.int64)], [], 0
        for block in blocks:
            compact = block.compact_samples()
            ends = np.arange(1, len(block) + 1) if compact.sample_offsets is None else compact.sample_offsets[1:]
            offsets.append(ends + base)
            parts.append(compact.samples)
            base += len(compact.samples)
        return Block(fields, np.concatenate(parts), np.concatenate(offsets))

    def to_rows(self) -> list[dict[str, Any]]:
        """One plain dict a record; a field that a record lacks is left out. Fields stand in the order of their names,
        since their order in a block depends on which records lie together in it.
        """
        rows: list[dict[str, Any]] = [{} for _ in range(len(self))]
        for name in sorted(self.fields):
            if not name.startswith(HIDDEN):
                for row, value in zip(rows, self.fields[name].to_list(), strict=True):
                    if value is not MISSING:
                        row[name] = value
        return rows

    @staticmethod
    def from_rows(
        rows: Sequence[Mapping[str, Any]], samples: IntArray, sample_offsets: IntArray | None = None
    ) -> Block:
        """Plain dicts as columns; the fields in the order in which they first appear."""
        names = dict.fromkeys(name for row in rows for name in row)
        fields = {n: column_of([row.get(n, MISSING) for row in rows]) for n in names}
        return Block(fields, samples, sample_offsets)


def visible(block: Block) -> Block:
    """The same records with their fields in the order of the names, without hidden fields and the samples' places."""
    names = sorted(name for name in block.fields if not name.startswith(HIDDEN))
    return Block({name: block.fields[name] for name in names}, block.samples[:, :3], block.sample_offsets)


def settled(block: Block) -> bool:
    """Whether any records of a `visible` block are in their final form as they lie there."""
    return all(isinstance(column, Fixed) and _is_final(column) for column in block.fields.values())


def canonical(block: Block) -> Block:
    """The final form of a batch: fields in the order of their names, each in the kind that its values alone decide.

    Records of one shape are stacked (`Fixed`), also where they travelled as `Ragged`; numbers of several widths are
    widened; a field that some records lack is None there, one that all lack is left out. Hidden fields and the samples'
    places end here.
    """
    block = visible(block)
    fields = {}
    for name, each in block.fields.items():
        column = _canonical_column(each)
        if column is not None:
            fields[name] = column
    return block.with_fields(fields).compact_samples()


def _is_final(column: Fixed) -> bool:
    return len(column.shape) != 2 or column.shape[1] > 0


def _canonical_column(column: Column) -> Column | None:
    if isinstance(column, Fixed) and _is_final(column):
        return column
    if isinstance(column, Objects):
        if all(v is MISSING for v in column.values) and column.values:
            return None
        column = column_of(_widened(_plain([None if v is MISSING else v for v in column.values])))
    if isinstance(column, Ragged) and len(column):
        lengths = column.lengths
        if not lengths.any():
            return Fixed(np.empty((len(column), 0), np.int64))
        if (lengths == lengths[0]).all():
            return Fixed(column.compact().values.reshape(len(column), int(lengths[0])))
    if isinstance(column, Fixed) and not _is_final(column):
        return Fixed(np.empty((len(column), 0), np.int64))
    return column.compact() if isinstance(column, _Offsets) else column


def _widened(values: Sequence[Any]) -> Sequence[Any]:
    """Numbers, or one-dimensional arrays of numbers, brought to one dtype if they are all integers or all floats."""
    arrays = [_list_array(v) if type(v) is list else v for v in values]
    if all(type(a) is np.ndarray and a.ndim == 1 and a.dtype.kind in "iuf" for a in arrays):
        solid = [a.dtype for a in arrays if a is not None and len(a)]
        kinds = {"f" if d.kind == "f" else "i" for d in solid}
        dtype = np.result_type(*solid) if solid else np.dtype(np.int64)
        if len(kinds) <= 1 and (dtype.kind == "f") == ("f" in kinds):
            return [np.asarray(a, dtype) for a in arrays]
    elif all(isinstance(v, (int, np.integer)) and not isinstance(v, bool) for v in values):
        dtype = np.result_type(*{v.dtype if isinstance(v, np.generic) else np.dtype(np.int64) for v in values})
        if dtype.kind in "iu" and all(-(2**63) <= int(v) < 2**63 for v in values):
            return [dtype.type(v) for v in values]
    elif all(isinstance(v, (float, np.floating)) for v in values):
        dtype = np.result_type(*{v.dtype if isinstance(v, np.generic) else np.dtype(np.float64) for v in values})
        return [dtype.type(v) for v in values]
    return values
