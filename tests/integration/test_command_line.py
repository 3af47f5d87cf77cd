"""The command `zephon`: exit codes, one-line errors, and `launch` with everything that may happen to it."""
from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.running import Here
from zephon import save_checkpoint
from zephon.recipe import load_recipe
from zephon.transport.channels import answers
from zephon_daemon.bootstrap import command
from zephon_daemon.cli import default_socket, size
from zephon_daemon.progress import ask

SECONDS = 30.0
RECIPE = """\
from zephon import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
rows = {str(i): InMemoryShard([{"id": 16 * i + j} for j in range(16)]) for i in range(4)}
source = StaticMixtureWorkSource([Dataset.from_dict("d", rows)], mixture=None, seed=0)
pipeline = Pipeline(source).batch(2).options(canonical_replicas=4)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "recipe.py").write_text(RECIPE)
    return str(tmp_path / "recipe.py")


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the command with arguments, in a process group of its own."""
    started: list[subprocess.Popen[str]] = []

    def make(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command("zephon_daemon.cli:main", *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **environment}, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield make
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=SECONDS)


@pytest.fixture
def zephon(start: Any) -> Callable[..., tuple[int, str, str]]:
    """Runs the command to its end: exit code, stdout, stderr."""

    def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
        process = start(*arguments, **environment)
        out, errors = process.communicate(timeout=SECONDS)
        return process.returncode, out, errors

    return run


