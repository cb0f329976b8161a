"""Restore of parameters and pages from the last commit, a checkpoint, or a run being resharded."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from tierstore.checkpoint.reshard import OtherRanks, end_reshard
from tierstore.errors import RunDirectoryError, StorageError
from tierstore.paging.session import Session
from tierstore.paging.whole_states import restore_parameters, write_pages
from tierstore.ranks.peers import agree, on_rank_0, together
from tierstore.run import tagged_json
from tierstore.run.committer import scalars_in
from tierstore.run.layout_file import RankLayout
from tierstore.run.manifest import Manifest, PageEntry
from tierstore.run.page_files import check_files, check_same_model
from tierstore.run.recovery import recover
from tierstore.run.registered import CommittedStep, committed_step

if TYPE_CHECKING:
    from tierstore.checkpoint.load import CheckpointSource

logger = logging.getLogger("tierstore")


class Restore:
    """Restore of a step, from one of three sources. All ranks make the same calls.

    Args:
        session: of the store.
        check: see TierStore.restore().
    """

    def __init__(self, session: Session, check: Callable[[CommittedStep], None]) -> None:
        self._ranks = session.ranks
        self._committer = session.require_committer("restore()")
        self._table = session.table
        self._usability = session.usability
        self._registered = session.registered
        self._check = check

    def from_commit(self) -> int:
        """Go back to the last commit of all ranks; return its step. See TierStore.restore()."""
        committer, table = self._committer, self._table
        committer.settle()
        manifest = self._recover()
        committed = committed_step([manifest], 0, 1)  # The commit of this rank alone.

        def check() -> dict[str, str]:
            renamed = self._check_model(manifest)
            check_files(committer.storage, table.layouts, manifest)
            self._check(committed)
            self._registered.compare(committed, begins=False)
            return renamed

        renamed = together(self._ranks, "check the run", check)
        with self._replacing_pages(manifest.entries):
            restore_parameters(table)
            committer.restore(manifest, table.groups[: len(manifest.hyperparameters)], renamed)
            table.allocate_files(table.pages)
            self._load(committed)
        return manifest.step

    def from_checkpoint(self, checkpoint: str | os.PathLike[str]) -> int:
        """Begin a new run with the content of a checkpoint; return its step."""
        return self._begin(
            checkpoint,
            "go back to it with rewind=True, go on with restore() alone, name another directory, "
            "or pass overwrite=True",
            begins=True,
        )

    def rewound(self, checkpoint: str | os.PathLike[str], commit: Callable[[], None]) -> int:
        """Go back to a checkpoint within the run, in a new epoch; return its step.

        The pages start afresh, as in a new run. They are written to the slots that the last commit
        does not need. Until the new commit is durable, a restart therefore finds the last commit.

        Args:
            checkpoint: the directory. A run without a commit begins from it.
            commit: makes a step durable.
        """
        committer, table = self._committer, self._table
        committer.settle()
        if not any(agree(self._ranks, "look for a commit", self._has_commit)):
            return self._begin(
                checkpoint,
                "to rewind it, commit a step first, with synchronize(); a run that is being "
                "resharded is committed by restore() alone",
                begins=True,
            )
        manifest = self._recover()
        try:
            renamed = together(self._ranks, "check the run", lambda: self._check_model(manifest))
            groups = table.groups[: len(manifest.hyperparameters)]
            # If the run was just opened, only the commit has the scalars.
            scalars = scalars_in(manifest, groups, renamed) | committer.scalars
            source = self._checked_source(checkpoint, scalars, is_earlier=True, begins=True)
        except Exception:
            if not self._usability.awaits_restore:
                # Restore the files from before the call: the next step must not find a full disk.
                with contextlib.suppress(StorageError):
                    table.allocate_files(table.pages)
            raise
        with self._replacing_pages({}):
            committer.begin_epoch(manifest)
            committer.scalars = {}
            table.allocate_files(table.pages)
            self._fill(source)
            commit()
        committer.rewound_step = source.step
        return source.step

    def from_other_ranks(self, other: OtherRanks, commit: Callable[[], None]) -> int:
        """Begin a new run from a run of another number of ranks; return its step.

        Args:
            other: the run. Its checkpoint is removed at the end.
            commit: makes a step durable.
        """
        committer, table = self._committer, self._table
        if self._usability.failure:
            raise RunDirectoryError(
                "a restore on another number of ranks failed: nothing is lost, start the job again "
                "with resume=True"
            )
        source = self._checked_source(
            other.checkpoint, committer.scalars, is_earlier=False, begins=False
        )
        other.begin_anew(committer, self._ranks)
        together(self._ranks, "allocate pages", lambda: table.allocate_files(table.pages))
        self._usability.awaits_restore = False
        with self._usability.failing(interrupts=True):
            self._fill(source)
        commit()
        on_rank_0(self._ranks, "end the reshard", lambda: end_reshard(other.directories[0]))
        return source.step

    def _recover(self) -> Manifest:
        """Remove newer commits; return the last commit of all ranks.

        Raises:
            RunDirectoryError: the ranks have no commit in common.
        """
        committer = self._committer
        manifest = recover(committer.storage, committer.identity, self._ranks)
        committer.forget_spares()
        if manifest is None:
            raise RunDirectoryError(
                f"no step was committed by all ranks of {committer.storage.location} yet, so "
                "restore() has no step to restore: start over with a new model and a new store"
            )
        return manifest

    @contextlib.contextmanager
    def _replacing_pages(self, entries: Mapping[int, PageEntry]) -> Iterator[None]:
        """Set pages to the content of these files. After an error only restore() works.

        Args:
            entries: page number -> content of its file. Pages without an entry start afresh.
        """
        self._usability.awaits_restore = True  # Until the restore is complete.
        try:
            self._table.pager.reset(self._table.pages, entries)
            self._table.ensure_placed()
            yield
        except BaseException as error:
            self._ranks.fail(error)
            raise
        self._usability.note_restored()

    def _has_commit(self) -> bool:
        """Return whether the run has a commit.

        Raises:
            ValueError: a rewind would overwrite the commit.
        """
        committer = self._committer
        if committer.committed is not None and not committer.keeps_commit:
            raise ValueError(
                "rewind=True needs a second slot of each page beside the last commit, and a run "
                "with commit_every=None has one slot: open it with resume=True and commit_every=1, "
                "which takes twice the space"
            )
        return committer.committed is not None

    def _check_model(self, manifest: Manifest) -> dict[str, str]:
        """Check that a commit belongs to the attached model and its optimizer.

        Returns:
            The result of check_same_model().
        """
        table, storage = self._table, self._committer.storage
        # Groups that were attached after the commit start afresh.
        count = max(len(manifest.hyperparameters), table.group_count_min)
        attached = RankLayout.from_pages(
            table.layout_groups[:count],
            [layout for layout in table.layouts if layout.subgroup.group < count],
        )
        renamed = check_same_model(storage, manifest, attached)
        for group, saved in zip(table.groups, manifest.hyperparameters, strict=False):
            group.check_commit(tagged_json.decode(saved))  # Different rules may have equal states.
        return renamed

    def _begin(self, checkpoint: str | os.PathLike[str], todo: str, *, begins: bool) -> int:
        """Fill the pages of a new run from a checkpoint; return its step.

        Args:
            checkpoint: the directory.
            todo: the advice in the error if the run has steps already.
            begins: see Registered.compare().
        """
        committer = self._committer
        if self._usability.awaits_restore or committer.step or self._usability.failure:
            raise RunDirectoryError(
                f"a checkpoint begins a new run, but this run has steps already: {todo}"
            )

        source = self._checked_source(
            checkpoint, committer.scalars, is_earlier=False, begins=begins
        )
        with self._usability.failing(interrupts=True):
            self._fill(source)
        return source.step

    def _checked_source(
        self,
        checkpoint: str | os.PathLike[str],
        scalars: Mapping[str, Mapping[str, float]],
        *,
        is_earlier: bool,
        begins: bool,
    ) -> CheckpointSource:
        """Return a checkpoint after checking it.

        Args:
            checkpoint: the directory.
            scalars: parameter name -> the scalars to load, by name.
            is_earlier: see CheckpointSource.
            begins: see Registered.compare().
        """
        from tierstore.checkpoint.load import CheckpointSource

        def checked_source() -> CheckpointSource:
            source = CheckpointSource(
                checkpoint, self._table.groups, scalars, self._ranks, is_earlier=is_earlier
            )
            self._check(source.committed)
            self._registered.compare(source.committed, begins=begins)
            return source

        source = together(self._ranks, "check a checkpoint", checked_source)
        if source.is_weights_alone and self._ranks.rank == 0:
            logger.warning(
                "the checkpoint %s has no optimizer: the run begins at step 0 with its weights, "
                "states of zeros, and the hyperparameters of this program",
                checkpoint,
            )
        for names, what in (
            (
                source.left_out,
                "that are in no param group here: restore() skips them, so load their values into "
                "the model if it has them",
            ),
            (
                source.never_stepped,
                "without states, because they never had a gradient: their states start afresh",
            ),
        ):
            if names and self._ranks.rank == 0:
                some = ", ".join(map(repr, names[:3])) + ", ..." * (len(names) > 3)
                logger.warning(
                    "the checkpoint %s has %d parameters (%s) %s",
                    *(checkpoint, len(names), some, what),
                )
        return source

    def _fill(self, source: CheckpointSource) -> None:
        """Load a checkpoint into parameters, pages, groups and registered objects."""
        self._committer.step = source.step
        write_pages(self._table, source.fill, source.scalars)
        for group, values in zip(self._table.groups, source.hyperparameters, strict=True):
            group.hyperparameters.update(values)
        self._load(source.committed)
        # Ask now: when the next step commits this step, data and random numbers are a batch ahead.
        self._committer.keep_states(self._registered.ask())

    def _load(self, committed: CommittedStep) -> None:
        """Load the states of registered objects. A scheduler may then set hyperparameters."""
        groups = [group.hyperparameters for group in self._table.groups]
        restored = [dict(group) for group in groups]
        try:
            together(
                self._ranks, "load registered states", lambda: self._registered.load(committed)
            )
        finally:
            for group, values in zip(groups, restored, strict=True):
                group.update(values)
