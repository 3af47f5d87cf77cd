"""Errors that name a path as it was given say where it starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from zephon import Dataset, load_checkpoint
from zephon.errors import ZephonError
from zephon.ops.tokenize import Tokenize
from zephon.recipe import load_recipe

READERS: dict[str, Callable[[str], object]] = {
    "dataset": lambda path: Dataset.from_path("web", path).total,
    "tokenizer": lambda path: Tokenize(tokenizer_id=f"{path}.json", field="text"),
    "tokenizer of the hub": lambda path: Tokenize(tokenizer_id=path, field="text"),
    "recipe": load_recipe,
    "checkpoint": load_checkpoint,
}


@pytest.mark.parametrize("what", READERS)
def test_an_error_about_a_relative_path_says_to_what_it_is_relative(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zephon.ops.tokenizer_source._hub_file", mock.Mock(side_effect=OSError("no hub is here")))
    with pytest.raises(ZephonError) as caught:
        READERS[what]("data/absent")
    assert f"(relative to {tmp_path})" in str(caught.value)
    if what != "tokenizer of the hub":
        with pytest.raises(ZephonError) as caught:
            READERS[what](str(tmp_path / "absent"))
        assert "(relative to" not in str(caught.value)
