"""What is wrong with recipe, data, topology or checkpoint is one line: what it is, what to do, and an exit status.

0 done, 1 the check failed, 2 usage, 3 cannot start, 130 interrupted. Ranks get an exception of `zephon.errors` whose
text is one line. No traceback of ours reaches the user, and nothing is left behind (every test of this folder checks).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.corpora import COUNT, byte_tokenizer
from tests.running import Daemon, Here, Ranks, counting, launch, write_recipe, zephon
from zephon.errors import (
    CheckpointError,
    CheckpointMismatch,
    DaemonUnavailable,
    RecipeError,
    RecordError,
    TopologyError,
    ZephonError,
)
from zephon.recipe import load_recipe
from zephon_client import connect

ONE = "pipeline = Pipeline(StaticMixtureWorkSource([Dataset.from_path('d', HERE / 'data')], mixture=None)){}.batch(2)\n"


def no_path(folder: Path) -> str:
    return ONE.format("")


def empty_folder(folder: Path) -> str:
    (folder / "data").mkdir()
    return ONE.format("")


def empty_files(folder: Path) -> str:
    COUNT(0, 2, folder / "data")
    return ONE.format("")


def other_files(folder: Path) -> str:
    (folder / "data").mkdir()
    (folder / "data" / "notes.docx").write_text("x")
    return ONE.format("")


def no_parquet(folder: Path) -> str:
    (folder / "data").mkdir()
    (folder / "data" / "a.parquet").write_bytes(b"PAR1" + b"\0" * 100 + b"PAR1")
    return ONE.format("")


def cut_parquet(folder: Path) -> str:
    COUNT(200, 1, folder / "data", suffix=".parquet")
    file = folder / "data" / "part-00000.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    return ONE.format("")


def no_tokenizer(folder: Path) -> str:
    COUNT(20, 1, folder / "data")
    return ONE.format(".tokenize(tokenizer_id=str(HERE / 'none.json'), field='text')")


def bad_tokenizer(folder: Path) -> str:
    COUNT(20, 1, folder / "data")
    (folder / "tok.json").write_text('{"version": "1.0", "model": ')
    return ONE.format(".tokenize(tokenizer_id=str(HERE / 'tok.json'), field='text')")


def bad_syntax(folder: Path) -> str:
    return "pipeline = (\n"


def bad_name(folder: Path) -> str:
    return "pipeline = Pipelin()\n"


def no_pipeline(folder: Path) -> str:
    return "x = 1\n"


def unknown_argument(folder: Path) -> str:
    COUNT(20, 1, folder / "data")
    return ONE.format(".shuffle(bufer_size=3)")


def senseless(folder: Path) -> str:
    COUNT(20, 1, folder / "data")
    return ONE.format("").strip() + ".options(canonical_replicas=0)\n"


def raises(folder: Path) -> str:
    return "raise OSError('the disk of the team\\nis full')\n"


def leaves(folder: Path) -> str:
    return "import sys; sys.exit(5)\n"


RECIPES: dict[Callable[[Path], str], list[str]] = {
    no_path: ["data"],
    empty_folder: ["data"],
    empty_files: ["data"],
    other_files: ["data"],
    no_parquet: ["a.parquet"],
    cut_parquet: ["part-00000.parquet"],
    no_tokenizer: ["none.json"],
    bad_tokenizer: ["tok.json"],
    bad_syntax: ["recipe.py:", "SyntaxError"],
    bad_name: ["recipe.py:", "NameError", "Pipelin"],
    no_pipeline: ["recipe.py", "pipeline"],
    unknown_argument: ["bufer_size", "buffer_size"],
    senseless: ["canonical_replicas"],
    raises: ["the disk of the team is full"],
    leaves: ["recipe.py:"],
}


ALSO_BY_THE_DAEMON = (no_parquet, cut_parquet, no_tokenizer, bad_tokenizer, senseless, raises, leaves)
"""Each of these shows at another moment; `zephon launch` below has one more."""


@pytest.mark.parametrize("make", RECIPES)
def test_a_recipe_or_data_that_cannot_be_used_is_one_line_and_status_3(
    make: Callable[[Path], str], runtime_folder: Path, here: Here
) -> None:
    """`explain` finds all of it; the daemon what shows as the recipe is loaded, and the first rank the rest."""
    recipe = write_recipe(runtime_folder, make(runtime_folder))
    status, _, errors = here("explain", recipe)
    assert status == 3
    _one_line(errors, "zephon explain: ", RECIPES[make])
    if make not in ALSO_BY_THE_DAEMON:
        return
    with Daemon(recipe, workers=1, ready=False) as daemon:
        if not daemon.line().startswith("zephon daemon ready"):
            assert daemon.end() == 3
            _one_line(daemon.errors, "zephon daemon: ", RECIPES[make])
        else:
            with connect(daemon.socket, output="numpy") as loader, pytest.raises(ZephonError) as raised:
                next(loader)
            _one_line(str(raised.value), "", RECIPES[make])
            assert daemon.stop() == 0
            assert daemon.errors == ""


def _one_line(text: str, begins: str, facts: list[str]) -> None:
    assert len(text.strip().splitlines()) == 1, text
    assert text.startswith(begins)
    assert "Traceback" not in text
    assert all(fact in text for fact in facts), text


def test_launch_passes_the_reason_and_the_status_on_and_starts_no_command(runtime_folder: Path) -> None:
    recipe = write_recipe(runtime_folder, no_path(runtime_folder))
    with launch(recipe, "print('started')") as job:
        assert job.end() == 3
        assert job.output == ""
        _one_line(job.errors, "zephon", ["data"])


@pytest.mark.parametrize(
    ("arguments", "status", "facts"),
    [
        ([], 2, ["usage"]),
        (["daemon"], 2, ["RECIPE"]),
        (["dance"], 2, ["dance"]),
        (["launch", "r.py"], 2, ["--"]),
        (["daemon", "r.py", "--workers", "0"], 2, ["--workers"]),
        (["daemon", "r.py", "--memory", "much"], 2, ["much"]),
        (["daemon", "nowhere.py"], 3, ["nowhere.py", "No such file"]),
        (["daemon", "nowhere.py", "--socket", "/nowhere/s.sock"], 3, ["/nowhere"]),
        (["launch", "nowhere.py", "--", "true"], 3, ["nowhere.py"]),
        (["launch", "nowhere.py", "--", "no-such-command"], 3, ["no-such-command"]),
        (["explain", "nowhere.py"], 3, ["nowhere.py"]),
        (["verify", "nowhere.py"], 3, ["nowhere.py"]),
        (["checkpoint", "nowhere.json"], 3, ["nowhere.json"]),
        (["progress", "--socket", "/nowhere/s.sock"], 3, ["/nowhere/s.sock"]),
        (["index", "/nowhere"], 3, ["/nowhere"]),
    ],
)  # fmt: skip
def test_the_command_line_says_what_is_wrong(
    arguments: list[str], status: int, facts: list[str], runtime_folder: Path, here: Here
) -> None:
    if arguments[:1] in (["daemon"], ["launch"]) and status == 3:  # such take signals and start processes
        with zephon(runtime_folder, *arguments, cwd=runtime_folder) as program:
            found = program.end(), program.output, program.errors
    else:
        found = here(*arguments)
    assert found[:2] == (status, "")
    assert "Traceback" not in found[2]
    assert all(fact in found[2] for fact in facts), found[2]
    if status == 3:
        assert len(found[2].splitlines()) == 1, found[2]


# What the first batch of a running daemon shows


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    folder = Path(tempfile.mkdtemp(prefix="z", dir="/tmp"))
    COUNT(100, 2, folder / "data")
    COUNT(300, 1, folder / "table", suffix=".parquet")
    COUNT(300, 1, folder / "worn", suffix=".parquet", row=lambda i: {"id": i, "text": f"{i * 7919:064d}"})
    worn = folder / "worn" / "part-00000.parquet"
    whole = bytearray(worn.read_bytes())
    whole[2000:2400] = b"\xff" * 400
    worn.write_bytes(whole)
    byte_tokenizer(folder / "tok.json")
    recipe = write_recipe(
        folder,
        """
