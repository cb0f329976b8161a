"""Decision after the completion of one I/O request.

The native engine has the same code in C++ (native/request.hpp), and one test covers both. The
libaio engine cannot use the C++ code, because it serves machines without the extension.
"""

from __future__ import annotations

import errno
from enum import Enum, auto

from tierstore.units import SECTOR_BYTES

# Most retries of one request that ends in EINTR or EAGAIN.
RETRIES_MAX = 16

_ERRNO_MAX = 4095


class Verdict(Enum):
    """Decision about a request after a completion."""

    DONE = auto()
    RESUBMIT = auto()
    FAILED = auto()


class Request:
    """One contiguous range of a file that remains to be moved.

    Attributes:
        offset: file offset of the first remaining byte.
        bytes_remaining: number of remaining bytes.
        error: the errno of a failed request, otherwise 0.
    """

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset = offset
        self.bytes_remaining = nbytes
        self.error = 0
        self._retries = 0

    def complete(self, result: int) -> Verdict:
        """Take the result of a completion: the bytes moved, or a negative errno."""
        if result in (-errno.EINTR, -errno.EAGAIN) and self._retries < RETRIES_MAX:
            self._retries += 1
            return Verdict.RESUBMIT
        if result < 0:
            return self._fail(-result if -result <= _ERRNO_MAX else errno.EIO)
        if result > self.bytes_remaining:
            return self._fail(errno.EIO)
        if result == self.bytes_remaining:
            self._advance(result)
            return Verdict.DONE
        # Keep whole sectors only, so that the resubmitted tail stays aligned.
        bytes_kept = result // SECTOR_BYTES * SECTOR_BYTES
        if bytes_kept == 0:
            return self._fail(errno.EIO)  # No progress: fail, never loop.
        self._advance(bytes_kept)
        return Verdict.RESUBMIT

    def _fail(self, error: int) -> Verdict:
        self.error = error
        return Verdict.FAILED

    def _advance(self, nbytes: int) -> None:
        self.offset += nbytes
        self.bytes_remaining -= nbytes
