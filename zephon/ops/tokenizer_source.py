"""Where a tokenizer comes from: an object, a `tokenizer.json`, a folder that holds one, or a hub name.

Whatever it was, a tokenizer of the `tokenizers` library becomes the text of its JSON, compressed. That travels to the
workers, and the content, not its path, is what the run's identity knows. Truncation and padding settings saved in it
are left out: they are settings of the pipeline here. Anything else that has `encode(text)` is used as it is, text by
text.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zephon.errors import SettingError, TokenizerError, whence
from zephon.function_digest import digest_of

#: Names that tokenizers give to the tokens that begin and end a document, the likeliest first.
_USUAL_NAMES = {
    "bos": (
        "<s>", "<|begin_of_text|>", "<bos>", "[BOS]", "<|bos|>", "<|startoftext|>", "<｜begin▁of▁sentence｜>",
        "<|endoftext|>", "[CLS]",
    ),
    "eos": (
        "</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[EOS]", "<|eos|>", "<｜end▁of▁sentence｜>", "[SEP]",
    ),
}  # fmt: skip

_ANSWER_SECONDS = 5.0


@dataclass(frozen=True)
class JsonTokenizer:
    """A tokenizer of the `tokenizers` library as the text of its `tokenizer.json`.

    It is looked at when a recipe is loaded and when a worker sets out, but every process of a run holds it: as a string
    with characters beyond Latin-1, which Python keeps in UTF-8 as well once it was handed on, it would be three times
    as large as the file, and `packed` it is a fifth of it.
    `named` maps "bos" and "eos" to the token that its configuration names, `ids` to the id where only that is known.
    """

    packed: bytes
    where: str
    named: dict[str, str] = field(default_factory=dict)
    ids: dict[str, int] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Unpacked anew each time."""
        return zlib.decompress(self.packed).decode()

    @property
    def digest(self) -> str:
        """32 hex digits over the content, whatever its layout."""
        data = json.loads(self.text)
        model = data.get("model") or {}
        if isinstance(model.get("merges"), list):
            model["merges"] = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
        return hashlib.blake2b(json.dumps(data, sort_keys=True).encode(), digest_size=16).hexdigest()

    def special_id(self, which: str) -> int | None:
        """The id of the token that begins ("bos") or ends ("eos") a document, if it can be told."""
        if which in self.ids:
            return self.ids[which]
        known = self._vocabulary()
        names = (self.named[which],) if which in self.named else ()
        return next((known[name] for name in (*names, *_USUAL_NAMES[which]) if name in known), None)

    @property
    def vocabulary_size(self) -> int | None:
        """One more than the largest id; None if the ids are not known."""
        return max(self._vocabulary().values(), default=-1) + 1 or None

    def _vocabulary(self) -> dict[str, int]:
        """Each token's id."""
        data = json.loads(self.text)
        vocab = (data.get("model") or {}).get("vocab") or {}
        if isinstance(vocab, list):
            vocab = {piece[0]: number for number, piece in enumerate(vocab)}
        return {**vocab, **{token["content"]: token["id"] for token in data.get("added_tokens") or ()}}

    def decoder(self) -> Callable[[list[int]], str] | None:
        """What makes text of token ids, special tokens shown; None if the tokenizer cannot."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.text)
        return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


@dataclass(frozen=True)
class OwnTokenizer:
    """Any object with `encode(text)`, which returns token ids or something that has them in `.ids`."""

    tokenizer: Any
    where: str

    @property
    def digest(self) -> str:
        return digest_of(self.tokenizer)

    @property
    def vocabulary_size(self) -> int | None:
        """One more than the largest id, where the object says so: by its length, or `n_vocab`."""
        size: Any
        try:
            size = len(self.tokenizer)
        except Exception:
            size = getattr(self.tokenizer, "n_vocab", None)
        return size if type(size) is int and size > 0 else None

    def special_id(self, which: str) -> int | None:
        names = ("bos_token_id", "bos_id") if which == "bos" else ("eos_token_id", "eos_id", "eot_token")
        for name in names:
            value = getattr(self.tokenizer, name, None)
            value = value() if callable(value) else value
            if type(value) is int and value >= 0:
                return value
        return None

    def decoder(self) -> Callable[[list[int]], str] | None:
        """What makes text of token ids; None if the tokenizer cannot."""
        decode = getattr(self.tokenizer, "decode", None)
        return (lambda ids: str(decode(ids))) if callable(decode) else None

    @property
    def takes_special_tokens(self) -> bool:
        """Whether `encode` has an argument that leaves special tokens out."""
        try:
            return "add_special_tokens" in inspect.signature(self.tokenizer.encode).parameters
        except (TypeError, ValueError):
            return False


def find_tokenizer(
    tokenizer: Any, tokenizer_id: str | os.PathLike[str] | None, operator: str = "tokenize"
) -> JsonTokenizer | OwnTokenizer:
    """What the arguments of an operator name. Raises `SettingError` or `TokenizerError`."""
    if isinstance(tokenizer, (str, os.PathLike)) and tokenizer_id is None:
        tokenizer, tokenizer_id = None, tokenizer
    if (tokenizer is None) == (tokenizer_id is None):
        raise SettingError(f"{operator}: give one of tokenizer (an object) and tokenizer_id (a path or a hub name)")
    if tokenizer_id is not None:
        return _from_id(os.fspath(tokenizer_id))
    where = f"the {type(tokenizer).__name__} object"
    inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if hasattr(inner, "to_str"):
        try:
            text = inner.to_str()
        except Exception:  # it holds components written in Python, which have no JSON
            text = None
        if text is not None:
            found = {which: getattr(tokenizer, f"{which}_token_id", None) for which in ("bos", "eos")}
            return _checked(text, where, ids={k: v for k, v in found.items() if type(v) is int})
    if not callable(getattr(tokenizer, "encode", None)):
        raise SettingError(f"{operator}: tokenizer must have encode(text), which {type(tokenizer).__name__} lacks")
    return OwnTokenizer(tokenizer, where)


def _from_id(name: str) -> JsonTokenizer:
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    if path.exists():
        return _checked(_read(path), str(path), named=_configured(path.parent / "tokenizer_config.json"))
    is_path = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or path.suffix == ".json"
    if is_path or path.name == "tokenizer.json":
        raise TokenizerError(
            f"tokenizer_id={name!r}: there is no file {path}{whence(path)}. Give a tokenizer.json or its folder"
        )
    return _from_hub(name)


def _from_hub(name: str) -> JsonTokenizer:
    try:
        text = _read(_hub_file(name, "tokenizer.json"))
        try:
            named = _configured(_hub_file(name, "tokenizer_config.json"))
        except TokenizerError:
            raise
        except Exception:  # there is none, or none here, where the tokenizer itself lay in the hub's cache
            named = {}
    except TokenizerError:
        raise
    except Exception as error:
        raise TokenizerError(
            f"tokenizer_id={name!r}: no such file or folder{whence(name)}, and fetching it from the hub failed "
            f"({type(error).__name__}: {error}). Download its tokenizer.json and give that path"
        ) from error
    return _checked(text, f"{name} (hub)", named=named)


def _hub_file(name: str, file: str) -> Path:
    """A file out of the hub's cache, or fetched, once the hub has answered: a download tries for half a minute."""
    import huggingface_hub as hub

    if hub.try_to_load_from_cache(name, file) is None:
        hub.get_hf_file_metadata(hub.hf_hub_url(name, file), timeout=_ANSWER_SECONDS)
    return Path(hub.hf_hub_download(name, file))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"tokenizer {path} cannot be read: {error}") from error


