"""TierStore: optimizer state in pages, streamed while an optimizer steps, committed per step."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import distributed as dist

from tierstore.checkpoint.opening import look_for_other_ranks, remove_other_ranks
from tierstore.checkpoint.publication import Publication
from tierstore.config import Budget, StoreConfig
from tierstore.errors import RunDirectoryError, StorageError, SweepError
from tierstore.paged import PagedStates
from tierstore.paging.fsdp import reshard
from tierstore.paging.rank_checks import require_same_options
from tierstore.paging.tier_plan import Tier
from tierstore.paging.whole_states import restore_parameters
from tierstore.ranks.job import ranks_of
from tierstore.ranks.peers import Ranks, on_rank_0, together
from tierstore.run.committer import Committer
from tierstore.run.directories import open_directories
from tierstore.run.manifest import Manifest
from tierstore.run.page_files import check_files, check_same_model
from tierstore.run.recovery import recover
from tierstore.storage.base import Storage
from tierstore.units import parse_bytes


class TierStore(PagedStates):
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
        config = StoreConfig(
            budget=Budget(
                host_memory=parse_bytes(host_memory),
                device_memory=parse_bytes(device_memory),
                buffers=buffers,
            ),
            page_bytes=parse_bytes(page_bytes),
            commit_every=commit_every,
            checksums=checksums,
            compute=compute,
            free_gradients=free_gradients,
        )
        if resume and overwrite:
            raise ValueError("resume=True keeps a run and overwrite=True deletes it: pass one")
        if reshard and not resume:
            raise ValueError("reshard=True is about how a run is resumed: pass resume=True, too")
        paths = [directory] if isinstance(directory, str | os.PathLike) else directory
        directories = [Path(each) for each in paths] if isinstance(paths, Sequence) else []
        if reshard and not directories:
            raise ValueError("reshard=True needs the path of a run directory")
        ranks = ranks_of(process_group, timeout_s=peer_timeout)

        def open_storage() -> Storage | None:
            if not isinstance(paths, Sequence):
                return paths
            return open_directories(
                directories,
                ranks.rank,
                engine=engine,
                page_bytes=config.page_bytes,
                overwrite=overwrite,
            )

        modes = {"resume": resume, "reshard": reshard, "overwrite": overwrite}
        options = {
            "page_bytes": config.page_bytes,
            "commit_every": commit_every,
            "number of directories": len(directories),
            **modes,
        }
        try:
            require_same_options(ranks, options)
            self._resharded: Path | None = None
            if directories:
                self._resharded, directories = look_for_other_ranks(directories, ranks, **modes)
            storage = together(ranks, "open the run directory", open_storage)
            super().__init__(storage, config, ranks, resume=resume, overwrite=overwrite)
        except BaseException:
            ranks.close()
            raise
        self._publication: Publication | None = None  # One that is being copied.
        if self._resharded is not None:
            self._guard.awaits_restore = True
        elif directories and not self._guard.awaits_restore:
            try:
                remove_other_ranks(directories, ranks, overwrite=overwrite)
            except BaseException:
                self._close(synchronize=False)
                raise

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
        self._guard.require_restored()
        if self._require_committer("commit()").annotate(extra):
            self._begin_commit()

    def synchronize(self) -> None:
        """Return when the last step is durable, committing it if nobody did.

        Raises:
            StorageError: it could not be made durable; the commit before it is intact.
        """
        self._guard.require_restored()
        committer = self._require_committer("synchronize()")
        if not committer.is_up_to_date:
            self._begin_commit()
        with self._guard.failing(interrupts=False), self._pager.stalled():
            committer.wait()
        with self._guard.failing(interrupts=True):
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

        self._guard.require_restored()
        committer = self._require_committer("checkpoint()")
        storage = self._require_storage("checkpoint()")
        self._finish_publication()
        self.synchronize()
        manifest = committer.committed
        commits = []
        if manifest is not None:
            pages = self._pages[: len(manifest.pages)]
            commits.append(
                RankCommit(
                    storage=storage,
                    manifest=manifest,
                    layouts=[page.layout for page in pages],
                    provide_spares=committer.provide_spares,
                )
            )
        committed = Committed(
            peers=self._ranks,
            commits=commits,
            contents=lambda: contents_of(model, self._groups[: committer.groups_written]),
            model_prefix=model_prefix,
        )

        def keep(publication: Publication) -> None:
            self._publication = publication

        try:
            return publish(committed, os.fsdecode(path), keep_last=keep_last, on_copying=keep)
        except BaseException as error:
            if self._ranks.world_size > 1 and not isinstance(error, Exception):
                self._fail(error)  # The others stand in the middle of it, and cannot be told.
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
        self._guard.require_open()
        storage = self._require_storage("restore()")
        committer = self._require_committer("restore()")
        members = [each for group in self._groups for each in group.parameters]
        together(self._ranks, "begin a restore", lambda: reshard(members))
        if checkpoint is not None:
            return self._begin_from(checkpoint)
        if self._resharded is not None:
            return self._reshard(committer, self._resharded)
        changed = committer.step or committer.groups_written or self._guard.failure
        if not (self._guard.awaits_restore or changed):
            return 0
        self._settle_publication()  # It reads files that recovery would remove.
        committer.settle()
        manifest = recover(storage, committer.identity, self._ranks)
        committer.forget_spares()
        if manifest is None:
            raise RunDirectoryError(
                f"no step was committed by all ranks of {storage.location} yet, so there is "
                "none to go back to: start over with a new model and a new store"
            )

        def check(committed: Manifest = manifest) -> None:
            layouts = [page.layout for page in self._pages]
            check_same_model(committed, self._groups, layouts)
            check_files(storage, layouts, committed)

        together(self._ranks, "check the run", check)
        self._guard.awaits_restore = True  # Until all of the below is done.
        try:
            self._pager.reset(self._pages, manifest.pages)
            self._place_again()
            restore_parameters(self._pager, self._pages)
            self._spread_all()
            committer.restore(manifest, self._groups)
            self._allocate(self._pages)
        except BaseException as error:
            self._ranks.fail(error)
            raise
        self._guard.awaits_restore = False
        self._guard.failure = None
        return manifest.step

    def _reshard(self, committer: Committer, checkpoint: Path) -> int:
        """Begin from what the run was on other ranks, and commit it before that is removed."""
        from tierstore.checkpoint.stopped_run import end_reshard

        self._guard.awaits_restore = False
        try:
            together(self._ranks, "allocate pages", lambda: self._allocate(self._pages))
            step = self._begin_from(checkpoint)
        except BaseException:
            self._guard.awaits_restore = True
            raise
        committer.annotate(self.extra)
        self.synchronize()
        run = checkpoint.parent
        on_rank_0(self._ranks, "end the reshard", lambda: end_reshard(run))
        self._resharded = None
        return step

    def _begin_from(self, checkpoint: str | os.PathLike[str]) -> int:
        from tierstore.checkpoint.load import CheckpointSource

        if self._guard.awaits_restore or self._committer.step or self._guard.failure:
            todo = "go on with restore() alone, or name another directory, or pass overwrite=True"
            if checkpoint is self._resharded:  # That failed.
                todo = "nothing is lost, start the job again with resume=True and reshard=True"
            raise RunDirectoryError(
                f"a checkpoint begins a new run, and this one has steps already: {todo}"
            )
        wanted = self._groups, self._committer.scalars
        source = together(
            self._ranks,
            "check a checkpoint",
            lambda: CheckpointSource(checkpoint, *wanted, self._ranks),
        )
        with self._guard.failing(interrupts=True):
            self._committer.step = source.step
            self._write_pages(source.fill, source.scalars)
            self._committer.extra = source.extra
            for group, values in zip(self._groups, source.hyperparameters, strict=True):
                group.hyperparameters.update(values)
        return source.step

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
        self._guard.require_restored()
        target = Tier(tier)
        if target is Tier.NVME:
            self._require_storage('move("nvme")')

        def plan() -> None:
            if self._device is not None:
                self._placement(self._pages, self._device.device, target)

        together(self._ranks, "plan a move", plan)  # Before any of them moves a page.
        together(self._ranks, "move pages", lambda: self._bring_to(target))
        self._tier = target
        self._agree_on_window()

    def stats(self) -> Stats:
        """Return what the store has done since it was opened."""
        return Stats(
            engine=self._storage.engine if self._storage else "none",
            pages=len(self._pages),
            state_bytes=sum(page.layout.nbytes for page in self._pages),
            bytes_read=self._pager.files.bytes_read,
            bytes_written=self._pager.files.bytes_written,
            bytes_spread=self._spread.bytes_sent,
            stall_seconds=self._pager.stall_seconds,
            host_bytes_peak=self._pager.host_bytes_peak,
            device_bytes_peak=self._pager.device_bytes_peak,
            pages_in=dict(Counter(page.tier.value for page in self._pages)),
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
            stack.callback(self._ranks.close)
            if self._storage:
                stack.callback(self._storage.close)
                stack.callback(self._committer.close)
            stack.callback(self._pager.close, self._displaced or self._pages)
            if self._mirrors is not None:
                stack.callback(self._mirrors.close)
            # Its error is in the log, and not the one to raise where there is another.
            stack.callback(self._finish_publication if synchronize else self._settle_publication)
            usable = not (self._guard.failure or self._guard.awaits_restore)
            if synchronize and self._storage and usable:
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

    def _finish_publication(self) -> None:
        publication, self._publication = self._publication, None
        if publication is not None:
            publication.wait()

    def _settle_publication(self) -> None:
        if self._publication is not None:
            self._publication.settle()

    def _require_storage(self, call: str) -> Storage:
        if self._storage is None:
            raise RunDirectoryError(f"{call} needs a store with a directory; this one has none")
        return self._storage


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
