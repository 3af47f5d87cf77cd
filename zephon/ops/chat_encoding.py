"""Rendered conversations to token ids, with a mark on every token that is learnt.

A token is marked if it overlaps a marked span of characters, as in the `transformers` library. The reference is the
`tokenizers` library, which says for each token which characters it stands for, at the price of a Python object a token.
Byte-level BPE needs none: its tokens stand for just their bytes, one after another, so running sums of their sizes say
where each lies, and the fast backend can make the ids. That way is taken for tokenizers which are built so, for texts
that they do not normalise into others, and it is checked: on the first conversations of a process against the
reference, and on every text by the sum of its tokens' sizes.

A user's own tokenizer says nothing of characters. There the text is cut at the spans' ends and each piece encoded by
itself, so that no token lies across an end.
"""

from __future__ import annotations

import json
import logging
import unicodedata
from collections.abc import Callable
from itertools import chain, pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np

from zephon.columns import AnyArray, IntArray
from zephon.extras import needing
from zephon.ops.chat_template import Rendered
from zephon.ops.tokenizer_backend import Backend, BoolArray, Reference, chosen, load_backend
from zephon.ops.tokenizer_source import JsonTokenizer, OwnTokenizer

log = logging.getLogger("zephon.tokenize")

CHECKED_FIRST = 32


class Marked(NamedTuple):
    """Conversations end to end: ids int32 `[m]`, offsets int64 `[n + 1]`, and whether each token is learnt, `[m]`."""

    ids: AnyArray
    offsets: IntArray
    mask: BoolArray


class Encoder(Protocol):
    """Encodes rendered conversations. `samples` (int64 `[n, 3]` or wider) names each one's sample."""

    @property
    def name(self) -> str: ...

    def encode(self, rendered: list[Rendered], samples: IntArray) -> Marked: ...


def load_encoder(source: JsonTokenizer | OwnTokenizer) -> Encoder:
    """The best encoder for a tokenizer."""
    backend = load_backend(source, False)
    if isinstance(source, OwnTokenizer):
        return InPieces(backend)
    reference = ByCharacters(source)
    sizes = byte_sizes(source.text)
    if sizes is None or backend.name == Reference.name:
        return reference
    return ByBytes(backend, sizes, reference, source)


class ByCharacters:
    """The `tokenizers` library, with the characters of each token."""

    name = Reference.name

    def __init__(self, source: JsonTokenizer) -> None:
        with needing("tokenize_chat"):
            from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_str(source.text)

    def encode(self, rendered: list[Rendered], samples: IntArray | None = None) -> Marked:
        found = self._tokenizer.encode_batch([one.text for one in rendered], add_special_tokens=False)
        offsets = _offsets([len(encoding.ids) for encoding in found])
        count = int(offsets[-1])
        ids = np.fromiter(chain.from_iterable(encoding.ids for encoding in found), np.int32, count)
        places = chain.from_iterable(chain.from_iterable(encoding.offsets for encoding in found))
        bounds = np.fromiter(places, np.int64, 2 * count).reshape(-1, 2)
        sizes = [len(one.text) for one in rendered]
        mask = _overlapping(bounds[:, 0], bounds[:, 1], offsets, sizes, [one.spans for one in rendered])
        return Marked(ids, offsets, mask)


