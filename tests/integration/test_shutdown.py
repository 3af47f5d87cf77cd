"""However a training script ends, what the user reads is the user's own, and nothing of the job stays."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.running import Daemon, Program, counting, launch, living, python, until

OPEN = {
    "with": "with connect(output='numpy') as loader:\n    {body}\n",
    "bare": "loader = connect(output='numpy')\n{body}\n",
    "kept": "loader = connect(output='numpy')\nkept = [next(loader) for _ in range(3)]\nids = kept[0]['id']\n{body}\n",
}  # fmt: skip
ENDS = {
    "normal": ("sum(len(batch) for batch in loader)", 0),
    "break": ("for n, batch in enumerate(loader):\n{indent}    if n == 2: break", 0),
    "raise": ("for batch in loader: raise RuntimeError('mine')", 1),
    "exit": ("for batch in loader: sys.exit(3)", 3),
    "in a thread": ("import threading; t = threading.Thread(target=lambda: next(loader)); t.start(); t.join()", 0),
    "in a child": ("next(loader); pid = os.fork(); os.waitpid(pid, 0) if pid else sys.exit(0)", 0),
}


def test_case_C12_nothing_but_the_users_own_words_at_the_end(
    runtime_folder: Path, amount: Callable[[int, int], int]
) -> None:
    recipe = counting(runtime_folder, 200, 2, lanes=2, batch=4)
    with Daemon(recipe, workers=1) as daemon:
        programs = []
        for way, head in OPEN.items():
            for end, (body, status) in ENDS.items():
                body = body.format(indent="    " if way == "with" else "")
                code = "import os, sys\nfrom zephon_client import connect\n" + head.format(body=body)
                environment = {"ZEPHON_SOCKET": daemon.socket}
                programs.append((way, end, status, code, environment))
        for way, end, status, code, environment in programs[:: amount(2, 1)]:
            with python(runtime_folder, code, environment=environment) as rank:
                assert rank.end() == status, (way, end, rank.errors)
                assert rank.output == ""
                if end != "raise":
                    assert rank.errors == "", (way, end)
                else:
                    assert rank.errors.startswith("Traceback (most recent call last):\n"), (way, end)
                    assert rank.errors.endswith("\nRuntimeError: mine\n"), (way, end)
                    assert rank.errors.count("Traceback") == 1
        until(lambda: not daemon.report()["clients"])
        assert daemon.stop() == 0
        assert daemon.errors == ""


RANKS = """
import os, subprocess, sys
RANK = '''
import os, sys
from zephon_client import connect
with connect(dp_degree=4, dp_group_id=int(sys.argv[1]), output="numpy") as loader:
    for batch in loader:
        if batch.ends_round and loader.rounds == 5:
            try:
                print("step 5", os.getpid(), flush=True)
                sys.stdin.readline()
            except KeyboardInterrupt:
                sys.exit(130)
'''
ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(n)]) for n in range(4)]
try:
    codes = [rank.wait() for rank in ranks]
except KeyboardInterrupt:
    codes = [rank.wait() for rank in ranks]
sys.exit(max(abs(code) for code in codes))
"""


def _at_step_5(job: Program) -> list[int]:
    return [int(job.line().split()[-1]) for _ in range(4)]


def test_case_J5_one_ctrl_c_is_one_short_message(runtime_folder: Path) -> None:
    """As a terminal sends it: to the launcher and the whole command at once."""
    recipe = counting(runtime_folder, 4000, 4, lanes=4, batch=4)
    with launch(recipe, RANKS, stdin=subprocess.PIPE) as job:
        pids = _at_step_5(job)
        os.killpg(job.pid, signal.SIGINT)
        assert job.end() == 130, job.errors
        assert job.errors == "zephon launch: interrupted; once more to force the end\n"
        until(lambda: not living(pids))
    assert not list(runtime_folder.rglob("*.sock*"))


def test_launch_passes_the_commands_status_on(runtime_folder: Path) -> None:
    recipe = counting(runtime_folder, 40, 1, lanes=1, batch=4)
    for code, status in (("pass", 0), ("import sys; sys.exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)):
        with launch(recipe, code) as job:
            assert job.end() == status
            assert job.errors == ""
