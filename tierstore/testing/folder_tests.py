"""Conformance suite of folders.

Subclass FolderTests once per kind of folder, with a fixture ``storage`` whose folders are of
that kind, and ``raw_children``, which bypasses the folder under test.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable

import pytest

from tierstore.errors import StorageError
from tierstore.storage.base import Folder, Storage
from tierstore.testing.storage_sharing import folder_path
from tierstore.testing.transfers import create_with, random_bytes, read_bytes
from tierstore.units import SECTOR_BYTES

CONTENT = random_bytes(3 * SECTOR_BYTES)

# Errors of removing or replacing a directory that is not empty.
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)

# Every operation that needs the child "child".
_ON_A_CHILD: list[Callable[[Storage, Folder], object]] = [
    lambda _, folder: folder.files("child"),
    lambda _, folder: folder.put("child", "file", b"new"),
    lambda _, folder: folder.get("child", "file"),
    lambda storage, folder: folder.link(storage, "page", "child", "linked"),
    lambda _, folder: folder.append("child", "file", memoryview(b"more")),
    lambda _, folder: folder.flush("child", "file"),
    lambda _, folder: folder.unlink("child", "file"),
    lambda _, folder: folder.remove("child"),
    lambda _, folder: folder.rename("child", "other"),
    lambda _, folder: folder.sync("child"),
]
# Every operation that needs a file "file" in it.
_ON_A_FILE: list[Callable[[Storage, Folder], object]] = [
    lambda _, folder: folder.get("child", "file"),
    lambda _, folder: folder.flush("child", "file"),
    lambda _, folder: folder.unlink("child", "file"),
]


class FolderTests(ABC):
    """Subclass once per kind of folder, with a fixture ``storage``: empty and open."""

    @abstractmethod
    def raw_children(self, storage: Storage) -> dict[str, dict[str, bytes]]:
        """Return child -> file -> content of folder_path(storage), without using a folder."""

    @pytest.fixture
    def folder(self, storage: Storage) -> Folder:
        """Give the folder, empty."""
        return storage.folder(folder_path(storage))

    def test_location_is_its_path(self, storage: Storage, folder: Folder) -> None:
        assert folder.location == folder_path(storage)

    def test_children_and_files_are_sorted(self, storage: Storage, folder: Folder) -> None:
        assert folder.children() == []
        for child in ("step-3", "step-1", ".step-2.tmp"):
            folder.make(child)
        assert folder.children() == [".step-2.tmp", "step-1", "step-3"]
        assert folder.files("step-1") == []
        for name in ("page", ".metadata", "commit"):
            folder.put("step-1", name, b"")
        assert folder.files("step-1") == [".metadata", "commit", "page"]
        assert folder.files("step-3") == []
        assert self.raw_children(storage) == {
            ".step-2.tmp": {},
            "step-1": {".metadata": b"", "commit": b"", "page": b""},
            "step-3": {},
        }

    @pytest.mark.parametrize("nbytes", [0, 1, 4097, 3_000_001])
    def test_put_and_get(self, storage: Storage, folder: Folder, nbytes: int) -> None:
        folder.make("child")
        folder.put("child", "file", b"longer content that was there before" * 3)
        folder.put("child", "file", random_bytes(nbytes))
        folder.sync("child")
        assert folder.get("child", "file") == random_bytes(nbytes)
        assert self.raw_children(storage) == {"child": {"file": random_bytes(nbytes)}}

    def test_make_refuses_a_name_that_is_taken(self, storage: Storage, folder: Folder) -> None:
        folder.make("child")
        folder.put("child", "file", b"kept")
        with pytest.raises(StorageError) as caught:
            folder.make("child")
        assert caught.value.errno == errno.EEXIST
        assert caught.value.path == f"{folder.location}/child"
        assert self.raw_children(storage) == {"child": {"file": b"kept"}}

    def test_append_adds_to_the_end(self, storage: Storage, folder: Folder) -> None:
        folder.make("child")
        for piece in (CONTENT[:1], CONTENT[1:5000], b"", CONTENT[5000:]):
            folder.append("child", "copy", memoryview(piece))
        folder.flush("child", "copy")
        folder.sync("child")
        assert self.raw_children(storage) == {"child": {"copy": CONTENT}}

    def test_link_is_the_file_itself(self, storage: Storage, folder: Folder) -> None:
        create_with(storage, "page", CONTENT)
        folder.make("child")
        folder.link(storage, "page", "child", "rank-00000.page-000000")
        folder.sync("child")
        assert self.raw_children(storage) == {"child": {"rank-00000.page-000000": CONTENT}}
        assert storage.is_shared("page")
        assert storage.list() == ["page"]
        storage.unlink("page")
        assert folder.get("child", "rank-00000.page-000000") == CONTENT

    def test_link_stays_when_another_file_takes_the_name(
        self, storage: Storage, folder: Folder
    ) -> None:
        create_with(storage, "page", CONTENT)
        folder.make("child")
        folder.link(storage, "page", "child", "linked")
        create_with(storage, "page.next", bytes(len(CONTENT)))
        storage.rename("page.next", "page")
        assert self.raw_children(storage) == {"child": {"linked": CONTENT}}
        assert not storage.is_shared("page")

    def test_link_to_a_taken_name_is_an_error(self, storage: Storage, folder: Folder) -> None:
        create_with(storage, "page", CONTENT)
        folder.make("child")
        folder.put("child", "taken", b"kept")
        with pytest.raises(StorageError) as caught:
            folder.link(storage, "page", "child", "taken")
        assert caught.value.errno == errno.EEXIST
        assert self.raw_children(storage) == {"child": {"taken": b"kept"}}
        assert not storage.is_shared("page")

    def test_link_of_a_missing_file_is_an_error(self, storage: Storage, folder: Folder) -> None:
        folder.make("child")
        with pytest.raises(StorageError) as caught:
            folder.link(storage, "page", "child", "linked")
        assert caught.value.errno == errno.ENOENT
        assert self.raw_children(storage) == {"child": {}}

    def test_unlink_takes_one_name_away(self, storage: Storage, folder: Folder) -> None:
        create_with(storage, "page", CONTENT)
        folder.make("child")
        folder.link(storage, "page", "child", "linked")
        folder.put("child", "other", b"")
        folder.unlink("child", "linked")
        assert self.raw_children(storage) == {"child": {"other": b""}}
        assert read_bytes(storage, "page", 0, len(CONTENT)) == CONTENT

    def test_remove_takes_an_empty_child_only(self, storage: Storage, folder: Folder) -> None:
        folder.make("child")
        folder.put("child", "file", b"kept")
        with pytest.raises(StorageError) as caught:
            folder.remove("child")
        assert caught.value.errno in _NOT_EMPTY
        assert self.raw_children(storage) == {"child": {"file": b"kept"}}
        folder.unlink("child", "file")
        folder.remove("child")
        assert folder.children() == []

    @pytest.mark.parametrize("there", [False, True])
    def test_rename_takes_a_free_or_empty_name(
        self, storage: Storage, folder: Folder, there: bool
    ) -> None:
        folder.make(".child.tmp")
        folder.put(".child.tmp", "file", b"content")
        if there:
            folder.make("child")
        folder.sync(".child.tmp")
        folder.rename(".child.tmp", "child")
        folder.sync_children()
        assert self.raw_children(storage) == {"child": {"file": b"content"}}

    def test_rename_replaces_no_content(self, storage: Storage, folder: Folder) -> None:
        for child in ("new", "old"):
            folder.make(child)
            folder.put(child, "file", child.encode())
        with pytest.raises(StorageError) as caught:
            folder.rename("new", "old")
        assert caught.value.errno in _NOT_EMPTY
        assert self.raw_children(storage) == {"new": {"file": b"new"}, "old": {"file": b"old"}}

    @pytest.mark.parametrize("operate", _ON_A_CHILD)
    def test_missing_child_is_an_error(
        self, storage: Storage, folder: Folder, operate: Callable[[Storage, Folder], object]
    ) -> None:
        create_with(storage, "page", CONTENT)
        with pytest.raises(StorageError) as caught:
            operate(storage, folder)
        assert caught.value.errno == errno.ENOENT
        assert self.raw_children(storage) == {}

    @pytest.mark.parametrize("operate", _ON_A_FILE)
    def test_missing_file_is_an_error(
        self, storage: Storage, folder: Folder, operate: Callable[[Storage, Folder], object]
    ) -> None:
        folder.make("child")
        with pytest.raises(StorageError) as caught:
            operate(storage, folder)
        assert caught.value.errno == errno.ENOENT
        assert caught.value.path == f"{folder.location}/child/file"
        assert self.raw_children(storage) == {"child": {}}

    @pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\0b"])
    def test_bad_names_are_refused(self, storage: Storage, folder: Folder, name: str) -> None:
        create_with(storage, "page", CONTENT)
        folder.make("child")
        folder.put("child", "file", b"kept")
        operations: list[Callable[[], object]] = [
            lambda: folder.files(name),
            lambda: folder.make(name),
            lambda: folder.put(name, "file", b""),
            lambda: folder.put("child", name, b""),
            lambda: folder.get("child", name),
            lambda: folder.link(storage, name, "child", "linked"),
            lambda: folder.link(storage, "page", name, "linked"),
            lambda: folder.link(storage, "page", "child", name),
            lambda: folder.append("child", name, memoryview(b"")),
            lambda: folder.flush("child", name),
            lambda: folder.unlink("child", name),
            lambda: folder.remove(name),
            lambda: folder.rename("child", name),
            lambda: folder.rename(name, "other"),
            lambda: folder.sync(name),
        ]
        for operate in operations:
            with pytest.raises(ValueError, match="plain file name"):
                operate()
        assert self.raw_children(storage) == {"child": {"file": b"kept"}}

    def test_one_path_is_one_folder(self, storage: Storage, folder: Folder) -> None:
        other = storage.folder(folder_path(storage))
        folder.make("child")
        other.put("child", "file", b"content")
        assert folder.get("child", "file") == b"content"
        folder.rename("child", "published")
        assert other.children() == ["published"]

    def test_two_paths_are_two_folders(self, storage: Storage, folder: Folder) -> None:
        other = storage.folder(f"{folder_path(storage)}-other")
        other.make("child")
        assert folder.children() == []
