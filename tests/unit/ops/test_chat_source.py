"""Where a chat template comes from: the argument, the tokenizer, or the files in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zephon.errors import SettingError, TokenizerError
from zephon.ops.chat_source import find_chat_templates


def folder(path: Path, **files: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text("{}")
    for name, content in files.items():
        file = path / name.replace("__", "/").replace("_jinja", ".jinja").replace("_json", ".json")
        file.parent.mkdir(exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def found(path: Path, chat_template: Any = None) -> tuple[str, str]:
    templates = find_chat_templates(chat_template, None, path)
    return templates.default, templates.tool_use


SEVERAL = [{"name": "default", "template": "{{ 1 }}"}, {"name": "tool_use", "template": "{{ 2 }}"}]


def test_a_folder_s_own_files_come_before_its_configuration(tmp_path: Path) -> None:
    config = {"chat_template": "{{ 0 }}"}
    assert found(folder(tmp_path / "a", tokenizer_config_json=config)) == ("{{ 0 }}", "{{ 0 }}")
    assert found(folder(tmp_path / "a") / "tokenizer.json") == ("{{ 0 }}", "{{ 0 }}")
    legacy = {"chat_template": "{{ 9 }}"}
    assert found(folder(tmp_path / "b", chat_template_json=legacy)) == ("{{ 9 }}", "{{ 9 }}")
    both = folder(tmp_path / "b", tokenizer_config_json=config)
    assert found(both) == ("{{ 0 }}", "{{ 0 }}")
    assert found(folder(both, chat_template_jinja="{{ 3 }}")) == ("{{ 3 }}", "{{ 3 }}")
    assert found(folder(both, additional_chat_templates__tool_use_jinja="{{ 4 }}")) == ("{{ 3 }}", "{{ 4 }}")


def test_several_templates_are_chosen_by_name_or_by_whether_there_are_tools(tmp_path: Path) -> None:
    path = folder(tmp_path, tokenizer_config_json={"chat_template": SEVERAL})
    assert found(path) == ("{{ 1 }}", "{{ 2 }}")
    assert found(path, "tool_use") == ("{{ 2 }}", "{{ 2 }}")
    assert found(path, "{{ 7 }}") == ("{{ 7 }}", "{{ 7 }}")
    file = tmp_path / "own.jinja"
    file.write_text("{{ 8 }}")
    assert found(path, file) == found(path, str(file)) == ("{{ 8 }}", "{{ 8 }}")
    with pytest.raises(SettingError, match=r"chat_template='rag': must be .* tokenizer's templates .default, tool_use"):
        found(path, "rag")
    with pytest.raises(TokenizerError, match="missing.jinja cannot be read"):
        found(path, "missing.jinja")


def test_a_tokenizer_without_a_default_template_says_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="the tokenizer brings none: pass a template as chat_template="):
        found(folder(tmp_path / "a"))
    with pytest.raises(SettingError, match="the tokenizer has only tool_use: pass one of these names"):
        found(folder(tmp_path / "b", tokenizer_config_json={"chat_template": SEVERAL[1:]}))


def test_special_tokens_are_strings_by_name_wherever_they_are_written(tmp_path: Path) -> None:
    config = {
        "chat_template": "{{ 0 }}", "bos_token": {"content": "<s>", "__type": "AddedToken"}, "eos_token": "</s>",
        "add_bos_token": True, "pad_token": None, "image_token": "<img>", "extra_special_tokens": {"boi_token": "<b>"},
    }  # fmt: skip
    path = folder(tmp_path, tokenizer_config_json=config)
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<img>", "boi_token": "<b>"}
    assert find_chat_templates(None, None, path).tokens == tokens
    folder(path, special_tokens_map_json={"bos_token": "<old>"})
    assert find_chat_templates(None, None, path).tokens == {**tokens, "bos_token": "<old>"}
    folder(path, tokenizer_config_json={**config, "added_tokens_decoder": {}})
    assert find_chat_templates(None, None, path).tokens == tokens


def test_an_object_brings_its_own() -> None:
    several = {"default": "{{ 1 }}", "x": "{{ 2 }}"}
    tokenizer = SimpleNamespace(chat_template=several, special_tokens_map={"eos_token": "E"})
    templates = find_chat_templates(None, tokenizer, None)
    assert (templates.default, templates.tool_use, templates.tokens) == ("{{ 1 }}", "{{ 1 }}", {"eos_token": "E"})
    assert find_chat_templates("x", tokenizer, None).default == "{{ 2 }}"


@pytest.mark.parametrize(("file", "content"), [("tokenizer_config_json", "{"), ("tokenizer_config_json", [1])])
def test_broken_files_are_named(tmp_path: Path, file: str, content: Any) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        found(folder(tmp_path, **{file: content}))
    with pytest.raises(TokenizerError, match="chat_template: expected a template, or several by name, found int"):
        found(folder(tmp_path, tokenizer_config_json={"chat_template": 5}))
