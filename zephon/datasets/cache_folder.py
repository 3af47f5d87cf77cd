"""Where indexes and expanded archives are kept between runs, and how a file gets there.

The folder is `$ZEPHON_CACHE`, else `$XDG_CACHE_HOME/zephon`, else `~/.cache/zephon`; where a home cannot be written (as
on many clusters), a folder of this user under the temporary one. Everything in it can be made again: a file appears
by renaming, so a reader sees all of it or nothing, and two processes that make the same one do no harm.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple, cast

from zephon.errors import DatasetError

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}


class Signature(NamedTuple):
    """How a file's change is noticed without reading it."""

    size: int
    mtime_ns: int
    inode: int

    @staticmethod
    def of(path: str) -> Signature:
        found = os.stat(path)
        return Signature(found.st_size, found.st_mtime_ns, found.st_ino)


def cache_folder() -> str:
    """The folder, made if it is not there."""
    asked = os.environ.get("ZEPHON_CACHE")
    if asked:
        try:
            os.makedirs(asked, exist_ok=True)
        except OSError as error:
            raise DatasetError(
                f"ZEPHON_CACHE={asked} cannot be used ({error}); name a folder that can be written"
            ) from error
        return os.path.abspath(asked)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.path.join(base, "zephon")
    with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)
    if os.access(folder, os.W_OK | os.X_OK):
        return os.path.abspath(folder)
    folder = os.path.join(tempfile.gettempdir(), f"zephon-cache-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    if os.lstat(folder).st_uid != os.getuid():
        raise DatasetError(f"{folder} belongs to another user; set ZEPHON_CACHE to a folder that can be written")
    return folder


def entry_name(kind: str, paths: Sequence[str], signatures: Sequence[Signature]) -> str:
    """`xx/<which files>-<in which state>.<kind>`: the first part alone finds what an older state has left."""
    names = hashlib.blake2b("\0".join(_real(paths)).encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()
    state = hashlib.blake2b(repr([tuple(s) for s in signatures]).encode(), digest_size=12).hexdigest()
    return os.path.join(names[:2], f"{names}-{state}.{kind}")


def _real(paths: Sequence[str]) -> list[str]:
    """Real paths, each folder resolved once."""
    folders = {folder: os.path.realpath(folder) for folder in {os.path.dirname(p) for p in paths}}
    return [
        os.path.realpath(p) if os.path.islink(p) else os.path.join(folders[os.path.dirname(p)], os.path.basename(p))
        for p in paths
    ]


@contextlib.contextmanager
def written(path: str) -> Iterator[BinaryIO]:
    """A file to write that takes its name once the block ends well, and is gone if it does not."""
    folder, name = os.path.split(path)
    aside = ""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".making-", delete=False) as file:
            aside = file.name
            yield cast(BinaryIO, file)
        os.replace(aside, path)
        aside = ""
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise DatasetError(
            f"the cache folder {folder} cannot take {name} ({error.strerror}); "
            "free some space or set ZEPHON_CACHE to another folder"
        ) from error
    finally:
        if aside:
            with contextlib.suppress(OSError):
                os.unlink(aside)


def forget_older(path: str) -> None:
    """Removes what the same files left here in an earlier state."""
    folder, name = os.path.split(path)
    stem, kind = name.split("-", 1)[0], name.rsplit(".", 1)[-1]
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name != name and entry.name.startswith(stem + "-") and entry.name.endswith("." + kind):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
