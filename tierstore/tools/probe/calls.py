"""System calls on files that runs, checkpoints and conversions make, tried in a directory."""

from __future__ import annotations

import ctypes
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tierstore.errors import errno_text
from tierstore.storage.paths import sync_path

_libc = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_ELSEWHERE = "name a directory on another filesystem"


@dataclass(frozen=True, slots=True)
class FailedCall:
    """A call that a filesystem refuses."""

    stops_runs: bool
    text: str
    """The call, its error, and what does not work without it."""
    remedy: str


def failed_calls(directory: Path) -> Iterator[FailedCall]:
    """Try each call on small files of a temporary directory, which is removed.

    Raises:
        OSError: the directory cannot hold any files.
    """
    with tempfile.TemporaryDirectory(dir=directory, prefix=".tierstore-doctor-") as folder:
        one, other, link = (Path(folder, name) for name in ("one", "other", "link"))
        for path in (one, other):
            path.write_bytes(b"tierstore")
        for call, name, stops_runs, loss, remedy in (
            (
                *(lambda: _lock(one), "flock", True),
                "a run would not be safe from a second process that writes it",
                f"mount it with locks (Lustre with -o flock, NFS with lockd), or {_ELSEWHERE}",
            ),
            (
                *(lambda: sync_path(Path(folder)), "fsync of a directory", True),
                "a commit would not survive a power loss",
                _ELSEWHERE,
            ),
            (
                *(lambda: os.link(one, link), "link", False),
                "checkpoint() copies page files instead of linking them",
                "name directories of runs and checkpoints on a filesystem with links, or wait",
            ),
            (
                *(lambda: _exchange(one, other), "renameat2 with flags", False),
                "`tierstore convert --force` is refused",
                "remove the destination before a conversion",
            ),
            (
                *(lambda: os.chmod(one, 0o600), "chmod", False),
                "files have the modes of the mount, and others may read them",
                "mount it with a mode that keeps others out",
            ),
        ):
            if error := _error_of(call):
                yield FailedCall(stops_runs, f"{name}: {errno_text(error)}: {loss}", remedy)


def _error_of(call: Callable[[], None]) -> int | None:
    """Return the error number with which a call fails; None if it works."""
    try:
        call()
    except OSError as error:
        return error.errno
    return None


def _lock(path: Path) -> None:
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _exchange(one: Path, other: Path) -> None:
    names = os.fsencode(one), os.fsencode(other)
    if _libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
