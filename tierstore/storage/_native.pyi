"""io_uring engine (C++, native/). Absent if liburing was absent at installation."""

from enum import Enum

RETRIES_MAX: int
"""How often one request may end in EINTR or EAGAIN before it fails."""

class Verdict(Enum):
    """Decision about a request after a completion."""

    DONE = ...
    RESUBMIT = ...
    FAILED = ...

class Request:
    """One contiguous range of a file that has not been moved yet."""

    def __init__(self, offset: int, nbytes: int) -> None: ...
    def complete(self, result: int) -> Verdict:
        """Take the result of a completion: the bytes moved, or a negative errno."""
    @property
    def offset(self) -> int: ...
    @property
    def bytes_remaining(self) -> int: ...
    @property
    def error(self) -> int:
        """The errno of a failed request, otherwise 0."""

class Ticket:
    """One transfer or sync; see tierstore.storage.engine.Ticket."""

    def __init__(self) -> None: ...
    @property
    def ended(self) -> bool:
        """True when the kernel has stopped using the memory and the descriptors."""

class UringEngine:
    """One io_uring and the thread that owns it; see tierstore.storage.engine.Engine.

    Raises:
        OSError: the kernel refused the ring (EPERM, ENOSYS, ENOMEM, ...).
        ValueError: queue_depth is not in 1..1024, or request_bytes is not a multiple of
            4096 up to 1 GiB.
    """

    def __init__(self, queue_depth: int, request_bytes: int) -> None: ...
    def submit(
        self, ticket: Ticket, is_write: bool, fd: int, address: int, nbytes: int, offset: int
    ) -> None:
        """Start a transfer; memory and descriptor must stay valid until it has ended.

        Raises:
            RuntimeError: the engine is closed (the ticket has then ended with ECANCELED),
                or belongs to the parent of this forked process.
        """
    def submit_sync(self, ticket: Ticket, fds: list[int]) -> None:
        """Start an fdatasync of every descriptor, all in one submission."""
    def submit_register(self, ticket: Ticket, address: int, nbytes: int) -> None:
        """Start to register this memory with the kernel, in place of the memory before.

        It must stay valid until a later registration has ended or the engine is closed.
        Zero bytes, or an errno (ENOMEM: over the limit of locked memory), leave nothing
        registered.
        """
    def wait(self, ticket: Ticket) -> tuple[int, int]:
        """Block until the ticket has ended; return (errno or 0, where it failed).

        Exceptions of signal handlers (KeyboardInterrupt) pass to the caller, and the transfer
        continues.
        """
    def close(self) -> None:
        """Wait for all transfers, then end the thread and release the ring.

        After an exception of a signal handler the engine takes no more transfers: call
        close() again.
        """
    def abandon(self) -> None:
        """Close this forked child's descriptors of the ring, and nothing else."""
