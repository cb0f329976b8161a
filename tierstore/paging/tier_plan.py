"""The tier plan: the tier of each page between two steps, and the pool of buffers.

Pages are stepped in a fixed order, so the plan is made once from the order and sizes of the pages.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from tierstore.errors import BudgetError
from tierstore.units import SECTOR_BYTES, align_up, format_bytes

# One buffer is stepped while another is read ahead or written behind.
BUFFERS_MIN = 2

# More transfers in flight do not make a disk faster. The rest of the memory keeps pages.
STREAM_BUFFERS = 4
STREAM_BYTES = 2**28

# With several ranks, the matrices of one subgroup are gathered, the updates of the next are
# computed, and the updates of a third are scattered, all at once.
WINDOW_MAX = 3

# Besides the pages that are stepped, one page moves to the device of the step, and one back. With a
# GPU one more page is in flight to it, because a page may take longer to copy than to step.
MOVING_PAGES = 2
MOVING_PAGES_OF_GPU = 3

# Larger pages do not make a disk faster.
PAGE_BYTES_MAX = 2**28


class Tier(enum.Enum):
    """The memory or file that holds a page between two steps."""

    DEVICE = "device"
    """Memory on the device that steps pages."""
    HOST = "host"
    """Host memory that only the page uses."""
    NVME = "nvme"
    """The page's file. The page is stepped in a buffer of the pool."""

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        names = ", ".join(repr(tier.value) for tier in cls)
        raise ValueError(f"a tier is one of {names}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The memory that a store may use, in bytes; see TierStore."""

    host_memory: int
    device_memory: int
    buffers: int | None
    reserved: int = 0
    """Bytes of host memory that are not for pages."""

    def __post_init__(self) -> None:
        if self.buffers is not None and self.buffers < BUFFERS_MIN:
            raise ValueError(
                f"buffers must be at least {BUFFERS_MIN} (one page is stepped while another "
                f"moves), or None for as many as host_memory holds; got {self.buffers}"
            )

    @property
    def for_pages(self) -> int:
        """Bytes of host memory for pages and their buffers."""
        return max(0, self.host_memory - self.reserved)


def check_page_options(
    page_bytes: int, commit_every: int | None, step_on: torch.device | None, budget: Budget
) -> None:
    """Check the arguments of TierStore that determine pages. A store and a plan call this.

    Raises:
        ValueError: an argument is out of range, or contradicts another.
    """
    if page_bytes < SECTOR_BYTES:
        raise ValueError(f"page_bytes must be at least {SECTOR_BYTES}, got {page_bytes}")
    if step_on is not None and step_on.type == "cpu" and budget.device_memory:
        raise ValueError(
            "step_on='cpu' steps pages in host memory: device_memory must be 0, got "
            f"{budget.device_memory}"
        )
    if commit_every is not None and commit_every < 1:
        raise ValueError(
            "commit_every must be a positive number of steps, or None to commit only in "
            f"synchronize() and close(), got {commit_every}"
        )


def step_device(step_on: torch.device | str | None) -> torch.device | None:
    """Return the device that pages are stepped on; None: where the parameters are.

    Raises:
        ValueError: the device is neither the CPU nor a GPU.
    """
    try:
        device = None if step_on is None else torch.device(step_on)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device is not None and device.type not in ("cpu", "cuda"):
        raise ValueError(f"step_on must be 'cpu', a GPU such as 'cuda:0', or None, got {step_on!r}")
    return device


def default_page_bytes(budget: Budget) -> int:
    """Return the default of page_bytes.

    It is host_memory / (8 + 2 * buffers) in whole sectors, at most PAGE_BYTES_MAX. If ``buffers``
    is None it counts as STREAM_BUFFERS. The rest of the memory has room for the copies that
    step_on="cpu" makes from a GPU, up to 8.4 pages, and for padding.
    """
    buffers = STREAM_BUFFERS if budget.buffers is None else budget.buffers
    nbytes = min(PAGE_BYTES_MAX, budget.host_memory // (8 + 2 * buffers))
    return max(SECTOR_BYTES, nbytes // SECTOR_BYTES * SECTOR_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The plan for all pages of a store."""

    tiers: tuple[Tier, ...]
    """The tier of each page, in order."""
    buffers: int
    """Number of buffers in the pool."""
    buffer_bytes: int
    """Bytes of each buffer."""

    def in_tier(self, tier: Tier, sizes: Sequence[int]) -> int:
        """Return the bytes of the pages in a tier, given the bytes of each page."""
        return sum(size for size, t in zip(sizes, self.tiers, strict=True) if t is tier)

    def host_bytes(self, sizes: Sequence[int]) -> int:
        """Return the bytes of host memory for buffers and pages, given the bytes of each page."""
        return self.buffers * self.buffer_bytes + self.in_tier(Tier.HOST, sizes)

    def staging(self, sizes: Sequence[int], window: int) -> tuple[int, int]:
        """Return number and bytes of device buffers for pages that do not rest on the device.

        Args:
            sizes: bytes of each page.
            window: most pages that are stepped at once.
        """
        pages = zip(sizes, self.tiers, strict=True)
        elsewhere = [size for size, tier in pages if tier is not Tier.DEVICE]
        return min(window + MOVING_PAGES_OF_GPU, len(elsewhere)), max(elsewhere, default=0)


def pages_at_once(world_size: int) -> int:
    """Return the most pages that a rank steps at once, given enough buffers."""
    return 1 if world_size == 1 else WINDOW_MAX


def sweep_order(elementwise: Sequence[bool]) -> list[int]:
    """Return the order in which all ranks step pages.

    On a GPU a page of elementwise rules takes longer to copy than to step, and a page of matrices
    longer to step. Each kind is therefore spread evenly over the sweep. The copies of one kind then
    overlap with the computation of the other kind. Pages of one kind keep their order.
    An example: for four pages of matrices and two of elementwise rules behind them, the order is
    [0, 4, 1, 2, 5, 3].

    Args:
        elementwise: for each page of all ranks, whether all its rules are elementwise.
    """
    counts, seen = Counter(elementwise), Counter[bool]()
    middles = []
    for kind in elementwise:
        # The middle of the page's part of the sweep, (2 n + 1) / (2 count), over one denominator.
        middles.append((2 * seen[kind] + 1) * counts[not kind])
        seen[kind] += 1
    return sorted(range(len(middles)), key=middles.__getitem__)


def place(sizes: Sequence[int], budget: Budget, order: Sequence[int] | None = None) -> Placement:
    """Keep as many pages in memory as fit, spread over the sweep; stream the others.

    With an explicit buffer count, host memory holds buffers only.

    Args:
        sizes: bytes of each page.
        budget: the memory that may be used.
        order: numbers of the pages in the order of the sweep; None: their own order.

    Raises:
        BudgetError: the host memory cannot hold the smallest pool that works; the message names
            the smallest budget that works.
    """
    order = range(len(sizes)) if order is None else order
    aligned = [align_up(size, SECTOR_BYTES) for size in sizes]
    tiers = [Tier.NVME] * len(sizes)
    for page in _choose_evenly(order, aligned, budget.device_memory):
        tiers[page] = Tier.DEVICE
    # Pages of tier DEVICE also go to their files through the pool.
    buffer_bytes = max(aligned, default=SECTOR_BYTES)
    if budget.buffers is None:
        resting = [page for page in order if tiers[page] is not Tier.DEVICE]
        through_pool = 0
        if sum(aligned[page] for page in resting) > budget.for_pages:
            through_pool = _stream_buffers(buffer_bytes, len(resting), budget) * buffer_bytes
        elif len(resting) < len(sizes):
            through_pool = BUFFERS_MIN * buffer_bytes
        for page in _choose_evenly(resting, aligned, budget.for_pages - through_pool):
            tiers[page] = Tier.HOST
    return _with_pool(tiers, aligned, budget, may_rest=True)


def place_all(sizes: Sequence[int], budget: Budget, tier: Tier) -> Placement:
    """Place every page in one tier.

    Raises:
        BudgetError: the pages do not fit; the message names the smallest budget that works.
    """
    aligned = [align_up(size, SECTOR_BYTES) for size in sizes]
    limits = {Tier.DEVICE: budget.device_memory, Tier.HOST: budget.for_pages}
    if tier in limits and sum(aligned) > limits[tier]:
        smallest = sum(aligned) + (budget.reserved if tier is Tier.HOST else 0)
        raise BudgetError(
            f"all pages take {sum(aligned)} bytes ({format_bytes(sum(aligned))}), and "
            f"{tier.value}_memory has room for {limits[tier]} ({format_bytes(limits[tier])}): "
            f"pass {tier.value}_memory={smallest} or more"
        )
    return _with_pool([tier] * len(sizes), aligned, budget, may_rest=False)


def _stream_buffers(buffer_bytes: int, pages: int, budget: Budget) -> int:
    """Return the number of buffers that keeps a disk busy with at most half of the memory."""
    in_flight = min(STREAM_BYTES, budget.for_pages // 2)
    return min(pages, max(STREAM_BUFFERS, in_flight // buffer_bytes))


def _choose_evenly(pages: Sequence[int], sizes: Sequence[int], budget: int) -> list[int]:
    """Choose pages that fit in a budget, spread evenly over the sweep.

    The transfers of the other pages then overlap with the computation on the chosen pages.
    """
    total = sum(sizes[page] for page in pages)
    share = min(1.0, budget / total) if total else 0.0
    chosen: list[int] = []
    credit, left = 0.0, budget
    for page in pages:
        credit += share * sizes[page]
        if sizes[page] <= credit and sizes[page] <= left:
            chosen.append(page)
            credit -= sizes[page]
            left -= sizes[page]
    taken = set(chosen)
    for page in pages:  # Add pages that rounding left out.
        if page not in taken and sizes[page] <= left:
            chosen.append(page)
            left -= sizes[page]
    return chosen


def _with_pool(
    tiers: Sequence[Tier], aligned: Sequence[int], budget: Budget, *, may_rest: bool
) -> Placement:
    """Complete a placement with a pool in the remaining host memory.

    Args:
        tiers: the tier of each page.
        aligned: bytes of each page, in whole sectors.
        budget: the memory that may be used.
        may_rest: whether all pages would fit in more host memory and then need no pool.
    """
    resident = sum(size for size, tier in zip(aligned, tiers, strict=True) if tier is Tier.HOST)
    moving = [size for size, tier in zip(aligned, tiers, strict=True) if tier is not Tier.HOST]
    if not moving:
        return Placement(tiers=tuple(tiers), buffers=0, buffer_bytes=SECTOR_BYTES)
    nbytes = max(moving)
    count_max = (budget.for_pages - resident) // nbytes
    streamed = sum(tier is Tier.NVME for tier in tiers)
    count = budget.buffers
    if count is None:
        wanted = _stream_buffers(nbytes, streamed, budget) if resident else streamed
        count = max(BUFFERS_MIN, min(count_max, wanted))
    if count > count_max:
        smallest, holding = count * nbytes, ""
        could_rest = may_rest and budget.buffers is None and Tier.DEVICE not in tiers
        if could_rest and sum(moving) < smallest:
            smallest, holding = sum(moving), ", which holds all pages"
        beside = f" beside {budget.reserved} for gradients and parameters"
        raise BudgetError(
            f"host_memory is {budget.host_memory} bytes ({format_bytes(budget.host_memory)}), "
            f"but {count} buffers of {nbytes} bytes, the largest page, take {count * nbytes}"
            f"{beside if budget.reserved else ''}: "
            f"pass host_memory={smallest + budget.reserved} or more{holding}"
            + (f", or buffers={count_max}" if count_max >= BUFFERS_MIN else "")
        )
    return Placement(tiers=tuple(tiers), buffers=count, buffer_bytes=nbytes)
