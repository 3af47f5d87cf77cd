"""Every test of this folder is checked for what it leaves behind."""
from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def leaves_nothing_behind(no_leaks: None) -> None:
    """See `no_leaks` in tests/conftest.py."""
