"""TierStore: optimizer state in pages, streamed while an optimizer steps, committed per step."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import distributed as dist

from tierstore.checkpoint.opening import look_for_other_ranks, remove_other_ranks
from tierstore.checkpoint.publication import Publication
from tierstore.checkpoint.restore import Restore
from tierstore.errors import RunDirectoryError, StorageError, SweepError
from tierstore.layout.parameters import PagedGroup
from tierstore.paging import rank_checks
from tierstore.paging.fsdp import reshard as drop_gathered_copies
from tierstore.paging.page import NoFiles, PageFiles
from tierstore.paging.page_table import PageTable
from tierstore.paging.pager import Pager
from tierstore.paging.sweep import Changes, SteppedPages, Sweep, may_retry
from tierstore.paging.tier_plan import Budget, Tier
from tierstore.paging.whole_states import (
    agree_to_read,
    agree_to_write,
    fill_states,
    read_states,
    write_pages,
)
from tierstore.ranks.job import ranks_of
from tierstore.ranks.peers import Ranks, together
from tierstore.run.committer import Committer, Progress
from tierstore.run.directories import open_directories
from tierstore.run.opening import open_committer
from tierstore.run.usability import Usability
from tierstore.storage.base import Storage
from tierstore.units import SECTOR_BYTES, parse_bytes


class TierStore:
    """Keeps the state of an optimizer in page files and streams it through few buffers.

    Args:
        directory: the run directory, on a disk; made if absent. A list of several, on
            several disks, has the pages dealt over them, in proportion to the bandwidth
            measured as the run begins; a run that is resumed needs all of them, in any
            order. A ``Storage`` stands for itself. None keeps every page in memory, of the
            device that computes unless moved: nothing is read, written or committed.
        host_memory: most bytes that page buffers and pages that rest in host memory may take
            together: an int, or a string such as "16GiB". What the buffers leave keeps as many
            pages in memory as fit.
        device_memory: most bytes of the parameters' device that pages may rest in.
        page_bytes: about how much state one page holds. A run keeps the value it began with.
        buffers: number of page buffers, at least 2, and no page rests in host memory; None:
            what ``host_memory`` gives.
        commit_every: steps from one commit to the next, at the price of losing up to that
            many in a crash. None keeps one copy of each page instead of two and commits on
            synchronize() and close() only; a crash in between loses the run.
        engine: "io_uring", "libaio", "aiofiles", or "auto": the first of them that works here.
        checksums: whether pages are checked when they are read.
        resume: go on with the run in the directory, through restore(); a directory without
            a commit begins a new run.
        overwrite: delete the run in the directory and begin a new one.
        reshard: with ``resume``, go on with a run of another number of ranks, too: restore()
            then lays it out anew, with ``page_bytes`` as given, as a run of its own.
        compute: where steps are computed: on the parameters' "device", or on the "host", to
            which gradients are copied then.
        free_gradients: set each ``.grad`` to None as soon as it was used.
        process_group: the ranks of the job that have a part of the parameters; None: all
            ranks where torch.distributed is initialized, else this process alone. ``Ranks``
            are used as they are.
        peer_timeout: seconds after which a rank that does not answer is given up, and this
            one fails.

    A store is used by one thread, and by the process that made it.

    Raises:
        RunDirectoryError: the directory cannot be used; the message says what to do.
        RunLockedError: another process uses it.
        StorageError: the disk refused.
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Storage | None,
        *,
        host_memory: int | str = "16GiB",
        device_memory: int | str = 0,
        page_bytes: int | str = "256MiB",
        buffers: int | None = None,
        commit_every: int | None = 1,
        engine: str = "auto",
        checksums: bool = True,
        resume: bool = False,
        overwrite: bool = False,
        reshard: bool = False,
        compute: str = "device",
        free_gradients: bool = False,
        process_group: dist.ProcessGroup | Ranks | None = None,
        peer_timeout: float = 600.0,
    ) -> None:
        budget = Budget(
            host_memory=parse_bytes(host_memory),
            device_memory=parse_bytes(device_memory),
            buffers=buffers,
        )
        page_size = parse_bytes(page_bytes)
        paths = [directory] if isinstance(directory, str | os.PathLike) else directory
        directories = [Path(path) for path in paths] if isinstance(paths, Sequence) else []
        _check_page_options(page_size, commit_every, compute, budget)
        _check_modes(directories, resume=resume, overwrite=overwrite, reshard=reshard)
        modes = {"resume": resume, "reshard": reshard, "overwrite": overwrite}
        options = {
            "page_bytes": page_size,
            "commit_every": commit_every,
            "number of directories": len(directories),
            **modes,
        }
        self._compute = compute
        self._free_gradients = free_gradients
        self._ranks = ranks = ranks_of(process_group, timeout_s=peer_timeout)
        self._resharded: Path | None = None  # A checkpoint that restore() begins from.
        self._publication: Publication | None = None  # A checkpoint that is being copied.
        self._changes = Changes()
        with contextlib.ExitStack() as opened:
            opened.callback(ranks.close)
            rank_checks.require_same_options(ranks, options)
            if directories:
                self._resharded, directories = look_for_other_ranks(directories, ranks, **modes)

            def open_storage() -> Storage | None:
                if not isinstance(paths, Sequence):
                    return paths
                return open_directories(
                    directories,
                    ranks.rank,
                    engine=engine,
                    page_bytes=page_size,
                    overwrite=overwrite,
                )

            storage = together(ranks, "open the run directory", open_storage)
            self._committer: Progress = Progress()
            files: PageFiles | NoFiles = NoFiles()
            awaits_restore = self._resharded is not None
            if storage is not None:
                opened.callback(storage.close)
                self._committer = committer = open_committer(
                    storage,
                    ranks,
                    resume=resume,
                    overwrite=overwrite,
                    page_bytes=page_size,
                    commit_every=commit_every,
                )
                files = PageFiles(storage, run_id=committer.identity.run_id, checksums=checksums)
                page_size = committer.identity.page_bytes
                awaits_restore = awaits_restore or committer.committed is not None
            opened.callback(self._committer.close)
            self._usability = Usability(
                ranks, has_directory=storage is not None, awaits_restore=awaits_restore
            )
            self._pager = Pager(files, self._committer)
            self._table = PageTable(
                ranks,
                self._pager,
                self._committer,
                self._usability,
                budget=budget,
                page_bytes=page_size,
                on_host=compute == "host",
            )
            opened.callback(self._table.close)
            if directories and not awaits_restore:
                remove_other_ranks(directories, ranks, overwrite=overwrite)
            self._opened = opened.pop_all()

    # -- Parameters and steps.

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
        self._usability.require_usable()
        self._table.attach(groups)

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
        self._usability.require_restored()
        if not 1 <= window <= self.window_max:
            raise ValueError(f"window must be from 1 to {self.window_max}, got {window}")
        table = self._table
        table.ensure_placed()
        table.require_same_values()
        present = rank_checks.names_with_gradient(self._ranks, table.groups, table.specs)
        self._changes.warn(wait=True)
        if self._committer.is_due:
            self._begin_commit()
        sweep = Sweep(
            table,
            self._committer,
            self._usability,
            self._ranks,
            free_gradients=self._free_gradients,
            present=present,
            window=window,
        )
        with sweep.run() as pages:
            yield pages
        self._changes.note(sweep.changed, table.step_device)
        self._changes.warn(wait=False)  # Or the next sweep warns, so that nobody waits now.

    def prefetch(self) -> None:
        """Start to read what the next sweep will step, as far as buffers are free; return at once.

        Raises:
            StorageError: a write of the last step failed, or a read could not begin, which
                may be tried again.
        """
        self._usability.require_restored()
        with self._only_reading():
            self._pager.prefetch(self._table.pages)

    @property
    def ranks(self) -> Ranks | None:
        """All ranks of the job that the parameters are one model of; None where there is one."""
        return self._ranks if self._ranks.world_size > 1 else None

    @property
    def window_max(self) -> int:
        """How many pages sweep() may have stepped at once, the same on all ranks."""
        return self._table.window_max

    @property
    def compute(self) -> str:
        """Where steps are computed: on the parameters' "device", or on the "host"."""
        return self._compute

    @property
    def group_count(self) -> int:
        """Number of groups attached; those of one optimizer, which sweep() steps together."""
        return len(self._table.groups)

    @property
    def step(self) -> int:
        """Number of steps done, in this run and before it was resumed."""
        return self._committer.step

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
        self._usability.require_restored()
        wanted = self._table.specs.keys() if names is None else names
        agree_to_read(self._ranks, wanted)
        self._table.ensure_placed()
        with self._only_reading():
            return read_states(self._table, wanted)

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
        self._usability.require_restored()
        agree_to_write(self._ranks, self._table.groups, values)
        self._table.ensure_placed()
        with self._usability.failing(interrupts=True):
            write_pages(
                self._table,
                self._committer,
                lambda view: fill_states(view, values),
                scalars or {},
            )

    def move(self, tier: str) -> None:
        """Bring all pages to one tier, between two steps: turn offload on or off.

        It stays so until another move(), or until the store is closed. Results do not change.
        All ranks call it together.

        Args:
            tier: "device" or "host", which the budget of that name must hold in full, or "nvme".

        Raises:
            BudgetError: they do not fit; nothing was changed.
            StorageError, CorruptionError: a page could not be read or written.
        """
        self._usability.require_restored()
        target = Tier(tier)
        if target is Tier.NVME:
            self._require_committer('move("nvme")')
        self._table.move(target)

    # -- Commits and checkpoints.

    @property
    def committed_step(self) -> int:
        """The newest step that a restart would find; 0 where there is none."""
        return self._committer.committed_step

    @property
    def extra(self) -> Any:
        """What was given to the commit that restore() went back to."""
        return self._committer.extra

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
        self._usability.require_restored()
        if self._require_committer("commit()").annotate(extra):
            self._begin_commit()

    def synchronize(self) -> None:
        """Return when the last step is durable, committing it if nobody did.

        Raises:
            StorageError: it could not be made durable; the commit before it is intact.
        """
        self._usability.require_restored()
        committer = self._require_committer("synchronize()")
        if not committer.is_up_to_date:
            self._begin_commit()
        with self._usability.failing(interrupts=False), self._pager.stalled():
            committer.wait()
        with self._usability.failing(interrupts=True):
            self._pager.finish_writes()

    def checkpoint(
        self,
        path: str | os.PathLike[str],
        model: torch.nn.Module | None = None,
        *,
        keep_last: int | None = None,
        model_prefix: str = "model.",
    ) -> Publication:
        """Publish the last step as a directory that ``torch.distributed.checkpoint`` loads.

        Commits the step if nobody did. On the filesystem of the run the page files are
        linked, no tensor is read or written, and the checkpoint is there on return. Pages on
        another one are copied in the background: close() and the next checkpoint() wait
        for it and raise what went wrong. An interrupt leaves nothing of the checkpoint, or
        all of it, or a copy that goes on.

        Args:
            path: the directory, which must be absent or empty.
            model: adds what is not paged: buffers, frozen parameters, and the further names
                of tied parameters. None: only what is paged.
            keep_last: afterwards remove the oldest checkpoints that this run published
                beside this one, but for so many; None keeps all.
            model_prefix: what stands before the names of the model's parameters; "" is how
                torchtitan has them.

        Raises:
            CheckpointError: there is something at ``path`` or no directory can be made
                there, no step was done yet, or the model is another one or holds what no
                checkpoint can. Nothing was published.
            StorageError: the disk is full, say. Nothing is left of the checkpoint.
            CorruptionError: a page that was copied is not what was committed. Likewise.
        """
        from tierstore.checkpoint.model_contents import contents_of
        from tierstore.checkpoint.page_links import RankCommit
        from tierstore.checkpoint.publish import Committed, publish

        self._usability.require_restored()
        committer = self._require_committer("checkpoint()")
        self._finish_publication()
        self.synchronize()
        manifest, table = committer.committed, self._table
        commits = []
        if manifest is not None:
            pages = table.pages[: len(manifest.pages)]
            commits.append(
                RankCommit(
                    storage=committer.storage,
                    manifest=manifest,
                    layouts=[page.layout for page in pages],
                    provide_spares=committer.provide_spares,
                )
            )
        committed = Committed(
            peers=self._ranks,
            commits=commits,
            contents=lambda: contents_of(model, table.groups[: committer.groups_written]),
            model_prefix=model_prefix,
        )

        def keep(publication: Publication) -> None:
            self._publication = publication

        try:
            return publish(committed, os.fsdecode(path), keep_last=keep_last, on_copying=keep)
        except BaseException as error:
            if self._ranks.world_size > 1 and not isinstance(error, Exception):
                self._usability.fail(error)  # Other ranks are in the middle of publishing.
            with contextlib.suppress(StorageError):  # The first error is the one to mend.
                committer.drop_spares()
            raise

    @torch.no_grad()
    def restore(self, checkpoint: str | os.PathLike[str] | None = None) -> int:
        """Go back to the committed step: parameters, states, hyperparameters and ``extra``.

        Args:
            checkpoint: begin a new run with what this checkpoint holds instead: one that was
                published, or any of a model and its optimizer that DCP has written. It is
                checked first.

        Returns:
            The step, or 0 where nothing was ever committed and nothing was changed.

        Raises:
            CheckpointError: the checkpoint is none, or of another model. Nothing was changed.
            RunDirectoryError: steps were done, and none was committed. Nothing was changed.
            RunMismatchError: the run is of another model; the message names the first
                difference. Nothing was changed.
            CorruptionError: a page, or the checkpoint, is not what was written.
            ValueError: the optimizer has no use for a hyperparameter of the checkpoint, or a
                forward of FSDP2 is under way. Nothing was changed.
        """
        usability = self._usability
        usability.require_open()
        committer = self._require_committer("restore()")
        parameters = self._table.parameters
        together(self._ranks, "begin a restore", lambda: drop_gathered_copies(parameters))
        restore = Restore(self._ranks, committer, self._table, usability)
        if checkpoint is not None:
            return restore.from_checkpoint(checkpoint)
        if self._resharded is not None:
            step = restore.from_resharded(self._resharded, self.synchronize)
            self._resharded = None
            return step
        was_changed = committer.step or committer.groups_written or usability.failure
        if not (usability.awaits_restore or was_changed):
            return 0
        self._settle_publication()  # It reads files that recovery would remove.
        return restore.from_commit()

    # -- The store itself.

    def stats(self) -> Stats:
        """Return what the store has done since it was opened."""
        pager, pages = self._pager, self._table.pages
        return Stats(
            engine=pager.files.engine,
            pages=len(pages),
            state_bytes=sum(page.layout.nbytes for page in pages),
            bytes_read=pager.files.bytes_read,
            bytes_written=pager.files.bytes_written,
            bytes_spread=self._table.replication.bytes_sent,
            stall_seconds=pager.stall_seconds,
            host_bytes_peak=pager.host_bytes_peak,
            device_bytes_peak=pager.device_bytes_peak,
            pages_in=dict(Counter(page.tier.value for page in pages)),
        )

    def close(self) -> None:
        """Synchronize, then release files, lock and buffers. May be called again.

        A failed store is released as it is. Raises what synchronize() raises, after
        everything was released.
        """
        self._close(synchronize=True)

    def _close(self, *, synchronize: bool) -> None:
        usability = self._usability
        if usability.closed or usability.is_forked:
            return
        if usability.sweeping:
            usability.fail(SweepError("the store was closed in the middle of a step"))
        with contextlib.ExitStack() as stack:  # From the last to the first, whatever fails.
            stack.callback(setattr, usability, "closed", True)
            stack.callback(self._opened.close)
            # Its error is in the log, and not the one to raise where there is another.
            stack.callback(self._finish_publication if synchronize else self._settle_publication)
            is_usable = not (usability.failure or usability.awaits_restore)
            if synchronize and is_usable and usability.has_directory:
                self.synchronize()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        """Close; after an exception, commit nothing that was not being committed already.

        The last step may lack its ``extra`` and the learning rates of the scheduler. A
        checkpoint that is being copied is waited for; if that fails, the log says so.
        """
        if error is not None:
            self._ranks.fail(error, of_others=True)
        self._close(synchronize=kind is None)

    def _begin_commit(self) -> None:
        """Begin to commit the last step; all ranks call this."""
        committer, table = self._require_committer("a commit"), self._table
        table.require_same_values()
        rank_checks.require_same_commit(self._ranks, table.groups, committer.scalars)
        with self._usability.failing(interrupts=True):
            writes = self._pager.write_changed(table.pages)
        pages = [(page.layout, page.entry) for page in table.pages]
        manifest = committer.manifest(table.groups, pages, shared=self._ranks.world_size > 1)
        with self._pager.stalled(), self._usability.failing(interrupts=False):
            committer.begin(manifest, writes)

    @contextlib.contextmanager
    def _only_reading(self) -> Iterator[None]:
        """Fail the store if the block, which only reads pages, raises and may not be retried."""
        try:
            yield
        except BaseException as error:
            if may_retry(error, self._pager, self._ranks):
                self._pager.drop_early()
            else:
                self._usability.fail(error)
            raise

    def _require_committer(self, call: str) -> Committer:
        if not isinstance(self._committer, Committer):
            raise RunDirectoryError(f"{call} needs a store with a directory; this one has none")
        return self._committer

    def _finish_publication(self) -> None:
        publication, self._publication = self._publication, None
        if publication is not None:
            publication.wait()

    def _settle_publication(self) -> None:
        if self._publication is not None:
            self._publication.settle()


