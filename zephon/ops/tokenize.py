"""`tokenize`: the text of one field becomes `input_ids`.

Text goes to the tokenizer a block at a time and its ids come back as one flat array with offsets; adding BOS and EOS,
truncating and splitting are arithmetic on these. Which library does the work (`zephon.ops.tokenizer_backend`) is an
execution detail and no part of the identity; the tokenizer's content is.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from zephon.arguments import recipe_level
from zephon.columns import MISSING, AnyArray, Block, Column, Fixed, IntArray, Objects, Ragged, Text, spans
from zephon.errors import SettingError, TokenizerError
from zephon.ops.base import Faults, Stateless
from zephon.ops.tokenizer_backend import CHOICE, Backend, BoolArray, Disagreement, Encoded, chosen, load_backend
from zephon.ops.tokenizer_source import find_tokenizer

_AT_ONCE, _BYTES_AT_ONCE = 128, 1 << 20
"""Documents, and bytes of more than one, whose text is a str at the same time: it stays in the caches."""
_MODES = {"bos_eos": ("bos", "eos"), "bos": ("bos",), "eos": ("eos",), "none": (), "tokenizer_default": ()}


class _Texts(NamedTuple):
    texts: list[str]
    records: IntArray  # which record of the block each came from


class Tokenize(Stateless):
    """Text to token ids.

    `special_tokens`: which of BOS and EOS are put around each document, or `"tokenizer_default"` for what the
    tokenizer's own post-processing adds. With `truncation` a document has at most `max_length` ids, special tokens
    included; with `split_long_samples` it becomes several records of at most that many, and no id is lost.
    A null counts as a missing field.
    """

    name = "tokenize"

    def __init__(
        self,
        tokenizer: Any = None,
        tokenizer_id: str | os.PathLike[str] | None = None,
        *,
        field: str,
        missing_field: str = "error",
        add_attention_mask: bool = True,
        max_length: int | None = None,
        truncation: bool = False,
        split_long_samples: bool = False,
        preserve_upstream_payload: bool = False,
        special_tokens: str = "bos_eos",
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
    ) -> None:
        if type(field) is not str or not field:
            raise SettingError(f"tokenize: field={field!r}: must be the name of the field that holds the text")
        if missing_field not in ("error", "skip"):
            raise SettingError(f"tokenize: missing_field={missing_field!r}: must be 'error' or 'skip'")
        if special_tokens not in _MODES:
            raise SettingError(f"tokenize: special_tokens={special_tokens!r}: must be one of {', '.join(_MODES)}")
        wanted = _MODES[special_tokens]
        _check_length(max_length, truncation, split_long_samples, len(wanted))
        self.field, self.missing_field, self.special_tokens = field, missing_field, special_tokens
        self.add_attention_mask = bool(add_attention_mask)
        self.max_length = max_length if truncation or split_long_samples else None
        self.split_long_samples = bool(split_long_samples)
        self.preserve_upstream_payload = bool(preserve_upstream_payload)
        self.changes_counts = self.split_long_samples or missing_field == "skip"
        self.needs = (field,) if missing_field == "error" else ()
        self.keeps_fields = self.preserve_upstream_payload
        self.tokenizer_source = find_tokenizer(tokenizer, tokenizer_id)
        given = {"bos": bos_token_id, "eos": eos_token_id}
        ids = {which: self._special_id(which, given[which]) for which in wanted}
        self._bos, self._eos = ids.get("bos"), ids.get("eos")
        self._backend: Backend | None = None

    def _special_id(self, which: str, given: int | None) -> int:
        if given is not None:
            if type(given) is not int or not 0 <= given < 2**31:
                raise SettingError(f"tokenize: {which}_token_id={given!r}: must be a whole number from 0 to 2147483647")
            size = self.tokenizer_source.vocabulary_size
            if size is not None and given >= size:
                raise SettingError(
                    f"tokenize: {which}_token_id={given}: beyond the vocabulary of tokenizer "
                    f"{self.tokenizer_source.where}, whose ids are 0 to {size - 1}"
                )
            return given
        found = self.tokenizer_source.special_id(which)
        if found is None:
            raise TokenizerError(
                f"tokenizer {self.tokenizer_source.where} does not tell its {which.upper()} token: pass "
                f"{which}_token_id=, or choose special_tokens without it "
                f"({', '.join(m for m, w in _MODES.items() if which not in w)})"
            )
        return found

    @cached_property
    def _digest(self) -> str:
        return self.tokenizer_source.digest

    def describe(self) -> dict[str, Any]:
        return {
            "tokenizer": self._digest,
            "field": self.field,
            "missing_field": self.missing_field,
            "attention_mask": self.add_attention_mask,
            "max_length": self.max_length,
            "split_long_samples": self.split_long_samples,
            "preserve_upstream_payload": self.preserve_upstream_payload,
            "special_tokens": self.special_tokens,
            "bos_token_id": self._bos,
            "eos_token_id": self._eos,
        }

    def requires(self, downstream: frozenset[str] | None) -> frozenset[str] | None:
        if not self.preserve_upstream_payload:
            return frozenset({self.field})
        return None if downstream is None else downstream - {"input_ids", "attention_mask"} | {self.field}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_backend": None}

    def empty(self, block: Block) -> Block:
        names = ["input_ids", *(["attention_mask"] if self.add_attention_mask else [])]
        tokens: dict[str, Column] = {name: Fixed(np.empty((0, 0), np.int32)) for name in names}
        return block.with_fields({**(block.fields if self.preserve_upstream_payload else {}), **tokens})

    def setup(self) -> None:
        self._loaded()

    @property
    def backend(self) -> str | None:
        """The library in use, once it is loaded."""
        return None if self._backend is None else self._backend.name

    def _loaded(self) -> Backend:
        if self._backend is None:
            default = self.special_tokens == "tokenizer_default"
            limit = self.max_length if default and not self.split_long_samples else None
            self._backend = load_backend(self.tokenizer_source, default, limit)
        return self._backend

    def process(self, block: Block, faults: Faults) -> Block:
        parts, of = [], []
        samples = block.samples if block.sample_offsets is None else block.samples[block.sample_offsets[:-1]]
        checked = chosen(samples)
        for low, high in _pieces(block.fields.get(self.field), len(block)):
            piece = block.slice(low, high)
            encoded, found = self._encode(self._texts(piece, faults), piece, checked[low:high], faults)
            faults.moved()
            if self.max_length is not None and not self.split_long_samples:
                encoded = _truncated(*encoded, self.max_length - (self._bos is not None) - (self._eos is not None))
            parts.append(encoded)
            of.append(found + low)
        ids, offsets = _with_specials(parts, self._bos, self._eos)
        records = np.concatenate(of)
        if self.split_long_samples and self.max_length is not None:
            offsets, pieces = _split(offsets, self.max_length)
            records = np.repeat(records, pieces)
        kept = block if self.preserve_upstream_payload else block.select(())
        if len(records) != len(block) or not np.array_equal(records, np.arange(len(block))):
            kept = kept.take(records)
        fields: dict[str, Column] = {**kept.fields, "input_ids": Ragged(ids, offsets)}
        if self.add_attention_mask:
            fields["attention_mask"] = Ragged(np.ones(len(ids), np.int32), offsets)
        return kept.with_fields(fields)

    def _texts(self, block: Block, faults: Faults) -> _Texts:
        """The texts of the block's records, without those that are bad or missing."""
        column = block.fields.get(self.field)
        if column is None:
            column = Objects([MISSING] * len(block))
        if type(column) is Text:
            try:
                return _Texts(_strings(column), np.arange(len(block)))
            except ValueError:  # a lone surrogate, looked for below
                pass
        texts, records = [], []
        for record, value in enumerate(column.to_list()):
            wrong = self._wrong(value)
            if wrong is None:
                texts.append(value)
                records.append(record)
            elif value is MISSING and wrong:
                faults.lacks(block.sample_of(record), self.name, [self.field], "str")
            elif wrong:
                faults.bad(block.sample_of(record), self.name, wrong)
        return _Texts(texts, np.array(records, np.int64))

    def _wrong(self, value: Any) -> str | None:
        """What is wrong with a value of the field; `""` if the record is to be dropped without a word."""
        if value is MISSING or value is None:
            found = "no such field" if value is MISSING else "null"
            return "" if self.missing_field == "skip" else f"field {self.field!r}: expected str, found {found}"
        if not isinstance(value, str):
            hint = "; decode_text() makes text of bytes" if isinstance(value, bytes) else ""
            return f"field {self.field!r}: expected str, found {type(value).__name__}{hint}"
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            return f"field {self.field!r}: not valid Unicode, a lone surrogate at character {error.start}"
        return None

    def _encode(self, found: _Texts, block: Block, checked: BoolArray, faults: Faults) -> tuple[Encoded, IntArray]:
        backend = self._loaded()
        try:
            return backend.encode(found.texts, checked[found.records]), found.records
        except Disagreement as difference:
            raise disagreement(self.name, difference, block, found.records, faults) from None
        except Exception:
            return self._one_by_one(found, block, checked, faults)

    def _one_by_one(self, found: _Texts, block: Block, checked: BoolArray, faults: Faults) -> tuple[Encoded, IntArray]:
        """After a failure somewhere in a block: each record alone, to know which are bad."""
        backend = self._loaded()
        parts, records = [np.empty(0, np.int32)], []
        for text, record in zip(found.texts, found.records.tolist()):
            try:
                ids, _ = backend.encode([text], checked[record : record + 1])
            except Disagreement as difference:
                raise disagreement(self.name, difference, block, np.array([record]), faults) from None
            except Exception as error:
                faults.bad(block.sample_of(record), self.name, error)
                continue
            parts.append(ids)
            records.append(record)
        offsets = np.cumsum([len(part) for part in parts])
        return (np.concatenate(parts), offsets), np.array(records, np.int64)