def until(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < end, "it did not come to that"
        select.select([], [], [], 0.02)
    return found


def answering(path: str) -> dict[str, Any] | None:
    """The report of the daemon there, None while none answers."""
    if not answers(path, socket.SOCK_STREAM):
        return None
    return ask(path)


def sh(script: str) -> tuple[str, ...]:
    return "--", "sh", "-c", script


def below(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def one(pid: int, title: str) -> psutil.Process:
    """The process below `pid` whose title begins so."""
    return until(lambda: next((p for p in below(pid) if " ".join(p.cmdline()).startswith(title)), None))


@pytest.mark.parametrize("arguments", [
    [], ["frobnicate"], ["daemon"], ["daemon", "r.py", "--workers", "0"], ["daemon", "r.py", "--memory", "many"],
    ["daemon", "r.py", "--metrics-port", "1"], ["daemon", "r.py", "--coordinator", "a:1"], ["launch", "r.py"],
    ["inspect", "r.py"], ["inspect", "r.py", "--step", "0"], ["verify", "r.py", "--dp", "4,x"],
])  # fmt: skip
def test_usage_errors_are_exit_code_2(zephon: Any, here: Here, arguments: list[str]) -> None:
    code, out, errors = here(*arguments) if arguments else zephon()
    assert (code, out) == (2, "")
    assert "Traceback" not in errors


@pytest.mark.parametrize("arguments", [
    ["daemon", "absent.py"], ["launch", "absent.py", "--", "true"], ["explain", "absent.py"],
])  # fmt: skip
def test_what_cannot_start_is_exit_code_3_and_one_line_with_the_reason(zephon: Any, arguments: list[str]) -> None:
    code, out, errors = zephon(*arguments)
    assert (code, out) == (3, "")
    assert len(errors.splitlines()) == 1
    assert "absent" in errors


def test_a_command_that_does_not_exist_is_refused_before_a_daemon_starts(zephon: Any, recipe: str) -> None:
    code, _, errors = zephon("launch", recipe, "--", "no-such-command")
    assert code == 3
    assert "no-such-command" in errors


def test_a_traceback_is_shown_only_on_request(zephon: Any) -> None:
    assert "Traceback" in zephon("explain", "absent.py", ZEPHON_DEBUG="1")[2]


def test_sizes_are_read_as_people_write_them() -> None:
    assert [size(text) for text in ("512M", "4G", "1.5KiB", "77", "2gb")] == [512 << 20, 4 << 30, 1536, 77, 2 << 30]


def test_explain_says_what_each_group_gets(zephon: Any, recipe: str) -> None:
    code, out, errors = zephon("explain", recipe, "--dp", "2")
    assert (code, errors) == (0, "")
    assert "group 1 of 2: lanes [2, 3]" in out


def test_index_counts_rows_and_shards(zephon: Any, count: Callable[[int, int], Path]) -> None:
    folder = count(100, 4)
    assert zephon("index", str(folder)) == (0, f"{folder}: 100 rows in 4 shards\n", "")


def test_a_checkpoint_is_told_to_people(zephon: Any, tmp_path: Path) -> None:
    lanes = {str(n): {"chunk": 9, "offset": 2, "records": 40 + n, "skipped": 1} for n in range(2)}
    identity = {"canonical_replicas": 2, "seed": 42}
    state = {"format": 1, "identity": identity, "epoch": 3, "complete": True, "lanes": lanes}
    (tmp_path / "c.json").write_text(json.dumps(state))
    code, out, _ = zephon("checkpoint", str(tmp_path / "c.json"))
    assert code == 0
    assert "epoch 3, 2 lanes, complete" in out
    assert "81 records" in out
    assert "seed 42" in out


def test_launch_gives_the_command_a_ready_daemon_leaves_its_output_alone_and_passes_its_exit_code_on(
    zephon: Any, recipe: str
) -> None:
    script = sh('test -S "$ZEPHON_SOCKET" && echo here; echo told >&2; exit 7')
    assert zephon("launch", recipe, "--workers", "1", *script) == (7, "here\n", "told\n")


def test_launch_says_128_and_the_signal_for_a_command_that_was_killed(zephon: Any, recipe: str) -> None:
    assert zephon("launch", recipe, "--workers", "1", *sh("kill -9 $$"))[0] == 137


def test_launch_of_a_broken_recipe_gives_its_reason_and_never_runs_the_command(zephon: Any, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("\nx = 1 / 0\n")
    code, out, errors = zephon("launch", str(tmp_path / "broken.py"), *sh("echo ran"))
    assert (code, out) == (3, "")
    assert errors.splitlines()[-1].endswith("broken.py:2: ZeroDivisionError: division by zero")


def running(start: Any, recipe: str, script: str) -> subprocess.Popen[str]:
    """A launch whose command has said "up"."""
    process = start("launch", recipe, "--workers", "1", *sh(f"{script}"))
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n", process.stderr.read()
    return process


def test_signals_to_the_launcher_reach_the_command(start: Any, recipe: str) -> None:
    traps = "trap 'echo TERM' TERM; trap 'echo HUP' HUP; trap 'echo USR1; exit 5' USR1"
    process = running(start, recipe, f"{traps}; echo up; while :; do sleep 0.1; done")
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        process.send_signal(number)
        assert process.stdout.readline() == f"{number.name[3:]}\n"
    out, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, out, errors) == (5, "", "")


def test_case_J5_one_interrupt_is_one_line_and_exit_code_130(start: Any, recipe: str) -> None:
    process = running(start, recipe, "echo up; exec sleep 600")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert len(errors.splitlines()) == 1


def test_case_J5_a_second_interrupt_ends_a_command_that_ignores_the_first(start: Any, recipe: str) -> None:
    process = running(start, recipe, "trap '' INT TERM; echo up; while :; do sleep 600; done")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert "once more" in process.stderr.readline()
    its = one(process.pid, "sleep")  # the command's own child, which nobody knows
    process.send_signal(signal.SIGINT)
    process.wait(SECONDS)
    assert process.returncode == 130
    its.kill()


def test_case_D5_a_killed_launcher_takes_everything_along(start: Any, recipe: str) -> None:
    process = running(start, recipe, "echo up; exec sleep 600")
    left = [one(process.pid, "sleep"), one(process.pid, "zephon engine"), *below(process.pid)]
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(left, SECONDS)
    assert not alive


def test_launch_starts_a_daemon_that_died_again_on_the_same_socket(start: Any, recipe: str) -> None:
    process = running(start, recipe, 'echo up; while [ ! -e "$ZEPHON_SOCKET.go" ]; do sleep 0.05; done')
    daemon = one(process.pid, "zephon daemon")
    path = one(process.pid, "sh").environ()["ZEPHON_SOCKET"]
    daemon.kill()
    daemon.wait(SECONDS)
    assert until(lambda: answering(path))["daemon"]["pid"] == one(process.pid, "zephon daemon").pid
    Path(f"{path}.go").touch()
    _, errors = process.communicate(timeout=SECONDS)
    Path(f"{path}.go").unlink()
    assert process.returncode == 0
    assert "started again" in errors


@pytest.mark.soak
def test_case_C1_restarts_need_no_manual_step(
    zephon: Any, start: Any, recipe: str, amount: Callable[[int, int], int]
) -> None:
    for turn in range(amount(1, 20)):
        number = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)[turn % 3]
        process = running(start, recipe, "echo up; exec sleep 600")
        os.killpg(process.pid, number)
        process.communicate(timeout=SECONDS)
    assert zephon("launch", recipe, "--workers", "1", "--", "true")[0] == 0


@pytest.mark.soak
@pytest.mark.parametrize("length", [180])
def test_case_D12_sockets_work_however_long_the_folders_name_is(
    zephon: Any, recipe: str, length: int, runtime_folder: Path
) -> None:
    folder = runtime_folder / ("t" * (length - len(str(runtime_folder)) - 1))
    folder.mkdir()
    environment = {"TMPDIR": str(folder), "XDG_RUNTIME_DIR": ""}
    script = sh(f'{sys.executable} -c "import os, sys; print(len(os.environ[\'ZEPHON_SOCKET\']) < 108)"')
    assert zephon("launch", recipe, "--workers", "1", *script, **environment) == (0, "True\n", "")


def test_case_D12_recipes_with_long_names_that_begin_alike_do_not_meet() -> None:
    names = [default_socket(f"/data/{'r' * 200}{end}.py") for end in ("a", "b")]
    assert names[0] != names[1]
    assert all(len(name) < 100 for name in names)


def test_the_daemon_and_progress_find_each_other_by_the_socket(
    start: Any, zephon: Any, recipe: str, runtime_folder: Path
) -> None:
    path = str(runtime_folder / "own.sock")
    daemon = start("daemon", recipe, "--socket", path, "--workers", "1")
    assert daemon.stdout is not None
    assert daemon.stdout.readline() == f"zephon daemon ready: {path}\n"
    code, out, _ = zephon("progress", "--socket", path)
    assert code == 0
    assert f"zephon daemon {daemon.pid}" in out
    code, out, _ = zephon("progress", "--json", ZEPHON_SOCKET=path)
    assert json.loads(out)["daemon"]["pid"] == daemon.pid
    watching = start("progress", "--watch", "--json", "--socket", path)
    assert watching.stdout is not None
    assert json.loads(watching.stdout.readline())["daemon"]["pid"] == daemon.pid
    daemon.send_signal(signal.SIGINT)
    assert daemon.wait(SECONDS) == 130
    watching.communicate(timeout=SECONDS)
    assert watching.returncode == 0


def test_a_step_can_be_looked_at_with_the_settings_of_a_checkpoint(zephon: Any, recipe: str, tmp_path: Path) -> None:
    pipeline = load_recipe(recipe).pipeline()
    batches = [next(iter(pipeline)) for _ in range(4)]
    save_checkpoint(tmp_path / "state.json", pipeline.checkpoint())
    for step, epoch in ((1, 0), (8, 3)):
        where = ("--step", str(step), "--epoch", str(epoch), "--checkpoint", str(tmp_path / "state.json"))
        code, out, errors = zephon("inspect", recipe, *where)
        assert (code, errors) == (0, "")
        assert out.startswith(f"step {step} of epoch {epoch}: 8 records of 4 lanes\n")
        first = [f"lane {b.lane}, record 0: {':'.join(map(str, b.samples[0]))}" for b in batches]
        assert all(line in out for line in first) == (step == 1)
    code, _, errors = zephon("inspect", recipe, "--step", "9")
    assert code == 3
    assert "epoch 0 has 8 steps, not 9" in errors
