"""Choice of the engine for a directory, by a real write and read there."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from tierstore.errors import RunDirectoryError, StorageError, errno_text
from tierstore.storage.base import Storage
from tierstore.storage.engine_storage import EngineStorage
from tierstore.storage.paths import NO_DIRECT, storage_errors
from tierstore.units import SECTOR_BYTES, Extent

_log = logging.getLogger("tierstore")

# Module and class of the storage of each engine, and the error if they cannot be imported.
_ENGINES = {
    "io_uring": (
        *("tierstore.storage.uring", "UringStorage"),
        "the extension tierstore.storage._native is not built ({error}); install liburing's "
        "development package and install tierstore again",
    ),
    "libaio": (
        *("tierstore.storage.libaio", "LibaioStorage"),
        "libaio cannot be loaded ({error}); install the Python package libaio and the system's "
        "library (libaio1, libaio1t64 or libaio)",
    ),
    "aiofiles": (
        *("tierstore.storage.aiofile", "AiofilesStorage"),
        "aiofiles cannot be loaded ({error}); install the Python package aiofiles",
    ),
}
# Errors of the directory: any engine would fail with them.
_DIRECTORY_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENOENT, errno.EIO}
)
_PROBE_NAME = re.compile(r"probe-[0-9a-f]{16}(\.tmp){1,2}")


class _EngineError(Exception):
    """An engine does not work here. The message gives the reason."""


def open_storage(directory: Path, engine: str = "auto") -> Storage:
    """Open a storage of a directory with an engine that works there.

    As a test, the engine writes a small file, reads it back and removes it.

    Args:
        directory: made with mode 0700 if absent.
        engine: "io_uring" (direct I/O, needs the native extension), "libaio" (direct I/O,
            needs the system's libaio), "aiofiles" (buffered), or "auto": the first of these
            that works. The choice and its reason are logged to "tierstore": as a warning if
            the choice is not io_uring.

    Raises:
        RunDirectoryError: the directory is not writable, or the given engine does not work
            there; the message gives the reason.
        ThreadError: the engine needs threads, and the system starts none.
        ValueError: unknown engine.
    """
    storage, reasons = choose_storage(directory, engine)
    name = storage.engine
    if reasons:
        _log.warning("%s: engine %s, because %s", directory, name, "; ".join(reasons))
    elif engine == "auto":
        _log.info("%s: engine %s, a write and read-back succeeded", directory, name)
    else:
        _log.info("%s: engine %s, as asked for", directory, name)
    return storage


def choose_storage(directory: Path, engine: str = "auto") -> tuple[Storage, list[str]]:
    """Open a storage as open_storage() does, and log nothing.

    Returns:
        The storage; and for each preferred engine, the reason why it does not work there.
    """
    if engine not in ("auto", *_ENGINES):
        choices = ", ".join(repr(choice) for choice in ("auto", *_ENGINES))
        raise ValueError(f"engine must be one of {choices}, got {engine!r}")
    reasons: list[str] = []
    for name in _ENGINES if engine == "auto" else [engine]:
        try:
            return _open_probed(directory, name), reasons
        except _EngineError as error:
            if engine != "auto":
                raise RunDirectoryError(
                    f"engine {engine!r} does not work in {directory}: {error}; "
                    "use engine='auto' to take another one"
                ) from error
            reasons.append(f"{name} does not work here: {error}")
    raise RunDirectoryError(f"no engine works in {directory}: {'; '.join(reasons)}")


def _open_probed(directory: Path, name: str) -> Storage:
    storage = _open(directory, name)
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
        refused_direct = storage.direct and error.errno in NO_DIRECT
        reason = "O_DIRECT is refused by the filesystem" if refused_direct else "the probe failed"
        raise _EngineError(f"{reason}: {error}") from error
    except BaseException:
        storage.close()
        raise
    return storage


def _open(directory: Path, name: str) -> EngineStorage[Any]:
    module, storage_type, absent = _ENGINES[name]
    try:
        open_engine = getattr(import_module(module), storage_type)
    except (ImportError, OSError) as error:  # The package or its shared library is missing.
        raise _EngineError(absent.format(error=error)) from error
    try:
        storage: EngineStorage[Any] = open_engine(directory)
    except OSError as error:
        reason = f"the kernel refuses {name}: {errno_text(error.errno or 0)}"
        if name == "libaio" and error.errno == errno.EAGAIN:
            reason += (
                "; other programs use all requests that /proc/sys/fs/aio-max-nr allows: raise it"
            )
        raise _EngineError(reason) from error
    return storage


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
    """Mark the directory as being probed. First remove the files of killed probes.

    Every probe holds a shared lock on the directory itself. When a process is killed, the system
    releases the lock. A probe that gets an exclusive lock therefore finds only stale files.
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
        with storage_errors("close", directory):
            os.close(fd)
