"""The demo, scaled down: real corpus, daemon, torchrun and ranks, but few of each. `make run` is the full one."""
from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.corpora import byte_tokenizer
from tests.running import SECONDS, SOURCES, living, until
from zephon import Dataset
from zephon_daemon.demo import report, story
from zephon_daemon.demo.corpus import make_corpus, read_documents
from zephon_daemon.demo.launches import Step, Training, TrainingFailed

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

SMALL = {"code": 400_000, "prose": 150_000}
INTERRUPTED = f"""
import sys
from pathlib import Path
from zephon_daemon.demo.story import Scale, demo
sys.exit(demo(Path(sys.argv[1]), Scale(steps=10_000, ranks=(2, 1), sizes={SMALL})))
"""


@pytest.fixture(scope="module", autouse=True)
def matplotlib_has_its_fonts_open(tmp_path_factory: pytest.TempPathFactory) -> None:
    """It keeps their files open for good; opened here, they are not taken for a leak of the first test that draws."""
    curves = {"4 ranks": made_up(Training("", "", 4, 4), differ=False)}
    report.draw(tmp_path_factory.mktemp("figure") / "first.png", curves, curves, 2)


def say_whatever(_: str) -> None:
    pass


def made_up(training: Training, differ: bool) -> list[Step]:
    """The steps of a run in which each step has its number as digest, or another one for each number of ranks."""
    first = 1 if training.resume is None else 3
    mark = f"{training.ranks:04d}" if differ and training.resume else "same"
    return [Step(step, 8.0 - step / 10, f"{step:04d}{mark}") for step in range(first, training.last + 1)]


def test_each_corpus_is_the_same_again_and_has_the_size_that_was_asked_for(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    corpora = [make_corpus(folder, SMALL) for folder in folders]
    assert corpora[0] == corpora[1]
    files = [{p.relative_to(folder): p.read_bytes() for p in folder.rglob("*.*")} for folder in folders]
    assert files[0] == files[1]
    for name, size in SMALL.items():
        assert size <= corpora[0].bytes[name] < size + 20_000
        documents = list(read_documents(folders[0] / name))
        assert len(documents) == corpora[0].documents[name] == Dataset.from_path(name, folders[0] / name).total


def test_documents_are_whole_lines_of_their_files_and_name_their_place(tmp_path: Path) -> None:
    (tmp_path / "installed").mkdir()
    long = "A docstring of some length. " * 9
    functions = [f"@decorated({n})\ndef function_{n}(x):\n    '''{long}'''\n" for n in range(40)]
    text = "import this\n" + "\x0c\n# a comment\n".join(functions)
    (tmp_path / "installed" / "module.py").write_text(text)
    make_corpus(tmp_path, {"code": 10**6, "prose": 10**6}, [tmp_path / "installed"])
    code, prose = (list(read_documents(tmp_path / name)) for name in ("code", "prose"))
    assert "".join(document.text for document in code) == text
    assert all(document.text.startswith("@decorated") or document.source == "module.py:1" for document in code[1:])
    assert [document.source for document in prose] == [f"module.py function_{n}:1" for n in range(40)]


def test_the_usual_loader_repeats_itself_on_as_many_ranks_and_gives_other_steps_on_fewer(tmp_path: Path) -> None:
    from zephon_daemon.demo.usual import UsualLoader

    make_corpus(tmp_path / "corpus", SMALL)
    byte_tokenizer(tmp_path / "tokenizer.json")

    def steps(world: int, count: int, state: dict[str, int] | None = None) -> tuple[list[Counter[str]], dict[str, int]]:
        loaders = [UsualLoader(tmp_path, rank, world) for rank in range(world)]
        if state:
            for loader in loaders:
                loader.load_state_dict(state)
        found = [Counter[str]() for _ in range(count)]
        for loader in loaders:
            batches = iter(loader)
            for names in found:
                ends = False
                while not ends:
                    batch = next(batches)
                    names.update(batch.names())
                    ends = batch.ends_round
        return found, loaders[0].state_dict()

    whole, _ = steps(4, 8)
    begun, state = steps(4, 4)
    assert begun == whole[:4]
    assert {sum(step.values()) for step in whole} == {16}
    on_two, _ = steps(2, 4, state)
    assert all(mine != theirs for mine, theirs in zip(on_two, whole[4:]))


def test_a_digest_that_differs_is_exit_status_1_and_names_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(story, "train", lambda folder, training, tell: made_up(training, differ=True))
    assert story.demo(tmp_path / "out", story.Scale(steps=4, sizes=SMALL)) == 1
    said = capsys.readouterr().out
    assert "2 of 4 global steps DIFFER, the first at step 3" in said
    assert re.search(r"^ +3 +0003same +00030002 ≠ +00030001 ≠", said, re.MULTILINE)


def test_losses_that_part_are_exit_status_1_even_where_digests_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def other_losses(_: Path, training: Training, __: Callable[[str], None]) -> list[Step]:
        more = 0.1 if training.resume and training.loader == "zephon" else 0.0
        return [Step(step.step, step.loss + more, step.digest) for step in made_up(training, differ=False)]

    monkeypatch.setattr(story, "train", other_losses)
    assert story.demo(tmp_path / "out", story.Scale(steps=4, sizes=SMALL)) == 1
    assert "losses differ by 0.1" in capsys.readouterr().out


def test_a_step_that_one_run_lacks_differs() -> None:
    steps = [Step(1, 8.0, "aa"), Step(2, 7.0, "bb")]
    assert report.differing({"4 ranks": steps, "4 → 2": steps[:1]}) == [2]
    assert report.differing({"4 ranks": steps, "4 → 2": steps}) == []


def test_a_folder_that_holds_something_else_is_refused_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "mine.txt").write_text("mine")
    assert story.main(["--out", str(tmp_path)]) == 3
    assert "--out" in capsys.readouterr().err
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.txt")] == ["corpus/mine.txt"]


