"""Where only the rank's side is installed, whatever needs more says which package it lacks and what to install."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.corpora import word_tokenizer
from zephon.extras import how_to_install, needing

LACKING = (
    "pyarrow", "msgspec", "zstandard", "tokenizers", "fastokens", "jinja2", "tomli", "cloudpickle", "psutil",
    "setproctitle", "torch",
)  # fmt: skip

CODE = """
import json, sys
for name in {lacking!r}:
    sys.modules[name] = None
from zephon import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource

def pipeline():
    memory = Dataset.from_dict("d", {{"s": InMemoryShard([{{"text": "a", "messages": []}}] * 8)}})
    return Pipeline(StaticMixtureWorkSource([memory], None)).options(canonical_replicas=1)

def device():
    from zephon_client.device import device_of
    device_of("cuda")

def run(built):
    return list(built.batch(1))

uses = {{
    "Dataset.from_path of JSON lines": lambda: Dataset.from_path("d", "a.jsonl"),
    "Dataset.from_path of Parquet": lambda: Dataset.from_path("d", "a.jsonl", fmt="parquet"),
    "tokenize": lambda: run(pipeline().tokenize(tokenizer_id="tokenizer.json", field="text", special_tokens="none")),
    "tokenize_chat": lambda: run(pipeline().tokenize_chat(tokenizer_id="tokenizer.json", chat_template="{{{{ 1 }}}}")),
    'runner="process"': lambda: run(pipeline().map_transform(dict).options(runner="process")),
    "to_torch_dataset": lambda: pipeline().batch(1).to_torch_dataset(),
    "device='cuda'": device,
}}
said = {{}}
for what, use in uses.items():
    try:
        use()
        said[what] = "nothing"
    except Exception as error:
        said[what] = str(error)
said["in memory"] = len(run(pipeline().map_transform(dict)))
print(json.dumps(said))
"""


def test_every_use_of_a_package_that_is_missing_names_it_and_the_command_that_brings_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    word_tokenizer(tmp_path / "tokenizer.json", ["a"])
    code = CODE.format(lacking=LACKING)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)
    assert said.pop("in memory") == 8, "rows in memory need nothing more"
    for what, text in said.items():
        assert text.startswith(f"{what} needs the package "), (what, text)
        command = how_to_install("torch" if "torch" in what or "device" in what else "msgspec")
        assert text.endswith(f": {command}"), text


def test_a_module_of_ones_own_that_is_missing_is_left_as_it_is() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'zephon\.nothing'$"), needing("this"):
        import zephon.nothing  # type: ignore[import-not-found]  # noqa: F401
    assert how_to_install("matplotlib").startswith("pip install '.[demo]'")
