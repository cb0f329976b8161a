"""Errors that tierstore raises, one class per kind of failure."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial


class TierstoreError(Exception):
    """Base class of all errors of tierstore."""


def errno_text(error: int) -> str:
    """Return text for an errno. If descriptors are exhausted, it names the limit to raise."""
    text = f"{os.strerror(error)} (errno {error})"
    if error == errno.EMFILE:
        return f"{text}; raise the limit of open files with `ulimit -n`"
    if error == errno.ENFILE:
        return f"{text}; raise fs.file-max, or lower `ulimit -n` of other programs"
    return text


class StorageError(TierstoreError):
    """A transfer or file operation failed or was incomplete.

    Attributes:
        what: the operation.
        path: the file.
        offset: first byte of the transfer; None if the operation has no range.
        nbytes: requested bytes; None if the operation has no range.
        errno: the error number of the operating system, for example ``errno.ENOSPC``.
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
        super().__init__(f"{what} failed: {place}: {errno_text(errno)}")

    def __reduce__(self) -> tuple[Callable[[], StorageError], tuple[()]]:
        # Exceptions are pickled as class and message; this class needs its own arguments.
        names = ("what", "path", "errno", "offset", "nbytes")
        return partial(type(self), **{name: getattr(self, name) for name in names}), ()


class ThreadError(TierstoreError, RuntimeError):
    """The system starts no further thread."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"no further thread can be started ({reason}): raise the limits of this process on "
            "threads (`ulimit -u`) and memory (`ulimit -v`)"
        )

    def __reduce__(self) -> tuple[type[ThreadError], tuple[str]]:
        return type(self), (self.reason,)


class CorruptionError(TierstoreError):
    """Bytes were read in full but differ from the committed bytes."""


class StoreFailedError(TierstoreError):
    """An earlier error left the store unusable. Only close() and restore() work."""


class SweepError(TierstoreError, RuntimeError):
    """A call during a sweep, or a sweep that ended before its last page."""


class StoreClosedError(TierstoreError):
    """The store was closed, or belongs to the parent process of a fork."""


class BudgetError(TierstoreError, ValueError):
    """A memory budget is too small; the message names the smallest one that works."""


class NonFiniteGradientError(TierstoreError, ValueError):
    """A gradient has NaN or infinite elements; the message names the parameter."""


class RunDirectoryError(TierstoreError, ValueError):
    """A directory cannot be used as the run directory; the message says what to do."""


class RunLockedError(RunDirectoryError):
    """Another process, or another store of this process, holds the run directory."""


class RunMismatchError(RunDirectoryError):
    """The directory holds a run of another model; the message names the first difference."""


class CheckpointError(TierstoreError, ValueError):
    """A checkpoint cannot be published or read; the message says what to do."""


class NotCarriedError(CheckpointError):
    """A strict conversion would leave out a part of the source; the message names it."""


class PlanError(TierstoreError, ValueError):
    """A model or machine cannot be planned for; the message names the value and what to do."""


class RollCallError(TierstoreError):
    """Not all ranks make a call, so no rank begins it. The next call works as usual."""


class PeerFailed(TierstoreError):  # noqa: N818 - the error happened on another rank.
    """Another rank of the job failed, so this rank cannot continue.

    Attributes:
        rank: the rank that failed.
        reason: the reason, reported by that rank or found by other ranks.
    """

    def __init__(self, rank: int, reason: str) -> None:
        self.rank = rank
        self.reason = reason
        super().__init__(f"rank {rank} failed: {reason}")

    def __reduce__(self) -> tuple[type[PeerFailed], tuple[int, str]]:
        return type(self), (self.rank, self.reason)
