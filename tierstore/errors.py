"""Every error that tierstore raises on purpose, one class per way to be wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial


class TierstoreError(Exception):
    """Base of all errors below, so that one ``except`` can tell ours from others."""


class StorageError(TierstoreError):
    """A transfer or a file operation did not happen in full.

    Attributes:
        what: the operation.
        path: the file, as the operating system names it.
        offset: first byte of the transfer, or None where the operation has no range.
        nbytes: bytes asked for, or None likewise.
        errno: the operating system's number, for example ``errno.ENOSPC``.
    """

    def __init__(
        self,
        what: str,
        *,
        path: str,
        errno: int,
        offset: int | None = None,
        nbytes: int | None = None,
    ) -> None:
        self.what = what
        self.path = path
        self.errno = errno
        self.offset = offset
        self.nbytes = nbytes
        place = path if offset is None else f"{path}, {nbytes} bytes at offset {offset}"
        super().__init__(f"{what} failed: {place}: {os.strerror(errno)} (errno {errno})")

    def __reduce__(self) -> tuple[Callable[[], StorageError], tuple[()]]:
        # An exception is pickled as its class and message, which are not what makes this one.
        again = partial(
            type(self),
            self.what,
            path=self.path,
            errno=self.errno,
            offset=self.offset,
            nbytes=self.nbytes,
        )
        return again, ()


class CorruptionError(TierstoreError):
    """Bytes were read in full but are not the bytes that were committed."""


class StoreFailedError(TierstoreError):
    """An earlier error left the store unusable; only close() and restore() work."""


class SweepError(TierstoreError, RuntimeError):
    """A call in the middle of a sweep, or a sweep that was left before its last page."""


class StoreClosedError(TierstoreError):
    """The store was closed, or belongs to the parent of this forked process."""


class BudgetError(TierstoreError, ValueError):
    """A memory budget is below the smallest one that works; the message names that one."""


class RunDirectoryError(TierstoreError, ValueError):
    """A directory cannot serve as this run's directory; the message says what to do."""


class RunLockedError(RunDirectoryError):
    """Another process holds the run directory."""


class RunMismatchError(RunDirectoryError):
    """The directory holds a run of another model; the message names the first difference."""


class CheckpointError(TierstoreError, ValueError):
    """A checkpoint cannot be published or read there; the message says what to do."""


class PeerFailed(TierstoreError):  # noqa: N818 - it tells of another's error.
    """Another rank of the job failed, and this one cannot go on without it.

    Attributes:
        rank: which one.
        reason: what it said.
    """

    def __init__(self, rank: int, reason: str) -> None:
        self.rank = rank
        self.reason = reason
        super().__init__(f"rank {rank} failed: {reason}")

    def __reduce__(self) -> tuple[type[PeerFailed], tuple[int, str]]:
        return type(self), (self.rank, self.reason)