def _check_page_options(
    page_bytes: int, commit_every: int | None, compute: str, budget: Budget
) -> None:
    if page_bytes < SECTOR_BYTES:
        raise ValueError(f"page_bytes must be at least {SECTOR_BYTES}, got {page_bytes}")
    if compute not in ("device", "host"):
        raise ValueError(f"compute must be 'device' or 'host', got {compute!r}")
    if compute == "host" and budget.device_memory:
        raise ValueError(
            "compute='host' steps pages in host memory: device_memory must be 0, got "
            f"{budget.device_memory}"
        )
    if commit_every is not None and commit_every < 1:
        raise ValueError(
            "commit_every must be a positive number of steps, or None to commit on "
            f"synchronize() and close() only; got {commit_every}"
        )


def _check_modes(
    directories: Sequence[Path], *, resume: bool, overwrite: bool, reshard: bool
) -> None:
    if resume and overwrite:
        raise ValueError("resume=True keeps a run and overwrite=True deletes it: pass one")
    if reshard and not resume:
        raise ValueError("reshard=True is about how a run is resumed: pass resume=True, too")
    if reshard and not directories:
        raise ValueError("reshard=True needs the path of a run directory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What a store has done since it was opened."""

    engine: str
    """How pages move: "io_uring", "libaio", "aiofiles", "memory"; "none" where all are resident."""
    pages: int
    state_bytes: int
    """Bytes of all pages, framing and padding included."""
    bytes_read: int
    bytes_written: int
    bytes_spread: int
    """What this rank sent of parameters that others hold, too: once for each that it went to."""
    stall_seconds: float
    """Time that the training thread waited for transfers and commits."""
    host_bytes_peak: int
    """Bytes of page buffers, pages that rest in host memory, and what compute="host" copies
    gradients and parameters to, all together at their most."""
    device_bytes_peak: int
    """Bytes of the device that pages rest in or are stepped in, at their most."""
    pages_in: Mapping[str, int]
    """Number of pages that rest in each of "device", "host" and "nvme"."""
