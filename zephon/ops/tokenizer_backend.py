"""The libraries that turn text into token ids, and the guard that keeps the fast one honest.

`tokenizers` is the reference. `fastokens` gives the same ids some fifty times faster, and is used only while nothing
contradicts that: it must load the tokenizer, give the reference's ids on probe texts, and again on the first documents
that this process sees; otherwise the reference is used, and a log line says so once. After that one document in two
thousand, chosen by its sample's name and so the same in every run, is encoded by both; a difference there is a
`Disagreement`, which stops the run, since earlier documents may be wrong too.

Both run on the calling thread: workers are the parallelism.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from zephon.columns import AnyArray, IntArray
from zephon.errors import TokenizerError
from zephon.extras import needing
from zephon.ops.tokenizer_source import JsonTokenizer, OwnTokenizer
from zephon.permutations import mix

log = logging.getLogger("zephon.tokenize")

CHOICE = "ZEPHON_TOKENIZER_BACKEND"
"""The environment variable that, set to `tokenizers`, leaves the fast library out."""
POOL_SIZES = ("RAYON_NUM_THREADS", "FASTOKENS_BPE_THREADS")
CHECK_ONE_IN = 2000
SAMPLE_DOCUMENTS, SAMPLE_CHARACTERS = 32, 1 << 18

BoolArray = npt.NDArray[np.bool_]
Encoded = tuple[AnyArray, IntArray]  # ids int32 [m] of all texts end to end; offsets int64 [n + 1]

PROBES = (
    "", " ", "\n", "a", "Hello, world!", "The quick brown fox jumps over the lazy dog.", "   leading and trailing   ",
    "tabs\tand\ttabs\t\t\tmore", "line\r\nline\r\n\r\nline\rline\n\n\n", " \u00a0\u2003\u3000mixed\u200bspaces\u2028x",
    "spaces" + " " * 300 + "end", "\n" * 70, "don't we'll I'VE they'Re it's 'tis",
    "1234567890 3.14159 1,000,000 0x1F 1e-9", "12345678901234567890123456789",
    "naïve café Straße ﬁne ½ ² №", "e\u0301 vs é, \u1e9b\u0323, \ufb01", "Ελληνικά и русский",
    "中文字符，没有空格。日本語のテキスト 한국어", "العربية עברית हिन्दी ไทย ქართული", "emoji 😀👍🏽👨‍👩‍👧‍👦🇩🇪 ❤️",
    "control \x00\x01\x07\x1b[0m\x7f\x85 \ufeff bom", "private \ue000 \U000f0000 \U0010ffff \ufffd",
    "x" * 3000, "ab" * 1500, "aaaa bbbb " * 200, "http://example.com/a/b?c=d&e=f#g user@example.org",
    "def f(x: int) -> str:\n    return f\"{x!r:>{10}}\"  # comment\n\n\nclass A(B):\n\tpass\n",
    "{\"key\": [1, 2.5, null, true], \"nested\": {\"a\": \"\\u00e9\"}}", "<div class='a'>&amp;<br/></div>",
    "SELECT * FROM t WHERE a<>b;--", "\\begin{equation} \\alpha_{i}^{2} \\end{equation}", "!!!???...---===###$$$%%%",
    "CamelCase snake_case kebab-case SCREAMING_CASE iPhone15Pro", "ZALGO t̸̢̛͎e̷̦̐x̵͚͝t", "ΐ ΰ ǰ ẞ İ ı",
)  # fmt: skip


class Disagreement(Exception):
    """The fast backend and the reference gave different ids for text number `text`."""

    def __init__(self, text: int, found: list[int], expected: list[int]) -> None:
        self.text, self.found, self.expected = text, found, expected
        super().__init__(f"text {text}")


def chosen(samples: IntArray) -> BoolArray:
    """Which texts both libraries encode, bool `[n]`, by the samples (int64 `[n, 3]` or wider) they come from."""
    found: BoolArray = mix("tokenizer check", *samples[:, :3].T) % np.uint64(CHECK_ONE_IN) == 0
    return found


class Backend(Protocol):
    """Encodes texts. `checked` (bool `[n]`) says which of them to check, `name` the library."""

    @property
    def name(self) -> str: ...

    def encode(self, texts: list[str], checked: BoolArray) -> Encoded: ...


def load_backend(source: JsonTokenizer | OwnTokenizer, special_tokens: bool, limit: int | None = None) -> Backend:
    """The best backend for a tokenizer.

    `special_tokens`: whether its own post-processing adds its special tokens; then `limit` truncates, these included.
    """
    if isinstance(source, OwnTokenizer):
        return Own(source, special_tokens, limit)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    reference = Reference(source, special_tokens, limit)
    if os.environ.get(CHOICE) == Reference.name:
        return reference
    with _one_thread():
        try:
            fast: Fast | None = Fast(source.text, special_tokens, limit, reference)
        except Exception as error:
            log.warning(
                "tokenizer %s: fastokens cannot be used (%s: %s); using tokenizers, which is slower",
                source.where, type(error).__name__, error,
            )  # fmt: skip
            fast = None
    return reference if fast is None else Guarded(fast, reference, source)


class Reference:
    """The `tokenizers` library."""

    name = "tokenizers"

    def __init__(self, source: JsonTokenizer, special_tokens: bool, limit: int | None) -> None:
        with needing("tokenize"):
            from tokenizers import Tokenizer

        try:
            self._tokenizer: Any = Tokenizer.from_str(source.text)
        except Exception as error:
            raise TokenizerError(f"tokenizer {source.where} cannot be loaded: {error}") from error
        if limit is not None:
            self._tokenizer.enable_truncation(limit)
        self._special_tokens = special_tokens
        self.added = [str(token.content) for token in self._tokenizer.get_added_tokens_decoder().values()]

    def encode(self, texts: list[str], checked: BoolArray | None = None) -> Encoded:
        found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=self._special_tokens)
        return _flat([encoding.ids for encoding in found])


class Fast:
    """The `fastokens` library. Raises at construction what it cannot do."""

    name = "fastokens"

    def __init__(self, text: str, special_tokens: bool, limit: int | None, reference: Reference) -> None:
        import fastokens

        self._tokenizer: Any = fastokens.Tokenizer.from_json_str(text)
        if limit is not None:
            self._tokenizer.enable_truncation(limit)
        self._special_tokens, self._reference = special_tokens, reference
        self._tokenizer.encode_batch_flat([*PROBES], special_tokens)  # starts its threads here, under `_one_thread`

    def encode(self, texts: list[str]) -> Encoded:
        try:
            ids, offsets = self._tokenizer.encode_batch_flat(texts, self._special_tokens)
        except Exception:  # what it refuses, the reference decides
            return self._reference.encode(texts)
        return np.frombuffer(ids, np.int32), np.frombuffer(offsets, np.int64)


class Guarded:
    """The fast backend while the reference confirms it; the reference for good once it does not."""

    def __init__(self, fast: Fast, reference: Reference, source: JsonTokenizer) -> None:
        self._fast: Fast | None = fast
        self._reference, self._where = reference, source.where
        self._sampled = False
        probes = [*PROBES, *_around(reference.added)]
        probes.append(" ".join(PROBES) * 4)  # longer than any usual limit of truncation
        self._confirm(probes, "probe texts")

    @property
    def name(self) -> str:
        return self._reference.name if self._fast is None else self._fast.name

    def encode(self, texts: list[str], checked: BoolArray) -> Encoded:
        if self._fast is not None and not self._sampled and texts:
            self._sampled = True
            self._confirm(_first(texts), "documents of this run")
        if self._fast is None:
            return self._reference.encode(texts)
        ids, offsets = self._fast.encode(texts)
        for text in np.flatnonzero(checked).tolist():
            expected = self._reference.encode([texts[text]])[0]
            found = ids[offsets[text] : offsets[text + 1]]
            if not np.array_equal(found, expected):
                raise Disagreement(text, found.tolist(), expected.tolist())
        return ids, offsets

    def _confirm(self, texts: list[str], what: str) -> None:
        assert self._fast is not None
        fast, reference = self._fast.encode(texts), self._reference.encode(texts)
        if not (np.array_equal(fast[1], reference[1]) and np.array_equal(fast[0], reference[0])):
            self._fast = None
            log.warning(
                "tokenizer %s: fastokens gives other ids than tokenizers on %s; using tokenizers, which is slower",
                self._where, what,
            )  # fmt: skip


class Own:
    """A user's own tokenizer, called for each text."""

    name = "own"

    def __init__(self, source: OwnTokenizer, special_tokens: bool, limit: int | None) -> None:
        self._encode = source.tokenizer.encode
        self._settings = {"add_special_tokens": special_tokens} if source.takes_special_tokens else {}
        self._limit = limit

    def encode(self, texts: list[str], checked: BoolArray) -> Encoded:
        found = [self._encode(text, **self._settings) for text in texts]
        return _flat([getattr(ids, "ids", ids)[: self._limit] for ids in found])


def _flat(lists: Sequence[Sequence[int]]) -> Encoded:
    offsets = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(ids) for ids in lists], out=offsets[1:])
    return np.fromiter(chain.from_iterable(lists), np.int32, int(offsets[-1])), offsets


def _around(added: list[str]) -> list[str]:
    """Probe texts with a tokenizer's own added tokens: alone, inside words, repeated, next to spaces."""
    some = added[:24] + added[-8:]
    return [text for token in some for text in (token, f"in{token}side", f" {token} {token}\n", token[:-1], token * 2)]


def _first(texts: list[str]) -> list[str]:
    """The first documents, not too much text in all."""
    sizes = np.cumsum([len(text) for text in texts[:SAMPLE_DOCUMENTS]])
    return texts[: max(1, int(np.searchsorted(sizes, SAMPLE_CHARACTERS, "right")))][:SAMPLE_DOCUMENTS]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Thread pools that start in here have one thread, unless the user has set their size."""
    missing = [name for name in POOL_SIZES if name not in os.environ]
    os.environ.update(dict.fromkeys(missing, "1"))
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)
