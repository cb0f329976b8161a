"""Checks of a restart: which version it finds, and which checkpoints are published."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.simulation.disk import Disk, rank_node
from tests.simulation.log import Log
from tests.simulation.plan import Plan
from tests.simulation.session import Session, Settings
from tierstore.errors import CorruptionError, PeerFailed, RunDirectoryError
from tierstore.run.committer import Committer
from tierstore.run.file_names import CLEAN_NAME, layout_name
from tierstore.run.layout_file import RankLayout


def check_version(restarted: Session, log: Log, cuts: Sequence[int], plan: Plan) -> tuple[int, int]:
    """Return the newest version that was acknowledged, and the one that all ranks are at."""
    committed, begun = bounds(log, cuts, plan)
    differences: list[str | BaseException] = []
    for found in range(begun, committed - 1, -1):
        differences = restarted.differences(plan.versions[found])
        if not any(differences):
            return committed, found
    raise AssertionError(
        f"no version from {committed} to {begun} was found; the first of them is not, "
        f"because of {differences}"
    )


def check_files(restarted: Session, disk: Disk, log: Log, cuts: Sequence[int]) -> None:
    """Check files of each rank that a restart itself does not need.

    The layout that the commit names is whole, so that any version can read the run. A mark of a
    clean end was made after the last write to a page.
    """
    for rank, cut in enumerate(cuts):
        names = disk.directories.get(rank_node(rank), {})
        store = restarted.stores[rank]
        assert store is not None
        assert isinstance(store._session.committer, Committer)
        commit = store._session.committer.committed
        if commit is not None:
            name = layout_name(commit.layout)
            data = disk.contents.get(names[name], b"") if name in names else b""
            try:
                RankLayout.from_bytes(data, name, digest=commit.layout).lay_out()
            except CorruptionError as error:
                raise AssertionError(
                    f"rank {rank} has no layout for its commit: {error}"
                ) from error
        operations = log.operations[rank][:cut]
        marked = [
            i for i, op in enumerate(operations) if op.text == f"{CLEAN_NAME}.tmp -> {CLEAN_NAME}"
        ]
        after = operations[marked[-1] if marked else 0 :]
        if CLEAN_NAME in names and any(op.kind == "write" for op in after):
            raise AssertionError(f"rank {rank} has a clean mark, and pages were written since")


def check_refusal(
    log: Log, cuts: Sequence[int], errors: Sequence[BaseException], settings: Settings
) -> None:
    """Allow a refusal only while something is overwritten that there is but one copy of.

    That is a run that keeps one copy of each page, or one that is being deleted.
    """
    refusals = [error for error in errors if not isinstance(error, PeerFailed)]
    expected: tuple[type[BaseException], ...] = ()
    if in_the_middle_of(log, cuts, "overwrite"):
        expected = (RunDirectoryError, CorruptionError)
    elif settings.commit_every is None and in_the_middle_of(log, cuts, None):
        expected = (RunDirectoryError,)
    if refusals and all(isinstance(error, expected) for error in refusals):
        return
    raise AssertionError(f"the restart failed: {errors}") from (refusals or errors)[0]


def check_published_after(
    session: Session, cuts: Sequence[int], disk: Disk, keep_last: int | None
) -> None:
    """Check that what is published is whole, and that all is there that should be."""
    found = disk.published()
    begun, acknowledged = published_at(session, cuts)
    for child, files in found.items():
        if child not in begun:
            raise AssertionError(f"{child} is published, which was not begun")
        whole = session.published.get(child)
        if whole is None:  # The call failed, and could not be undone everywhere.
            session.check_published(files, session.expected[child])
        elif files != whole:
            names = files.keys() | whole.keys()
            wrong = sorted(name for name in names if files.get(name) != whole.get(name))
            raise AssertionError(f"checkpoint {child} is not whole: {wrong}")
    for child in acknowledged - found.keys():
        newer = [other for other in found if _order(other) >= _order(child)]
        if keep_last is None or len(newer) < keep_last:
            raise AssertionError(f"checkpoint {child} is lost; there are {sorted(found)}")


def bounds(log: Log, cuts: Sequence[int], plan: Plan) -> tuple[int, int]:
    """Return the oldest and the newest version that may be found.

    The oldest is the newest that some rank was told is committed; while the run is being
    deleted, any may come to light. The newest is what all ranks have begun to commit.
    """
    committed = max(
        index for rank, cut in enumerate(cuts) for index in (0, *log.marks(rank, cut, "committed"))
    )
    begun = min(max((plan.found, *log.marks(rank, cut, "begun"))) for rank, cut in enumerate(cuts))
    if in_the_middle_of(log, cuts, "overwrite"):
        committed = 0
    return committed, max(committed, begun)


def in_the_middle_of(log: Log, cuts: Sequence[int], action: str | None) -> bool:
    """Return whether some rank had begun to overwrite what was committed, in some action."""
    for rank, cut in enumerate(cuts):
        operations = log.operations[rank][log.starts[rank] : cut]
        last = [op.kind for op in operations if op.kind in ("overwriting", "committed")][-1:]
        doing = [op.value for op in operations if op.kind == "doing"][-1:]
        if last == ["overwriting"] and action in (None, *doing):
            return True
    return False


def published_at(session: Session, cuts: Sequence[int]) -> tuple[set[str], set[str]]:
    """Return what was begun to be published at a cut, and what was acknowledged."""
    begun, acknowledged = set(session.publishing), set(session.acknowledged)
    for rank, cut in enumerate(cuts):
        begun.update(session.log.marks(rank, cut, "publishing"))
        acknowledged.update(session.log.marks(rank, cut, "published"))
    return begun, acknowledged


def _order(child: str) -> tuple[int, int]:
    """Return the epoch and the step in the name of a checkpoint."""
    match = re.match(r"(?:epoch-(\d+)-)?step-(\d+)-", child)
    assert match is not None
    return int(match[1] or 0), int(match[2])
