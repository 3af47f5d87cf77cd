"""The guard of the other tests sees each kind of thing that a test can leave behind."""
from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.leaks
from tests.leaks import SHM, Leaks

WAITS = "import sys; sys.stdin.read()"


@pytest.fixture
def leaks(runtime_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Leaks:
    mark = uuid.uuid4().hex
    monkeypatch.setenv("ZEPHON_TEST_MARK", mark)
    monkeypatch.setattr(tests.leaks, "GRACE", 0.2)
    return Leaks(f"ZEPHON_TEST_MARK={mark}", runtime_folder)


@pytest.fixture
def child(leaks: Leaks) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", WAITS], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_a_clean_test_leaves_nothing(leaks: Leaks) -> None:
    with open(os.devnull), socket.socket():
        subprocess.run([sys.executable, "-c", ""], check=True)
    assert leaks.after_the_test() == []


def test_a_child_process_is_found_and_killed(leaks: Leaks, child: subprocess.Popen[bytes]) -> None:
    found = leaks.after_the_test()
    assert found[0].startswith(f"process {child.pid} ")
    assert child.poll() is not None


def test_a_process_that_left_the_tree_is_found_by_its_mark(leaks: Leaks) -> None:
    script = "import subprocess as s; print(s.Popen(['sleep', '60'], start_new_session=True, stdout=s.DEVNULL).pid)"
    pid = subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    assert any(line.startswith(f"process {pid} ") for line in leaks.after_the_test())
    assert leaks.after_the_test() == []


def test_an_open_descriptor_is_found(leaks: Leaks) -> None:
    descriptor = os.memfd_create("left")
    try:
        assert [line for line in leaks.after_the_test() if "left" in line] != []
    finally:
        os.close(descriptor)
    assert leaks.after_the_test() == []


@pytest.mark.skipif(not SHM.is_dir(), reason="this machine has no /dev/shm")
def test_a_file_in_shared_memory_is_found(leaks: Leaks) -> None:
    path = SHM / f"zephon-test-{uuid.uuid4().hex}"
    path.touch()
    try:
        assert leaks.after_the_test() == [f"file {path}"]
    finally:
        path.unlink()


def test_a_socket_left_in_the_runtime_folder_is_found(leaks: Leaks, runtime_folder: Path) -> None:
    path = runtime_folder / "run" / "s"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
    assert leaks.after_the_test() == [f"socket {path}"]
