"""The stack of a process that sleeps or hangs in C is had from outside; an engine's is told with its work."""

from __future__ import annotations

import array
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.running import SOURCES, until
from zephon import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
from zephon.pointers import packed
from zephon.whereabouts import NUMBERS, READING, Whereabouts
from zephon.windows import Task, halved, pointers_of
from zephon_daemon.black_box import BlackBox
from zephon_daemon.engine_watch import EngineWatch
from zephon_daemon.named_work import given_up, record_of, samples_of
from zephon_daemon.scheduler import Work
from zephon_daemon.stacks import Stack, calls, state_of
from zephon_daemon.watchdog import Patience

CHILD = """
import os, socket, sys, time
from zephon_daemon.stacks import offer_stack
channel = socket.socket(fileno=int(sys.argv[1]))
def hangs():
    {how}
socket.send_fds(channel, [b"ready"], [offer_stack(), os.pidfd_open(os.getpid())])
hangs()
"""


@contextmanager
def process(how: str) -> Iterator[tuple[Stack, int]]:
    """A process that does this for ever."""
    mine, its = socket.socketpair()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES)}
    code = [sys.executable, "-c", CHILD.format(how=how), str(its.fileno())]
    with subprocess.Popen(code, pass_fds=[its.fileno()], env=environment) as child, mine:
        its.close()
        _, fds, _, _ = socket.recv_fds(mine, 16, 2)
        stack = Stack(fds[0], fds[1], child.pid)
        try:
            yield stack, child.pid
        finally:
            stack.kill()
            child.wait()
            stack.close()


@pytest.mark.parametrize(
    "how", ["time.sleep(3600)", "os.read(os.pipe()[0], 1)", "sum(iter(int, 1))", "while True: pass"]
)
def test_a_process_that_sleeps_reads_computes_in_c_or_in_python_shows_where_it_stands(how: str) -> None:
    with process(how) as (stack, _):

        def stands() -> str:
            stack.ask()
            until(lambda: stack.read().endswith("in <module>\n"))  # it comes piece by piece
            return stack.described()

        assert until(lambda: "hangs (" in stands())
        assert stands().startswith("hangs (")
        assert stack.read().count("in hangs") == 1, "what was said before is forgotten"


def test_a_process_that_is_stopped_has_no_stack_and_says_why_until_it_goes_on() -> None:
    with process("time.sleep(3600)") as (stack, pid):
        os.kill(pid, signal.SIGSTOP)
        until(lambda: state_of(pid) == "T")
        stack.ask()
        assert "SIGSTOP" in stack.described()
        os.kill(pid, signal.SIGCONT)
        until(stack.read)
        stack.kill()
        until(lambda: state_of(pid) == "Z")
        stack.ask()
        assert "has ended" in stack.described()


def test_the_main_threads_calls_are_named_innermost_first_without_our_own() -> None:
    text = (
        'Thread 0x01 (most recent call first):\n  File "/a/other.py", line 1 in other\n\n'
        'Current thread 0x02 (most recent call first):\n  File "/u/recipe.py", line 9 in inner\n'
        '  File "/u/recipe.py", line 20 in outer\n  File "/x/zephon_daemon/worker.py", line 3 in _do\n'
    )
    assert calls(text) == "inner (recipe.py:9) < outer (recipe.py:20)"
    assert calls("") == ""


def test_where_a_process_is_can_be_read_as_it_was_written() -> None:
    at = Whereabouts(array.array("q", [0] * NUMBERS))
    at.begin(7)
    at.enter(READING)
    assert at.now == (7, READING, -1)
    at.enter(2)
    at.turn_to(99)
    assert at.now == (7, 2, 99)
    at.enter(3)
    assert at.now == (7, 3, -1), "of another operator's record nothing is known"
    assert at.moves == 0
    at.move()
    assert (at.moves, at.now) == (1, (7, 3, -1))


def test_an_engine_that_goes_round_is_left_alone_and_one_that_does_not_is_shown_and_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    with process("time.sleep(3600)") as (stack, _):

        def stands() -> bool:
            return "hangs (" in stack.described()

        until(lambda: stack.ask() or stands())  # it has got there
        box = BlackBox.create()
        watch = EngineWatch(Patience(20.0, 200.0), lambda: now)
        watch.met(box, Stack(os.dup(stack._memory), os.dup(stack._pidfd), stack._pid))
        for second in range(100):
            now = float(second)
            box.beat()
            assert not watch.look()
            assert watch.state() == ""
        box.task(Task(0, 3, 10, 20), "shuffle, map_transform")
        ends = []
        for second in range(100, 400):
            now = float(second)
            ends += [second] if watch.look() else []
            if second in (102, 119):
                until(stands)  # the stack comes piece by piece, a moment after it was asked for
            if second == 105:
                assert "has not answered for 6 s, at work on lane 3" in watch.state()
            if second == 118:
                os.ftruncate(stack._memory, 0)  # it is asked for once more, right before it is reported
        assert ends == [299]
        assert "stands in hangs (" in watch.gone()
        assert watch.state() == watch.gone() == ""
        box.close()
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert all("stands in hangs (" in record.getMessage() for record in caplog.records)


def test_samples_are_named_by_shard_with_their_rows_and_a_record_by_its_place() -> None:
    shards = {f"part-{n}": InMemoryShard([{"id": i} for i in range(10)]) for n in range(5)}
    source = StaticMixtureWorkSource([Dataset.from_dict("web", shards)], None, seed=1, chunk_size=50)
    plan = Pipeline(source).batch(1).options(canonical_replicas=1).plan()
    task = Task(0, 0, 0, 50)
    first = samples_of(plan, task).split("; ")
    assert len(first) == 4
    assert first[0].startswith("dataset 'web', shard part-")
    assert first[0].endswith("10 rows from 0 to 9")
    assert first[3] == "and 2 more shards"
    _, shard, row = pointers_of(plan, task)[17].tolist()
    for each in (task, task._replace(pointers=packed(pointers_of(plan, task)))):
        assert record_of(plan, each, 17) == f"dataset 'web', shard part-{shard}, row {row}"
        assert record_of(plan, each, 50) == record_of(plan, each, -1) == ""
    parts = halved(task)
    assert parts is not None
    assert samples_of(plan, parts[0]).endswith("5 rows from 0 to 4")


def test_work_that_is_given_up_is_named_with_every_way_in_which_workers_ended() -> None:
    source = StaticMixtureWorkSource([Dataset.from_dict("web", {"a": InMemoryShard([{"id": 0}] * 9)})], None)
    plan = Pipeline(source).batch(1).options(canonical_replicas=1).plan()
    work = Work(0, 0, Task(0, 0, 4, 5), ["killed by 9", "killed by 9", "killed by 9", "exit code 1"], 3)
    said = given_up(plan, work, "operator 'map_transform'")
    assert said.startswith("3 workers died on the same record (killed by 9; exit code 1): ")
    assert "dataset 'web', shard a, row 4 " in said
    assert "(lane 0, its sample 4), last in operator 'map_transform'" in said
    work.task = Task(0, 0, 4, 8)
    assert "on the same samples" in given_up(plan, work, "reading")
