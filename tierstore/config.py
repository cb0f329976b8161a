"""The settings of one store, validated once, where they enter."""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.units import SECTOR_BYTES

# One buffer is being stepped while another is read ahead or written behind.
BUFFERS_MIN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Settings of a TierStore; see there for what they mean to a user."""

    host_memory: int
    """Most bytes that all host buffers together may take."""

    page_bytes: int
    """About how large a page is. A run keeps the value that it began with."""

    buffers: int | None
    """Number of page buffers; None: as many as host_memory holds."""

    commit_every: int | None
    """Steps from one commit to the next; None: commit on synchronize() and close() only."""

    checksums: bool
    """Whether pages are checked when they are read."""

    def __post_init__(self) -> None:
        if self.page_bytes < SECTOR_BYTES:
            raise ValueError(f"page_bytes must be at least {SECTOR_BYTES}, got {self.page_bytes}")
        if self.buffers is not None and self.buffers < BUFFERS_MIN:
            raise ValueError(
                f"buffers must be at least {BUFFERS_MIN} (one page is stepped while another "
                f"moves), or None for as many as host_memory holds; got {self.buffers}"
            )
        if self.commit_every is not None and self.commit_every < 1:
            raise ValueError(
                "commit_every must be a positive number of steps, or None to commit on "
                f"synchronize() and close() only; got {self.commit_every}"
            )
