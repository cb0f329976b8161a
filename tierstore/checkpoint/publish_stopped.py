"""Publishing of the committed step of a stopped run. One process publishes for all ranks."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from tierstore.checkpoint.model_contents import paged_contents
from tierstore.checkpoint.page_links import PageLinks
from tierstore.checkpoint.publication import Publication
from tierstore.checkpoint.publish import Committed, checked_place, publish
from tierstore.errors import CheckpointError, CorruptionError, RunDirectoryError
from tierstore.inspection.coverage import coverage_faults
from tierstore.inspection.kinds import kind_of, refuse_in_use
from tierstore.inspection.page_file import check_page
from tierstore.inspection.reader import Reader
from tierstore.inspection.run_reader import missing_ranks, newest_commit, read_ranks
from tierstore.ranks.peers import Alone
from tierstore.run.commit import CommittedPage, load_commit
from tierstore.run.directories import whole_run
from tierstore.run.file_names import RESHARDED_NAME, page_file
from tierstore.run.recovery import find_whole_run
from tierstore.storage.base import Storage
from tierstore.storage.paths import storage_errors


def publish_run(
    run: Path,
    out: Path,
    *,
    verify: bool = False,
    on_progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> Publication:
    """Publish the committed step of a run that no process uses; see publish().

    The checkpoint holds the paged parameters and states. A run does not have the rest of a model.

    Args:
        run: the directory of the run.
        out: the directory of the checkpoint.
        verify: whether to read every page first, and compare it with the checksums.
        on_progress: called with "verify" or "copy", the number of bytes that were read or copied,
            and of all bytes.

    Raises:
        CheckpointError: ``run`` is not a run, lacks ranks, or may not be read by this user; or as
            in publish().
        RunDirectoryError: nothing was committed, or the directory cannot be used.
        RunLockedError: a process uses the run.
        StorageError, CorruptionError: as in publish_whole().
    """
    if kind_of(run) != "run":
        raise CheckpointError(f"{run} is a checkpoint already: name a run directory")
    checked_place(os.fspath(out))  # Before everything is read.
    reader = Reader(run)
    refuse_in_use(reader)  # Refuse at once: whole_run() would wait for the lock.
    ranks = read_ranks(reader)
    if RESHARDED_NAME in reader.list() and newest_commit(ranks) is None:
        raise RunDirectoryError(
            f"{run} was being resharded to another number of ranks, and its committed step is the "
            f"checkpoint {run / RESHARDED_NAME}: copy this checkpoint, begin from it with "
            "restore(checkpoint=), or start the job again with resume=True and publish then"
        )
    missing = missing_ranks(ranks)
    if missing is not None:
        raise CheckpointError(
            f"{run}: {missing.place} {missing.what}, or publish from the job, with "
            "store.checkpoint()"
        )
    with whole_run([run], find_others=True) as storages:
        return publish_whole(list(storages.values()), out, verify=verify, on_progress=on_progress)


def publish_whole(
    storages: Sequence[Storage],
    out: Path,
    *,
    for_reshard: bool = False,
    verify: bool = False,
    on_progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> Publication:
    """Publish the committed step of a run, given the locked storages of all its ranks.

    Raises:
        RunDirectoryError: the storages are not of one run, or the run has no committed step.
        CorruptionError: the commits of the ranks do not fit together; a page file is missing, is
            not a regular file, or has another length or owner; or with ``verify``, a page is not
            what was committed. Nothing was published.
        CheckpointError: as in publish().
        StorageError, CorruptionError: as in publish().
    """
    found = find_whole_run(storages)
    commits = [load_commit(storage, manifest) for storage, manifest in found]
    for fault in coverage_faults(commits):
        raise CorruptionError(f"{storages[0].location} and beside it: {fault.place} {fault.what}")
    page_files = [
        # The next job allocates spares when it overwrites a page.
        PageLinks(storage, commit, commit.pages())
        for (storage, _), commit in zip(found, commits, strict=True)
    ]
    paths = {_path(files.storage, page): page for files in page_files for page in files.pages}
    for path, page in paths.items():
        _check_file(path, page.layout.nbytes)
    if verify:
        _read_pages(storages[0], paths, partial(on_progress, "verify"))
    names = [spec.name for group in commits[0].groups for spec in group]
    committed = Committed(
        peers=Alone(),
        page_files=page_files,
        contents=lambda: paged_contents(names),
        model_prefix="model.",
        for_reshard=for_reshard,
    )
    publication = publish(committed, os.fspath(out), on_progress=partial(on_progress, "copy"))
    try:
        publication.wait()
    except BaseException:
        publication.settle()  # After an interrupt, the copy still uses the storages.
        raise
    return publication


def _path(storage: Storage, page: CommittedPage) -> Path:
    name = page_file(page.number, page.entry.slot)
    return Path(storage.home(name).location, name)


def _check_file(path: Path, nbytes: int) -> None:
    """Refuse a page file with another type, owner or length. Its content is not read."""
    with storage_errors("look for", path):
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            raise CorruptionError(f"{path} is missing; nothing was published") from None
    fault = None
    if not stat.S_ISREG(status.st_mode):
        fault = "is a symbolic link" if stat.S_ISLNK(status.st_mode) else "is not a regular file"
    elif status.st_uid != os.geteuid():
        fault = f"belongs to user {status.st_uid}, expected user {os.geteuid()}"
    elif status.st_size != nbytes:
        fault = f"has {status.st_size} bytes, expected {nbytes}"
    if fault is not None:
        raise CorruptionError(f"{path} {fault}; nothing was published")


def _read_pages(
    first: Storage,
    pages: Mapping[Path, CommittedPage],
    on_progress: Callable[[int, int], None],
) -> None:
    """Read all pages; refuse pages that are not what was committed."""
    reader = Reader(Path(first.location), on_progress)
    reader.expect(sum(page.layout.nbytes for page in pages.values()))
    for path, page in pages.items():
        reader.allow(str(path.parent))
        check_page(reader, str(path), page)
    if reader.faults:
        fault = reader.faults[0]
        more = f" ({len(reader.faults) - 1} further faults)" if reader.faults[1:] else ""
        raise CorruptionError(f"{fault.place}: {fault.what}{more}; nothing was published")