class ByBytes:
    """The fast backend, and where each token lies by the sizes of those before it."""

    def __init__(self, backend: Backend, sizes: _Sizes, reference: ByCharacters, source: JsonTokenizer) -> None:
        self._backend, self._sizes, self._reference, self._where = backend, sizes, reference, source.where
        self._checked = self._refused = False

    @property
    def name(self) -> str:
        return self._reference.name if self._refused else self._backend.name

    def encode(self, rendered: list[Rendered], samples: IntArray) -> Marked:
        if not self._checked and rendered:
            self._checked = True
            first = rendered[:CHECKED_FIRST]
            self._refused = not _equal(self._fast(first, samples[:CHECKED_FIRST]), self._reference.encode(first))
            if self._refused:
                log.warning(
                    "tokenizer %s: sizes of tokens and the tokenizers library disagree on what is learnt; using the "
                    "library, which is slower", self._where,
                )  # fmt: skip
        return self._reference.encode(rendered) if self._refused else self._fast(rendered, samples)

    def _fast(self, rendered: list[Rendered], samples: IntArray) -> Marked:
        ids, offsets = self._backend.encode([one.text for one in rendered], chosen(samples))
        of_each = self._sizes.of_id.take(ids)
        ends = np.cumsum(of_each)
        before = np.concatenate([np.zeros(1, np.int64), ends])[offsets]  # bytes of all texts before each
        sizes = [len(one.text) if one.text.isascii() else len(one.text.encode()) for one in rendered]
        spans = [_in_bytes(one) for one in rendered]
        ends -= np.repeat(before[:-1], np.diff(offsets))
        starts, ends = self._sizes.trimmed(ids, ends - of_each, ends)
        mask = _overlapping(starts, ends, offsets, sizes, spans)
        fits = np.diff(before) == np.array(sizes, np.int64)
        odd = [at for at, fit in enumerate(fits.tolist()) if not fit or self._sizes.changes(rendered[at].text)]
        if not odd:
            return Marked(ids, offsets, mask)
        again = self._reference.encode([rendered[at] for at in odd])
        parts = [Marked(ids[a:b], offsets, mask[a:b]) for a, b in pairwise(offsets.tolist())]
        for at, (low, high) in zip(odd, pairwise(again.offsets.tolist())):
            parts[at] = Marked(again.ids[low:high], again.offsets, again.mask[low:high])
        whole = _offsets([len(part.ids) for part in parts])
        return Marked(np.concatenate([p.ids for p in parts]), whole, np.concatenate([p.mask for p in parts]))


class InPieces:
    """A user's own tokenizer, on each piece between two ends of spans."""

    name = "own"

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def encode(self, rendered: list[Rendered], samples: IntArray) -> Marked:
        pieces, marks, counts = [], [], []
        for text, spans in rendered:
            bounds = [0, *chain.from_iterable(spans), len(text)]
            cut = [(text[a:b], bool(at % 2)) for at, (a, b) in enumerate(pairwise(bounds)) if a < b]
            pieces += [piece for piece, _ in cut]
            marks += [mark for _, mark in cut]
            counts.append(len(cut))
        ids, offsets = self._backend.encode(pieces, np.repeat(chosen(samples), counts))
        mask = np.repeat(np.array(marks, np.bool_), np.diff(offsets))
        return Marked(ids, offsets[_offsets(counts)], mask)


