"""Builds the Markdown pages of this folder with Sphinx; `make docs` makes every warning an error, broken links too."""
from __future__ import annotations

project = "Zephon"
author = "The Zephon authors"
copyright = author
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "alabaster"
html_theme_options = {"description": "A deterministic, elastic data loader", "page_width": "1000px"}
html_show_sphinx = False
html_show_copyright = False
# Headings get GitHub's anchors, so that one and the same link works there and here.
myst_heading_anchors = 3
