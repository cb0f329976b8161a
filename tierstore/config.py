"""Settings of a store, validated on construction."""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.units import SECTOR_BYTES

# One buffer is being stepped while another is read ahead or written behind.
BUFFERS_MIN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of memory, in bytes; TierStore documents them."""

    host_memory: int
    device_memory: int
    buffers: int | None
    reserved: int = 0
    """Host memory that is reserved for other uses than pages."""

    @property
    def for_pages(self) -> int:
        """Host memory for pages and their buffers."""
        return max(0, self.host_memory - self.reserved)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Settings of a store; TierStore documents them."""

    budget: Budget
    """Memory for pages and buffers."""

    page_bytes: int
    """Approximate size of a page. A run keeps its first value."""

    commit_every: int | None
    """Steps from one commit to the next; None: commit on synchronize() and close() only."""

    checksums: bool
    """Whether checksums of pages are computed and checked."""

    compute: str
    """Where pages are stepped: on the "device" of the parameters, or on the "host"."""

    free_gradients: bool
    """Whether a gradient is set to None after its use in a step."""

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
