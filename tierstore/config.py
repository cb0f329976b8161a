"""The settings of one store, validated once, where they enter."""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.units import SECTOR_BYTES

# One buffer is being stepped while another is read ahead or written behind.
BUFFERS_MIN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a store may use, in bytes; see TierStore for what it means to a user."""

    host_memory: int
    device_memory: int
    buffers: int | None
    reserved: int = 0
    """Of the host memory, for other things than pages."""

    @property
    def for_pages(self) -> int:
        """Host memory for pages and their buffers."""
        return max(0, self.host_memory - self.reserved)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Settings of a TierStore; see there for what they mean to a user."""

    budget: Budget
    """What pages and buffers may take."""

    page_bytes: int
    """About how large a page is. A run keeps the value that it began with."""

    commit_every: int | None
    """Steps from one commit to the next; None: commit on synchronize() and close() only."""

    checksums: bool
    """Whether pages are checked when they are read."""

    compute: str
    """Where pages are stepped: "device", that of the parameters, or "host"."""

    free_gradients: bool
    """Whether gradients are let go of once they were used."""

    def __post_init__(self) -> None:
        if self.page_bytes < SECTOR_BYTES:
            raise ValueError(f"page_bytes must be at least {SECTOR_BYTES}, got {self.page_bytes}")
        if self.compute not in ("device", "host"):
            raise ValueError(f"compute must be 'device' or 'host', got {self.compute!r}")
        if self.compute == "host" and self.budget.device_memory:
            raise ValueError(
                "compute='host' steps pages in host memory: device_memory must be 0, got "
                f"{self.budget.device_memory}"
            )
        if self.budget.buffers is not None and self.budget.buffers < BUFFERS_MIN:
            raise ValueError(
                f"buffers must be at least {BUFFERS_MIN} (one page is stepped while another "
                f"moves), or None for as many as host_memory holds; got {self.budget.buffers}"
            )
        if self.commit_every is not None and self.commit_every < 1:
            raise ValueError(
                "commit_every must be a positive number of steps, or None to commit on "
                f"synchronize() and close() only; got {self.commit_every}"
            )
