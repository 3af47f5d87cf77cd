"""Conversations through a real daemon: the example of docs/chat.md, its masks, and what is dropped on workers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.running import Daemon, Ranks, python, run_to_the_end, until
from zephon.recipe import load_recipe

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "chat"
NOTHING_SAID = 30


def example(folder: Path) -> Path:
    shutil.copytree(EXAMPLE, folder / "chat", ignore=shutil.ignore_patterns("data", "__pycache__"))
    making = ran(folder / "chat", "make_data.py")
    assert making == ""
    return folder / "chat"


def ran(folder: Path, script: str) -> str:
    """What a script of the example prints."""
    code = f"import runpy; runpy.run_path({script!r}, run_name='__main__')"
    with python(folder, code, cwd=folder) as program:
        assert program.end() == 0, program.errors
        return program.output


def test_the_example_of_conversations_gives_the_daemon_s_ranks_what_an_embedded_run_gives(runtime_folder: Path) -> None:
    folder = example(runtime_folder)
    silent = [{"messages": [{"role": "user", "content": f"Is anybody there? {i}"}]} for i in range(NOTHING_SAID)]
    (folder / "data" / "talks-3.jsonl").write_text("".join(json.dumps(row) + "\n" for row in silent))
    recipe = str(folder / "recipe.py")
    with Daemon(recipe, workers=2) as daemon:
        for name in ("pipeline", "turns"):
            embedded = load_recipe(recipe).pipeline(name)
            expected = {}
            for batch in embedded:
                assert batch["loss_mask"].any(), "a sequence's conversations all teach something"
                expected[batch.lane, batch.first_record] = batch.digest
            embedded.close()
            assert len(expected) > 20
            assert run_to_the_end(daemon.socket, 2, name) == expected
        with Ranks(daemon.socket, 2) as ranks:
            ranks.rounds()
            until(lambda: sum(lane["counters"].get("dropped_records", 0) for lane in daemon.lanes()) == NOTHING_SAID)


def test_the_example_shows_what_is_learnt(runtime_folder: Path) -> None:
    folder = example(runtime_folder)
    shown = ran(folder, "show.py")
    green = [text.split("\033[0m")[0] for text in shown.split("\033[32m")[1:]]
    assert green
    assert all(text.endswith("<|im_end|>") for text in green)
    assert "tokens are learnt" in shown