def _checked(
    text: str, where: str, named: dict[str, str] | None = None, ids: dict[str, int] | None = None
) -> JsonTokenizer:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise TokenizerError(f"tokenizer {where} is not valid JSON: {error}. Is the file complete?") from error
    if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
        raise TokenizerError(f"tokenizer {where} holds no tokenizer: it has no 'model'. Give a tokenizer.json")
    if data.get("truncation") or data.get("padding"):
        text = json.dumps({**data, "truncation": None, "padding": None})
    return JsonTokenizer(zlib.compress(text.encode(), 1), where, named or {}, ids or {})


def _configured(path: Path) -> dict[str, str]:
    """The bos and eos tokens that a `tokenizer_config.json` names, if there is one."""
    data = read_object(path)
    found = {which: content(data.get(f"{which}_token")) for which in ("bos", "eos")}
    return {which: token for which, token in found.items() if token is not None}


def content(token: Any) -> str | None:
    """The text of a token as such files name it: itself, or an object that has it."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def read_object(path: Path) -> dict[str, Any]:
    """A file of JSON that holds an object; an empty one if there is no file. Raises TokenizerError, which names it."""
    if not path.exists():
        return {}
    try:
        found = json.loads(_read(path))
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise TokenizerError(f"{path}: expected an object, found {type(found).__name__}")
    return found
