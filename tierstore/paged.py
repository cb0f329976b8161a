"""The side of a store that faces an optimizer: attach groups, sweep their pages, see states."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from tierstore.commit import Commits
from tierstore.config import StoreConfig
from tierstore.device import Device, PlainDevice, open_device
from tierstore.errors import SweepError, TierstoreError
from tierstore.groups import PagedGroup, ParameterSpec, check_states, check_unchanged
from tierstore.guard import Guard
from tierstore.history import History
from tierstore.mirrors import MIRRORS, Mirrors, mirror_bytes
from tierstore.pages import check_groups, create_files, device_of, make_pages
from tierstore.peers import Peers
from tierstore.placement import Placement, Tier, place, place_all
from tierstore.residency import Pager
from tierstore.run import abandon_in_children, open_run
from tierstore.states import fill_states, read_states, write_pages
from tierstore.storage.base import Storage
from tierstore.sweep import Changed, Sweep
from tierstore.transit import Page
from tierstore.units import SECTOR_BYTES, align_up
from tierstore.views import PageView


class PagedStates:
    """States of parameters in pages of a run, stepped page by page.

    Args:
        storage: the rank's files; closed if the run cannot be opened. None keeps every page
            in memory, where nothing is committed.
        config: the settings.
        peers: all ranks.
        resume: go on with the run that is there.
        overwrite: delete it and begin a new one.
    """

    def __init__(
        self,
        storage: Storage | None,
        config: StoreConfig,
        peers: Peers,
        *,
        resume: bool,
        overwrite: bool,
    ) -> None:
        self._config = config
        self._peers = peers
        self._guard = Guard()
        self._groups: list[PagedGroup] = []
        self._pages: list[Page] = []
        self._device: Device | None = None  # That of the parameters.
        self._mirrors: Mirrors | None = None  # Only where that is not where steps are computed.
        self._tier: Tier | None = None  # Where move() brought all pages.
        self._displaced: Sequence[Page] | None = None  # Those of a placement that did not end.
        self._specs: dict[str, ParameterSpec] = {}
        self._history = History()
        self._changed: Changed | None = None  # By others, as the last sweep found.
        self._warned = False
        self._storage = storage
        self._pager = Pager(None, run_id="", checksums=False)
        if storage is not None:
            self._open(storage, resume, overwrite)

    def _open(self, storage: Storage, resume: bool, overwrite: bool) -> None:
        try:
            self._identity, found = open_run(
                storage,
                self._peers,
                resume=resume,
                overwrite=overwrite,
                page_bytes=self._config.page_bytes,
            )
        except BaseException:
            storage.close()
            raise
        self._guard.awaits_restore = found is not None
        self._pager = Pager(storage, run_id=self._identity.run_id, checksums=self._config.checksums)
        self._commits = Commits(
            storage, self._peers, found, single_copy=self._config.commit_every is None
        )
        abandon_in_children(storage)

    def attach(self, groups: Sequence[PagedGroup]) -> None:
        """Lay out pages for these groups, after those of groups attached before.

        Nothing is written yet. Call it at the first step or just before restore(), when
        frameworks have put the parameters where they stay.

        Raises:
            BudgetError: ``host_memory`` cannot hold the fewest buffers that work; the
                message names the smallest budget that does.
            ValueError, TypeError: two parameters of one name, or a hyperparameter that no
                commit can hold.
        """
        self._guard.require_usable()
        specs = check_groups(groups, self._specs, first_group=len(self._groups))
        pages = make_pages(
            groups,
            first_group=len(self._groups),
            first_page=len(self._pages),
            page_bytes=self._identity.page_bytes if self._storage else self._config.page_bytes,
        )
        all_pages = [*self._pages, *pages]
        device = device_of([*self._groups, *groups])
        placement = self._placement(all_pages, device, self._tier)
        if not self._groups:
            self._device = open_device(device)
        self._place(all_pages, placement)
        if self._storage is not None and not self._guard.awaits_restore:
            self._allocate(self._storage, pages)
        self._groups += groups
        self._pages += pages
        self._specs |= specs

    @contextlib.contextmanager
    def sweep(self) -> Iterator[Iterator[PageView]]:
        """Step once over all pages: ``with store.sweep() as pages: for page in pages: ...``.

        Yields the pages of which some parameter has a gradient, in order. The loop body
        updates ``master`` and ``states`` of the chunks in place; the store then writes the
        parameters and the page. A step that was not committed yet is committed first.

        If the loop raises or stops early after the first page was handed out, the
        parameters are of two steps and the store is failed. (A store without a directory,
        which has no step to go back to, goes on as optimizers of PyTorch do.)

        Raises:
            StorageError, CorruptionError: a page could not be read or written. Before the
                first page was handed out, nothing was changed and the step may be retried.
            SweepError: the loop was left before its last page.
            ValueError: a parameter or gradient does not fit what was attached.

        Warns:
            UserWarning: a parameter was changed outside of the optimizer. Where it takes a
                device to find out, that is told when the next sweep begins.
        """
        self._guard.require_restored()
        self._place_again()
        for group in self._groups:
            for parameter in group.parameters:
                check_unchanged(parameter, self._specs[parameter.name])
        self._warn_of_changed()
        self._commit_if_due()
        step = self._history.step
        sweep = Sweep(
            self._pager,
            self._pages,
            self._swap_out,
            mirrors=self._mirrors,
            free_gradients=self._config.free_gradients,
        )
        try:
            self._guard.sweeping = True
            self._history.step = step + 1
            with contextlib.closing(sweep.stepped_pages()) as pages:
                yield pages
            if not sweep.finished:
                raise SweepError("the sweep was left before its last page")
            self._history.wrote(len(self._groups))
        except BaseException as error:
            if sweep.begun or (sweep.reading and not self._may_retry(error)):
                self._fail(error)
            else:
                self._history.step = step
            raise
        finally:
            self._guard.sweeping = False
        if sweep.changed and not self._warned:
            device = PlainDevice() if self._mirrors else self._device
            assert device is not None
            self._changed = Changed(sweep.changed, device)
            if self._changed.is_known():  # Or the next sweep looks, and nobody waits now.
                self._warn_of_changed()

    def prefetch(self) -> None:
        """Start to read what the next sweep will step, as far as buffers are free.

        Returns at once. To be called when gradients begin to come, so that the first pages
        are there when the step begins.

        Raises:
            StorageError: a write of the last step failed, or a read could not begin, which
                may be tried again.
        """
        self._guard.require_restored()
        try:
            self._pager.prefetch(self._pages, lambda page: page.layout.readable)
        except BaseException as error:
            if self._may_retry(error):
                self._pager.drop_early()
            else:
                self._fail(error)
            raise

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
        return self._history.scalars

    def read_states(
        self, names: Collection[str] | None = None
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Return the states of some parameters, or of all, as they are now.

        The tensors are private mappings of the page files: they cost no memory, and stay as
        they are while training goes on. (Pieces of a parameter that is cut over pages are
        put together in an unnamed file; without a directory all are copies.)

        Returns:
            Parameter name -> state name -> tensor of the parameter's shape. The state
            "master" is there only for parameters that are not their own master; before the
            first step it is the parameter, and other states are zero.
        """
        self._guard.require_restored()
        self._place_again()
        wanted = self._specs.keys() if names is None else names
        try:
            return read_states(self._pager, self._pages, wanted)
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
            values: as read_states() returns them; converted to the dtype of each state.
            scalars: what to update ``scalars`` with, together with the pages.

        Raises:
            ValueError: an unknown name, or a wrong shape. Nothing was changed.
        """
        self._guard.require_restored()
        for name, states in values.items():
            if name not in self._specs:
                raise ValueError(f"there is no parameter {name!r} in this store")
            check_states(self._specs[name], states)
        self._place_again()
        self._write_pages(lambda view: fill_states(view, values), scalars or {})

    @property
    def step(self) -> int:
        """Number of steps done, in this run and before it was resumed."""
        return self._history.step

    def _allocate(self, storage: Storage, pages: Sequence[Page]) -> None:
        """Allocate all that steps will write to: a full disk shows here and not in one."""
        names = create_files(storage, pages, self._commits.copies)
        self._commits.provide_spares(name for name in names if storage.is_shared(name))

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
            budget = replace(budget, reserved=MIRRORS * _mirror_bytes(pages))
        return place(sizes, budget) if tier is None else place_all(sizes, budget, tier)

    def _bring_to(self, tier: Tier) -> None:
        """Move all pages to a tier now."""
        if self._device is not None:
            placement = self._placement(self._pages, self._device.device, tier)
            self._place(self._pages, placement)
            with self._guard.failing(interrupts=True):
                self._pager.load(self._pages)
        self._tier = tier

    def _place(self, pages: Sequence[Page], placement: Placement) -> None:
        assert self._device is not None
        self._displaced = pages
        device = self._device
        on_host = self._config.compute == "host"
        stepped_on = PlainDevice() if on_host else device
        beside = MIRRORS * _mirror_bytes(pages) if on_host else 0
        try:
            if self._mirrors is not None and self._mirrors.nbytes != beside:
                self._mirrors.close()
                self._mirrors = None
            self._pager.make_way(pages, placement, stepped_on, self._write)
            if on_host and self._mirrors is None:
                self._mirrors = Mirrors(device, _mirror_bytes(pages))
            self._pager.place(pages, placement, stepped_on, beside=beside)
        except BaseException as error:
            # In its traceback would live on what was taken so far, and it is taken anew.
            traceback.clear_frames(error.__traceback__)
            if self._storage and self._pages:
                self._guard.fail(error)
            else:  # Nothing is lost: without a storage, pages are whole in one tier or the other.
                self._pager.forget(pages[len(self._pages) :])
                self._displaced = self._pages or None
            raise
        self._displaced = None

    def _place_again(self) -> None:
        """Place pages anew if that failed: from their files, or from memory if they have none."""
        if self._displaced is not None and self._device is not None:
            if self._storage:
                # Of those that were to be attached the error still knows.
                self._pager.forget(self._displaced)
            self._place(self._pages, self._placement(self._pages, self._device.device, self._tier))

    def _warn_of_changed(self) -> None:
        changed, self._changed = self._changed, None
        name = changed.first() if changed is not None else None
        if name is not None:
            self._warned = True
            warnings.warn(
                f"parameter {name!r} was changed outside of the optimizer; its "
                "master follows it. Later changes are adopted without a warning",
                stacklevel=4,
            )

    def _swap_out(self, page: Page) -> None:
        """Bring a page that was stepped to where it rests.

        What rests in memory is written for commits only, and early if the next one is due.
        """
        if page.tier is not Tier.NVME and not self._commit_is_due():
            self._pager.keep(page)
        else:
            self._write(page)

    def _write(self, page: Page) -> None:
        """Write a page to the file that the last commit does not need."""
        with self._pager.stalled():
            copy = self._commits.claim_copy(page.index)
        self._pager.write(page, step=self._history.step, copy=copy)

    def _write_pages(
        self, fill: Callable[[PageView], None], scalars: Mapping[str, Mapping[str, float]]
    ) -> None:
        """Make all pages and some scalars anew; fail the store if anything comes in between."""
        try:
            write_pages(self._pager, self._pages, fill, self._swap_out)
            for name, values in scalars.items():
                self._history.scalars[name] = dict(values)
            self._history.wrote(len(self._groups))
        except BaseException as error:
            self._fail(error)
            raise

    def _commit_is_due(self) -> bool:
        every = self._config.commit_every
        if self._storage is None or every is None:
            return False
        return self._history.step - self._commits.begun_step >= every

    def _commit_if_due(self) -> None:
        if self._commit_is_due():
            self._begin_commit()

    def _begin_commit(self) -> None:
        with self._guard.failing(interrupts=True):
            for page in self._pages:
                if page.is_changed:
                    self._write(page)
            writes = self._pager.pending_writes()
        manifest = self._history.manifest(
            self._identity,
            attempt=self._commits.attempt,
            before=self._commits.begun,
            groups=self._groups,
            pages=self._pages,
        )
        with self._pager.stalled(), self._guard.failing(interrupts=False):
            self._commits.begin(manifest, writes)
        self._history.committed()

    def _may_retry(self, error: BaseException) -> bool:
        """Whether a call that only read leaves everything as it was, despite an error.

        An interrupt may have come anywhere within the pager.
        """
        return isinstance(error, TierstoreError) and not self._pager.lost_write

    def _fail(self, error: BaseException) -> None:
        if self._storage:  # Without one there is nothing to go back to.
            self._guard.fail(error)


def _mirror_bytes(pages: Sequence[Page]) -> int:
    """Return the bytes of the largest mirror of these pages."""
    nbytes = max((mirror_bytes(page.layout, page.parameters) for page in pages), default=0)
    return align_up(nbytes, SECTOR_BYTES)
