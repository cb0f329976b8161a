"""The io_uring engine (C++, native/). Absent where liburing was absent at installation."""

from enum import Enum

RETRIES_MAX: int
"""How often one request may end in EINTR or EAGAIN before it is given up."""

class Verdict(Enum):
    """What to do with a request after a completion."""

    DONE = ...
    RESUBMIT = ...
    FAILED = ...

class Request:
    """What is left of one I/O request, and the decision after each completion."""

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
    """One transfer, made before it is submitted so that its owner can register it first."""

    def __init__(self) -> None: ...
    @property
    def ended(self) -> bool:
        """Whether the kernel has stopped using the memory and the descriptors."""

class UringEngine:
    """One io_uring and the thread that owns it.

    Raises:
        OSError: the kernel refused the ring (EPERM, ENOSYS, ENOMEM, ...).
        ValueError: queue_depth is not in 1..1024, or request_bytes is no multiple of 4096
            up to 1 GiB.
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
        """Have the kernel keep this memory ready for transfers, in place of what it kept.

        It must stay valid until a later registration has ended or the engine is closed.
        Nothing is kept for zero bytes, and where it ends in an errno (ENOMEM: over the
        limit of locked memory).
        """
    def wait(self, ticket: Ticket) -> tuple[int, int]:
        """Block until it has ended; return (errno or 0, where it failed).

        Where: the file offset, or for a sync the index of the descriptor. Whatever a signal
        handler raises (KeyboardInterrupt) passes to the caller, and the transfer goes on.
        """
    def close(self) -> None:
        """Wait for all transfers, then end the thread and release the ring.

        Interrupted by a signal handler that raises, it takes no more transfers, and is to
        be called again.
        """
    def abandon(self) -> None:
        """Close this forked child's descriptors of the ring, and nothing else."""
