"""`zephon demo`: the whole path on real text, and what it is for, on one machine in a few minutes.

`story.py` says what happens in which order. To learn how to use Zephon, read `recipe.py` and `train.py`.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status. Ranks import this package too, so it loads nothing by itself."""
    from zephon_daemon.demo import story

    return story.main(argv)
