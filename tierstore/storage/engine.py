"""Protocol of engines. An engine moves bytes between files and memory."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol, TypeVar

THREAD_NAME = "tierstore-io"
"""Prefix of the names of all Python threads that an engine starts."""

# Request size and queue depth of the engines with direct I/O. One request is large enough to
# amortize its cost and small enough that several requests share a page. With more requests in
# flight than a device needs, one call submits several and one wake-up completes several. In
# processor time, a depth of 32 took three quarters of a depth of 16, and half of a depth of 8.
REQUEST_BYTES = 8 << 20
QUEUE_DEPTH = 32


class Ticket(Protocol):
    """One transfer or sync. It is made before submission so that it can be registered first."""

    @property
    def ended(self) -> bool:
        """True if the kernel has finished with the memory and the descriptors."""


TicketT = TypeVar("TicketT", bound=Ticket)
_SubmittedT = TypeVar("_SubmittedT", bound=Ticket, contravariant=True)


class Engine(Protocol[_SubmittedT]):
    """Moves the bytes of one EngineStorage. A ticket serves once."""

    @abstractmethod
    def submit(
        self, ticket: _SubmittedT, is_write: bool, fd: int, address: int, nbytes: int, offset: int
    ) -> None:
        """Start a transfer. Memory and descriptor must stay valid until it has ended.

        Raises:
            RuntimeError: the engine is closed. The ticket ends with ECANCELED.
        """

    @abstractmethod
    def submit_sync(self, ticket: _SubmittedT, fds: list[int]) -> None:
        """Start an fdatasync of every descriptor; errors as in submit()."""

    @abstractmethod
    def wait(self, ticket: _SubmittedT) -> tuple[int, int]:
        """Block until the ticket has ended.

        A KeyboardInterrupt passes to the caller, and the transfer continues.

        Returns:
            (errno or 0, position of the failure): the file offset, for a sync the index of the
            descriptor. A transfer past the end of the file fails with EIO.

        Raises:
            ValueError: the ticket was never submitted.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait for all transfers, then release everything. Call it again after an interrupt."""

    @abstractmethod
    def abandon(self) -> None:
        """Close the engine's descriptors in a forked child. Do nothing else."""
