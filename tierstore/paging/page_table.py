"""The page table: the param groups of a store, their pages, and the memory of each page."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from tierstore.errors import BudgetError
from tierstore.layout.dtensors import local_tensor
from tierstore.layout.ownership import (
    SharedParameter,
    SharedSubgroup,
    owned_costs,
    partition_ranks,
)
from tierstore.layout.page_layout import PageLayout, lay_out
from tierstore.layout.parameters import PagedGroup, PagedParameter, ParameterSpec
from tierstore.layout.subgroups import uncut_nbytes
from tierstore.paging.device import Device, open_device
from tierstore.paging.host_gradients import (
    HostGradient,
    HostGradients,
    gradients_bytes,
    require_offloadable,
)
from tierstore.paging.page import Content, Page
from tierstore.paging.pager import Pager
from tierstore.paging.replication import Replication
from tierstore.paging.shared_parameters import describe_groups, require_same_values
from tierstore.paging.sources import Places, Sources, require_page_locked
from tierstore.paging.tier_plan import (
    BUFFERS_MIN,
    Budget,
    Placement,
    Tier,
    default_page_bytes,
    pages_at_once,
    place,
    place_all,
    sweep_order,
)
from tierstore.paging.views import Source
from tierstore.ranks.peers import Ranks, together
from tierstore.run.committer import Progress, encode_hyperparameters
from tierstore.run.usability import Usability
from tierstore.units import SECTOR_BYTES, align_up


class PageTable:
    """The param groups that were attached, cut into subgroups and pages.

    Args:
        ranks: all ranks of the job, which attach the same groups.
        pager: moves the pages.
        committer: counts the steps, and allocates the page files.
        usability: the condition of the store.
        budget: the memory that pages may use.
        page_bytes: approximate size of a page.
        step_on: where pages are stepped; None: where the parameters are.
        offloads: whether gradients leave the GPU of the parameters during backward.
        gradient_dtype: dtype of gradients in memory of the store; None: of each parameter.
    """

    def __init__(
        self,
        ranks: Ranks,
        pager: Pager,
        committer: Progress,
        usability: Usability,
        *,
        budget: Budget,
        page_bytes: int,
        step_on: torch.device | None,
        offloads: bool,
        gradient_dtype: torch.dtype | None,
    ) -> None:
        self.groups: list[PagedGroup] = []
        self.specs: dict[str, ParameterSpec] = {}
        """Parameter name -> spec when the parameter was attached."""
        self.all_pages: list[Page] = []
        """This rank's page of every subgroup, in order; some may be empty."""
        self.swept: list[Page] = []
        """The same pages in the order of a sweep."""
        self.layout_groups: list[list[ParameterSpec]] = []
        """For each group, the specs of its parameters when the group was attached."""
        self.group_count_min = 0
        """Number of groups of the resumed run. A commit with fewer groups cannot be restored."""
        self.ranks = ranks
        self.pager = pager
        self.committer = committer
        self.usability = usability
        self.replication = Replication(ranks)
        host = Device()
        self.places = Places(parameters=host, step=host)
        """The devices of parameters and steps."""
        self.sources = Sources(self.places, 0, 0)
        self._host_gradients: HostGradients | None = None
        self._budget = budget
        self._page_bytes = page_bytes
        self._step_on = step_on
        self._offloads = offloads
        self._gradient_dtype = gradient_dtype
        # Most pages that may be stepped at once: with any number of buffers, and with this pool.
        self._window = self.window_max = pages_at_once(ranks.world_size)
        self._tier: Tier | None = None  # The tier that move() chose for all pages.
        self._is_placed = True
        self._values_may_differ = False  # Whether the values of replicas may differ from the owner.

    @property
    def pages(self) -> list[Page]:
        """All pages of this rank that are not empty, in order."""
        return [page for page in self.all_pages if not page.is_empty]

    @property
    def layouts(self) -> list[PageLayout]:
        """The layouts of all pages that are not empty, in order."""
        return [page.layout for page in self.pages]

    @property
    def partition(self) -> list[SharedSubgroup]:
        """The subgroups with the part that each rank owns, in order."""
        return [page.shared for page in self.all_pages]

    @property
    def parameters(self) -> list[PagedParameter]:
        """All parameters, in order of the groups."""
        return [parameter for group in self.groups for parameter in group.parameters]

    def memory(self) -> dict[str, dict[str, int]]:
        """Return place -> what is there -> bytes; see Pages.memory()."""
        places = self.places
        parameters, step = (
            "host" if device.is_host else "GPU" for device in (places.parameters, places.step)
        )
        found: dict[str, Counter[str]] = {place: Counter() for place in ("GPU", "host", "NVMe")}
        for parameter in self.parameters:
            found[parameters]["parameters"] += local_tensor(parameter.tensor).nbytes
            gradient = parameter.tensor.grad if parameter.gradient is None else None
            own = None if gradient is None else local_tensor(gradient)
            if own is not None and not isinstance(own, HostGradient):
                found[parameters]["gradients"] += own.nbytes
        left = self._offloaded(self.pages, places)
        found["host"]["gradients that leave"] = gradients_bytes(left, places.gradient_dtype)
        found[step]["copies of gradients and parameters"] = self.sources.nbytes
        found["GPU"]["pages in a step"] = self.pager.staging_bytes
        found["host"]["buffers of pages"] = self.pager.pool_bytes
        for page in self.pages:
            if page.tier is not Tier.NVME:
                where = "host" if page.tier is Tier.HOST else step
                found[where]["pages that rest there"] += page.layout.nbytes
            files = page.layout.nbytes * len(self.committer.slots)
            found["NVMe"]["files of pages"] += files
        return {place: {k: n for k, n in parts.items() if n} for place, parts in found.items()}

    def attach(self, groups: Sequence[PagedGroup]) -> None:
        """Lay out pages for groups, after the pages of earlier groups. All ranks call this.

        Raises:
            BudgetError, ValueError, TypeError, RunMismatchError, PeerFailed: as
                Pages.attach(). The table is unchanged.
        """
        first_group = len(self.groups)
        specs = together(
            self.ranks,
            "check the param groups",
            lambda: _check_groups(
                groups,
                self.specs,
                first_group=first_group,
                are_encoded=self.usability.has_directory or self.ranks.world_size > 1,
            ),
        )
        shared = describe_groups(self.ranks, groups)
        self._values_may_differ = self.ranks.world_size > 1 and not self.usability.awaits_restore
        pages = together(self.ranks, "lay out pages", lambda: self._lay_out(groups, shared))
        self.replication.prepare(pages)
        self.groups += groups
        self.layout_groups += [[specs[member.name] for member in g.parameters] for g in groups]
        self.all_pages += pages
        self.swept = _swept(self.all_pages)
        self.specs |= specs
        if self.usability.awaits_restore:
            self.group_count_min = len(self.groups)
        self._agree_on_window()

    def allocate_files(self, pages: Sequence[Page]) -> None:
        """Allocate the files that steps write. A full disk then fails before a step."""
        self.committer.allocate({page.index: page.layout for page in pages})

    def require_same_values(self) -> None:
        """Raise if values of replicas differ from the owner. Checks once after attach()."""
        if self._values_may_differ:
            require_same_values(self.ranks, self.groups, self.partition)
            self._values_may_differ = False

    def are_replicated(self, names: Collection[str]) -> bool:
        """Return whether several ranks hold the same elements of any of these parameters."""
        wanted = set(names)
        return any(
            shard.spec.name in wanted and any(shard.parameter.holding.replicas())
            for subgroup in self.partition
            for shard in subgroup.shards
        )

    def replicate(self) -> None:
        """Send all parameters from their owners to their replicas. All ranks call this."""
        for page in self.all_pages:
            self.replication.begin(page, page.source, page.parameters)
        self.replication.finish()
        self._values_may_differ = False

    def move(self, tier: Tier) -> None:
        """Move all pages to one tier and keep them there. All ranks call this.

        Raises:
            BudgetError: the pages of a rank do not fit. Nothing was changed.
            StorageError, CorruptionError: a page could not be read or written.
        """
        placement = together(
            self.ranks, "plan a move", lambda: self._plan(self.all_pages, self.places, tier)
        )
        together(self.ranks, "move pages", lambda: self._move(placement))
        self._tier = tier
        self._agree_on_window()

    def ensure_placed(self) -> None:
        """Place the pages again if an earlier placement was interrupted."""
        if not self._is_placed:
            self._place(self.pages, self._plan(self.all_pages, self.places, self._tier))

    def offload_gradients(self) -> None:
        """Move to the host the gradients that should have left the device during backward."""
        if self._host_gradients is not None:
            self._host_gradients.take_rest()

    def close(self) -> None:
        """Free all memory, after waiting until nothing uses it."""
        try:
            self.sources.close()
            if self._host_gradients is not None:
                self._host_gradients.close()
            self._host_gradients = None
        finally:
            self.pager.close(self.pages)

    def _lay_out(
        self, groups: Sequence[PagedGroup], shared: Sequence[Sequence[SharedParameter]]
    ) -> list[Page]:
        """Cut groups into subgroups; return this rank's pages of them, with memory and files."""
        rank, world_size = self.ranks.rank, self.ranks.world_size
        # Without files and with one rank, pages are not cut: a tensor can then show a whole state.
        may_cut = self.usability.has_directory or world_size > 1
        loads = owned_costs(self.partition, world_size)
        members = {parameter.name: parameter for group in groups for parameter in group.parameters}
        pages = self.pages
        first = len(pages)
        new_pages = []
        for number, parameters in enumerate(shared, start=len(self.groups)):
            for subgroup in partition_ranks(
                number, parameters, self._page_bytes, world_size, loads, may_cut=may_cut
            ):
                own = {shard.spec.name: members[shard.spec.name] for shard in subgroup.shards}
                source = Source(subgroup.places(rank))
                page = Page(len(pages), lay_out(subgroup.of(rank)), subgroup, own, source)
                new_pages.append(page)
                if page.is_empty:
                    page.content = Content.LOADED  # There is nothing to make or read.
                else:
                    pages.append(page)
        device = device_of([*self.groups, *groups])
        places = self.places if self.groups else self._open_places(device)
        if self._offloads and not places.parameters.is_host:
            for parameter in members.values():
                require_offloadable(parameter, world_size)
        if places.parameters.is_host and not places.step.is_host:
            for parameter in members.values():
                require_page_locked(parameter)
        placement = self._plan([*self.all_pages, *new_pages], places, self._tier)
        self.places = places
        self.replication.device = places.gpu.device
        self._place(pages, placement)
        if not self.usability.awaits_restore:
            self.allocate_files(pages[first:])
        return new_pages

    def _open_places(self, parameters: torch.device) -> Places:
        """Return the devices of parameters and steps.

        Raises:
            ValueError: the devices are two different GPUs.
        """
        step_on = self._step_on or parameters
        types = {step_on.type, parameters.type}
        if "cpu" not in types and step_on.index not in (None, parameters.index):
            raise ValueError(
                f"step_on is {str(step_on)!r} and the parameters are on {str(parameters)!r}: step "
                "where the parameters are, or let one of the two be the CPU"
            )
        own = open_device(parameters)
        return Places(
            parameters=own,
            step=own if len(types) == 1 else open_device(step_on),
            offloads=self._offloads,
            gradient_dtype=self._gradient_dtype,
        )

    def _agree_on_window(self) -> None:
        """Set the window of all ranks to the window of the rank with the fewest buffers."""
        limits = self.ranks.gather(self.pager.held_max)
        self.window_max = min([self._window, *(limit for limit in limits if limit is not None)])

    def _plan(self, all_pages: Sequence[Page], places: Places, tier: Tier | None) -> Placement:
        """Return the tier of each page that is not empty: one tier for all, or by the budget.

        Args:
            all_pages: all pages, in order; some may be empty.
            places: the devices of parameters and steps.
            tier: the tier of all pages; None: the budget decides.

        Raises:
            BudgetError: the budget is too small.
        """
        pages = [page for page in all_pages if not page.is_empty]
        sizes = [page.layout.nbytes for page in pages]
        if not self.usability.has_directory:  # Without files, no budget applies.
            default = Tier.HOST if places.step.is_host else Tier.DEVICE
            tiers = (tier or default,) * len(pages)
            return Placement(tiers=tiers, buffers=0, buffer_bytes=0)
        budget = replace(self._budget, reserved=self._host_bytes(pages, places))
        positions = {page: position for position, page in enumerate(pages)}
        order = [positions[page] for page in _swept(all_pages) if not page.is_empty]
        try:
            return place(sizes, budget, order) if tier is None else place_all(sizes, budget, tier)
        except BudgetError as error:
            page_bytes = self._smaller_page_bytes(pages, budget, places)
            if page_bytes is None or tier in (Tier.DEVICE, Tier.HOST):
                raise
            unit, count = ("MiB", 2**20) if page_bytes % 2**20 == 0 else ("KiB", 2**10)
            raise BudgetError(
                f'{error}, or begin a run with page_bytes="{page_bytes // count}{unit}"'
            ) from None

    def _slabs_bytes(self, pages: Sequence[Page], places: Places) -> int:
        return places.slabs_bytes([page.layout for page in pages], self._window)

    def _offloaded(self, pages: Sequence[Page], places: Places) -> list[PagedParameter]:
        """Return the parameters whose gradients leave the GPU during backward."""
        if not places.offloads or places.parameters.is_host:
            return []
        return list({n: p for page in pages for n, p in page.parameters.items()}.values())

    def _host_bytes(self, pages: Sequence[Page], places: Places) -> int:
        """Return the bytes of host memory for gradients and parameters."""
        slabs = self._slabs_bytes(pages, places) if places.step.is_host else 0
        return slabs + gradients_bytes(self._offloaded(pages, places), places.gradient_dtype)

    def _smaller_page_bytes(
        self, pages: Sequence[Page], budget: Budget, places: Places
    ) -> int | None:
        """Return a smaller page_bytes that fits the budget; None if no size is known to fit."""
        page_bytes = default_page_bytes(budget)
        if page_bytes >= self._page_bytes:
            return None
        shards = [shard for page in pages for shard in page.layout.subgroup.shards]
        whole = [uncut_nbytes(shard) for shard in shards]
        sections_max = 1 + max(len(shard.parameter.stored) for shard in shards)
        largest = max(page_bytes, *whole, 0) + sections_max * SECTOR_BYTES
        gradients = gradients_bytes(self._offloaded(pages, places), places.gradient_dtype)
        slabs = budget.reserved - gradients
        slabs = slabs * largest // max(page.layout.nbytes for page in pages)
        pool = (budget.buffers or BUFFERS_MIN) * align_up(largest, SECTOR_BYTES)
        needed = pool + slabs + gradients
        return page_bytes if needed <= budget.host_memory else None

    def _prepare_offload(self, parameters: Sequence[PagedParameter]) -> None:
        if self._host_gradients is not None:
            if self._host_gradients.are_of(parameters):
                return
            self._host_gradients.close()
            self._host_gradients = None  # Free its memory before new memory is allocated.
        if parameters:
            self._host_gradients = HostGradients(
                self.places.parameters, parameters, self._gradient_dtype
            )

    def _move(self, placement: Placement) -> None:
        self._place(self.pages, placement)
        with self.usability.failing(interrupts=True):
            self.pager.load(self.pages)

    def _place(self, pages: Sequence[Page], placement: Placement) -> None:
        """Bring pages to the tiers of a placement.

        Args:
            pages: all pages of the table, and after them the pages of groups to be attached.
            placement: the tier of each page.

        Raises:
            BudgetError: the machine has not enough memory. If steps were done, the store has
                failed, and ensure_placed() retries after restore(). Otherwise the table is
                unchanged, and pages without files keep their memory and content.
        """
        self._is_placed = False
        places = self.places
        slab_bytes = self._slabs_bytes(pages, places)
        try:
            if self.sources.nbytes != slab_bytes:
                self.sources.close()
            self.pager.make_way(pages, placement, places.step)
            if self.sources.nbytes != slab_bytes:
                self.sources = Sources(places, slab_bytes, self._window)
            self._prepare_offload(self._offloaded(pages, places))
            self.pager.place(
                pages,
                placement,
                places.step,
                host_bytes=self._host_bytes(pages, places),
                device_bytes=0 if places.step.is_host else slab_bytes,
                window=self._window,
            )
        except BaseException as error:
            # The traceback would keep memory that a retry needs.
            traceback.clear_frames(error.__traceback__)
            self.pager.free(pages[len(self.pages) :])
            if not self.pages:
                self.pager.free_pool()
                self._is_placed = True
            elif self.usability.has_directory:
                self.usability.fail(error)
            raise
        self._is_placed = True


