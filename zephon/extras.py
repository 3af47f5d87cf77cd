"""Packages that only some of Zephon needs, and what to install where one is missing.

A rank's environment has numpy, pyzmq and msgpack. Who calls there for what needs more is told which extra brings it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_BY_ITSELF = ("torch", "huggingface_hub")
_OF_THE_DEMO = ("matplotlib",)


def how_to_install(package: str) -> str:
    """The command that brings a package."""
    if package in _BY_ITSELF:
        return f"pip install {package}"
    return f"pip install '.[{'demo' if package in _OF_THE_DEMO else 'daemon'}]' in a clone of Zephon's repository"


@contextmanager
def needing(what: str) -> Iterator[None]:
    """Around imports: a ModuleNotFoundError of a package says who needs it, and what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "zephon").partition(".")[0]
        if package.startswith("zephon"):
            raise
        text = f"{what} needs the package {package!r}: {how_to_install(package)}"
        raise ModuleNotFoundError(text, name=error.name) from error
