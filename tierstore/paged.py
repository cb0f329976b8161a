"""The side of a store that faces an optimizer: attach groups, sweep their pages, see states."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from tierstore.config import StoreConfig
from tierstore.errors import RunDirectoryError, SweepError, TierstoreError
from tierstore.layout.ownership import SharedSubgroup
from tierstore.layout.parameters import PagedGroup, ParameterSpec
from tierstore.paging import rank_checks
from tierstore.paging.device import Device, PlainDevice, open_device
from tierstore.paging.host_mirrors import Mirrors, mirrors_bytes
from tierstore.paging.page import NoFiles, Page, PageFiles
from tierstore.paging.page_table import (
    LocalSubgroup,
    check_groups,
    device_of,
    local_subgroups,
    pages_of,
)
from tierstore.paging.pager import Pager
from tierstore.paging.replication import Spread
from tierstore.paging.sweep import Changes, SteppedPages, Sweep
from tierstore.paging.tier_plan import Placement, Tier, place, place_all
from tierstore.paging.views import PageView
from tierstore.paging.whole_states import (
    agree_to_read,
    agree_to_write,
    fill_states,
    read_states,
    write_pages,
)
from tierstore.ranks.peers import Ranks, together
from tierstore.run.committer import Committer, Progress
from tierstore.run.page_files import create_files
from tierstore.run.recovery import abandon_in_children, open_run
from tierstore.run.usability import Guard
from tierstore.storage.base import Storage

# The matrices of one subgroup are gathered, of one computed, and of one the updates come back.
_WINDOW_MAX = 3


class PagedStates:
    """States of parameters in pages of a run, stepped page by page.

    Args:
        storage: the rank's files; closed if the run cannot be opened. None keeps every page
            in memory, where nothing is committed.
        config: the settings.
        ranks: all ranks of the job, which have the same parameters.
        resume: go on with the run that is there.
        overwrite: delete it and begin a new one.
    """

    def __init__(
        self,
        storage: Storage | None,
        config: StoreConfig,
        ranks: Ranks,
        *,
        resume: bool,
        overwrite: bool,
    ) -> None:
        self._config = config
        self._page_bytes = config.page_bytes
        self._ranks = ranks
        self._spread = Spread(ranks)
        self._guard = Guard(on_failure=ranks.fail)
        self._groups: list[PagedGroup] = []
        self._subgroups: list[LocalSubgroup] = []
        # Most pages that are stepped at once, whatever the buffers are, and with these.
        self._held = self._window_max = 1 if ranks.world_size == 1 else _WINDOW_MAX
        self._device: Device | None = None  # That of the parameters.
        self._mirrors: Mirrors | None = None  # Only where that is not where steps are computed.
        self._tier: Tier | None = None  # Where move() brought all pages.
        self._displaced: Sequence[Page] | None = None  # Those of a placement that did not end.
        self._specs: dict[str, ParameterSpec] = {}
        self._may_differ = False  # Whether ranks may hold other values than each other.
        self._changes = Changes()
        self._storage = storage
        self._committer = Progress()
        self._pager = Pager(NoFiles(), self._committer)
        if storage is not None:
            self._open(storage, resume, overwrite)

    def _open(self, storage: Storage, resume: bool, overwrite: bool) -> None:
        try:
            identity, found = open_run(
                storage,
                self._ranks,
                resume=resume,
                overwrite=overwrite,
                page_bytes=self._config.page_bytes,
            )
        except BaseException:
            storage.close()
            raise
        self._guard.awaits_restore = found is not None
        self._page_bytes = identity.page_bytes
        peers = self._ranks.commits
        committer = Committer(storage, peers, identity, commit_every=self._config.commit_every)
        committer.begin_attempt(found)
        files = PageFiles(storage, run_id=identity.run_id, checksums=self._config.checksums)
        self._committer = committer
        self._pager = Pager(files, committer)
        abandon_in_children(storage)

    def attach(self, groups: Sequence[PagedGroup]) -> None:
        """Lay out pages for these groups, after those of groups attached before.

        Nothing is written yet. Call it at the first step or just before restore(), when
        frameworks have put the parameters where they stay. All ranks call it together.

        Raises:
            BudgetError: ``host_memory`` cannot hold the fewest buffers that work; the
                message names the smallest budget that does.
            ValueError, TypeError: a name twice, or a hyperparameter that no commit can hold.
            RunMismatchError: the ranks have different parameters; the message names the first.
            PeerFailed: any of these on another rank.
        """
        self._guard.require_usable()
        specs = together(
            self._ranks,
            "check the param groups",
            lambda: check_groups(groups, self._specs, first_group=len(self._groups)),
        )
        shared = rank_checks.partition_groups(
            self._ranks,
            groups,
            earlier=self._shared,
            first_group=len(self._groups),
            page_bytes=self._page_bytes,
        )
        self._may_differ = self._ranks.world_size > 1 and not self._guard.awaits_restore
        subgroups = together(self._ranks, "lay out pages", lambda: self._laid_out(groups, shared))
        self._spread.prepare(shared)
        self._groups += groups
        self._subgroups += subgroups
        self._specs |= specs
        self._agree_on_window()

    def _laid_out(
        self, groups: Sequence[PagedGroup], shared: Sequence[SharedSubgroup]
    ) -> list[LocalSubgroup]:
        """Return the subgroups of some groups, and have room for their pages."""
        subgroups = local_subgroups(
            groups,
            shared,
            rank=self._ranks.rank,
            first_subgroup=len(self._subgroups),
            first_page=len(self._pages),
        )
        pages = pages_of(subgroups)
        all_pages = [*self._pages, *pages]
        device = device_of([*self._groups, *groups])
        placement = self._placement(all_pages, device, self._tier)
        if not self._groups:
            self._device = open_device(device)
        self._place(all_pages, placement)
        if self._storage is not None and not self._guard.awaits_restore:
            self._allocate(pages)
        return subgroups

    @property
    def _pages(self) -> list[Page]:
        return pages_of(self._subgroups)

    def _agree_on_window(self) -> None:
        """Have as many subgroups in flight as the rank with the fewest buffers can."""
        limits = self._ranks.gather(self._pager.held_max)
        self._window_max = min([self._held, *(limit for limit in limits if limit is not None)])

    @contextlib.contextmanager
    def sweep(self, window: int = 1) -> Iterator[SteppedPages]:
        """Step once over all pages: ``with store.sweep() as pages: for page in pages: ...``.

        Yields the pages of which some parameter has a gradient on any rank, in order: of each
        subgroup a page, be it empty. The loop body updates ``master`` and ``states`` of the
        chunks in place; the store then writes the parameters and the page, and sends the
        parameters to the ranks that hold them, too. A step that was not committed yet is
        committed first.

        Args:
            window: how many pages are stepped at once: each is written when so many more were
                asked for. At most ``window_max``, and the same on all ranks.

        If the loop raises or stops early after the first page was handed out, the
        parameters are of two steps and the store is failed. (A store without a directory,
        which has no step to go back to, goes on as optimizers of PyTorch do.)

        Raises:
            StorageError, CorruptionError: a page could not be read or written. Before the
                first page was handed out, nothing was changed and the step may be retried.
            SweepError: the loop was left before its last page.
            ValueError: a parameter or gradient does not fit what was attached.
            PeerFailed: any of these on another rank.

        Warns:
            UserWarning: a parameter was changed outside of the optimizer. Where it takes a
                device to find out, that is told when the next sweep begins.
        """
        self._guard.require_restored()
        if not 1 <= window <= self._window_max:
            raise ValueError(f"window must be from 1 to {self._window_max}, got {window}")
        self._place_again()
        self._compare_values()
        present = rank_checks.names_with_gradient(self._ranks, self._groups, self._specs)
        self._changes.warn(wait=True)
        if self._committer.is_due:
            self._begin_commit()
        step = self._committer.step
        sweep = Sweep(
            self._pager,
            self._subgroups,
            mirrors=self._mirrors,
            spread=self._spread,
            free_gradients=self._config.free_gradients,
            present=present,
            window=window,
        )
        try:
            self._guard.sweeping = True
            self._committer.step = step + 1
            with contextlib.closing(sweep.stepped_pages()) as pages:
                yield SteppedPages(pages, present, sweep.stepped)
            if not sweep.finished:
                raise SweepError("the sweep was left before its last page")
            self._committer.note_written(len(self._groups))
        except BaseException as error:
            if sweep.begun or (sweep.reading and not self._may_retry(error)):
                self._fail(error)
            else:
                self._committer.step = step
            raise
        finally:
            self._guard.sweeping = False
        device = PlainDevice() if self._mirrors else self._device
        if device is not None:
            self._changes.note(sweep.changed, device)
            self._changes.warn(wait=False)  # Or the next sweep looks, and nobody waits now.

    def prefetch(self) -> None:
        """Start to read what the next sweep will step, as far as buffers are free; return at once.

        Raises:
            StorageError: a write of the last step failed, or a read could not begin, which
                may be tried again.
        """
        self._guard.require_restored()
        try:
            self._pager.prefetch(self._pages)
        except BaseException as error:
            if self._may_retry(error):
                self._pager.drop_early()
            else:
                self._fail(error)
            raise

    @property
    def ranks(self) -> Ranks | None:
        """All ranks of the job that the parameters are one model of; None where there is one."""
        return self._ranks if self._ranks.world_size > 1 else None

    @property
    def window_max(self) -> int:
        """How many pages sweep() may have stepped at once, the same on all ranks."""
        return self._window_max

    @property
    def compute(self) -> str:
        """Where steps are computed: on the parameters' "device", or on the "host"."""
        return self._config.compute

    @property
    def group_count(self) -> int:
        """Number of groups attached; those of one optimizer, which sweep() steps together."""
        return len(self._groups)

    @property
    def scalars(self) -> dict[str, dict[str, float]]:
        """Parameter name -> scalar name -> value: small states such as a step count.

        Kept in memory and stored with every commit; restore() puts them back. Change them
        within sweep(), after its last page: whatever interrupts that fails the store.
        """
        return self._committer.scalars

    def read_states(
        self, names: Collection[str] | None = None
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Return the states of some parameters, or of all, as they are now.

        The tensors are private mappings of the page files: they cost no memory, and stay as
        they are. (What this rank has in pieces, or gets from others, is put together in an
        unnamed file; without a directory all are copies.) All ranks ask together for the same.

        Returns:
            Parameter name -> state name -> tensor of the parameter's shape, a DTensor as that
            may be one, on the host. The state "master" is there only for parameters that are
            not their own; before the first step it is the parameter, and other states are zero.
        """
        self._guard.require_restored()
        wanted = self._specs.keys() if names is None else names
        agree_to_read(self._ranks, wanted)
        self._place_again()
        try:
            return read_states(self._pager, self._groups, self._subgroups, self._spread, wanted)
        except BaseException as error:
            if not self._may_retry(error):
                self._fail(error)
            raise

    @torch.no_grad()
    def write_states(
        self,
        values: Mapping[str, Mapping[str, torch.Tensor]],
        scalars: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """Replace states, outside of a step. States not named become zero, or the parameter.

        Args:
            values: as read_states() returns them, or whole; converted to each state's dtype.
            scalars: what to update ``scalars`` with, together with the pages.

        Raises:
            ValueError: an unknown name, or a wrong shape or placement. Nothing was changed.
        """
        self._guard.require_restored()
        agree_to_write(self._ranks, self._groups, values)
        self._place_again()
        self._write_pages(lambda view: fill_states(view, values), scalars or {})

    @property
    def step(self) -> int:
        """Number of steps done, in this run and before it was resumed."""
        return self._committer.step

    def _allocate(self, pages: Sequence[Page]) -> None:
        """Allocate all files that steps will write, so that a full disk is found before a step."""
        committer, storage = self._require_committer("attach()"), self._storage
        assert storage is not None
        layouts = {page.index: page.layout for page in pages}
        names = create_files(storage, layouts, committer.slots)
        committer.provide_spares(name for name in names if storage.is_shared(name))

    def _placement(
        self, pages: Sequence[Page], device: torch.device, tier: Tier | None
    ) -> Placement:
        sizes = [page.layout.nbytes for page in pages]
        on_host = device.type == "cpu" or self._config.compute == "host"
        if self._storage is None:  # There is nothing to plan.
            here = Tier.HOST if on_host else Tier.DEVICE
            return Placement(tiers=(tier or here,) * len(pages), buffers=0, buffer_bytes=0)
        budget = self._config.budget
        if self._config.compute == "host":
            budget = replace(budget, reserved=mirrors_bytes(pages, self._held))
        return place(sizes, budget) if tier is None else place_all(sizes, budget, tier)

    def _bring_to(self, tier: Tier) -> None:
        """Move all pages to a tier now."""
        if self._device is not None:
            placement = self._placement(self._pages, self._device.device, tier)
            self._place(self._pages, placement)
            with self._guard.failing(interrupts=True):
                self._pager.load(self._pages)

    def _place(self, pages: Sequence[Page], placement: Placement) -> None:
        assert self._device is not None
        self._displaced = pages
        on_host = self._config.compute == "host"
        stepped_on = PlainDevice() if on_host else self._device
        beside = mirrors_bytes(pages, self._held) if on_host else 0
        try:
            if self._mirrors is not None and self._mirrors.nbytes != beside:
                self._mirrors.close()
                self._mirrors = None
            self._pager.make_way(pages, placement, stepped_on)
            if beside and self._mirrors is None:
                self._mirrors = Mirrors(self._device, beside, self._held)
            self._pager.place(pages, placement, stepped_on, other_bytes=beside, window=self._held)
        except BaseException as error:
            # In its traceback would live on what was taken so far, and it is taken anew.
            traceback.clear_frames(error.__traceback__)
            if self._storage and self._pages:
                self._guard.fail(error)
            else:  # Nothing is lost: without a storage, pages are whole in one tier or the other.
                self._pager.free_memory(pages[len(self._pages) :])
                self._displaced = self._pages or None
            raise
        self._displaced = None

    def _place_again(self) -> None:
        """Place pages anew if that failed: from their files, or from memory if they have none."""
        if self._displaced is not None and self._device is not None:
            if self._storage:
                # Of those that were to be attached the error still knows.
                self._pager.free_memory(self._displaced)
            self._place(self._pages, self._placement(self._pages, self._device.device, self._tier))

    def _write_pages(
        self, fill: Callable[[PageView], None], scalars: Mapping[str, Mapping[str, float]]
    ) -> None:
        """Make all pages and some scalars anew; fail the store if anything comes in between."""
        try:
            write_pages(self._pager, self._pages, fill)
            for name, values in scalars.items():
                self._committer.scalars[name] = dict(values)
            self._committer.note_written(len(self._groups))
            self._spread_all()
        except BaseException as error:
            self._fail(error)
            raise

    def _spread_all(self) -> None:
        """Send all parameters from their owners to the other ranks that hold them."""
        for subgroup in self._subgroups:
            self._spread.begin(subgroup, subgroup.direct, subgroup.parameters)
        self._spread.finish()
        self._may_differ = False

    @property
    def _shared(self) -> list[SharedSubgroup]:
        return [subgroup.shared for subgroup in self._subgroups]

    def _compare_values(self) -> None:
        if self._may_differ:
            rank_checks.require_same_values(self._ranks, self._groups, self._shared)
            self._may_differ = False

    def _begin_commit(self) -> None:
        self._compare_values()
        committer = self._require_committer("a commit")
        rank_checks.require_same_commit(self._ranks, self._groups, committer.scalars)
        with self._guard.failing(interrupts=True):
            writes = self._pager.write_changed(self._pages)
        pages = [(page.layout, page.entry) for page in self._pages]
        manifest = committer.manifest(self._groups, pages, shared=self._ranks.world_size > 1)
        with self._pager.stalled(), self._guard.failing(interrupts=False):
            committer.begin(manifest, writes)

    def _require_committer(self, call: str) -> Committer:
        if not isinstance(self._committer, Committer):
            raise RunDirectoryError(f"{call} needs a store with a directory; this one has none")
        return self._committer

    def _may_retry(self, error: BaseException) -> bool:
        """Whether a call that only read leaves everything as it was, despite an error."""
        alone = self._ranks.world_size == 1  # Other ranks may stand in the middle of the step.
        # (An interrupt may have come anywhere within the pager.)
        return alone and isinstance(error, TierstoreError) and not self._pager.lost_write

    def _fail(self, error: BaseException) -> None:
        if self._storage:
            self._guard.fail(error)
        else:  # There is nothing to go back to, so this rank may go on; the others cannot.
            self._ranks.fail(error)
