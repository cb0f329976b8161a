"""TierStore: optimizer state in pages, streamed while an optimizer steps, committed per step."""

from __future__ import annotations

import collections
import contextlib
import os
import warnings
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from tierstore import tagged
from tierstore.commit import Commits
from tierstore.config import StoreConfig
from tierstore.errors import RunDirectoryError, SweepError, TierstoreError
from tierstore.groups import PagedGroup, ParameterSpec, check_states, check_unchanged
from tierstore.guard import Guard
from tierstore.manifest import Manifest
from tierstore.pages import (
    buffer_plan,
    check_files,
    check_same_model,
    create_files,
    encode_hyperparameters,
    make_manifest,
    make_pages,
)
from tierstore.residency import Page, Pager
from tierstore.run import (
    abandon_in_children,
    open_run,
    rank_directory,
    recover,
    refuse_several_ranks,
)
from tierstore.states import read_states, restore_parameters, write_states
from tierstore.stats import Stats
from tierstore.storage.base import Storage
from tierstore.storage.select import open_storage
from tierstore.units import parse_bytes
from tierstore.views import PageView


class TierStore:
    """Keeps the state of an optimizer in page files and streams it through few buffers.

    Args:
        directory: the run directory, on a disk; made if absent. A ``Storage`` stands for
            itself. None keeps every page in memory: nothing is read, written or committed.
        host_memory: most bytes that all page buffers together may take: an int, or a
            string such as "16GiB".
        page_bytes: about how much state one page holds. A run keeps the value it began with.
        buffers: number of page buffers, at least 2; None: as many as ``host_memory`` holds
            and the pages can use.
        commit_every: steps from one commit to the next, at the price of losing up to that
            many in a crash. None keeps one copy of each page instead of two and commits on
            synchronize() and close() only; a crash in between loses the run.
        engine: "io_uring", "aiofiles", or "auto": the first of them that works here.
        checksums: whether pages are checked when they are read.
        resume: go on with the run in the directory, through restore(); a directory without
            a commit begins a new run.
        overwrite: delete the run in the directory and begin a new one.

    A store is used by one thread, and by the process that made it.

    Raises:
        RunDirectoryError: the directory cannot be used; the message says what to do.
        RunLockedError: another process uses it.
        StorageError: the disk refused.
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Storage | None,
        *,
        host_memory: int | str = "16GiB",
        page_bytes: int | str = "256MiB",
        buffers: int | None = None,
        commit_every: int | None = 1,
        engine: str = "auto",
        checksums: bool = True,
        resume: bool = False,
        overwrite: bool = False,
    ) -> None:
        self._config = StoreConfig(
            host_memory=parse_bytes(host_memory),
            page_bytes=parse_bytes(page_bytes),
            buffers=buffers,
            commit_every=commit_every,
            checksums=checksums,
        )
        if resume and overwrite:
            raise ValueError("resume=True keeps a run and overwrite=True deletes it: pass one")
        refuse_several_ranks()
        self._guard = Guard()
        self._groups: list[PagedGroup] = []
        self._pages: list[Page] = []
        self._specs: dict[str, ParameterSpec] = {}
        self._scalars: dict[str, dict[str, float]] = {}
        self._step, self._warned = 0, False
        self._changed = False  # Whether a page was written since a commit was begun.
        self._groups_written = 0  # Groups attached later are in no commit yet.
        self._extra: Any = None
        self._next_extra: tuple[int, Any] = (0, None)  # A step, and what to commit with it.
        self._storage: Storage | None = None
        self._pager = Pager(None, run_id="", checksums=False)
        if isinstance(directory, str | os.PathLike):
            self._open(
                open_storage(rank_directory(Path(directory), rank=0), engine), resume, overwrite
            )
        elif directory is not None:
            self._open(directory, resume, overwrite)

    def _open(self, storage: Storage, resume: bool, overwrite: bool) -> None:
        try:
            self._identity, found = open_run(
                storage,
                resume=resume,
                overwrite=overwrite,
                page_bytes=self._config.page_bytes,
                rank=0,
                world_size=1,
            )
        except BaseException:
            storage.close()
            raise
        self._storage = storage
        self._guard.awaits_restore = found is not None
        self._pager = Pager(storage, run_id=self._identity.run_id, checksums=self._config.checksums)
        self._commits = Commits(storage, found, single_copy=self._config.commit_every is None)
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
        specs = [parameter.spec for group in groups for parameter in group.parameters]
        names = collections.Counter(spec.name for spec in specs)
        for name, count in names.items():
            if count > 1 or name in self._specs:
                raise ValueError(f"two parameters are named {name!r}: names must be unique")
        for index, group in enumerate(groups, start=len(self._groups)):
            encode_hyperparameters(index, group)  # Refuses now what could not be committed later.
        pages = make_pages(
            groups,
            first_group=len(self._groups),
            first_page=len(self._pages),
            page_bytes=self._identity.page_bytes if self._storage else self._config.page_bytes,
        )
        if self._storage is None:
            self._pager.make_resident(pages)
        else:
            plan = buffer_plan([*self._pages, *pages], self._config)
            with self._guard.failing(interrupts=True):
                self._pager.provide_buffers(*plan)
            if not self._guard.awaits_restore:
                create_files(self._storage, pages, self._commits.copies)
        self._groups += groups
        self._pages += pages
        self._specs |= {spec.name: spec for spec in specs}

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
        """
        self._guard.require_restored()
        for group in self._groups:
            for parameter in group.parameters:
                check_unchanged(parameter, self._specs[parameter.name])
        self._commit_if_due()
        step, progress = self._step, _Progress()
        try:
            self._guard.sweeping = True
            self._step = step + 1
            with contextlib.closing(self._stepped_pages(progress)) as pages:
                yield pages
            if not progress.finished:
                raise SweepError("the sweep was left before its last page")
            self._changed = True
            self._groups_written = len(self._groups)
        except BaseException as error:
            if progress.begun or (progress.reading and not self._may_retry(error)):
                self._fail(error)
            else:
                self._step = step
            raise
        finally:
            self._guard.sweeping = False

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
        return self._scalars

    def read_states(
        self, names: Collection[str] | None = None
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Return copies of the states of some parameters, or of all.

        Returns:
            Parameter name -> state name -> tensor of the parameter's shape. The state
            "master" is there only for parameters that are not their own master. Empty
            before anything was written.
        """
        self._guard.require_restored()
        wanted = self._specs.keys() if names is None else names
        try:
            return read_states(self._pager, self._pages, wanted)
        except BaseException as error:
            if not self._may_retry(error):
                self._fail(error)
            raise

    @torch.no_grad()
    def write_states(self, values: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Replace states, outside of a step. States not named become zero, or the parameter.

        Args:
            values: as read_states() returns them; converted to the dtype of each state.

        Raises:
            ValueError: an unknown name, or a wrong shape. Nothing was changed.
        """
        self._guard.require_restored()
        for name, states in values.items():
            if name not in self._specs:
                raise ValueError(f"there is no parameter {name!r} in this store")
            check_states(self._specs[name], states)
        try:
            write_states(self._pager, self._pages, values, self._swap_out)
        except BaseException as error:
            self._fail(error)
            raise
        self._changed = True
        self._groups_written = len(self._groups)

    @property
    def step(self) -> int:
        """Number of steps done, in this run and before it was resumed."""
        return self._step

    @property
    def committed_step(self) -> int:
        """The newest step that a restart would find; 0 where there is none."""
        return self._commits.committed_step if self._storage else 0

    @property
    def extra(self) -> Any:
        """What was given to the commit that restore() went back to."""
        return self._extra

    def commit(self, extra: Any = None) -> None:
        """Make the last step the one that a restart finds, in the background.

        Hyperparameters and ``extra`` are copied now; parameters and states are those that
        the step left, whatever was changed since. With ``commit_every`` above 1 only
        every so many steps are committed; ``extra`` is then kept for synchronize().

        Args:
            extra: plain values and small tensors to get back after a restart: the state of
                the scheduler, of random generators, the position in the data.

        Raises:
            TypeError, ValueError: ``extra`` holds something that cannot be stored, or is
                too large; the message names it.
            StorageError: an earlier commit or write failed.
        """
        self._guard.require_restored()
        self._require_storage("commit()")
        committed = self._step and self._step == self._commits.begun_step
        if committed and extra is None and not self._changed:
            return
        self._next_extra = (self._step, tagged.encode(extra, name="extra"))
        if committed:
            self._begin_commit()  # The same step with another extra.
        else:
            self._commit_if_due()

    def synchronize(self) -> None:
        """Return when the last step is durable, committing it if nobody did.

        Raises:
            StorageError: it could not be made durable; the commit before it is intact.
        """
        self._guard.require_restored()
        self._require_storage("synchronize()")
        if self._changed or (self._step and self._next_extra[0] == self._step):
            self._begin_commit()
        with self._guard.failing(interrupts=False), self._pager.stalled():
            self._commits.wait()
        with self._guard.failing(interrupts=True):
            self._pager.finish_writes()

    @torch.no_grad()
    def restore(self) -> int:
        """Go back to the committed step: parameters, states, hyperparameters and ``extra``.

        Returns:
            The step, or 0 where nothing was ever committed and nothing was changed.

        Raises:
            RunDirectoryError: steps were done, and none was committed. Nothing was changed.
            RunMismatchError: the run is of another model; the message names the first
                difference. Nothing was changed.
            CorruptionError: a page is not what was committed.
        """
        self._guard.require_open()
        storage = self._require_storage("restore()")
        changed = self._step or self._groups_written or self._guard.failure
        if not (self._guard.awaits_restore or changed):
            return 0
        self._commits.settle()
        manifest = recover(storage, self._identity)
        check_same_model(manifest, self._groups, self._pages)
        check_files(storage, self._pages, manifest)
        self._guard.awaits_restore = True  # Until all of the below is done.
        self._pager.abandon(self._pages)
        restore_parameters(self._pager, self._pages, manifest.pages)
        create_files(storage, self._pages, self._commits.copies)
        self._go_on_from(manifest)
        return manifest.step

    def stats(self) -> Stats:
        """Return what the store has done since it was opened."""
        return Stats(
            engine=self._storage.engine if self._storage else "none",
            pages=len(self._pages),
            state_bytes=sum(page.layout.nbytes for page in self._pages),
            bytes_read=self._pager.bytes_read,
            bytes_written=self._pager.bytes_written,
            stall_seconds=self._pager.stall_seconds,
            host_bytes_peak=self._pager.buffer_bytes_peak,
        )

    def close(self) -> None:
        """Synchronize, then release files, lock and buffers. May be called again.

        A failed store is released as it is. Raises what synchronize() raises, after
        everything was released.
        """
        self._close(synchronize=True)

    def _close(self, *, synchronize: bool) -> None:
        if self._guard.closed or self._guard.is_forked:
            return
        if self._guard.sweeping:
            self._guard.fail(SweepError("the store was closed in the middle of a step"))
        with contextlib.ExitStack() as stack:  # From the last to the first, whatever fails.
            stack.callback(setattr, self._guard, "closed", True)
            if self._storage:
                stack.callback(self._storage.close)
                stack.callback(self._commits.close)
            stack.callback(self._pager.close, self._pages)
            usable = not (self._guard.failure or self._guard.awaits_restore)
            if synchronize and self._storage and usable:
                self.synchronize()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Close; after an exception, commit nothing that was not being committed already.

        The last step may lack its ``extra`` and the learning rates of the scheduler.
        """
        self._close(synchronize=kind is None)

    def _stepped_pages(self, progress: _Progress) -> Generator[PageView, None, None]:
        """Yield the pages to step, and write each one as soon as the next is asked for."""
        pages = [page for page in self._pages if page.entry is None or page.has_gradient]
        progress.reading = True
        with contextlib.closing(
            self._pager.stream(pages, lambda page: page.layout.readable)
        ) as stream:
            for page in stream:
                view = page.view()
                changed = view.adopt_parameters()
                if changed and not self._warned:
                    self._warned = True
                    warnings.warn(
                        f"parameter {changed[0]!r} was changed outside of the optimizer; its "
                        "master follows it. Later changes are adopted without a warning",
                        stacklevel=2,
                    )
                progress.begun = True
                if page.has_gradient:
                    yield view
                    view.write_parameters()
                view.read_parameters()
                self._swap_out(page)
        progress.finished = True

    def _swap_out(self, page: Page) -> None:
        """Write a page to the file that the last commit does not need."""
        copy = "a"
        if self._storage:
            with self._pager.stalled():
                copy = self._commits.claim_copy(page.index)
        self._pager.swap_out(page, step=self._step, copy=copy)

    def _commit_if_due(self) -> None:
        every = self._config.commit_every
        if self._storage and every is not None and self._step - self._commits.begun_step >= every:
            self._begin_commit()

    def _begin_commit(self) -> None:
        groups = self._groups[: self._groups_written]
        pages = [page for page in self._pages if page.layout.subgroup.group < len(groups)]
        extra_step, extra = self._next_extra
        manifest = make_manifest(
            self._identity,
            attempt=self._commits.attempt,
            step=self._step,
            groups=groups,
            pages=pages,
            scalars=self._scalars,
            extra=extra if extra_step == self._step else None,
        )
        with self._pager.stalled(), self._guard.failing(interrupts=False):
            self._commits.begin(manifest, self._pager.pending_writes())
        self._next_extra = (0, None)
        self._changed = False

    def _go_on_from(self, manifest: Manifest) -> None:
        """Make a commit whose pages were read the present of this store."""
        for group, saved in zip(self._groups, manifest.hyperparameters, strict=True):
            group.hyperparameters.update(tagged.decode(saved))
        self._scalars = tagged.decode(manifest.scalars)
        self._extra = tagged.decode(manifest.extra)
        self._commits.go_on_from(manifest)
        self._step = manifest.step
        self._groups_written = len(self._groups)
        self._changed = self._guard.awaits_restore = False
        self._next_extra = (0, None)
        self._guard.failure = None

    def _may_retry(self, error: BaseException) -> bool:
        """Whether a call that only read leaves everything as it was, despite an error.

        An interrupt may have come anywhere within the pager.
        """
        return isinstance(error, TierstoreError) and not self._pager.lost_write

    def _fail(self, error: BaseException) -> None:
        if self._storage:  # Without one there is nothing to go back to.
            self._guard.fail(error)

    def _require_storage(self, call: str) -> Storage:
        if self._storage is None:
            raise RunDirectoryError(f"{call} needs a store with a directory; this one has none")
        return self._storage


@dataclass(slots=True)
class _Progress:
    reading: bool = False  # The pager may have been asked for pages.
    begun: bool = False  # A page may have been stepped or written.
    finished: bool = False
