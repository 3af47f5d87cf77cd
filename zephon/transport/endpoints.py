"""Where sockets live, and which daemons of this user are running.

    <runtime folder>/<name>.sock          control socket (ZeroMQ)        folder 0700, sockets 0600
    <runtime folder>/<name>.sock.data     data socket (SEQPACKET), beside it
    <runtime folder>/<name>-<hash>.json   who serves the control socket, wherever that one is

A Unix socket address holds 107 bytes. A path too long for that (leaving room for the suffix of the data socket) is
replaced, on both sides alike, by a name made from a hash of all of it in the private folder. A daemon is listed as
running only if its process id lives, started when the file says, in this boot: a reused process id fools nobody.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

from zephon.errors import SettingError
from zephon.transport.channels import MAX_PATH, answers

SUFFIX_ROOM = 8
MAX_CONTROL_PATH = MAX_PATH - SUFFIX_ROOM
"""Bytes of the longest control path: what is left beside the suffix of a socket next to it."""

_DATA_SUFFIX = ".data"
_SHORT_NAME = 32
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class RunningDaemon:
    """A daemon as it announced itself. `started` is in clock ticks since `boot`.

    `launched`: for one command, which knows its socket.
    """

    control_path: str
    recipe: str
    pid: int
    started: int
    boot: str
    pid_namespace: str
    launched: bool = False


def runtime_folder() -> Path:
    """This user's private folder, made if need be.

    It is `$XDG_RUNTIME_DIR/zephon` where that is usable, else `zephon-<uid>` in `$TMPDIR` or `/tmp`.
    Raises SettingError when it belongs to somebody else, can be written by others, or cannot be made.
    """
    return _private(_runtime_folder())


def control_path(name_or_path: str) -> str:
    """The control socket for a name, a path or an `ipc://` endpoint: absolute and short enough. The same input gives
    the same path on both sides.
    """
    text = name_or_path.strip()
    scheme, separator, rest = text.partition("://")
    if separator:
        if scheme != "ipc":
            raise SettingError(f"socket {name_or_path!r}: a path, a name or an ipc:// endpoint is expected")
        text = rest
    if not text or text.startswith("@") or "\0" in text:
        raise SettingError(f"socket {name_or_path!r}: not a name or a path (abstract sockets have no permissions)")
    if "/" not in text and not separator:
        plain = _PLAIN_NAME.fullmatch(text) is not None
        if plain:
            path = str(_runtime_folder() / f"{text}.sock")
            if len(os.fsencode(path)) <= MAX_CONTROL_PATH:
                return str(runtime_folder() / f"{text}.sock")
        return _short(f"name:{text}")
    path = os.path.abspath(os.path.expanduser(text))
    return path if len(os.fsencode(path)) <= MAX_CONTROL_PATH else _short(f"path:{path}")


def data_path(control: str) -> str:
    """The data socket beside the control socket."""
    return control + _DATA_SUFFIX


def announce(control: str, recipe: str, *, launched: bool = False) -> Path:
    """Notes that this process serves `control`, and clears away what dead daemons left. Returns the note's path."""
    _sweep()
    note = runtime_folder() / _note_name(control)
    pid = os.getpid()
    daemon = RunningDaemon(control, recipe, pid, process_start(pid) or 0, _boot(), _pid_namespace(), launched)
    aside = note.with_name(f".{note.name}.{pid}")
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(handle, "w") as file:
        json.dump(asdict(daemon), file)
    os.replace(aside, note)
    return note


def withdraw(control: str) -> None:
    """Takes this process's note back; does nothing when another process serves `control` by now."""
    for folder in _folders():
        note = folder / _note_name(control)
        daemon = _read(note)
        if daemon is not None and (daemon.pid, daemon.pid_namespace) == (os.getpid(), _pid_namespace()):
            note.unlink(missing_ok=True)


def running_daemons() -> list[RunningDaemon]:
    """The live daemons of this user, by control path. Changes nothing."""
    found = (daemon for _, daemon in _notes() if _is_running(daemon))
    return sorted({daemon.control_path: daemon for daemon in found}.values(), key=lambda daemon: daemon.control_path)


def process_start(pid: int) -> int | None:
    """When process `pid` started, in clock ticks since boot; None when it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The command stands in brackets and may hold anything; fields count from behind it.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _runtime_folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and _is_own_folder(runtime):
        return Path(runtime) / "zephon"
    temporary = os.environ.get("TMPDIR", "")
    if os.path.isabs(temporary) and os.path.isdir(temporary) and os.access(temporary, os.W_OK):
        return Path(temporary) / _user_folder()
    return _last_resort()


def _last_resort() -> Path:
    return Path("/tmp") / _user_folder()


def _user_folder() -> str:
    return f"zephon-{os.geteuid()}"


def _folders() -> list[Path]:
    """Where daemons of this user may have left notes, whatever their environment was; only folders that are private."""
    candidates = (_runtime_folder(), Path(f"/run/user/{os.geteuid()}/zephon"), _last_resort())
    return [folder for folder in dict.fromkeys(candidates) if _is_own_folder(folder)]


def _is_own_folder(path: str | Path) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _private(folder: Path) -> Path:
    remedy = "Remove it, or set XDG_RUNTIME_DIR or TMPDIR to a folder of your own."
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = os.lstat(folder)
    except OSError as error:
        raise SettingError(f"the folder {folder} for sockets cannot be made: {error.strerror}. {remedy}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise SettingError(f"{folder}, the folder for sockets, is a link or a file. {remedy}")
    if status.st_uid != os.geteuid():
        raise SettingError(f"{folder}, the folder for sockets, belongs to user {status.st_uid}. {remedy}")
    if status.st_mode & 0o022:
        raise SettingError(f"{folder}, the folder for sockets, can be written by others. {remedy}")
    if status.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def _short(identity: str) -> str:
    name = hashlib.sha256(os.fsencode(identity)).hexdigest()[:_SHORT_NAME] + ".sock"
    folder = _runtime_folder()
    if len(os.fsencode(folder / name)) > MAX_CONTROL_PATH:
        folder = _last_resort()
    return str(_private(folder) / name)


def _note_name(control: str) -> str:
    digest = hashlib.sha256(os.fsencode(control)).hexdigest()[:16]
    stem = os.path.basename(control).removesuffix(".sock")[:40]
    return f"{stem}-{digest}.json"


def _notes() -> list[tuple[Path, RunningDaemon]]:
    notes = (note for folder in _folders() for note in sorted(folder.glob("*.json")))
    return [(note, daemon) for note in notes if (daemon := _read(note)) is not None]


def _read(note: Path) -> RunningDaemon | None:
    try:
        return RunningDaemon(**json.loads(note.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _is_running(daemon: RunningDaemon) -> bool:
    return (
        daemon.boot == _boot()
        and daemon.pid_namespace == _pid_namespace()
        and process_start(daemon.pid) == daemon.started
    )


def _sweep() -> None:
    """Removes notes and private sockets of daemons that are surely dead."""
    for note, daemon in _notes():
        # Of a process in another container nothing is known, unless the machine has started again since.
        if _is_running(daemon) or (daemon.boot == _boot() and daemon.pid_namespace != _pid_namespace()):
            continue
        if _read(note) == daemon:
            note.unlink(missing_ok=True)
        if Path(daemon.control_path).parent in _folders():
            for path, kind in (
                (daemon.control_path, socket.SOCK_STREAM),
                (data_path(daemon.control_path), socket.SOCK_SEQPACKET),
            ):
                if os.path.exists(path) and not answers(path, kind):
                    Path(path).unlink(missing_ok=True)


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")