def over(name, size=2, seed=0, **options):
    source = StaticMixtureWorkSource([Dataset.from_path(name, HERE / name)], mixture=None, seed=seed)
    return Pipeline(source).options(canonical_replicas=4, **options)
pipeline = over("data").batch(2)
no_field = over("data").tokenize(tokenizer_id=str(HERE / "tok.json"), field="body").batch(2)
no_column = over("table").tokenize(tokenizer_id=str(HERE / "tok.json"), field="body").batch(2)
worn = over("worn").batch(2)
no_tokens = over("data").pack_flat(16).batch(2)
rejects = over("data").map_transform(lambda row: None).batch(2)
other_data = over("table").batch(2)
shuffled = over("data").shuffle(8).batch(2)
""",
    )
    with Daemon(recipe) as running:
        yield running.all_started()
    assert running.errors == ""
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("pipeline", "kind", "facts"),
    [
        ("no_field", RecordError, ["data", "body", "row"]),
        ("no_column", ZephonError, ["table", "body"]),
        ("worn", ZephonError, ["worn", "part-00000.parquet"]),
        ("no_tokens", RecordError, ["pack_flat", "input_ids"]),
        ("pipelin", RecipeError, ["pipelin", "Did you mean 'pipeline'"]),
    ],
)
def test_a_rank_is_told_in_one_line_and_again(
    daemon: Daemon, pipeline: str, kind: type[ZephonError], facts: list[str]
) -> None:
    for _ in range(2):
        with pytest.raises(kind) as raised, connect(daemon.socket, pipeline=pipeline, output="numpy") as loader:
            for _ in loader:
                pass
        _one_line(str(raised.value), "", facts)


def test_more_groups_than_lanes_are_refused_on_every_rank(daemon: Daemon) -> None:
    with Ranks(daemon.socket, 5) as ranks:
        for error in ranks.each(lambda rank: ranks.refused(rank, TopologyError)):
            _one_line(str(error), "", ["5", "4 lanes", "canonical_replicas"])
    with Ranks(daemon.socket, 4) as ranks:
        ranks.rounds()


def test_a_group_that_is_none_is_refused_before_anything_is_opened(daemon: Daemon) -> None:
    with pytest.raises(TopologyError, match="dp_group_id=4"):
        connect(daemon.socket, dp_degree=4, dp_group_id=4)


def test_a_step_that_is_no_whole_round_is_refused(daemon: Daemon) -> None:
    with connect(daemon.socket, batches_per_step=6, output="numpy") as loader, pytest.raises(TopologyError) as raised:
        next(loader)
    _one_line(str(raised.value), "", ["batches_per_step=6", "4"])


def test_a_group_that_is_taken_is_refused_and_named(daemon: Daemon) -> None:
    with connect(daemon.socket, output="numpy"), pytest.raises(TopologyError) as raised:
        connect(daemon.socket, output="numpy", timeout=5)
    _one_line(str(raised.value), "", ["group 0", "group_readers"])


@pytest.mark.parametrize(
    ("change", "kind", "facts"),
    [
        (lambda s: s.pop("lanes"), CheckpointError, ["lanes"]),
        (lambda s: s.update(format=9), CheckpointError, ["format 9"]),
        (lambda s: s["lanes"].pop("2"), CheckpointError, ["[2]"]),
        (lambda s: s["lanes"]["1"].update(records=-1), CheckpointError, ["lane 1", "records"]),
        (lambda s: s["lanes"]["1"].update(chunk=1), ZephonError, ["lane 1", "chunk 1"]),
        (lambda s: s["identity"].update(canonical_replicas=5), CheckpointError, ["4"]),
        (lambda s: s["identity"]["datasets"][0].update(digest="0"), CheckpointMismatch, ["datasets", "allow_changed"]),
    ],
)  # fmt: skip
def test_a_checkpoint_that_cannot_be_is_refused(
    daemon: Daemon, change: Callable[[Any], Any], kind: type[ZephonError], facts: list[str]
) -> None:
    with Ranks(daemon.socket, 2, pipeline="shuffled") as ranks:
        ranks.rounds(3)
        state = ranks.state()
    change(state)
    with pytest.raises(kind) as raised, Ranks(daemon.socket, 2, state, pipeline="shuffled") as ranks:
        ranks.rounds(1)
    _one_line(str(raised.value), "", facts)


def test_a_checkpoint_of_another_run_is_refused_with_what_differs(daemon: Daemon) -> None:
    with Ranks(daemon.socket, 2) as ranks:
        ranks.rounds(3)
        state = ranks.state()
    for pipeline, facts in (("other_data", ["datasets"]), ("shuffled", ["steps"])):
        with Ranks(daemon.socket, 2, state, pipeline=pipeline) as ranks:
            for error in ranks.each(lambda rank: ranks.refused(rank, CheckpointMismatch)):
                _one_line(str(error), "the checkpoint belongs to another run", [*facts, "allow_changed"])


def test_two_ranks_that_bring_different_checkpoints_are_told_whose(daemon: Daemon) -> None:
    with Ranks(daemon.socket, 2) as ranks:
        ranks.rounds(3)
        state = ranks.state()
    with (
        connect(daemon.socket, dp_degree=2, dp_group_id=0, output="numpy") as one,
        connect(daemon.socket, dp_degree=2, dp_group_id=1, output="numpy") as other,
    ):
        one.load_state_dict(state)
        assert one.state_dict()
        with pytest.raises(CheckpointMismatch) as raised:
            next(other)
    _one_line(str(raised.value), "", ["group 0", "group 1", "different checkpoints"])


def test_a_second_daemon_on_the_socket_is_refused_and_the_first_one_goes_on(daemon: Daemon) -> None:
    with Daemon(daemon.recipe, ready=False) as second:
        assert second.end() == 3
        _one_line(second.errors, "zephon daemon: ", [str(daemon.pid), daemon.socket, "--socket"])
    with Ranks(daemon.socket, 1) as ranks:
        ranks.rounds(1)


RANK = """
from zephon_client import connect
connect(output="numpy")
"""


def test_a_rank_that_fails_is_launchs_status_and_its_own_traceback_is_all(runtime_folder: Path) -> None:
    recipe = counting(runtime_folder, 64, 2, lanes=2, batch=2)
    code = RANK.replace('connect(output', 'connect(dp_degree=3, dp_group_id=0, output').strip() + "\nnext(_)\n"
    code = code.replace("connect(dp", "_ = connect(dp")
    with launch(recipe, code) as job:
        assert job.end() == 1
    lines = job.errors.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1].startswith("zephon.errors.TopologyError: dp_degree=3")
    assert job.errors.count("Traceback") == 1


def test_a_daemon_that_is_stopped_leaves_no_rank_waiting(runtime_folder: Path) -> None:
    recipe = counting(runtime_folder, 64, 2, lanes=2, batch=2)
    with Daemon(recipe, workers=1) as daemon, Ranks(daemon.socket, 1) as ranks:
        ranks.rounds(1)
        daemon.stop()
        with pytest.raises(DaemonUnavailable) as raised:
            ranks.rounds()
    _one_line(str(raised.value), "", [daemon.socket, "state_dict"])


def test_an_embedded_run_says_the_same_as_the_daemon(daemon: Daemon) -> None:
    for pipeline in ("no_field", "worn", "no_tokens"):
        embedded = load_recipe(daemon.recipe).pipeline(pipeline)
        with pytest.raises(ZephonError) as here:
            list(embedded)
        embedded.close()
        with pytest.raises(ZephonError) as there, connect(daemon.socket, pipeline=pipeline, output="numpy") as loader:
            list(loader)
        assert type(here.value) is type(there.value)
        _one_line(str(here.value), "", [])
