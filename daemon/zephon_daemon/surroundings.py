"""What surrounds a daemon: the socket's path, the supervisor, and memory that carries text too large for a message."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat

from zephon.errors import SettingError, ZephonError
from zephon.transport.channels import answers, connect
from zephon.transport.endpoints import data_path

_F_ADD_SEALS, _SEALS = 1033, 0x1 | 0x2 | 0x4  # seal, shrink, grow


def memory_of_text(text: str) -> int:
    """Text that may be larger than a message, as sealed memory; the caller's to close."""
    fd = os.memfd_create("zephon:text", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    data = text.encode()
    while data:
        data = data[os.write(fd, data) :]
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    return fd


def supervisor(parent: int | None) -> str:
    """Who starts this daemon again should it die, as clients are told."""
    if parent is not None:
        return f"launch {parent}"
    if os.environ.get("NOTIFY_SOCKET"):
        return "systemd"
    return "kubernetes" if os.environ.get("KUBERNETES_SERVICE_HOST") else os.environ.get("ZEPHON_SUPERVISOR", "")


def who_serves(path: str) -> str | None:
    """What to say of the process that holds the socket; None if it does not answer."""
    try:
        serving = connect(data_path(path), 1.0)
    except (ZephonError, OSError):
        return None
    pid = serving.peer().pid
    serving.close()
    return f"process {pid} serves {path} already. End it, or choose another --socket."


def check_free(path: str) -> None:
    """Nothing but a dead socket may lie where the control socket will."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SettingError(f"{path} exists and is no socket. Remove it, or choose another --socket.")
    if answers(path, socket.SOCK_STREAM):
        raise SettingError(f"a live process already serves {path}. Stop it, or choose another --socket.")


def notify(state: str) -> None:
    """Tells systemd, if it started this process."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.sendto(state.encode(), address)
