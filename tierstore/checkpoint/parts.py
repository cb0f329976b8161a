"""Checkpoints in parts: several directories, if ranks see different disks under one path.

A part has the files of the ranks that see the directory, and the files that describe the whole
checkpoint. A user copies all parts into one directory to load the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from tierstore.checkpoint.directory import CheckpointDirectory
from tierstore.errors import PeerFailed
from tierstore.ranks.peers import Peers, agree, on_rank_0, together
from tierstore.run.file_names import MARKER_NAME

Marked = Mapping[str, Collection[int]]
"""Checkpoint -> ranks that have verified it."""


class Parts:
    """The parts of one checkpoint: the part of rank 0, and one part for each further maker.

    All methods are collective.

    Args:
        peers: all ranks.
        directory: the part that this rank made or sees.
    """

    def __init__(self, peers: Peers, directory: CheckpointDirectory) -> None:
        self._peers = peers
        self._directory = directory
        self._made_further_part = directory.made_here and peers.rank > 0

    def share(self, metadata: bytes, marker: bytes) -> bytes:
        """Put the marker of rank 0 into every part; return the metadata of rank 0."""
        metadata, marker = self._peers.gather((metadata, marker))[0]
        self._on_further_parts(
            "mark the parts of the checkpoint", lambda: self._directory.put(MARKER_NAME, marker)
        )
        return metadata

    def name(
        self,
        metadata: bytes,
        publish: Callable[[Marked], None],
        keep_last: int | None,
        marked: Callable[[], Marked],
    ) -> None:
        """Give all parts the final name. The part of rank 0 is last.

        Args:
            metadata: the content of ``.metadata``.
            publish: called on rank 0 with the marks of all parts: gives its part the final name,
                and removes old parts beside it.
            keep_last: as in publish().
            marked: called on the rank that made a part: returns the marks of older parts.

        Raises:
            PeerFailed: another rank failed, or rank 0 does not answer.
        """
        # The checkpoint is published when the part of rank 0 has the final name. In this example,
        # rank 0 made part A, and rank 2 made part B:
        #
        #   phase                  on success            on failure
        #   1 name further parts,  A TEMPORARY, B KEPT   on any rank: all ranks remove their parts
        #     look for marks
        #   2 name the checkpoint  A KEPT, B KEPT        rank 0 reports it: all ranks remove their
        #                                                parts; rank 0 does not answer: B stays,
        #                                                because A may have its name
        #   3 retain               old parts removed     logged

        def name_further_part() -> Marked:
            if self._made_further_part:
                self._directory.take_name(metadata)
            return marked() if self._directory.made_here else {}

        marks = agree(self._peers, "name the further parts of the checkpoint", name_further_part)
        if self._made_further_part:
            self._directory.keep()
        failure = self._attempt_on_rank_0("name the checkpoint", lambda: publish(_merged(marks)))
        if failure is not None:
            self._directory.withdraw()
            raise failure
        if self._made_further_part:
            self._directory.retain(keep_last, _merged(marks))

    def _on_further_parts(self, call: str, act: Callable[[], None]) -> None:
        """Call ``act`` on the ranks that made a further part. A failure raises on all ranks."""
        together(self._peers, call, act if self._made_further_part else lambda: None)

    def _attempt_on_rank_0(self, call: str, act: Callable[[], None]) -> Exception | None:
        """Call ``act`` on rank 0; return its error, or None.

        Raises:
            PeerFailed: rank 0 does not answer, so it is unknown whether it succeeded.
        """
        failure: Exception | None = None
        if self._peers.rank == 0:
            try:
                act()
            except Exception as error:  # The other ranks wait for an answer in any case.
                failure = error
        reason = None if failure is None else str(failure) or type(failure).__name__
        try:
            reason = on_rank_0(self._peers, call, lambda: reason)
        except PeerFailed as peer_failed:
            raise peer_failed from failure
        return failure if failure or reason is None else PeerFailed(0, reason)


def _merged(marks: Sequence[Marked]) -> Marked:
    """Return the marks of all parts together. Each rank marks the part that has its files."""
    names = {name for marked in marks for name in marked}
    return {name: {r for marked in marks for r in marked.get(name, ())} for name in names}
