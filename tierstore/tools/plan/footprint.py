"""Footprint: the pages, files, memory and disk traffic of one rank of a run that does not exist.

The code of the store itself chooses pages, tiers and buffers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tierstore.errors import PlanError
from tierstore.layout.encodings import MASTER
from tierstore.layout.ownership import (
    SharedParameter,
    SharedSubgroup,
    owned_costs,
    partition_ranks,
)
from tierstore.layout.page_layout import PageLayout, lay_out
from tierstore.paging.sources import slabs_bytes, slabs_count
from tierstore.paging.tier_plan import (
    Budget,
    Placement,
    Tier,
    check_page_options,
    default_page_bytes,
    pages_at_once,
    place,
    step_device,
    sweep_order,
)
from tierstore.paging.wear import bytes_per_step
from tierstore.units import format_bytes

PAGES_MAX = 2**17
"""Most pages of a rank. Drives are slow with smaller ones, and so is a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """Arguments of ``TierStore`` that decide pages, tiers and traffic; sizes in bytes.

    Raises:
        PlanError: an argument that TierStore() would refuse.
    """

    host_memory: int = 16 * 2**30
    device_memory: int = 0
    page_bytes: int | None = None
    buffers: int | None = None
    commit_every: int | None = 1
    step_on: str | None = None
    offload_gradients: str | None = None

    def __post_init__(self) -> None:
        for name in ("host_memory", "device_memory", "page_bytes"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 2**63:
                raise PlanError(f"{name} must be 0 or more and below 2^63, got {str(value)[:20]}")
        try:
            size = default_page_bytes(self.budget) if self.page_bytes is None else self.page_bytes
            check_page_options(size, self.commit_every, step_device(self.step_on), self.budget)
        except ValueError as error:
            raise PlanError(str(error)) from error

    @property
    def budget(self) -> Budget:
        """The memory that pages may use."""
        return Budget(
            host_memory=self.host_memory,
            device_memory=self.device_memory,
            buffers=self.buffers,
        )

    def written_bytes(self, layout: PageLayout) -> int:
        """Return the bytes that a step writes of a page; a commit may add parameters to them."""
        return layout.nbytes if self.commit_every == 1 else layout.step_nbytes

    @property
    def slots(self) -> int:
        """Number of files of each page."""
        return 1 if self.commit_every is None else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes that a run takes on one rank. All parameters have gradients in every step."""

    options: StoreOptions
    layouts: Sequence[PageLayout] = field(repr=False)
    """The layout of the rank's page of each subgroup; pages of equal sizes share one."""
    placement: Placement = field(repr=False)
    """Of the pages that are not empty."""
    host_bytes: int
    """``Stats.host_bytes_peak``: buffers, pages in host memory, mirrors."""
    device_bytes: int
    """``Stats.device_bytes_peak``: pages on the device, and pages that are stepped there."""

    @property
    def pages(self) -> list[tuple[PageLayout, Tier]]:
        """Layout and tier of each page that is not empty, in the order of the sweep."""
        return list(zip(_present(self.layouts), self.placement.tiers, strict=True))

    @property
    def resting_bytes(self) -> int:
        """Bytes of the pages that rest in host memory."""
        return sum(layout.nbytes for layout, tier in self.pages if tier is Tier.HOST)

    @property
    def state_bytes(self) -> int:
        """Bytes of all pages, with framing and padding."""
        return sum(layout.nbytes for layout in self.layouts)

    @property
    def file_bytes(self) -> int:
        """Bytes of all page files, without those that checkpoints share with the run."""
        return self.options.slots * self.state_bytes

    @property
    def step_read_bytes(self) -> int:
        """Bytes that a step reads from the disk, after the first step."""
        return sum(
            section.extent.nbytes
            for layout, tier in self.pages
            if tier is Tier.NVME
            for section in layout.readable
        )

    @property
    def step_written_bytes(self) -> int:
        """Bytes that a step writes to the disk if no commit is due."""
        written_bytes = self.options.written_bytes
        return sum(written_bytes(layout) for layout, tier in self.pages if tier is Tier.NVME)

    @property
    def commit_written_bytes(self) -> int:
        """Bytes of pages that a commit writes in addition to its step, without its manifest."""
        return self.state_bytes - self.step_written_bytes

    @property
    def mean_written_bytes(self) -> float:
        """Bytes that a step writes to the disk on average over many steps."""
        return bytes_per_step(self.pages, self.options.commit_every)


def subgroups_of(
    groups: Sequence[Sequence[SharedParameter]], options: StoreOptions, world_size: int
) -> list[SharedSubgroup]:
    """Return the subgroups that a store would make, in the order of the sweep.

    Args:
        groups: the parameters of each param group, as the optimizer attaches them.
        options: the arguments of the store.
        world_size: number of ranks.

    Raises:
        PlanError: there are more than PAGES_MAX pages.
    """
    page_bytes = options.page_bytes
    if page_bytes is None:
        page_bytes = default_page_bytes(options.budget)
    state = sum(parameter.spec.nbytes for parameters in groups for parameter in parameters)
    if state // world_size // page_bytes > PAGES_MAX:
        raise PlanError(
            f"{format_bytes(state // world_size)} of state on each rank in pages of "
            f"{format_bytes(page_bytes)} are more than {PAGES_MAX:,} pages: plan with a larger "
            "host_memory, from which page_bytes follows, or with larger page_bytes"
        )
    loads = owned_costs([], world_size)
    subgroups: list[SharedSubgroup] = []
    for number, parameters in enumerate(groups):
        subgroups += partition_ranks(number, parameters, page_bytes, world_size, loads)
    return [subgroups[number] for number in sweep_order([one.elementwise for one in subgroups])]


def footprint_of(
    subgroups: Sequence[SharedSubgroup],
    options: StoreOptions,
    *,
    world_size: int = 1,
    rank: int = 0,
    parameters_on_gpu: bool = False,
    steps_on_gpu: bool = False,
) -> Footprint:
    """Return the footprint of a run on one rank.

    Args:
        subgroups: result of subgroups_of().
        options: the arguments of the store.
        world_size: number of ranks.
        rank: the rank.
        parameters_on_gpu: whether parameters are on a GPU.
        steps_on_gpu: whether pages are stepped there.

    Raises:
        BudgetError: the host memory cannot hold the fewest buffers that work; the message names
            the smallest budget that does.
    """
    layouts = _layouts(subgroups, rank)
    sizes = [layout.nbytes for layout in _present(layouts)]
    window = pages_at_once(world_size)
    moves_parameters = parameters_on_gpu != steps_on_gpu
    offloads = parameters_on_gpu and options.offload_gradients is not None
    slabs = gradients = 0
    if moves_parameters or offloads:
        slabs = slabs_bytes(
            layouts,
            slabs_count(window, on_gpu=steps_on_gpu),
            moves_parameters=moves_parameters,
            gradient_dtype=None,
        )
    if offloads:
        gradients = sum(map(parameter_bytes, layouts))
    reserved = gradients + (0 if steps_on_gpu else slabs)
    placement = place(sizes, replace(options.budget, reserved=reserved))
    device_bytes = placement.in_tier(Tier.DEVICE, sizes)
    if steps_on_gpu:
        device_bytes += slabs + math.prod(placement.staging(sizes, window))
    return Footprint(
        options=options,
        layouts=layouts,
        placement=placement,
        host_bytes=reserved + placement.host_bytes(sizes),
        device_bytes=device_bytes,
    )


def parameter_bytes(layout: PageLayout) -> int:
    """Return the bytes of the parameters of a page, and of their gradients."""
    return sum(
        chunk.numel * records[MASTER][0].parameter.dtype.itemsize
        for (_, chunk), records in layout.records.items()
    )


def _layouts(subgroups: Sequence[SharedSubgroup], rank: int) -> list[PageLayout]:
    """Return the layout of the rank's page of each subgroup; chunks of equal sizes have one."""
    made: dict[object, PageLayout] = {}
    found = []
    for subgroup in subgroups:
        own = subgroup.of(rank)
        key = tuple(
            (
                *(shard.parameter.dtype, shard.parameter.states, shard.parameter.shapes),
                shard.parameter.encodings,
                tuple(chunk.sizes for chunk in shard.chunks),
            )
            for shard in own.shards
        )
        if key not in made:
            made[key] = lay_out(own)
        found.append(made[key])
    return found


def _present(layouts: Sequence[PageLayout]) -> list[PageLayout]:
    return [layout for layout in layouts if layout.nbytes]
