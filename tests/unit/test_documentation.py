"""The pages that are not built by `make docs` point at things that exist."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)#\s]+)")
COMMAND = re.compile(r"^make ([a-z]+)|`make ([a-z]+)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_every_link_inside_the_repository_leads_somewhere(page: str) -> None:
    targets = [target for target in LINK.findall((ROOT / page).read_text()) if "://" not in target]
    assert [target for target in targets if not (ROOT / target).exists()] == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_every_make_command_that_a_page_names_exists(page: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {a or b for a, b in COMMAND.findall((ROOT / page).read_text())}
    assert {"run", "test"} <= named <= targets
