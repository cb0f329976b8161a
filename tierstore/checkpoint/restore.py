"""Restore: parameters and pages from the last commit, a checkpoint, or a run being resharded."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tierstore.checkpoint.reshard import end_reshard
from tierstore.errors import RunDirectoryError
from tierstore.paging.page_table import PageTable
from tierstore.paging.whole_states import restore_parameters, write_pages
from tierstore.ranks.peers import Ranks, on_rank_0, together
from tierstore.run import tagged_json
from tierstore.run.committer import Committer
from tierstore.run.layout_file import RankLayout
from tierstore.run.manifest import Manifest
from tierstore.run.page_files import check_files, check_same_model
from tierstore.run.recovery import recover
from tierstore.run.usability import Usability

logger = logging.getLogger("tierstore")


class Restore:
    """Restore of a step, from one of three sources. All ranks make the same calls.

    Args:
        ranks: all ranks of the job.
        committer: the commits of the run.
        table: the pages.
        usability: of the store.
        check: see TierStore.restore().
    """

    def __init__(
        self,
        ranks: Ranks,
        committer: Committer,
        table: PageTable,
        usability: Usability,
        check: Callable[[int, Any], None],
    ) -> None:
        self._ranks = ranks
        self._committer = committer
        self._table = table
        self._usability = usability
        self._check = check

    def from_commit(self) -> int:
        """Go back to the last commit of all ranks; return its step. See TierStore.restore()."""
        committer, usability = self._committer, self._usability
        committer.settle()
        manifest = recover(committer.storage, committer.identity, self._ranks)
        committer.forget_spares()
        if manifest is None:
            raise RunDirectoryError(
                f"no step was committed by all ranks of {committer.storage.location} yet, so "
                "there is none to go back to: start over with a new model and a new store"
            )
        renamed = together(self._ranks, "check the run", lambda: self._check_commit(manifest))
        usability.awaits_restore = True  # Until the restore is complete.
        try:
            self._table.pager.reset(self._table.pages, manifest.entries)
            self._table.ensure_placed()
            restore_parameters(self._table)
            groups = self._table.groups[: len(manifest.hyperparameters)]
            committer.restore(manifest, groups, renamed)
            self._table.allocate_files(self._table.pages)
        except BaseException as error:
            self._ranks.fail(error)
            raise
        usability.note_restored()
        return manifest.step

    def from_checkpoint(self, checkpoint: str | os.PathLike[str]) -> int:
        """Begin a new run with the content of a checkpoint; return its step."""
        return self._load(
            checkpoint,
            "go on with restore() alone, or name another directory, or pass overwrite=True",
        )

    def from_resharded(self, checkpoint: Path, commit: Callable[[], None]) -> int:
        """Begin a run from a checkpoint of the run on another number of ranks; return its step.

        Args:
            checkpoint: the old run, published in its own directory; removed at the end.
            commit: makes a step durable, after which the checkpoint is not needed.
        """
        self._usability.awaits_restore = False
        try:
            pages = self._table.pages
            together(self._ranks, "allocate pages", lambda: self._table.allocate_files(pages))
            step = self._load(
                checkpoint,
                "nothing is lost, start the job again with resume=True and reshard=True",
            )
        except BaseException:
            self._usability.awaits_restore = True
            raise
        self._committer.annotate(self._committer.extra)
        commit()
        on_rank_0(self._ranks, "end the reshard", lambda: end_reshard(checkpoint.parent))
        return step

    def _check_commit(self, manifest: Manifest) -> dict[str, str]:
        """Check a commit and its files; return what check_same_model() does."""
        table, storage = self._table, self._committer.storage
        # Groups that were attached after the commit begin anew.
        count = max(len(manifest.hyperparameters), table.group_count_min)
        attached = RankLayout.from_pages(
            table.layout_groups[:count],
            [layout for layout in table.layouts if layout.subgroup.group < count],
        )
        pages = [page.index for page in table.pages if page.layout.subgroup.group < count]
        names = {spec.name for group in attached.groups for spec in group}
        dropped = [name for name in table.dropped if name in names]
        renamed = check_same_model(storage, manifest, attached, pages, dropped)
        check_files(storage, table.layouts, manifest)
        self._check(manifest.step, tagged_json.decode(manifest.extra))
        return renamed

    def _load(self, checkpoint: str | os.PathLike[str], todo: str) -> int:
        """Fill the pages of a new run from a checkpoint; return its step.

        Args:
            checkpoint: the directory.
            todo: the advice in the error if the run has steps already.
        """
        from tierstore.checkpoint.load import CheckpointSource

        committer, groups = self._committer, self._table.groups
        if self._usability.awaits_restore or committer.step or self._usability.failure:
            raise RunDirectoryError(
                f"a checkpoint begins a new run, and this one has steps already: {todo}"
            )

        def checked_source() -> CheckpointSource:
            source = CheckpointSource(checkpoint, groups, committer.scalars, self._ranks)
            self._check(source.step, source.extra)
            return source

        source = together(self._ranks, "check a checkpoint", checked_source)
        if source.is_weights_alone and self._ranks.rank == 0:
            logger.warning(
                "the checkpoint %s has no optimizer: the run begins at step 0 with its weights, "
                "states of zeros, and the hyperparameters of this program",
                checkpoint,
            )
        with self._usability.failing(interrupts=True):
            committer.step = source.step
            write_pages(self._table, source.fill, source.scalars)
            committer.extra = source.extra
            for group, values in zip(groups, source.hyperparameters, strict=True):
                group.hyperparameters.update(values)
        return source.step
