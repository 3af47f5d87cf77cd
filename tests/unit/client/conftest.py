"""A client's tests use a made-up daemon and engine (`peer`), and none leaves a descriptor or a socket behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.client.peer import Peer, Shape
from zephon_client import connect


@pytest.fixture
def make_peer(runtime_folder: Path, no_leaks: None) -> Iterator[Callable[..., Peer]]:
    """`make_peer(lanes=..., ...)`: a peer of that shape, closed after the test."""
    made: list[Peer] = []

    def make(**shape: Any) -> Peer:
        made.append(Peer(runtime_folder, Shape(**shape), name=f"d{len(made)}.sock"))
        return made[-1]

    yield make
    for peer in made:
        peer.close()


@pytest.fixture
def join(make_peer: Callable[..., Peer]) -> Iterator[Callable[..., Any]]:
    """`join(peer, ...)`: a numpy loader on a peer, closed after the test (before the peer is)."""
    made: list[Any] = []

    def make(peer: Peer, **arguments: Any) -> Any:
        made.append(connect(peer.path, **{"output": "numpy", "timeout": 40.0, **arguments}))
        return made[-1]

    yield make
    for loader in made:
        loader.close()