@pytest.mark.soak
def test_real_ranks_stop_and_resume_on_fewer_with_every_global_step_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = story.train

    def usual_made_up(folder: Path, training: Training, tell: Callable[[str], None]) -> list[Step]:
        return real(folder, training, tell) if training.loader == "zephon" else made_up(training, differ=True)

    monkeypatch.setattr(story, "train", usual_made_up)
    out = tmp_path / "out"
    assert story.demo(out, story.Scale(steps=4, ranks=(2, 1), sizes=SMALL)) == 0
    said = capsys.readouterr().out
    assert "all 4 global steps are the same" in said
    assert "Usual loader: 2 of 4 global steps differ, from step 3 on" in said
    runs = {p.stem: [json.loads(line) for line in p.read_text().splitlines()] for p in (out / "runs").glob("*.jsonl")}
    assert [row["step"] for row in runs["zephon-2-to-1"]] == [3, 4]
    assert [row["digest"] for row in runs["zephon-2-to-1"]] == [row["digest"] for row in runs["zephon-2"][2:]]
    assert len({row["digest"] for row in runs["zephon-2"]}) == 4
    assert json.loads((out / "runs" / "zephon-state" / "loader.json").read_text())["complete"] is True
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert str(out / "demo.png") in said


def test_a_run_that_fails_says_which_and_shows_the_end_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "recipe.py").write_text("pipeline = None\n")
    with pytest.raises(TrainingFailed, match=r"(?s)'broken' ended before its first step of 4.*\n  \| .*recipe\.py"):
        story.train(tmp_path, Training("broken", "zephon", ranks=1, last=4), say_whatever)


@pytest.mark.soak
def test_ctrl_c_ends_the_demo_and_all_that_it_started(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process: subprocess.Popen[Any] = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(out)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES)},
    )  # fmt: skip
    try:
        until(lambda: process.poll() is not None or (out / "runs" / "zephon-2.jsonl").exists())
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
        process.communicate()
    assert errors.splitlines() == ["zephon demo: interrupted; all that it started has ended"]
    assert process.returncode == 130
    assert len(started) > 4
    assert living(other.pid for other in started) == []
