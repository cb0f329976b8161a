"""Choice of the engine for a directory, by a real write and read there."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tierstore.errors import RunDirectoryError, StorageError
from tierstore.storage.aiofile import AiofilesStorage
from tierstore.storage.base import Storage
from tierstore.storage.engine_storage import EngineStorage
from tierstore.storage.paths import storage_errors
from tierstore.units import SECTOR_BYTES, Extent

_log = logging.getLogger("tierstore")

# Errors of the directory: any engine would fail with them.
_DIRECTORY_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENOENT, errno.EIO}
)
_Opener = Callable[[Path], EngineStorage[Any]]
_PROBE_NAME = re.compile(r"probe-[0-9a-f]{16}\.tmp")


class _EngineError(Exception):
    """An engine does not work here; the message says why."""


def open_storage(directory: Path, engine: str = "auto") -> Storage:
    """Open a storage of a directory with an engine that works there.

    To prove that, the engine writes a small file, reads it back and removes it.

    Args:
        directory: made with mode 0700 if absent.
        engine: "io_uring" (direct I/O, needs the native extension), "libaio" (direct I/O,
            needs the system's libaio), "aiofiles" (buffered), or "auto": the first of these
            that works. The choice and its reason are logged to "tierstore", as a warning
            if it is not io_uring.

    Raises:
        RunDirectoryError: the directory is not writable, or the given engine does not work
            there; the message gives the reason.
        ValueError: unknown engine.
    """
    openers: dict[str, _Opener] = {
        "io_uring": _open_uring,
        "libaio": _open_libaio,
        "aiofiles": AiofilesStorage,
    }
    if engine == "auto":
        return _open_first(directory, openers)
    if engine not in openers:
        choices = ", ".join(repr(choice) for choice in ("auto", *openers))
        raise ValueError(f"engine must be one of {choices}, got {engine!r}")
    try:
        storage = _open_probed(directory, openers[engine])
    except _EngineError as reason:
        raise RunDirectoryError(
            f"engine {engine!r} does not work in {directory}: {reason}; "
            "use engine='auto' to take another one"
        ) from reason
    _log.info("%s: engine %s, as asked for", directory, engine)
    return storage


def _open_first(directory: Path, openers: dict[str, _Opener]) -> Storage:
    reasons: list[str] = []
    for name, opener in openers.items():
        try:
            storage = _open_probed(directory, opener)
        except _EngineError as reason:
            reasons.append(f"{name} does not work here: {reason}")
            continue
        if reasons:
            _log.warning("%s: engine %s, because %s", directory, name, "; ".join(reasons))
        else:
            _log.info("%s: engine %s, a write and read-back succeeded", directory, name)
        return storage
    raise RunDirectoryError(f"no engine works in {directory}: {'; '.join(reasons)}")


def _open_probed(directory: Path, opener: _Opener) -> Storage:
    storage = opener(directory)
    try:
        with _probing(directory):
            _probe(storage)
    except StorageError as error:
        storage.close()
        if error.errno in _DIRECTORY_ERRNOS:
            raise RunDirectoryError(
                f"{directory} cannot be used: {error}; free space or grant access there, "
                "or name another directory"
            ) from error
        refused_direct = storage.direct and error.errno in (errno.EINVAL, errno.EOPNOTSUPP)
        reason = "O_DIRECT is refused by the filesystem" if refused_direct else "the probe failed"
        raise _EngineError(f"{reason}: {error}") from error
    except BaseException:
        storage.close()
        raise
    return storage


def _open_uring(directory: Path) -> EngineStorage[Any]:
    try:
        from tierstore.storage.uring import UringStorage
    except ImportError as error:
        raise _EngineError(
            f"the extension tierstore.storage._native is not built ({error}); "
            "install liburing's development package and install tierstore again"
        ) from error
    try:
        return UringStorage(directory)
    except OSError as error:
        raise _EngineError(
            f"the kernel refuses io_uring: {os.strerror(error.errno or 0)} (errno {error.errno})"
        ) from error


def _open_libaio(directory: Path) -> EngineStorage[Any]:
    try:
        from tierstore.storage.libaio import LibaioStorage
    except (ImportError, OSError) as error:  # Of the package, or of the library it loads.
        raise _EngineError(
            f"libaio cannot be loaded ({error}); install the Python package libaio and the "
            "system's library (libaio1, libaio1t64 or libaio)"
        ) from error
    try:
        return LibaioStorage(directory)
    except OSError as error:
        advice = ""
        if error.errno == errno.EAGAIN:
            advice = (
                "; other programs use all requests that /proc/sys/fs/aio-max-nr allows: raise it"
            )
        raise _EngineError(
            f"the kernel refuses libaio: {os.strerror(error.errno or 0)} (errno {error.errno})"
            f"{advice}"
        ) from error


def _probe(storage: Storage) -> None:
    """Write a sector and read it back; leave nothing behind."""
    name = f"probe-{secrets.token_hex(8)}.tmp"
    extent = Extent(0, SECTOR_BYTES)
    buffer = mmap.mmap(-1, SECTOR_BYTES)
    expected = secrets.token_bytes(SECTOR_BYTES)
    try:
        storage.create(name, SECTOR_BYTES)
        buffer[:] = expected
        storage.write(name, extent, memoryview(buffer)).wait()
        storage.flush([name])
        buffer[:] = bytes(SECTOR_BYTES)
        storage.read(name, extent, memoryview(buffer)).wait()
        if buffer[:] != expected:
            raise _EngineError("bytes read back differ from those written")
    finally:
        with suppress(StorageError):
            storage.unlink(name)


@contextmanager
def _probing(directory: Path) -> Iterator[None]:
    """Mark the directory as being probed; first remove the files of killed probes.

    Every probe holds a shared lock on the directory itself, which the system releases when a
    process is killed: a probe that gets the lock exclusively finds only stale files.
    """
    with storage_errors("open", directory):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Some network filesystems cannot lock directories: stale files stay there.
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in os.listdir(fd):
                if _PROBE_NAME.fullmatch(name):
                    os.unlink(name, dir_fd=fd)
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)
