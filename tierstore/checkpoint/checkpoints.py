"""The checkpoints of an open store: published one at a time, each verified before the next."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import torch

from tierstore.checkpoint.page_links import PageLinks
from tierstore.checkpoint.publication import Publication
from tierstore.checkpoint.verification import Verifier
from tierstore.errors import StorageError, TierstoreError
from tierstore.paging.session import Session
from tierstore.ranks.peers import agree, together
from tierstore.run.commit import Commit, CommittedPage
from tierstore.storage.paths import FULL

# Ranks that wait for a verification meet this often.
_VERIFYING_TURN_S = 1.0


class Checkpoints:
    """Publishes the last step of a store, and waits for copies and verifications in progress.

    Args:
        session: the open store.
        verifier: verifies each checkpoint after its publication.
    """

    def __init__(self, session: Session, verifier: Verifier) -> None:
        self._session = session
        self._verifier = verifier
        self._copying: Publication | None = None

    def publish(
        self,
        path: str | os.PathLike[str],
        model: torch.nn.Module | None,
        synchronize: Callable[[], None],
        *,
        keep_last: int | None,
        model_prefix: str,
    ) -> Publication:
        """Publish a checkpoint; arguments and errors as in ``TierStore.checkpoint()``.

        Args:
            path: the directory.
            model: adds the tensors that are not paged.
            synchronize: makes the last step durable.
            keep_last: number of checkpoints to keep.
            model_prefix: prefix of the names of the model's parameters.

        Returns:
            The checkpoint, which may still be copied.
        """
        # These import torch.distributed.checkpoint, which takes a second.
        from tierstore.checkpoint.model_contents import contents_of
        from tierstore.checkpoint.publish import Committed, publish

        session = self._session
        session.usability.require_restored()
        committer = session.require_committer("checkpoint()")
        with session.calls.together("checkpoint()"):
            self.finish_copy()
            # At an interrupt, tell other ranks not to wait for this rank.
            with session.usability.failing(interrupts=session.ranks.world_size > 1):
                # In short turns, because a rank with a slow disk may take long.
                while not all(agree(session.ranks, "verify the last checkpoint", self._verify_on)):
                    pass
            together(session.ranks, "start to verify checkpoints", self._verifier.start)
            synchronize()
            manifest, table = committer.committed, session.table
            page_files = []
            if manifest is not None:
                layout = committer.layout(table.layout_groups, table.layouts)
                commit = Commit(manifest=manifest, layout=layout)
                pages, spares = commit.pages(table.layouts), committer.provide_spares
                page_files.append(PageLinks(committer.storage, commit, pages, spares))
            committed = Committed(
                peers=session.ranks,
                page_files=page_files,
                contents=lambda: contents_of(model, table.groups[: committer.groups_written]),
                model_prefix=model_prefix,
                is_rewind=committer.rewound_step == committer.step,
            )

            def keep(publication: Publication) -> None:
                self._copying = publication

            try:
                publication = publish(
                    committed, os.fsdecode(path), keep_last=keep_last, on_copying=keep
                )
            except BaseException as error:
                if session.ranks.world_size > 1 and not isinstance(error, Exception):
                    session.usability.fail(error)  # Other ranks are in the middle of publishing.
                with contextlib.suppress(StorageError):  # The user has to fix the first error.
                    committer.drop_spares()
                if isinstance(error, StorageError) and error.errno in FULL:
                    with contextlib.suppress(OSError, TierstoreError):
                        self._explain_full_disk(error, Path(path).absolute().parent)
                raise
            (links,) = page_files

            def is_in_run(page: CommittedPage) -> bool:
                assert committer.committed is not None
                entry = committer.committed.entries.get(page.number)
                return links.is_linked(page) and entry == page.entry

            self._verifier.begin(links, publication, is_in_run)
            return publication

    def finish_verification(self) -> None:
        """Wait until the last checkpoint was verified, unless the store has failed.

        Raises:
            CorruptionError, StorageError: as in Verifier.wait(). The store has then failed.
        """
        session = self._session
        if session.usability.failure is None:
            with session.usability.failing(interrupts=False):
                self._verifier.wait()

    def finish_copy(self) -> None:
        """Wait until the last checkpoint was copied.

        Raises:
            CorruptionError, StorageError: as in Publication.wait(), once.
        """
        publication, self._copying = self._copying, None
        if publication is not None:
            publication.wait()

    def settle(self) -> None:
        """Wait until the copy has ended, but do not raise its error."""
        if self._copying is not None:
            self._copying.settle()

    def forget(self) -> None:
        """Discard the result of the last verification: the run now has other files."""
        self._verifier.forget()

    def _explain_full_disk(self, error: StorageError, parent: Path) -> None:
        """Add to an error of checkpoint() the space it needs, and files that could be removed."""
        from tierstore.checkpoint.retention import advice_on_full_disk

        session = self._session
        committer = session.require_committer("checkpoint()")
        assert committer.committed is not None
        nbytes = sum(page.layout.nbytes for page in session.table.pages)
        with contextlib.closing(committer.storage.folder(str(parent))) as folder:
            run_id, step = committer.committed.run_id, committer.committed.step
            error.add_note(advice_on_full_disk(folder, run_id, step, nbytes))

    def _verify_on(self) -> bool:
        return self._verifier.wait(_VERIFYING_TURN_S)
