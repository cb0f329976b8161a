"""TierStore: optimizer state in pages, streamed while an optimizer steps, committed per step."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import distributed as dist

from tierstore.checkpoint.checkpoints import Checkpoints
from tierstore.checkpoint.publication import Publication
from tierstore.checkpoint.reshard import OtherRanks, look_for_other_ranks, remove_other_ranks
from tierstore.checkpoint.restore import Restore
from tierstore.checkpoint.verification import Verifier
from tierstore.compiling import not_compiled
from tierstore.errors import SweepError
from tierstore.layout.parameters import PARAMETER_DTYPES
from tierstore.pages import Pages
from tierstore.paging import rank_checks
from tierstore.paging.fsdp import reshard as drop_gathered_copies
from tierstore.paging.page import PageFiles
from tierstore.paging.page_table import PageTable
from tierstore.paging.pager import Pager
from tierstore.paging.session import Session
from tierstore.paging.stats import Stats
from tierstore.paging.tier_plan import (
    Budget,
    Tier,
    check_page_options,
    default_page_bytes,
    step_device,
)
from tierstore.paging.wear import Wear, rated_life
from tierstore.ranks.job import ranks_of
from tierstore.ranks.peers import Ranks, together
from tierstore.ranks.roll_call import Calls
from tierstore.run.committer import Committer, Progress
from tierstore.run.directories import open_directories
from tierstore.run.opening import close_storage, open_committer
from tierstore.run.registered import CommittedStep, Stateful, committed_step
from tierstore.run.releases import Releases
from tierstore.run.unclosed import Unclosed
from tierstore.run.usability import Usability
from tierstore.storage.base import Storage
from tierstore.storage.memory import MemoryStorage
from tierstore.units import parse_bytes
from tierstore.user_warnings import warn_user


class TierStore:
    """Keeps the state of an optimizer in page files and streams it through few buffers.

    Args:
        directory: the run directory; created if absent. Pages are striped over a list of
            directories, on several drives, by the bandwidth measured when the run begins; resuming
            needs all of them, in any order. A ``Storage`` is used as it is. None keeps all pages in
            memory, on the device that computes until move(), without commits.

    Memory:
        host_memory: most bytes of host memory for page buffers and resting pages: an int, or a
            string such as "16GiB".
        device_memory: most bytes for pages on the GPU that steps them.
        page_bytes: about how much state one page holds; a run keeps its first value. None:
            ``host_memory / (8 + 2 * buffers)``, with 4 for ``buffers=None``, at most 256 MiB; the
            smallest of all ranks.
        buffers: number of page buffers, at least 2; no page then stays in host memory. None: as
            many as ``host_memory`` allows.

    Durability:
        resume: resume the run in the directory, with restore(), or begin one if nothing was
            committed. restore() lays out a run of another number of ranks anew, with pages of
            ``page_bytes``.
        overwrite: delete the run in the directory and begin a new one.
        commit_every: steps from one commit to the next; a crash loses up to that many. None: one
            slot of each page instead of two, and commits on synchronize() and close() only; a crash
            in between loses the run.
        engine: "io_uring", "libaio", "aiofiles", or "auto": the first of them that works here.
        endurance: bytes that may be written to one drive in its life, from its data sheet: an int,
            or a string such as "1200TBW" or "7PBW". stats() and the log then report the used part
            and the days left. Drives count as equal.

    Device and gradients:
        step_on: the device that steps pages: "cpu" for parameters on a GPU, or a GPU for parameters
            in page-locked host memory. None: the device of the parameters.
        offload_gradients: "backward": once pages are laid out, by restore() or the first step, each
            gradient moves during backward from the GPU to page-locked memory, which counts towards
            ``host_memory``. With several ranks, FSDP2 must shard it. ``.grad`` then supports
            addition, ``torch.nn.utils.clip_grad_norm_`` and assigning None only.
        gradient_dtype: dtype of gradients that the store copies, and of sums of offloaded gradients
            over several backwards. None: the dtype of each parameter.
        free_gradients: set each ``.grad`` to None after its use.

    Ranks:
        process_group: the ranks that share the parameters. None: all ranks of torch.distributed, or
            this process alone if it is not initialized. ``Ranks`` are used as they are.
        timeout: seconds to wait for another rank. A call that it does not make is then refused on
            all ranks; a rank that does not arrive in the middle of a call counts as failed.

    A store is used by one thread of the process that opened it.

    Raises:
        RunDirectoryError: the directory cannot be used; the message says what to do.
        RunLockedError: another process, or another store of this process, uses the directory.
        StorageError: a file operation failed.
        ValueError: an argument is out of range, or differs between ranks.
        RollCallError: another rank did not open the store in time. It may be opened again.
        PeerFailed: any of these on another rank.

    Calls that all ranks make together raise RollCallError if a rank makes another call, or does
    not come in time. Such a call does nothing, and the store stays usable.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Storage | None,
        *,
        host_memory: int | str = "16GiB",
        device_memory: int | str = 0,
        page_bytes: int | str | None = None,
        buffers: int | None = None,
        commit_every: int | None = 1,
        engine: str = "auto",
        resume: bool = False,
        overwrite: bool = False,
        step_on: torch.device | str | None = None,
        offload_gradients: str | None = None,
        gradient_dtype: torch.dtype | None = None,
        free_gradients: bool = False,
        endurance: int | str | None = None,
        process_group: dist.ProcessGroup | Ranks | None = None,
        timeout: float = 600.0,
    ) -> None:
        budget = Budget(
            host_memory=parse_bytes(host_memory),
            device_memory=parse_bytes(device_memory),
            buffers=buffers,
        )
        page_size = default_page_bytes(budget) if page_bytes is None else parse_bytes(page_bytes)
        paths = [directory] if isinstance(directory, str | os.PathLike) else directory
        directories = [Path(path) for path in paths] if isinstance(paths, Sequence) else []
        device = step_device(step_on)
        check_page_options(page_size, commit_every, device, budget)
        _check_gradients(offload_gradients, gradient_dtype)
        _check_modes(resume=resume, overwrite=overwrite)
        modes = {"resume": resume, "overwrite": overwrite}
        life = rated_life(endurance, directories)
        options = {
            "page_bytes": None if page_bytes is None else page_size,
            "commit_every": commit_every,
            "number of directories": len(directories),
            "endurance": life,
            **modes,
        }
        ranks = ranks_of(process_group, timeout_s=timeout)
        self._other_ranks: OtherRanks | None = None  # The run that restore() begins from.
        opened_at = time.monotonic()
        with Releases() as opened:
            opened.add(ranks.close)
            rank_checks.require_same_options(ranks, options)
            page_size = min(ranks.gather(page_size))
            if directories:
                self._other_ranks, directories = look_for_other_ranks(directories, ranks, **modes)
            other = self._other_ranks
            if other is not None and ranks.rank == 0:
                before = len(other.manifests)
                change = f"from {before} to {ranks.world_size} ranks"
                if before == ranks.world_size:
                    change = "to another number of ranks, which was interrupted"
                warn_user(
                    f"the run in {directories[0]} goes {change}: restore() lays it out anew, from "
                    f"step {other.manifests[0].step}"
                )

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
            progress: Progress = Progress()
            awaits_restore = other is not None
            run_id = ""
            if storage is not None:
                opened.add(partial(close_storage, storage))
                progress = committer = open_committer(
                    storage,
                    ranks,
                    resume=resume,
                    overwrite=overwrite,
                    page_bytes=page_size,
                    commit_every=commit_every,
                    begins_later=other is not None,
                )
                run_id, page_size = committer.identity.run_id, committer.identity.page_bytes
                awaits_restore = awaits_restore or committer.committed is not None
            opened.add(progress.close)
            wear = Wear(life, directories, ranks, commit_every=commit_every, buffers=buffers)
            verifier = Verifier()
            opened.add(verifier.close)
            usability = Usability(
                ranks, has_directory=storage is not None, awaits_restore=awaits_restore
            )
            self._engine = "none" if storage is None else storage.engine
            files = PageFiles(storage or MemoryStorage(), run_id=run_id)
            pager = Pager(files, progress)
            table = PageTable(
                ranks,
                pager,
                progress,
                usability,
                budget=budget,
                page_bytes=page_size,
                step_on=device,
                offloads=offload_gradients is not None,
                gradient_dtype=gradient_dtype,
            )
            opened.add(table.close)
            if storage is not None:
                files.start_threads()
            if directories and not awaits_restore:
                remove_other_ranks(directories, ranks, overwrite=overwrite)
            if isinstance(progress, Committer):
                unclosed = Unclosed(self, progress, usability, verifier.cancel)
                opened.add(unclosed.cancel)
            self._session = Session(
                ranks,
                Calls(ranks),
                usability,
                progress,
                pager,
                table,
                verifier.check,
                step_on=device,
                free_gradients=free_gradients,
                wear=wear,
                directory=directories or storage,
                opened_at=opened_at,
            )
            self._checkpoints = Checkpoints(self._session, verifier)
            self.pages = Pages(self._session)
            """The pages, for optimizers: see ``tierstore.pages``."""
            self._opened = opened

    def __repr__(self) -> str:
        return f"{type(self).__name__}({vars(self).get('_session', 'not open')!s})"

    # -- Parameters and steps.

    @property
    def step(self) -> int:
        """Number of the last step, counted from the beginning of the run."""
        return self._session.committer.step

    @not_compiled
    def move(self, tier: str) -> None:
        """Move all pages to one tier, between two steps: turn offload on or off.

        Pages stay there until another move() or close(). Results do not change. All ranks call
        it together.

        Args:
            tier: "device" or "host", which the budget of that name must hold in full, or "nvme".

        Raises:
            BudgetError: the pages do not fit; nothing was changed.
            StorageError, CorruptionError: a page could not be read or written.
        """
        session = self._session
        session.usability.require_restored()
        target = Tier(tier)
        if target is Tier.NVME:
            session.require_committer('move("nvme")')
        with session.calls.together("move()"):
            session.given.require_unchanged()
            session.table.move(target)
            session.given.forget()  # Shown views refer to the old memory.

    # -- Commits and checkpoints.

    @property
    def committed(self) -> CommittedStep:
        """The newest durable step, which a restart finds, and its registered states.

        Available before restore(), for a program that must know where it continues. On another
        number of ranks it has the states that are equal on all ranks of the commit.
        """
        session = self._session
        ranks = session.ranks
        if self._other_ranks is not None:
            return committed_step(self._other_ranks.manifests, ranks.rank, ranks.world_size)
        manifest = session.committer.committed if isinstance(session.committer, Committer) else None
        return CommittedStep(step=0) if manifest is None else committed_step([manifest], 0, 1)

    def register(self, **objects: Stateful | dict[Any, Any] | None) -> None:
        """Include the states of objects in each commit. restore() loads them back.

        For example ``store.register(scheduler=scheduler, random=tierstore.RandomState())``.
        commit() asks each object for its state. restore() loads the states in the order of
        registration. Objects that are registered later are not loaded.

        Args:
            objects: by name, objects with ``state_dict()`` and ``load_state_dict()``, such as
                schedulers, gradient scalers and data loaders; or dicts, which restore() fills with
                the committed items. A state has plain values and small tensors. None drops an
                object; restore() then leaves out its committed state.

        Raises:
            TypeError, ValueError: an object has no state, or its state is in the pages of this
                store. Nothing was registered.
            RunDirectoryError: the store has no directory.
        """
        session = self._session
        session.usability.require_open()
        session.require_committer("register()")
        for name, given in objects.items():
            if getattr(given, "store", None) is self:
                raise ValueError(
                    f"register({name}=) got the {type(given).__name__} whose state is in the pages "
                    "of this store, and therefore in each commit: leave it out"
                )
        session.registered.add(objects)

    @not_compiled
    def commit(self) -> None:
        """Make the last step durable in the background, so that a restart finds it.

        Copies the current hyperparameters and states of registered objects. Parameters and states
        are as the step left them.
        With ``commit_every`` above 1 a step that is not due is not committed. synchronize() then
        commits it with these states. A step is committed again if a registered state has changed.
        If values of groups change after the commit of a step, the next step's commit has them.

        Raises:
            TypeError, ValueError: a registered state cannot be stored, or is too large; the message
                names the value. Or a tensor of show_states() was changed in place. Or the memory of
                a parameter was freed: the store has then failed.
            StorageError: an earlier commit or write failed.
        """
        session = self._session
        session.usability.require_restored()
        session.raise_damage()
        session.given.require_unchanged()
        committer = session.require_committer("commit()")
        committer.keep_states(session.registered.ask())
        begins = committer.begins_commit
        if committer.was_begun and session.registered:  # Another rank may have changed states.
            with session.calls.together("commit()"):
                begins = any(session.ranks.gather(begins))
                if begins:
                    session.begin_commit()
        elif begins:
            with session.calls.together("commit()"):
                session.begin_commit()

    @not_compiled
    def synchronize(self) -> None:
        """Commit the last step if no commit holds it, and wait until it is durable.

        Raises:
            StorageError: the commit failed. The previous commit is intact.
            ValueError: a tensor of show_states() was changed in place; or the last step was not due
                by ``commit_every``, and parameters were changed since. Nothing was committed.
        """
        session = self._session
        session.usability.require_restored()
        session.raise_damage()
        session.given.require_unchanged()
        self._synchronize()

    def _keeps_commit_before(self) -> bool:
        """Return whether close() must not commit the last step because parameters were changed.

        If no other commit exists, close() commits the changed parameters, to keep the run.
        """
        session = self._session
        committer = session.require_committer("close()")
        with session.calls.together("close()"):
            is_changed = not committer.is_up_to_date and session.left_was_changed()
        if is_changed and session.ranks.rank == 0:
            lost = committer.lost_commit
            warn_user(
                f"parameters were changed since step {committer.step}, and a commit holds what its "
                + (
                    "step left. No other step is committed, so close() commits them as they are now"
                    if lost
                    else "step left: close() does not commit this step, and a restart finds step "
                    f"{self.committed.step}"
                )
                + ". Call synchronize() right after the last step()"
            )
        if is_changed and committer.lost_commit:
            session.accept_parameters()
            return False
        return is_changed

    def _synchronize(self, *, begins: bool = True) -> None:
        session = self._session
        committer = session.require_committer("synchronize()")
        session.ask()
        if begins and not committer.is_up_to_date:
            with session.calls.together("synchronize()"):
                session.begin_commit()
        with session.usability.failing(interrupts=False), session.pager.stalled():
            committer.wait()
        with session.usability.failing(interrupts=True):
            session.pager.finish_writes()

    @not_compiled
    def checkpoint(
        self,
        path: str | os.PathLike[str],
        model: torch.nn.Module | None = None,
        *,
        keep_last: int | None = None,
        model_prefix: str = "model.",
    ) -> Publication:
        """Publish the last step as a directory that ``torch.distributed.checkpoint`` loads.

        Synchronizes first. On the filesystem of the run, page files are linked, no tensor is read
        or written, and the checkpoint is complete on return. On another filesystem, pages are
        copied: with several ranks before the return, else in the background; close() and the next
        checkpoint() wait for the copy and raise its error. The checkpoint is then verified in the
        background. If damage also affects the run, the next step(), commit(), synchronize(),
        checkpoint() or close() raises it, and the store fails. An interrupt leaves nothing of the
        checkpoint, all of it, or a copy that continues. All ranks call it together.

        Args:
            path: the directory; must be absent or empty, or a checkpoint of this run of steps
                that a rewind has abandoned. Such a checkpoint is replaced. It may be in the run
                directory, but not in the directory of a rank.
            model: adds the tensors that are not paged: buffers, frozen parameters, and the
                further names of tied parameters. None: paged state only.
            keep_last: number of checkpoints of this run to keep next to ``path``. The oldest are
                removed afterwards. One more is kept if none of them is known to be whole. None
                keeps all.
            model_prefix: prefix of the names of the model's parameters; torchtitan uses "".

        Raises:
            CheckpointError: ``path`` is not empty, cannot be created, or is in the directory of a
                rank; no step was done yet; or the model does not match or cannot be stored. Nothing
                was published.
            StorageError: a file operation failed, for example on a full disk. Nothing is left of
                the checkpoint.
            CorruptionError: a copied page is not what was committed. Nothing is left of the
                checkpoint. Or the previous checkpoint and the run are damaged. The store has then
                failed.
            ThreadError, BudgetError: the system has no thread or memory for the verification.
        """
        return self._checkpoints.publish(
            path, model, self.synchronize, keep_last=keep_last, model_prefix=model_prefix
        )

    @not_compiled
    @torch.no_grad()
    def restore(
        self,
        checkpoint: str | os.PathLike[str] | None = None,
        *,
        rewind: bool = False,
        check: Callable[[CommittedStep], None] = lambda committed: None,
    ) -> int:
        """Go back to the committed step: parameters, states, hyperparameters, registered objects.

        Registered objects get their states after the pages, in the order of registration.
        Hyperparameters are set last. Each rank gets the states that it has committed. On another
        number of ranks, all ranks get the states that are equal on the ranks of the commit, and a
        RandomState does not change.

        Groups that this store attached after the commit start afresh: their parameters and
        hyperparameters do not change, states are reset, and ``scalars`` has no entries for them.

        Args:
            checkpoint: begin a new run from this checkpoint instead: one that tierstore
                published, or any DCP checkpoint of a model and its optimizer, or of a model
                alone, with which states are zeros and the step is 0. It is checked first.
            rewind: with ``checkpoint``, continue from its step in this run instead, for example
                after a loss spike. The run may have steps. This makes one commit. Then a restart
                finds the checkpoint's step, even if later steps were committed before. After a
                crash during the call, it finds the last commit or this one. Checkpoints of the run
                do not change. A run without steps begins from the checkpoint.
            check: called with the step and its states before any change. It raises ValueError if
                the program cannot continue from there.

        Returns:
            The step; 0 if nothing was ever committed and no step was done.

        Raises:
            CheckpointError: not a checkpoint, or of another model. Nothing was changed.
            RunDirectoryError: steps were done, but none was committed. Nothing was changed.
            RunMismatchError: the run is of another model; the message names the first
                difference. Nothing was changed.
            CorruptionError: a page, or the checkpoint, is not what was written.
            ValueError: raised by ``check``; or no object is registered for a committed state (with
                ``checkpoint``, a warning); or a state differs between the ranks of a commit by
                another number of ranks; or the optimizer cannot use a hyperparameter of the
                checkpoint; or a forward of FSDP2 is in progress; or ``rewind`` without
                ``checkpoint``, or in a run with ``commit_every=None``. Nothing was changed.
            StorageError: a page could not be read or written, for example on a full disk. Another
                restore() goes back to the last commit.

        Warns:
            UserWarning: a registered object has no state in the commit, and does not change.
        """
        session = self._session
        session.usability.require_open()
        session.require_committer("restore()")
        if rewind and checkpoint is None:
            raise ValueError(
                "rewind=True goes back to a checkpoint: also pass checkpoint=; restore() alone "
                "goes back to the last commit"
            )
        with session.calls.together("restore(rewind=True)" if rewind else "restore()"):
            return self._restore(checkpoint, rewind, check)

    def _restore(
        self,
        checkpoint: str | os.PathLike[str] | None,
        rewind: bool,
        check: Callable[[CommittedStep], None],
    ) -> int:
        session = self._session
        committer, usability = session.committer, session.usability
        parameters = session.table.parameters
        together(session.ranks, "begin a restore", lambda: drop_gathered_copies(parameters))
        session.given.forget()
        restore = Restore(session, check)
        if checkpoint is not None and rewind:
            self._checkpoints.settle()
            step = restore.rewound(checkpoint, self._synchronize)
            self._checkpoints.forget()
            return step
        if checkpoint is not None:
            return restore.from_checkpoint(checkpoint)
        if self._other_ranks is not None:
            step = restore.from_other_ranks(self._other_ranks, self.synchronize)
            self._other_ranks = None
            return step
        was_changed = committer.step or committer.groups_written or usability.failure
        if not (usability.awaits_restore or was_changed):
            together(session.ranks, "check the step", lambda: check(CommittedStep(step=0)))
            return 0
        self._checkpoints.settle()  # It reads files that recovery would remove.
        return restore.from_commit()

    # -- The store itself.

    @not_compiled
    def stats(self) -> Stats:
        """Return counters of this opening of the store."""
        session = self._session
        pager, pages = session.pager, session.table.pages
        written, seconds = pager.files.bytes_written, session.seconds
        return Stats(
            engine=self._engine,
            pages=len(pages),
            state_bytes=sum(page.layout.nbytes for page in pages),
            bytes_read=pager.files.bytes_read,
            bytes_written=written,
            bytes_spread=session.table.replication.bytes_sent,
            stall_seconds=pager.stall_seconds,
            host_bytes_peak=pager.host_bytes_peak,
            device_bytes_peak=pager.device_bytes_peak,
            pages_in=dict(Counter(page.tier.value for page in pages)),
            steps=session.steps_begun,
            seconds=seconds,
            drive_life_used=session.wear.life_used(written),
            drive_days_left=session.wear.days_left(written, seconds),
        )

    @not_compiled
    def close(self) -> None:
        """Synchronize, then release files, lock and buffers. Call it again after an interrupt.

        Waits until the last checkpoint was verified. A failed store is released without a commit.
        A step that was not due is not committed if parameters were changed after it (with a
        warning). An error of synchronize(), or of the last checkpoint, is raised at the end.
        """
        self._close(synchronize=True)

    def _close(self, *, synchronize: bool) -> None:
        session, checkpoints = self._session, self._checkpoints
        usability = session.usability
        if usability.is_forked:
            return
        if usability.closed:
            self._opened.close()  # Release the resources that an interrupt has left.
            return
        if usability.sweeping:
            usability.fail(SweepError("the store was closed in the middle of a step"))
        # Both stacks call all callbacks, the last one first, even if some fail.
        with contextlib.ExitStack() as released, contextlib.ExitStack() as stack:
            stack.callback(self._opened.close)
            stack.callback(setattr, usability, "closed", True)
            if synchronize:
                stack.callback(checkpoints.finish_verification)
            # After an error in the program, only the log reports the outcome of the copy.
            stack.callback(checkpoints.finish_copy if synchronize else checkpoints.settle)
            if synchronize and usability.has_directory and not usability.failure:
                committer = session.require_committer("close()")
                if usability.awaits_restore:  # Nothing was written since the run was opened.
                    committer.marks_clean_end = committer.is_clean
                else:
                    if not session.given.was_refused:
                        # Called last, so that the last step is committed in any case.
                        released.callback(session.given.require_unchanged)
                    with session.calls.named("close()"):
                        keeps = committer.adds_parameters and self._keeps_commit_before()
                        self._synchronize(begins=not keeps)
                    committer.marks_clean_end = not keeps

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        """Close. After an exception, do not commit the last step if no commit of it has begun.

        Registered objects and learning rates of the scheduler may belong to the step before. Waits
        for a checkpoint that is being copied. If the copy fails, the log reports it.
        """
        if error is not None:
            self._session.ranks.fail(error, other_group=True)
        self._close(synchronize=kind is None)


def _check_gradients(offload_gradients: str | None, gradient_dtype: torch.dtype | None) -> None:
    if offload_gradients not in (None, "backward"):
        raise ValueError(f"offload_gradients must be None or 'backward', got {offload_gradients!r}")
    if gradient_dtype not in (None, *PARAMETER_DTYPES):
        raise ValueError(
            "gradient_dtype must be None, bfloat16, float16, float32 or float64, got "
            f"{gradient_dtype!r}"
        )


def _check_modes(*, resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise ValueError("resume=True keeps a run and overwrite=True deletes it: pass one")
