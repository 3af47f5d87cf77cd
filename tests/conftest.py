"""Fixtures that every test may use, and the guard that no test leaves anything behind.

`runtime_folder` gives a test a short private folder and points every place where Zephon keeps sockets and caches at it.
`no_leaks` fails a test that leaves a process, a file descriptor, a file in /dev/shm or a socket; the folders of tests
that start processes use it for every test. `amount(quick, full)` scales a test between `make test` and `make soak`.
"""
from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.corpora import COUNT
from tests.leaks import Leaks

#: Variables of a surrounding job that would change what a test means.
OF_A_JOB = (
    "ZEPHON_SOCKET", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "NOTIFY_SOCKET",
)  # fmt: skip
#: Every process that a test starts inherits this variable, which names the test.
MARK = "ZEPHON_TEST_MARK"

#: Continuous integration draws the same few examples each time; everybody else draws anew, and more.
IN_CI = bool(os.environ.get("CI"))

settings.register_profile("quick", deadline=None, max_examples=10 if IN_CI else 30, print_blob=True,
                          derandomize=IN_CI, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("soak", deadline=None, max_examples=2000, print_blob=True,
                          suppress_health_check=[HealthCheck.too_slow])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="full length: many repeats, long waits, many drawn examples")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("soak" if config.getoption("--soak") else "quick")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--soak"):
        return
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.skip(reason="runs for minutes; `make soak` runs it"))


@pytest.fixture(scope="session")
def amount(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """`amount(quick, full)`: how often or how long, in `make test` and in `make soak`."""
    soak = bool(request.config.getoption("--soak"))
    return lambda quick, full: full if soak else quick


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's own index cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEPHON_CACHE", str(tmp_path_factory.mktemp("cache")))
        for name in OF_A_JOB:
            patch.delenv(name, raising=False)
        yield


@pytest.fixture
def runtime_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of this test alone, with a path short enough for sockets; XDG_RUNTIME_DIR and ZEPHON_CACHE lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="z", dir="/tmp"))
    (folder / "run").mkdir(mode=0o700)
    (folder / "cache").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "run"))
    monkeypatch.setenv("ZEPHON_CACHE", str(folder / "cache"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def no_leaks(runtime_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails the test if, once it is over, a process, descriptor, /dev/shm file or socket of it remains."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    leaks = Leaks(mark=f"{MARK}={mark}", folder=runtime_folder)
    yield
    found = leaks.after_the_test()
    if found:
        pytest.fail("the test left behind:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture
def count(tmp_path: Path) -> Callable[[int, int], Path]:
    """`count(n, shards)`: the corpus COUNT(n, shards) in a folder of this test."""

    def make(n: int, shards: int) -> Path:
        return COUNT(n, shards, tmp_path / f"count-{n}-{shards}")

    return make
