"""`connect`: find the daemon's socket, say hello, and hand out a Loader."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

from zephon.errors import DaemonUnavailable, SettingError
from zephon.transport.endpoints import RunningDaemon, control_path, running_daemons
from zephon.words import hinting
from zephon_client.settings import settings_from

if TYPE_CHECKING:
    from zephon_client.loader import Loader

_log = logging.getLogger("zephon.client")

START_SECONDS = 2.0
"""How long a daemon that is just starting is waited for, at most; then `connect` fails."""

_LOOK_AGAIN_SECONDS = 0.05
_HOW_TO_START = (
    "Start one with `zephon daemon RECIPE`, or run the training command under `zephon launch RECIPE -- ...`; "
    "for one in another place name its socket (argument `socket`, or ZEPHON_SOCKET)."
)


@hinting
def connect(
    socket: str | os.PathLike[str] | None = None,
    *,
    dp_degree: int | None = None,
    dp_group_id: int | None = None,
    group_readers: int = 1,
    pipeline: str = "pipeline",
    output: str = "torch",
    pin_memory: bool = False,
    device: Any = None,
    batches_per_step: int | None = None,
    timeout: float = 60.0,
) -> Loader:
    """Connects this rank to the node's daemon. The run takes its shape only when the first batch or state is wanted.

    - `socket`: a path, a name or an `ipc://` endpoint; else `$ZEPHON_SOCKET`, else the user's only running daemon.
    - `dp_degree`, `dp_group_id`: how many data-parallel groups there are and which one this rank belongs to; by
      default the variables WORLD_SIZE and RANK, else 1 and 0.
    - `group_readers`: ranks of this node that share the group's batches; each gets every one of them.
    - `pipeline`: which of the recipe's pipelines.
    - `output`: "torch" or "numpy", what arrays of numbers come as. Without torch installed it is numpy.
    - `pin_memory`: batches are copied into torch's pinned memory (with a GPU; else ignored, with a warning).
    - `device`: fields and training arrays come as tensors on that device, copied.
    - `batches_per_step`: checked to be whole rounds, once the lanes are known.
    - `timeout`: seconds without an answer, or with nothing moving while a batch is awaited, after which an error says
      what was waited for. While the daemon says that it is at work, the wait goes on.

    Fails within two seconds when no daemon listens. Raises DaemonUnavailable, SettingError, TopologyError, or what the
    daemon refuses the hello with.
    """
    settings = settings_from(
        dp_degree=dp_degree,
        dp_group_id=dp_group_id,
        group_readers=group_readers,
        pipeline=pipeline,
        output=output,
        pin_memory=pin_memory,
        device=device,
        batches_per_step=batches_per_step,
        timeout=timeout,
    )
    path = find_socket(socket, min(START_SECONDS, timeout))
    # Only now: pyzmq and the rest are not needed to import this package.
    from zephon_client.loader import Loader

    return Loader(path, settings, min(START_SECONDS, timeout))


def find_socket(socket: str | os.PathLike[str] | None, patience: float) -> str:
    """The control socket to use: the named one, `$ZEPHON_SOCKET`, or that of the user's only running daemon.

    Those that `zephon launch` has started are left out: they are for their own commands, which get `$ZEPHON_SOCKET`.
    """
    named = os.fspath(socket) if socket is not None else os.environ.get("ZEPHON_SOCKET", "")
    if socket is not None or named:
        return control_path(named)
    deadline = time.monotonic() + patience
    while not (daemons := [daemon for daemon in running_daemons() if not daemon.launched]):
        if time.monotonic() >= deadline:
            others = f" besides those of running launches ({_listed(found)})" if (found := running_daemons()) else ""
            raise DaemonUnavailable(f"no daemon of this user is running on this machine{others}. {_HOW_TO_START}")
        time.sleep(_LOOK_AGAIN_SECONDS)
    if len(daemons) > 1:
        raise SettingError(
            f"{len(daemons)} daemons of this user are running. Name the socket of one (argument `socket`, or "
            f"ZEPHON_SOCKET): {_listed(daemons)}"
        )
    if os.environ.get("RANK", "0") == "0":  # found, not given: it may be another job's
        _log.warning("uses the daemon on %s, of recipe %s", daemons[0].control_path, daemons[0].recipe)
    return daemons[0].control_path


def _listed(daemons: list[RunningDaemon]) -> str:
    return "; ".join(f"{d.control_path} (recipe {d.recipe}, process {d.pid})" for d in daemons)
