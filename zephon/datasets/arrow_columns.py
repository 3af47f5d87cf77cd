"""Arrow arrays as columns, without a Python object per record where the type allows.

Numbers, booleans, text, bytes and flat lists of numbers become views of Arrow's own memory. Everything else becomes
Python objects. A record's value has the same type whether or not others beside it are null: a null is None, the rest
is what the column would hold without it.

Offsets of 32 bits are widened here. Arrow's `cast` would do that too, but copy the values as well, and load all of
`pyarrow.compute`, 4 MiB for each worker.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from zephon.columns import AnyArray, Bytes, Column, Fixed, IntArray, Objects, Ragged, Text
from zephon.datasets.source import in_words


def column_from_arrow(array: pa.Array) -> tuple[Column, dict[int, str]]:
    """The column, and for each record whose text is not valid UTF-8 why it is bad."""
    array = _plain(array)
    if array.null_count == len(array):
        return Objects([None] * len(array)), {}
    if array.null_count:
        return _with_nulls(array)
    kind = array.type
    if _is_number(kind):
        return Fixed(array.to_numpy(zero_copy_only=True)), {}
    if pt.is_boolean(kind):
        return Fixed(array.to_numpy(zero_copy_only=False)), {}
    text = pt.is_string(kind) or pt.is_large_string(kind)
    if text or pt.is_binary(kind) or pt.is_large_binary(kind):
        data, offsets = array.buffers()[2], _offsets(array)
        values = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
        if not text:
            return Bytes(values, offsets), {}
        column = Text(values, offsets)
        return column, _bad_text(array, column)
    if _is_list(kind) and _is_number(kind.value_type):
        offsets = _offsets(array)
        flat = array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))  # `flatten` is a compute function
        if not flat.null_count:
            return Ragged(flat.to_numpy(zero_copy_only=True), offsets - offsets[0]), {}
    if pt.is_fixed_size_list(kind) and _is_number(kind.value_type):
        flat = array.flatten()
        if not flat.null_count:
            return Fixed(flat.to_numpy(zero_copy_only=True).reshape(len(array), kind.list_size)), {}
    return _objects(array)


def raw_value(array: pa.Array) -> Any:
    """The only value of an array, text as bytes; for one that Python cannot hold, the error's text."""
    array = _plain(array)
    if pt.is_string(array.type) or pt.is_large_string(array.type):
        array = array.view(pa.binary() if pt.is_string(array.type) else pa.large_binary())
    try:
        return array[0].as_py()
    except (ValueError, OverflowError) as error:
        return f"unreadable: {error}"


def _plain(array: pa.Array) -> pa.Array:
    """The same values in one of the few types that are known here."""
    if isinstance(array, pa.ExtensionArray):
        return _plain(array.storage)
    kind = array.type
    if pt.is_dictionary(kind):
        return _plain(array.dictionary_decode())
    if _is(kind, "is_string_view"):
        return array.cast(pa.large_string())
    if pt.is_fixed_size_binary(kind) or _is(kind, "is_binary_view"):
        return array.cast(pa.large_binary())
    if _is(kind, "is_list_view") or _is(kind, "is_large_list_view"):
        return array.cast(pa.large_list(kind.value_field))
    if pt.is_timestamp(kind) and kind.unit == "ns":  # Python's datetime ends at microseconds
        return array.cast(pa.timestamp("us", kind.tz), safe=False)
    if pt.is_duration(kind) and kind.unit == "ns":
        return array.cast(pa.duration("us"), safe=False)
    if pt.is_time64(kind) and kind.unit == "ns":
        return array.cast(pa.time64("us"), safe=False)
    return array


def _is(kind: pa.DataType, test: str) -> bool:
    """A test that older releases of Arrow do not have, for types that they do not have either."""
    found = getattr(pt, test, None)
    return bool(found and found(kind))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pt.is_integer(kind) or pt.is_floating(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pt.is_list(kind) or pt.is_large_list(kind))


def _offsets(array: pa.Array) -> IntArray:
    kind = array.type
    wide = pt.is_large_string(kind) or pt.is_large_binary(kind) or pt.is_large_list(kind)
    own = np.frombuffer(array.buffers()[1], np.int64 if wide else np.int32)
    return own[array.offset : array.offset + len(array) + 1].astype(np.int64, copy=False)


def _with_nulls(array: pa.Array) -> tuple[Column, dict[int, str]]:
    places: AnyArray = np.flatnonzero(array.is_valid().to_numpy(zero_copy_only=False))
    solid, bad = column_from_arrow(array.drop_null())
    values: list[Any] = [None] * len(array)
    if bad:
        for i in range(len(solid)):
            if i not in bad:
                values[places[i]] = solid.slice(i, i + 1).to_list()[0]
        return Objects(values), {int(places[i]): cause for i, cause in bad.items()}
    for place, value in zip(places.tolist(), solid.to_list(), strict=True):
        values[place] = value
    return Objects(values), {}


def _bad_text(array: pa.Array, text: Text) -> dict[int, str]:
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        bad = {}
        for i in range(len(text)):
            data = text.values[text.offsets[i] : text.offsets[i + 1]].tobytes()
            try:
                data.decode("utf-8")
            except UnicodeDecodeError as error:
                bad[i] = in_words(error)
        return bad
    return {}


def _objects(array: pa.Array) -> tuple[Column, dict[int, str]]:
    lists = _is_list(array.type) or pt.is_fixed_size_list(array.type)
    if lists and _is_number(array.type.value_type):  # some elements are null: only those records are lists
        each = [scalar.values for scalar in array]
        return Objects([v.to_pylist() if v.null_count else v.to_numpy(zero_copy_only=True) for v in each]), {}
    try:
        return Objects(array.to_pylist()), {}
    except (ValueError, OverflowError):  # bad text inside, or a date that Python cannot hold
        values, bad = [], {}
        for i, scalar in enumerate(array):
            try:
                values.append(scalar.as_py())
            except (ValueError, OverflowError) as error:
                values.append(None)
                bad[i] = f"{type(error).__name__}: {error}"
        return Objects(values), bad
