"""Every test of this folder is checked for what it leaves behind; `here` is the command line without a process."""
from __future__ import annotations

import logging
import warnings

import pytest

from tests.running import Here
from zephon_daemon.cli import main


@pytest.fixture(autouse=True)
def leaves_nothing_behind(no_leaks: None) -> None:
    """See `no_leaks` in tests/conftest.py."""


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    """Runs a command to its end; what it logs and warns of goes where it goes in a process of its own."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with monkeypatch.context() as patch:
            patch.setattr(logging.root, "handlers", [])
            patch.setattr(logging.root, "level", logging.root.level)
            patch.setattr(warnings, "showwarning", warnings.showwarning)
            try:
                status = main(arguments)
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 1
        return status, *capfd.readouterr()

    return run
