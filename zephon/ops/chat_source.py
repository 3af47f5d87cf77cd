"""Where a chat template comes from, with the special tokens that it is given.

It is the argument (a template, a `.jinja` file, or the name of one of the tokenizer's), else what the tokenizer brings:
an object's `chat_template`, or in its folder `chat_template.jinja` and `additional_chat_templates/*.jinja`, else
`chat_template` in `tokenizer_config.json`, else `chat_template.json`. As in the `transformers` library a tokenizer may
have several: a record with tools gets the one called `tool_use`, every other the `default`.

A tokenizer named on the hub is looked up there, or in the hub's cache where there is no network.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zephon.errors import SettingError, TokenizerError
from zephon.ops.tokenizer_source import content, read_object

STANDARD_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FILES = (
    "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates/*.jinja",
)  # fmt: skip


@dataclass(frozen=True)
class ChatTemplates:
    """The templates to choose from by whether a record has tools, and the special tokens by name."""

    default: str
    tool_use: str
    tokens: Mapping[str, str]
    where: str


@dataclass(frozen=True)
class _Brought:
    """What a tokenizer brings: its templates by name, and its special tokens."""

    templates: Mapping[str, str]
    tokens: Mapping[str, str]


def find_chat_templates(
    chat_template: Any, tokenizer: Any, tokenizer_id: str | os.PathLike[str] | None
) -> ChatTemplates:
    """What the arguments of `tokenize_chat` name. Raises `SettingError`, or `TokenizerError` for broken files."""
    if isinstance(tokenizer, (str, os.PathLike)) and tokenizer_id is None:
        tokenizer, tokenizer_id = None, tokenizer
    brought = _of_object(tokenizer) if tokenizer_id is None else _of_id(os.fspath(tokenizer_id))
    names = ", ".join(brought.templates)
    if chat_template is None:
        default = brought.templates.get("default")
        if default is None:
            have = f"has only {names}: pass one of these names" if names else "brings none: pass a template"
            raise SettingError(f"tokenize_chat: chat_template=None, and the tokenizer {have} as chat_template=")
        return ChatTemplates(default, brought.templates.get("tool_use", default), brought.tokens, "chat_template")
    if isinstance(chat_template, str) and chat_template in brought.templates:
        text, where = brought.templates[chat_template], f"chat_template {chat_template!r}"
    elif isinstance(chat_template, os.PathLike) or (isinstance(chat_template, str) and is_template_file(chat_template)):
        where = os.fspath(chat_template)
        text = _read(Path(chat_template).expanduser())
    elif isinstance(chat_template, str) and ("{{" in chat_template or "{%" in chat_template):
        text, where = chat_template, "chat_template"
    else:
        raise SettingError(
            f"tokenize_chat: chat_template={chat_template!r}: must be a Jinja template, the path of a .jinja file, or "
            f"the name of one of the tokenizer's templates ({names or 'it has none'})"
        )
    return ChatTemplates(text, text, brought.tokens, where)


def is_template_file(text: str) -> bool:
    """Whether a chat template is the path of a file, and not a template or the name of one."""
    return text.endswith((".jinja", ".jinja2", ".j2")) and "{" not in text


def _of_object(tokenizer: Any) -> _Brought:
    found = getattr(tokenizer, "special_tokens_map", None)
    tokens = {name: token for name, token in found.items() if isinstance(token, str)} if isinstance(found, dict) else {}
    return _Brought(_by_name(getattr(tokenizer, "chat_template", None), "the tokenizer's chat_template"), tokens)


def _of_id(name: str) -> _Brought:
    path = Path(name).expanduser()
    if path.is_file():
        return _of_folder(path.parent)
    return _of_folder(path if path.is_dir() else _fetched(name))


def _fetched(name: str) -> Path:
    try:
        import huggingface_hub as hub

        return Path(hub.snapshot_download(name, allow_patterns=list(FILES)))
    except Exception as error:
        raise TokenizerError(
            f"tokenizer_id={name!r}: fetching its chat template from the hub failed ({type(error).__name__}: {error}). "
            "Download its folder and give that path"
        ) from error


def _of_folder(folder: Path) -> _Brought:
    config = read_object(folder / "tokenizer_config.json")
    files = {"default": folder / "chat_template.jinja"} if (folder / "chat_template.jinja").exists() else {}
    files.update({path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))})
    if files:
        templates = {name: _read(path) for name, path in files.items()}
    else:
        where = folder / "tokenizer_config.json"
        templates = dict(_by_name(config.get("chat_template"), f"{where}: chat_template"))
        legacy = folder / "chat_template.json"
        if not templates and legacy.exists():
            templates = dict(_by_name(read_object(legacy).get("chat_template"), f"{legacy}: chat_template"))
    known = dict(config)
    if "added_tokens_decoder" not in config:  # older folders keep their special tokens in a file of their own
        known.update(read_object(folder / "special_tokens_map.json"))
    extra = known.get("extra_special_tokens")
    known.update(extra if isinstance(extra, dict) else {})
    named = {name: content(value) for name, value in known.items() if name.endswith("_token")}
    named.update({name: content(value) for name, value in extra.items()} if isinstance(extra, dict) else {})
    return _Brought(templates, {name: token for name, token in named.items() if token is not None})


def _by_name(found: Any, where: str) -> Mapping[str, str]:
    """Templates by name: a text is the default one; several are a dict, or a list of `name` and `template`."""
    if found is None:
        return {}
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, list) and all(isinstance(one, dict) and {"name", "template"} <= one.keys() for one in found):
        found = {one["name"]: one["template"] for one in found}
    if isinstance(found, dict) and all(type(k) is str and type(v) is str for k, v in found.items()):
        return found
    raise TokenizerError(f"{where}: expected a template, or several by name, found {type(found).__name__}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
