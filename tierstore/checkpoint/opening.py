"""What the ranks of a job find out together before they open a run, so that none is lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tierstore.errors import RunDirectoryError
from tierstore.ranks.peers import Peers, agree, on_rank_0
from tierstore.run.directories import in_order, left_by_reshard, looking_into, rank_directory
from tierstore.run.file_names import folder_rank, manifest_revision, rank_folder


def look_for_other_ranks(
    directories: Sequence[Path],
    peers: Peers,
    *,
    resume: bool,
    reshard: bool,
    overwrite: bool,
) -> tuple[Path | None, list[Path]]:
    """Return a checkpoint to begin from instead of a run, and the directories in one order.

    Args:
        directories: those of the run, in any order.
        peers: all ranks, which call this together.
        resume: whether the run is gone on with.
        reshard: whether it may have been one of another number of ranks.
        overwrite: whether it is going to be removed.

    Raises:
        RunDirectoryError: a directory cannot be used, or has commits of a rank that is not
            started where they are; or as in begin_reshard().
        PeerFailed: any of this on another rank.
    """
    given = [str(each.absolute()) for each in directories]

    def look() -> tuple[str | None, list[str]]:
        for each in directories:
            rank_directory(each, 0)  # Refuses one that may not be looked into.
        if overwrite:
            from tierstore.checkpoint.stopped_run import has_resharded

            for each in directories:
                has_resharded(each)  # Refuses what is not to be removed.
            return None, given
        ordered = in_order(list(map(Path, given)))
        found = None
        if reshard or any(map(left_by_reshard, ordered)):
            from tierstore.checkpoint.reshard import begin_reshard

            found = begin_reshard(ordered, peers.world_size, reshard=reshard)
        return None if found is None else str(found), list(map(str, ordered))

    checkpoint, ordered = on_rank_0(peers, "look into the run directories", look)
    if sorted(ordered) != sorted(given):
        ordered = given  # This rank has a disk of its own, under another path.
    if checkpoint is None and resume:
        _require_ranks_where_they_were(ordered, peers)
    return None if checkpoint is None else Path(checkpoint), list(map(Path, ordered))


def remove_other_ranks(directories: Sequence[Path], peers: Peers, *, overwrite: bool) -> None:
    """Remove what jobs of more ranks left where a new run begins; see remove_surplus()."""

    def remove() -> None:
        from tierstore.checkpoint.stopped_run import remove_surplus

        remove_surplus(directories, peers.world_size, overwrite=overwrite)

    on_rank_0(peers, "remove the files of other ranks", remove)


def _require_ranks_where_they_were(directories: Sequence[str], peers: Peers) -> None:
    """Refuse to begin anew, or to mix, where commits are on a disk that their rank is not on."""
    found = agree(peers, "look for commits", lambda: _ranks_with_commits(directories, peers.rank))
    none_is_there = not any(rank in own for rank, own in enumerate(found))
    for finder, ranks in enumerate(found):
        for rank, place in ranks.items():
            here = rank < len(found)
            if rank not in found[rank] if here else none_is_there:
                raise RunDirectoryError(
                    f"rank {finder} finds commits of rank {rank} in {place}, and "
                    + (f"rank {rank} does not" if here else "no rank of this job finds its own")
                    + ": start each rank on the machine and with the directories that it had, or "
                    "pass overwrite=True to begin anew"
                )


def _ranks_with_commits(directories: Sequence[str], rank: int) -> dict[int, str]:
    """Return where this rank has commits, or else all others that have some here."""
    found = {}
    for directory in map(Path, directories):
        with looking_into(directory):
            if _has_commits(directory / rank_folder(rank)):
                return {rank: str(directory)}  # The others need no look, which takes each a while.
            for folder in sorted(directory.iterdir()) if directory.is_dir() else ():
                other = folder_rank(folder.name)
                if other is not None and _has_commits(folder):
                    found[other] = str(directory)
    return found


def _has_commits(folder: Path) -> bool:
    if folder.is_symlink() or not folder.is_dir():
        return False
    return any(manifest_revision(path.name) for path in folder.iterdir())
