"""A directory that is held: descriptors, filesystems that lack something, and renumbered inodes."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import shutil
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.interrupts import InterruptedAfter
from tests.support.transfers import exit_code_of_child
from tierstore.errors import RunDirectoryError, StorageError, ThreadError
from tierstore.storage import Storage, open_storage
from tierstore.storage.folder import LocalFolder
from tierstore.units import SECTOR_BYTES

ENGINES = ["io_uring", "libaio", "aiofiles"]


def opened(engine: str, directory: Path) -> Storage:
    try:
        return open_storage(directory, engine)
    except RunDirectoryError as error:
        pytest.skip(str(error))


def descriptors_of(directory: Path) -> list[str]:
    """Return the files that this process has open in a directory, the directory included."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # The descriptor of the listing itself.
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [path for path in found if path.startswith(str(directory))]


# ------------------------------------------------------------------------------- descriptors


@pytest.mark.parametrize("engine", ENGINES)
def test_a_storage_holds_one_descriptor_until_it_is_closed(engine: str, tmp_path: Path) -> None:
    opened(engine, tmp_path).close()
    for _ in range(3):
        storage = opened(engine, tmp_path)
        assert descriptors_of(tmp_path) == [str(tmp_path)]
        storage.close()
        assert descriptors_of(tmp_path) == []
        storage.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_forked_child_closes_the_descriptors(engine: str, tmp_path: Path) -> None:
    with closing(opened(engine, tmp_path / "run")), closing(LocalFolder(tmp_path / "folder")):
        assert len(descriptors_of(tmp_path)) == 2
        assert exit_code_of_child(lambda: len(descriptors_of(tmp_path))) == 0
        assert len(descriptors_of(tmp_path)) == 2


@pytest.mark.parametrize("engine", ENGINES)
def test_an_abandoned_storage_has_no_descriptor(engine: str, tmp_path: Path) -> None:
    def abandon() -> int:
        storage.abandon()
        return len(descriptors_of(tmp_path))

    with closing(opened(engine, tmp_path)) as storage:
        storage.lock(0)
        assert exit_code_of_child(abandon) == 0
        storage.put("file", b"content")


@pytest.mark.parametrize("engine", ENGINES)
def test_an_opening_that_fails_leaves_no_descriptor(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = opened(engine, tmp_path)
    kind: Any = type(storage)
    storage.close()

    def refuse(*_: Any) -> None:
        raise ThreadError("none left")

    monkeypatch.setattr(
        {"io_uring": "tierstore.storage.uring.UringEngine"}.get(
            engine, f"{kind.__module__}.{kind.__name__.removesuffix('Storage')}Engine"
        ),
        refuse,
    )
    errors = []  # Their tracebacks keep what is half made.
    for _ in range(3):
        with pytest.raises(ThreadError) as caught:
            kind(tmp_path)
        errors.append(caught)
        assert descriptors_of(tmp_path) == []


def test_an_interrupt_loses_no_descriptor(tmp_path: Path) -> None:
    for calls in itertools.count(1):
        folder, interrupted = None, True
        with suppress(KeyboardInterrupt), InterruptedAfter(calls):
            folder = LocalFolder(tmp_path)
            folder.close()
            interrupted = False
        if folder is not None:
            folder.close()
        gc.collect()
        assert descriptors_of(tmp_path) == [], f"after {calls} calls"
        if not interrupted:
            break
    assert calls > 5


def test_a_directory_that_cannot_be_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", refuse)
    for kind in (LocalFolder, lambda path: open_storage(path, "aiofiles")):
        with pytest.raises(RunDirectoryError, match=f"{tmp_path}.*`ulimit -n`"):
            kind(tmp_path)


# ------------------------------------------------------------- filesystems that lack something


def refuse_nameless(monkeypatch: pytest.MonkeyPatch, error: int) -> list[str]:
    """Have every O_TMPFILE fail; returns what else was made."""
    real, made = os.open, []

    def call(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(error, os.strerror(error))
        if flags & os.O_CREAT:
            made.append(path)
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", call)
    return made


@pytest.mark.parametrize("error", [errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS])
def test_scratch_memory_without_nameless_files(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_storage(tmp_path, "aiofiles")) as storage:
        made = refuse_nameless(monkeypatch, error)
        one, other = storage.scratch(SECTOR_BYTES), storage.scratch(SECTOR_BYTES)
        one[:] = b"x" * SECTOR_BYTES
        assert bytes(other) == bytes(SECTOR_BYTES)
        assert len(set(made)) == 2
        assert storage.list() == []
        assert descriptors_of(tmp_path) == [str(tmp_path)]


def test_scratch_memory_that_keeps_its_name_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    with closing(open_storage(tmp_path, "aiofiles")) as storage:
        refuse_nameless(monkeypatch, errno.EOPNOTSUPP)
        monkeypatch.setattr(os, "unlink", refuse)
        with pytest.raises(StorageError):
            storage.scratch(SECTOR_BYTES)
        assert descriptors_of(tmp_path) == [str(tmp_path)]
        monkeypatch.undo()


def test_other_errors_of_scratch_memory_are_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_storage(tmp_path, "aiofiles")) as storage:
        made = refuse_nameless(monkeypatch, errno.ENOSPC)
        with pytest.raises(StorageError) as caught:
            storage.scratch(SECTOR_BYTES)
        assert (caught.value.errno, made) == (errno.ENOSPC, [])


# -------------------------------------------------------------------------- renumbered inodes


def renumber(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no inode number compare equal, as where a filesystem gives a directory another one."""
    monkeypatch.setattr(os.path, "samestat", lambda one, other: False)


def test_a_renumbered_directory_is_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_storage(tmp_path, "aiofiles")) as storage:
        storage.put("identity", b"one")
        renumber(monkeypatch)
        storage.require_in_place("identity")


@pytest.mark.parametrize("content", [None, b"", b"other", b"one more"])
def test_a_directory_with_another_identity_is_not(content: bytes | None, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with closing(open_storage(directory, "aiofiles")) as storage:
        storage.put("identity", b"one")
        shutil.copytree(directory, tmp_path / "copy")
        directory.rename(tmp_path / "moved")
        (tmp_path / "copy").rename(directory)
        if content is None:
            (directory / "identity").unlink()
        else:
            (directory / "identity").write_bytes(content)
        with pytest.raises(RunDirectoryError, match="another directory is there now"):
            storage.require_in_place("identity")


def test_a_disk_that_does_not_tell_is_another_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.stat

    def fail(path: Any, **named: Any) -> os.stat_result:
        if path == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, **named)

    with closing(open_storage(tmp_path, "aiofiles")) as storage:
        storage.put("identity", b"one")
        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", fail)
            with pytest.raises(StorageError) as caught:
                storage.require_in_place("identity")
        assert (caught.value.errno, caught.value.path) == (errno.EIO, str(tmp_path))
        storage.require_in_place("identity")