def disagreement(
    operator: str, difference: Disagreement, block: Block, records: IntArray, faults: Faults
) -> TokenizerError:
    """The error for a document of a block, given the records that its texts came from."""
    dataset, shard, row = block.sample_of(int(records[difference.text]))
    known = dataset < len(faults.datasets)
    name = faults.datasets[dataset].name if known else str(dataset)
    path = faults.datasets[dataset].shard_path(shard) if known else str(shard)
    at = _first_difference(difference.found, difference.expected)
    return TokenizerError(
        f"{operator}: dataset {name!r}, shard {path}, row {row}: fastokens gave other ids than tokenizers for this "
        f"document, from token {at} on. Tokens delivered so far may be wrong as well. Start again with "
        f"{CHOICE}=tokenizers in the environment, and report the document to the makers of fastokens"
    )


def _pieces(column: Column | None, count: int) -> Iterator[tuple[int, int]]:
    """Where to cut a block of so many documents: first and last of each piece, of one piece at least."""
    low = 0
    while True:
        high = min(low + _AT_ONCE, count)
        if type(column) is Text and column.offsets[high] - column.offsets[low] > _BYTES_AT_ONCE:
            fit = int(np.searchsorted(column.offsets, column.offsets[low] + _BYTES_AT_ONCE, "right")) - 1
            high = max(low + 1, fit)
        yield low, high
        low = high
        if low >= count:
            return