_CHANGES_BYTES = ("unk_token", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")


class _Blanks(NamedTuple):
    """How many bytes of blanks each id begins and ends with, int64 `[largest id + 1]`."""

    before: IntArray
    after: IntArray
    keeps_first: bool


class _Sizes(NamedTuple):
    """How many bytes of text each id stands for, int64 `[largest id + 1]`."""

    of_id: IntArray
    normal_form: str | None
    blanks: _Blanks | None = None

    def trimmed(self, ids: AnyArray, starts: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
        """Where tokens lie without the blanks at their edges, if the tokenizer leaves these out of their places."""
        if self.blanks is None:
            return starts, ends
        before, after = self.blanks.before.take(ids), self.blanks.after.take(ids)
        if self.blanks.keeps_first:  # a blank that opens a text counts as one that the tokenizer put there
            before -= (starts == 0) & (before > 0)
        starts = np.minimum(starts + before, ends)
        return starts, np.maximum(ends - after, starts)

    def changes(self, text: str) -> bool:
        """Whether the tokenizer normalises this text into another."""
        form: Any = self.normal_form
        return form is not None and not text.isascii() and not unicodedata.is_normalized(form, text)


def byte_sizes(text: str) -> _Sizes | None:
    """The sizes of a `tokenizer.json`'s tokens, if it is byte-level BPE and nothing in it adds or takes characters."""
    data = json.loads(text)
    model, normalizer = data["model"], data.get("normalizer")
    form = None if normalizer is None else normalizer.get("type")
    if model.get("type") != "BPE" or form not in (None, "NFC"):
        return None
    if any(model.get(setting) for setting in _CHANGES_BYTES):
        return None
    steps = _steps(data.get("pre_tokenizer"), "pretokenizers")
    levels = [step for step in steps if step.get("type") == "ByteLevel"]
    if len(levels) != 1 or levels[0].get("add_prefix_space", True):
        return None
    if any(s.get("type") not in ("ByteLevel", "Split", "Digits") or s.get("behavior") == "Removed" for s in steps):
        return None
    after = _steps(data.get("post_processor"), "processors")
    trims = [step for step in after if step.get("type") == "ByteLevel" and step.get("trim_offsets", True)]
    if len(trims) > 1 or any(step.get("type") not in ("ByteLevel", "TemplateProcessing") for step in after):
        return None
    added = data.get("added_tokens") or []
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None
    names = {number: token.replace(_BLANK, " ") for token, number in model["vocab"].items()}  # a letter a byte
    sizes = _by_id({number: len(name) for number, name in names.items()}, added, lambda text: text)
    if not trims:
        return _Sizes(sizes, form)
    before = _by_id({number: len(name) - len(name.lstrip(" ")) for number, name in names.items()}, added, _before)
    behind = _by_id({number: len(name) - len(name.rstrip(" ")) for number, name in names.items()}, added, _behind)
    return _Sizes(sizes, form, _Blanks(before, behind, bool(trims[0].get("add_prefix_space", True))))


_BLANK = "\u0120"  # how byte-level vocabularies write a blank


def _before(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def _behind(text: str) -> str:
    return text[len(text.rstrip()) :]


def _by_id(known: dict[int, int], added: list[dict[str, Any]], part: Callable[[str], str]) -> IntArray:
    """Numbers of bytes by id: those of the vocabulary, and of a part of each added token's text."""
    known = {**known, **{token["id"]: len(part(token["content"]).encode()) for token in added}}
    found = np.zeros(max(known, default=0) + 1, np.int64)
    found[np.fromiter(known, np.int64, len(known))] = np.fromiter(known.values(), np.int64, len(known))
    return found


def _steps(part: Any, inner: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return list(part[inner]) if part.get("type") == "Sequence" else [part]


def _in_bytes(rendered: Rendered) -> list[tuple[int, int]]:
    text, spans = rendered
    if text.isascii() or not spans:
        return spans
    pieces = [text[a:b] for a, b in pairwise([0, *chain.from_iterable(spans)])]
    ends = np.cumsum([len(piece.encode()) for piece in pieces]).tolist()
    return list(zip(ends[::2], ends[1::2]))


def _overlapping(
    starts: IntArray, ends: IntArray, offsets: IntArray, sizes: list[int], spans: list[list[tuple[int, int]]]
) -> BoolArray:
    """Which tokens overlap a span of their text. `starts` and `ends` are places in the token's own text; spans are in
    order and apart.
    """
    bases = _offsets([size + 1 for size in sizes])[:-1]  # texts end to end, one place apart
    flat = np.array(list(chain.from_iterable(spans)), np.int64).reshape(-1, 2)
    if not len(flat):
        return np.zeros(len(starts), np.bool_)
    flat += np.repeat(bases, [len(of_one) for of_one in spans])[:, None]
    base = np.repeat(bases, np.diff(offsets))
    first_ending_after = np.searchsorted(flat[:, 1], starts + base, "right")
    inside = first_ending_after < len(flat)
    begins = flat[np.where(inside, first_ending_after, 0), 0]
    marked: BoolArray = inside & (ends + base > begins)
    return marked


def _offsets(lengths: list[int]) -> IntArray:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _equal(a: Marked, b: Marked) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b))
