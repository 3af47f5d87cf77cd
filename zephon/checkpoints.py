"""Checkpoints in files: written so that a reader never sees half of one."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zephon.errors import CheckpointError, whence
from zephon.frontiers import merge_checkpoints, parse_checkpoint

__all__ = ["load_checkpoint", "merge_checkpoints", "save_checkpoint"]


def save_checkpoint(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write a checkpoint aside, flush it to disk, and rename it: `path` holds the old one or the new one, whole."""
    target = Path(path)
    aside = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")  # ranks of several nodes may save at once
    try:
        with aside.open("x", encoding="utf-8") as file:
            json.dump(state, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a checkpoint and check its form. `CheckpointError` names the file."""
    try:
        state = json.loads(Path(path).read_text(encoding="utf-8"))
        parse_checkpoint(state)
    except OSError as error:
        raise CheckpointError(f"{path}{whence(path)}: cannot read the checkpoint: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a checkpoint, or only part of one: {error}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return state  # type: ignore[no-any-return]