def _strings(column: Text) -> list[str]:
    """The texts, made by Arrow: twice as fast as one after another. ValueError for bytes that are not UTF-8."""
    import pyarrow as pa

    offsets, data = pa.py_buffer(column.offsets), pa.py_buffer(column.values)
    array = pa.LargeStringArray.from_buffers(len(column), offsets, data)
    try:
        strings: list[str] = array.to_numpy(zero_copy_only=False).tolist()
    except pa.ArrowException as error:
        raise ValueError(str(error)) from error
    return strings


def _check_length(max_length: int | None, truncation: bool, split: bool, specials: int) -> None:
    if max_length is None:
        if truncation or split:
            raise SettingError(
                f"tokenize: {'truncation' if truncation else 'split_long_samples'}=True needs max_length, "
                "a whole number from 1"
            )
        return
    least = 1 if split else specials + 1
    if type(max_length) is not int or max_length < least:
        raise SettingError(f"tokenize: max_length={max_length!r}: must be a whole number from {least}")
    idle = None
    if not truncation and not split:
        idle = f"max_length={max_length} alone has no effect: add truncation=True or split_long_samples=True"
    elif truncation and split:
        idle = "truncation=True has no effect beside split_long_samples=True, which loses nothing: leave one out"
    if idle:
        warnings.warn(f"tokenize: {idle}", stacklevel=recipe_level())


def _truncated(ids: AnyArray, offsets: IntArray, limit: int) -> Encoded:
    lengths = np.diff(offsets)
    if not len(lengths) or lengths.max() <= limit:
        return ids, offsets
    lengths = np.minimum(lengths, limit)
    cut = np.zeros(len(offsets), np.int64)
    np.cumsum(lengths, out=cut[1:])
    return ids.take(spans(offsets[:-1], lengths, cut)), cut


def _with_specials(parts: list[Encoded], bos: int | None, eos: int | None) -> Encoded:
    """The documents of all parts end to end, each begun by `bos` and ended by `eos`."""
    more = (bos is not None) + (eos is not None)
    lengths = np.concatenate([np.diff(offsets) for _, offsets in parts]) + more
    bounds = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    if not more:
        return np.concatenate([ids for ids, _ in parts]), bounds
    out = np.empty(int(bounds[-1]), np.int32)
    first = 0
    for ids, offsets in parts:
        wider = offsets + more * np.arange(len(offsets))
        here, first = out[first : first + int(wider[-1])], first + int(wider[-1])
        content = np.ones(len(here), np.bool_)
        for token, where in ((bos, wider[:-1]), (eos, wider[1:] - 1)):
            if token is not None:
                content[where] = False
                here[where] = token
        here[content] = ids
    return out, bounds


def _split(offsets: IntArray, limit: int) -> tuple[IntArray, IntArray]:
    """`(offsets of the pieces, number of pieces of each document)`; an empty document is one empty piece."""
    pieces = np.maximum(1, -(-np.diff(offsets) // limit))
    firsts = np.cumsum(pieces) - pieces
    within = np.arange(int(pieces.sum())) - np.repeat(firsts, pieces)
    return np.append(np.repeat(offsets[:-1], pieces) + limit * within, offsets[-1]), pieces


def _first_difference(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
