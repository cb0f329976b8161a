"""Protocol of engines, which move the bytes between files and memory."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol, TypeVar

THREAD_NAME = "tierstore-io"
"""Prefix of the names of all Python threads that an engine starts."""

# Request size and queue depth of the engines with direct I/O. One request is large enough to
# amortize its cost and small enough that several requests share a page. With more requests in
# flight than a device needs, one call submits several of them and one wake-up completes
# several: a depth of 32 took three quarters of the processor time of 16, and half that of 8.
REQUEST_BYTES = 8 << 20
QUEUE_DEPTH = 32


class Ticket(Protocol):
    """One transfer or sync, made before its submission so that it can be registered first."""

    @property
    def ended(self) -> bool:
        """True when the kernel has stopped using the memory and the descriptors."""


TicketT = TypeVar("TicketT", bound=Ticket)
_SubmittedT = TypeVar("_SubmittedT", bound=Ticket, contravariant=True)


class Engine(Protocol[_SubmittedT]):
    """Moves the bytes of one EngineStorage. A ticket serves once."""

    @abstractmethod
    def submit(
        self, ticket: _SubmittedT, is_write: bool, fd: int, address: int, nbytes: int, offset: int
    ) -> None:
        """Start a transfer; memory and descriptor must stay valid until it has ended.

        Raises:
            RuntimeError: the engine is closed. The ticket ends with ECANCELED.
        """

    @abstractmethod
    def submit_sync(self, ticket: _SubmittedT, fds: list[int]) -> None:
        """Start an fdatasync of every descriptor; errors as submit()."""

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
        """Wait for all transfers, then release everything. Called again after an interrupt."""

    @abstractmethod
    def abandon(self) -> None:
        """Close the engine's descriptors in a forked child, and nothing else."""
