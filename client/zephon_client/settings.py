"""What a client was asked for, checked: senseless arguments are refused before anything is opened."""

from __future__ import annotations

import math
import operator
import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from zephon.errors import SettingError, TopologyError

OUTPUTS = ("torch", "numpy")


@dataclass(frozen=True)
class Settings:
    """The arguments of `connect`, with defaults filled in. `output` is "numpy" where torch is not installed."""

    dp_degree: int
    dp_group_id: int
    group_readers: int
    pipeline: str
    output: str
    pin_memory: bool
    device: Any
    batches_per_step: int | None
    timeout: float
    job: str


def settings_from(
    *,
    dp_degree: int | None,
    dp_group_id: int | None,
    group_readers: int,
    pipeline: Any,
    output: str,
    pin_memory: bool,
    device: Any,
    batches_per_step: int | None,
    timeout: Any,
) -> Settings:
    """Checks the arguments of `connect`. Raises SettingError or TopologyError that names the argument."""
    degree, degree_name = _given_or_environment("dp_degree", dp_degree, "WORLD_SIZE", 1)
    group, group_name = _given_or_environment("dp_group_id", dp_group_id, "RANK", 0)
    if degree < 1:
        raise SettingError(f"{degree_name}={degree}: must be at least 1")
    if not 0 <= group < degree:
        raise TopologyError(
            f"{group_name}={group} with {degree_name}={degree}: a data-parallel group is numbered 0 to {degree - 1}. "
            "Pass both dp_degree and dp_group_id where they are not the world size and the rank."
        )
    if output not in OUTPUTS:
        raise SettingError(f'output={output!r}: must be "torch" or "numpy"')
    if not isinstance(pipeline, str) or not pipeline:
        raise SettingError(f"pipeline={pipeline!r}: must be the name of one of the recipe's pipelines")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or math.isnan(timeout) or timeout <= 0:
        raise SettingError(f"timeout={timeout!r}: must be a number of seconds above 0")
    has_torch = find_spec("torch") is not None
    if device is not None and (output != "torch" or not has_torch):
        why = "output is not 'torch'" if output != "torch" else "torch is not installed"
        raise SettingError(f"device={device!r}: {why}, so there is nothing to move to a device. Leave device out.")
    return Settings(
        dp_degree=degree,
        dp_group_id=group,
        group_readers=_at_least_one("group_readers", group_readers),
        pipeline=pipeline,
        output=output if has_torch else "numpy",
        pin_memory=bool(pin_memory),
        device=device,
        batches_per_step=None if batches_per_step is None else _at_least_one("batches_per_step", batches_per_step),
        timeout=float(timeout),
        job=job_key(),
    )


def job_key() -> str:
    """What names this training job: torchrun's run id and restart count, or nothing."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return f"{run}:{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}" if run else ""


def _given_or_environment(name: str, given: int | None, variable: str, default: int) -> tuple[int, str]:
    """The number and, for messages, where it comes from."""
    if given is not None:
        return _whole(name, given), name
    text = os.environ.get(variable, "")
    if not text:
        return default, name
    try:
        return int(text), f"{name} (from {variable})"
    except ValueError:
        raise SettingError(f"{variable}={text!r}: must be a whole number. Or pass {name} to connect.") from None


def _at_least_one(name: str, value: int) -> int:
    number = _whole(name, value)
    if number < 1:
        raise SettingError(f"{name}={value}: must be at least 1")
    return number


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool):
        raise SettingError(f"{name}={value!r}: must be a whole number")
    try:
        return operator.index(value)
    except TypeError:
        raise SettingError(f"{name}={value!r}: must be a whole number") from None
