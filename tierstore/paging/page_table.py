"""The page table: the param groups of a store, their pages, and the memory of each page."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import replace

from tierstore.layout.ownership import SharedSubgroup
from tierstore.layout.parameters import PagedGroup, PagedParameter, ParameterSpec
from tierstore.paging import rank_checks
from tierstore.paging.device import Device, PlainDevice, open_device
from tierstore.paging.host_mirrors import Mirrors, NoMirrors, mirrors_bytes
from tierstore.paging.local_subgroups import (
    LocalSubgroup,
    check_groups,
    device_of,
    local_subgroups,
    pages_of,
)
from tierstore.paging.page import Page
from tierstore.paging.pager import Pager
from tierstore.paging.replication import Spread
from tierstore.paging.tier_plan import Budget, Placement, Tier, place, place_all
from tierstore.ranks.peers import Ranks, together
from tierstore.run.committer import Progress
from tierstore.run.usability import Usability

# With several ranks, the matrices of one subgroup are gathered, the updates of the next are
# computed, and the updates of a third are scattered, all at once.
_WINDOW_MAX = 3


class PageTable:
    """The param groups that were attached, cut into subgroups and pages.

    Args:
        ranks: all ranks of the job, which attach the same groups.
        pager: moves the pages.
        committer: allocates the page files.
        usability: of the store.
        budget: the memory that pages may use.
        page_bytes: about how large a page is.
        on_host: whether pages are stepped on the host wherever the parameters are.
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
        on_host: bool,
    ) -> None:
        self.groups: list[PagedGroup] = []
        self.specs: dict[str, ParameterSpec] = {}
        """Parameter name -> spec when the parameter was attached."""
        self.subgroups: list[LocalSubgroup] = []
        self.pager = pager
        self.replication = Spread(ranks)
        self.mirrors: Mirrors | NoMirrors = NoMirrors()
        self._ranks = ranks
        self._budget = budget
        self._page_bytes = page_bytes
        self._on_host = on_host
        self._committer = committer
        self._usability = usability
        # Most pages that may be stepped at once: with any number of buffers, and with those here.
        self._window = self.window_max = 1 if ranks.world_size == 1 else _WINDOW_MAX
        self._device: Device = PlainDevice()  # The parameters are there.
        self._tier: Tier | None = None  # The tier that move() chose for all pages.
        self._is_placed = True
        self._values_may_differ = False  # Whether replicas may hold other values than the owner.

    @property
    def pages(self) -> list[Page]:
        """All pages of this rank, in order."""
        return pages_of(self.subgroups)

    @property
    def partition(self) -> list[SharedSubgroup]:
        """The subgroups with the part that each rank owns, in order."""
        return [subgroup.shared for subgroup in self.subgroups]

    @property
    def parameters(self) -> list[PagedParameter]:
        """All parameters, in order of the groups."""
        return [parameter for group in self.groups for parameter in group.parameters]

    @property
    def step_device(self) -> Device:
        """The device that pages are stepped on."""
        return PlainDevice() if self._on_host else self._device

    def attach(self, groups: Sequence[PagedGroup]) -> None:
        """Lay out pages for groups, after the pages of earlier groups. All ranks call this.

        Raises:
            BudgetError, ValueError, TypeError, RunMismatchError, PeerFailed: as
                TierStore.attach(). The table is unchanged.
        """
        first_group = len(self.groups)
        specs = together(
            self._ranks,
            "check the param groups",
            lambda: check_groups(groups, self.specs, first_group=first_group),
        )
        partition = rank_checks.partition_groups(
            self._ranks,
            groups,
            earlier=self.partition,
            first_group=first_group,
            page_bytes=self._page_bytes,
        )
        self._values_may_differ = self._ranks.world_size > 1 and not self._usability.awaits_restore
        subgroups = together(
            self._ranks, "lay out pages", lambda: self._laid_out(groups, partition)
        )
        self.replication.prepare(partition)
        self.groups += groups
        self.subgroups += subgroups
        self.specs |= specs
        self._agree_on_window()

    def allocate_files(self, pages: Sequence[Page]) -> None:
        """Allocate the files that steps write, so that a full disk is found before a step."""
        self._committer.allocate({page.index: page.layout for page in pages})

    def require_same_values(self) -> None:
        """Refuse replicas of other values than the owner's, once after attach()."""
        if self._values_may_differ:
            rank_checks.require_same_values(self._ranks, self.groups, self.partition)
            self._values_may_differ = False

    def replicate(self) -> None:
        """Send all parameters from their owners to their replicas. All ranks call this."""
        for subgroup in self.subgroups:
            self.replication.begin(subgroup, subgroup.direct, subgroup.parameters)
        self.replication.finish()
        self._values_may_differ = False

    def move(self, tier: Tier) -> None:
        """Move all pages to one tier, to stay there. All ranks call this.

        Raises:
            BudgetError: a rank has no room; nothing was changed.
            StorageError, CorruptionError: a page could not be read or written.
        """
        placement = together(
            self._ranks, "plan a move", lambda: self._plan(self.pages, self._device, tier)
        )
        together(self._ranks, "move pages", lambda: self._move(placement))
        self._tier = tier
        self._agree_on_window()

    def ensure_placed(self) -> None:
        """Place the pages again if that was interrupted before."""
        if not self._is_placed:
            self._place(self.pages, self._plan(self.pages, self._device, self._tier))

    def close(self) -> None:
        """Free all memory once nothing uses it."""
        try:
            self.mirrors.close()
        finally:
            self.pager.close(self.pages)

    def _laid_out(
        self, groups: Sequence[PagedGroup], partition: Sequence[SharedSubgroup]
    ) -> list[LocalSubgroup]:
        """Return the subgroups of some groups, with memory and files for their pages."""
        subgroups = local_subgroups(
            groups,
            partition,
            rank=self._ranks.rank,
            first_subgroup=len(self.subgroups),
            first_page=len(self.pages),
        )
        new_pages = pages_of(subgroups)
        pages = [*self.pages, *new_pages]
        torch_device = device_of([*self.groups, *groups])
        device = self._device if self.groups else open_device(torch_device)
        placement = self._plan(pages, device, self._tier)
        self._device = device
        self._place(pages, placement)
        if not self._usability.awaits_restore:
            self.allocate_files(new_pages)
        return subgroups

    def _agree_on_window(self) -> None:
        """Let all ranks step as many pages at once as the rank with the fewest buffers can."""
        limits = self._ranks.gather(self.pager.held_max)
        self.window_max = min([self._window, *(limit for limit in limits if limit is not None)])

    def _plan(self, pages: Sequence[Page], device: Device, tier: Tier | None) -> Placement:
        """Return the tier of each page: as the budget allows, or one tier for all pages.

        Args:
            pages: all pages, in order.
            device: the device of the parameters.
            tier: the tier of all pages; None: the budget decides.

        Raises:
            BudgetError: the budget is too small.
        """
        sizes = [page.layout.nbytes for page in pages]
        if not self._usability.has_directory:  # Without files there is no budget to keep to.
            default = Tier.HOST if self._on_host or device.is_host else Tier.DEVICE
            tiers = (tier or default,) * len(pages)
            return Placement(tiers=tiers, buffers=0, buffer_bytes=0)
        budget = self._budget
        if self._on_host:
            budget = replace(budget, reserved=mirrors_bytes(pages, self._window))
        return place(sizes, budget) if tier is None else place_all(sizes, budget, tier)

    def _move(self, placement: Placement) -> None:
        self._place(self.pages, placement)
        with self._usability.failing(interrupts=True):
            self.pager.load(self.pages)

    def _place(self, pages: Sequence[Page], placement: Placement) -> None:
        """Bring pages to the tiers of a placement.

        Args:
            pages: all pages of the table, and after them the pages of groups to be attached.
            placement: the tier of each page.

        Raises:
            BudgetError: the machine has not enough memory. If steps were done, the store has
                failed, and ensure_placed() tries again after restore(). Else the table is
                unchanged; pages without files keep their content in the memory that they have.
        """
        self._is_placed = False
        mirror_bytes = mirrors_bytes(pages, self._window) if self._on_host else 0
        try:
            if self.mirrors.nbytes != mirror_bytes:
                self.mirrors.close()
                self.mirrors = NoMirrors()
            self.pager.make_way(pages, placement, self.step_device)
            if self.mirrors.nbytes != mirror_bytes:
                self.mirrors = Mirrors(self._device, mirror_bytes, self._window)
            self.pager.place(
                pages,
                placement,
                self.step_device,
                other_bytes=mirror_bytes,
                window=self._window,
            )
        except BaseException as error:
            # The traceback would keep memory allocated that a retry needs.
            traceback.clear_frames(error.__traceback__)
            self.pager.free(pages[len(self.pages) :])
            if not self.pages:
                self.pager.free_pool()
                self._is_placed = True
            elif self._usability.has_directory:
                self._usability.fail(error)
            raise
        self._is_placed = True
