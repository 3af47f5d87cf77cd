"""What a pipeline means: recipes, lanes, windows, work source, datasets, operators, checkpoints.

Nothing here starts a process or opens a server. Names resolve when they are first used, so that a rank, which needs
numpy alone, imports neither pyarrow nor a tokenizer.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from zephon.extras import needing

__version__ = "0.1.0"

_HOMES = {
    "Dataset": "zephon.datasets",
    "InMemoryShard": "zephon.datasets",
    "MixtureSchedule": "zephon.work",
    "MixtureSpec": "zephon.work",
    "StaticMixtureWorkSource": "zephon.work",
    "Pipeline": "zephon.pipeline",
    "SampleBatch": "zephon.types",
    "SampleMeta": "zephon.types",
    "SampleRecord": "zephon.types",
    "WorkChunk": "zephon.custom_source",
    "WorkSource": "zephon.custom_source",
    "ZephonError": "zephon.errors",
    "generator": "zephon.randomness",
    "load_checkpoint": "zephon.checkpoints",
    "merge_checkpoints": "zephon.checkpoints",
    "save_checkpoint": "zephon.checkpoints",
}

__all__ = ["__version__", *sorted(_HOMES)]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'zephon' has no attribute {name!r}")
    with needing(f"zephon.{name}"):
        return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