def _swept(all_pages: Sequence[Page]) -> list[Page]:
    """Return pages in the order of a sweep. Empty pages count, so all ranks get one order."""
    order = sweep_order([page.shared.elementwise for page in all_pages])
    return [all_pages[number] for number in order]


def _check_groups(
    groups: Sequence[PagedGroup],
    known: Collection[str],
    *,
    first_group: int,
    are_encoded: bool,
) -> dict[str, ParameterSpec]:
    """Check that a store can keep these groups; return parameter name -> spec.

    Args:
        groups: the groups to attach.
        known: names of the parameters that were attached before.
        first_group: number of the first of these groups.
        are_encoded: whether hyperparameters are committed, or compared between ranks.

    Raises:
        ValueError, TypeError: two parameters have one name, or a hyperparameter is of a type
            that a commit cannot hold.
    """
    specs: dict[str, ParameterSpec] = {}
    for spec in (parameter.spec for group in groups for parameter in group.parameters):
        if spec.name in specs or spec.name in known:
            raise ValueError(f"two parameters are named {spec.name!r}: names must be unique")
        specs[spec.name] = spec
    if are_encoded:
        for index, group in enumerate(groups, start=first_group):
            encode_hyperparameters(index, group)  # An error is raised now, not by a later commit.
    return specs


def device_of(groups: Sequence[PagedGroup]) -> torch.device:
    """Return the device that all parameters are on.

    Raises:
        ValueError: the parameters are on several devices.
    """
    members = [parameter for group in groups for parameter in group.parameters]
    devices = {parameter.tensor.device: parameter.name for parameter in members}
    if len(devices) > 1:
        places = " and ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ValueError(f"one store pages the parameters of one device, got {places}")
    return next(iter(devices), torch.device("cpu"))
