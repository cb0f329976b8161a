"""Conformance suite of storages.

Subclass StorageTests once per storage, with a ``storage`` fixture and the methods of
``transfers.RawAccess``; pytest then runs all tests on it. A storage with one file per name in a
directory subclasses FileStorageTests, which has both. To have failed assertions explained, call
``pytest.register_assert_rewrite()`` in a conftest.py for this module, ``storage_transfers``,
``storage_sharing``, ``storage_machine`` and ``transfers``.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from typing_extensions import override

from tests.support.storage_machine import StorageMachine
from tests.support.storage_sharing import FileSharingTests, SharingTests, folder_path
from tests.support.storage_transfers import FileTransferTests, TransferTests
from tests.support.transfers import (
    aligned_buffer,
    create_with,
    exit_code_of_child,
    fails_with,
    random_bytes,
    read_bytes,
    write_bytes,
)
from tierstore.errors import (
    CorruptionError,
    RunDirectoryError,
    RunLockedError,
    StoreClosedError,
)
from tierstore.storage.base import Storage
from tierstore.storage.checks import WHOLE_FILE_BYTES_MAX
from tierstore.units import SECTOR_BYTES

_OLD = random_bytes(2 * SECTOR_BYTES, seed=1)
_NEW = random_bytes(2 * SECTOR_BYTES, seed=2)
_OTHER = random_bytes(3 * SECTOR_BYTES, seed=3)

# Every operation that needs the file "page".
_ON_A_FILE: list[Callable[[Storage], object]] = [
    lambda storage: storage.size("page"),
    lambda storage: storage.get("page"),
    lambda storage: storage.unlink("page"),
    lambda storage: storage.rename("page", "other"),
    lambda storage: storage.link("page", "other"),
    lambda storage: storage.is_shared("page"),
    lambda storage: storage.map("page"),
    lambda storage: storage.flush(["page"]),
    lambda storage: read_bytes(storage, "page", 0, SECTOR_BYTES),
    lambda storage: write_bytes(storage, "page", 0, bytes(SECTOR_BYTES)),
]
_WITHOUT_A_FILE: list[Callable[[Storage], object]] = [
    lambda storage: storage.lock(0),
    lambda storage: storage.require_in_place("page"),
    lambda storage: storage.register(aligned_buffer(SECTOR_BYTES)),
    lambda storage: storage.list(),
    lambda storage: storage.create("page", SECTOR_BYTES),
    lambda storage: storage.put("page", b""),
    lambda storage: storage.scratch(SECTOR_BYTES),
    lambda storage: storage.folder(folder_path(storage)),
    lambda storage: storage.sync_directory(),
]


class StorageTests(TransferTests, SharingTests):
    """Subclass once per storage, with a fixture ``storage`` that gives an empty, open one."""

    def test_create_gives_zeros_on_allocated_space(self, storage: Storage) -> None:
        storage.create("page", 300 * SECTOR_BYTES)
        assert storage.size("page") == 300 * SECTOR_BYTES
        assert self.raw_bytes(storage, "page") == bytes(300 * SECTOR_BYTES)
        assert self.allocated_bytes(storage, "page") >= 300 * SECTOR_BYTES
        storage.create("page", 0)
        assert storage.size("page") == 0

    def test_create_leaves_other_links_of_the_old_file_alone(self, storage: Storage) -> None:
        content = random_bytes(2 * SECTOR_BYTES)
        create_with(storage, "page", content)
        storage.link("page", "kept")
        storage.create("page", SECTOR_BYTES)
        write_bytes(storage, "page", 0, b"n" * SECTOR_BYTES)
        assert self.raw_bytes(storage, "kept") == content
        assert self.raw_bytes(storage, "page") == b"n" * SECTOR_BYTES

    def test_create_refuses_a_negative_length(self, storage: Storage) -> None:
        with pytest.raises(ValueError, match="negative"):
            storage.create("page", -SECTOR_BYTES)

    def test_is_in_place(self, storage: Storage) -> None:
        storage.put("file", b"content")
        storage.require_in_place("file")

    @pytest.mark.parametrize("operate", _ON_A_FILE)
    def test_missing_file_is_an_error(
        self, storage: Storage, operate: Callable[[Storage], object]
    ) -> None:
        with fails_with(errno.ENOENT) as caught:
            operate(storage)
        assert caught.value.path.endswith("page")
        assert storage.list() == []

    @pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "lock", "a\0b"])
    def test_bad_names_are_refused(self, storage: Storage, name: str) -> None:
        storage.put("file", b"")
        operations: list[Callable[[], object]] = [
            lambda: storage.create(name, SECTOR_BYTES),
            lambda: storage.put(name, b""),
            lambda: storage.rename("file", name),
            lambda: storage.link("file", name),
            lambda: storage.is_shared(name),
            lambda: storage.map(name),
            lambda: storage.unlink(name),
        ]
        for operate in operations:
            with pytest.raises(ValueError, match="plain file name"):
                operate()
        assert storage.list() == ["file"]

    @pytest.mark.parametrize("nbytes", [0, 1, 4095, 4097, 3_000_001])
    def test_put_and_get(self, storage: Storage, nbytes: int) -> None:
        storage.put("file", b"longer content that was there before" * 3)
        storage.put("file", random_bytes(nbytes))
        assert self.raw_bytes(storage, "file") == random_bytes(nbytes)
        assert storage.get("file") == random_bytes(nbytes)
        assert storage.size("file") == nbytes

    def test_put_replaces_the_file_and_leaves_its_other_name_alone(self, storage: Storage) -> None:
        storage.put("file", b"old")
        storage.link("file", "other")
        storage.put("file", b"new")
        assert (storage.get("file"), storage.get("other")) == (b"new", b"old")
        assert not storage.is_shared("file")

    def test_put_refuses_what_get_would_refuse(self, storage: Storage) -> None:
        storage.put("file", b"kept")
        with fails_with(errno.EFBIG):
            storage.put("file", bytes(WHOLE_FILE_BYTES_MAX + 1))
        assert storage.get("file") == b"kept"

    def test_rename_replaces(self, storage: Storage) -> None:
        storage.put("old", b"old")
        storage.put("new", b"new")
        storage.rename("new", "old")
        storage.sync_directory()
        assert storage.list() == ["old"]
        assert self.raw_bytes(storage, "old") == b"new"

    def test_list_is_sorted_and_unlink_removes(self, storage: Storage) -> None:
        for name in ("c", "a", "b"):
            storage.put(name, b"")
        assert storage.list() == ["a", "b", "c"]
        storage.unlink("b")
        assert storage.list() == ["a", "c"]

    def test_flush_of_many_files(self, storage: Storage) -> None:
        names = [f"page-{index}" for index in range(300)]
        for name in names:
            storage.create(name, SECTOR_BYTES)
        write_bytes(storage, names[-1], 0, b"x" * SECTOR_BYTES)
        storage.flush(names)
        storage.flush([])
        assert self.raw_bytes(storage, names[-1]) == b"x" * SECTOR_BYTES

    def test_lock_excludes_others_until_close(self, storage: Storage) -> None:
        storage.lock(0)
        storage.lock(0)  # The holder may lock again.
        with closing(self.open_again(storage)) as other:
            with pytest.raises(RunLockedError, match=f"process {os.getpid()} on host"):
                other.lock(0)
            assert storage.list() == []  # The lock file is not listed.
            storage.close()
            other.lock(0)

    def test_lock_waits_for_its_holder(self, storage: Storage) -> None:
        storage.lock(0)
        with closing(self.open_again(storage)) as other:
            waiter = threading.Thread(target=other.lock, args=(60,))
            waiter.start()
            storage.close()
            waiter.join()
            with closing(self.open_again(storage)) as third, pytest.raises(RunLockedError):
                third.lock(0)

    def test_lock_is_refused_after_the_timeout(self, storage: Storage) -> None:
        storage.lock(0)
        with closing(self.open_again(storage)) as other:
            started_s = time.monotonic()
            with pytest.raises(RunLockedError):
                other.lock(0.2)
            assert 0.2 <= time.monotonic() - started_s < 20

    def test_forked_child_that_abandons_leaves_the_lock_to_its_parent(
        self, storage: Storage
    ) -> None:
        def abandon() -> None:
            storage.abandon()
            storage.close()

        storage.lock(0)
        assert exit_code_of_child(abandon) == 0
        with closing(self.open_again(storage)) as other, pytest.raises(RunLockedError):
            other.lock(0)

    def test_files_outlive_the_storage(self, storage: Storage) -> None:
        content = random_bytes(3 * SECTOR_BYTES)
        create_with(storage, "page", content)
        storage.close()
        with closing(self.open_again(storage)) as other:
            assert read_bytes(other, "page", 0, len(content)) == content

    @pytest.mark.parametrize("operate", [*_ON_A_FILE, *_WITHOUT_A_FILE])
    def test_closed_storage_refuses(
        self, storage: Storage, operate: Callable[[Storage], object]
    ) -> None:
        create_with(storage, "page", b"x" * SECTOR_BYTES)
        storage.close()
        storage.close()
        with pytest.raises(StoreClosedError):
            operate(storage)
        assert self.raw_bytes(storage, "page") == b"x" * SECTOR_BYTES

    def test_forked_child_is_refused(self, storage: Storage) -> None:
        create_with(storage, "page", b"x" * SECTOR_BYTES)
        assert exit_code_of_child(lambda: _allowed_operations(storage)) == 0
        assert read_bytes(storage, "page", 0, SECTOR_BYTES) == b"x" * SECTOR_BYTES

    def test_any_sequence_agrees_with_a_dict(self, storage: Storage) -> None:
        class Machine(StorageMachine):
            tested = storage
            raw_bytes = staticmethod(lambda name: self.raw_bytes(storage, name))

        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=15,
                stateful_step_count=20,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


def _allowed_operations(storage: Storage) -> int:
    """Return how many operations do not raise StoreClosedError."""
    allowed = 0
    for operate in [*_ON_A_FILE, *_WITHOUT_A_FILE]:
        with suppress(StoreClosedError):
            operate(storage)
            allowed += 1
    return allowed


class FileStorageTests(FileTransferTests, FileSharingTests, StorageTests):
    """For storages with one file per name in a directory; implement ``open_storage``."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Iterator[Storage]:
        """Give an empty storage and close it afterwards."""
        with closing(self.open_storage(tmp_path / "run")) as storage:
            yield storage

    @override
    def raw_bytes(self, storage: Storage, name: str) -> bytes:
        return (Path(storage.location) / name).read_bytes()

    @override
    def allocated_bytes(self, storage: Storage, name: str) -> int:
        return (Path(storage.location) / name).stat().st_blocks * 512

    @override
    def open_again(self, storage: Storage) -> Storage:
        return self.open_storage(Path(storage.location))

    def test_get_refuses_a_file_of_any_length(self, storage: Storage) -> None:
        storage.put("file", b"")
        path = Path(storage.location) / "file"
        os.truncate(path, WHOLE_FILE_BYTES_MAX + 1)
        with pytest.raises(CorruptionError, match=f"{path} has 1.0 GiB: no file of its kind"):
            storage.get("file")

    @pytest.fixture
    def moved(self, storage: Storage) -> Path:
        """Fill the storage, then move it and put another directory in its place; where it is."""
        create_with(storage, "page", _OLD)
        storage.put("identity", b"one")
        directory = Path(storage.location)
        moved = directory.with_name("moved")
        directory.rename(moved)
        directory.mkdir()
        (directory / "page").write_bytes(_OTHER)
        (directory / "identity").write_bytes(b"another")
        return moved

    def test_stays_the_directory_that_was_opened(self, storage: Storage, moved: Path) -> None:
        assert read_bytes(storage, "page", 0, len(_OLD)) == _OLD
        assert bytes(storage.map("page")) == _OLD
        assert storage.get("identity") == b"one"
        assert storage.size("page") == len(_OLD)
        assert storage.list() == ["identity", "page"]
        write_bytes(storage, "page", 0, _NEW)
        storage.flush(["page"])
        storage.link("page", "linked")
        assert storage.is_shared("page")
        storage.unlink("linked")
        storage.create("made", SECTOR_BYTES)
        storage.rename("made", "renamed")
        storage.put("put", b"content")
        storage.scratch(SECTOR_BYTES)
        storage.lock(0)
        storage.sync_directory()
        assert (moved / "page").read_bytes() == _NEW
        assert sorted(os.listdir(moved)) == ["identity", "lock", "page", "put", "renamed"]
        directory = Path(storage.location)
        assert sorted(os.listdir(directory)) == ["identity", "page"]
        assert (directory / "page").read_bytes() == _OTHER

    def test_replaced_directory_is_not_in_place(self, storage: Storage, moved: Path) -> None:
        directory = Path(storage.location)
        expected = f"{re.escape(str(directory))}: another directory is there now.*{moved}"
        for _ in range(2):
            with pytest.raises(RunDirectoryError, match=expected):
                storage.require_in_place("identity")
            (directory / "identity").unlink(missing_ok=True)
        assert storage.list() == ["identity", "page"]

    def test_moved_directory_is_not_in_place(self, storage: Storage, moved: Path) -> None:
        directory = Path(storage.location)
        directory.rename(directory.with_name("third"))
        with pytest.raises(RunDirectoryError, match="nothing is there now"):
            storage.require_in_place("identity")
        moved.rename(directory)
        storage.require_in_place("identity")

    def test_files_are_closed_to_other_users(self, storage: Storage) -> None:
        umask = os.umask(0)  # The storage must not rely on the umask.
        try:
            storage.create("page", SECTOR_BYTES)
            storage.put("file", b"")
            storage.lock(0)
        finally:
            os.umask(umask)
        modes = [path.stat().st_mode & 0o777 for path in Path(storage.location).iterdir()]
        assert len(modes) >= 2
        assert set(modes) == {0o600}
