"""Counts in messages: one lane, two lanes. Every message that counts something says it through `many`."""

from __future__ import annotations


def many(count: int, one: str, more: str | None = None) -> str:
    """So many of something: `many(1, "lane")` is "1 lane"; `more` is the plural where it is not `one` with an s."""
    return f"{count} {one if count == 1 else one + 's' if more is None else more}"
