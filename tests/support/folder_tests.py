"""Conformance suite of folders.

Subclass FolderTests once per kind of folder, with a fixture ``storage`` whose folders are of
that kind, and ``raw_children``, which bypasses the folder under test.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable

import pytest

from tests.support.storage_sharing import folder_path
from tests.support.transfers import (
    aligned_buffer,
    create_with,
    fails_with,
    random_bytes,
    read_bytes,
    write_bytes,
)
from tierstore.storage.base import Folder, Storage
from tierstore.storage.checks import WHOLE_FILE_BYTES_MAX
from tierstore.units import SECTOR_BYTES

CONTENT = random_bytes(3 * SECTOR_BYTES)


def read_from(folder: Folder, child: str, name: str, first: int = 0, count: int = 1) -> bytes:
    """Return at most ``count`` sectors of a file in a child, from sector number ``first`` on."""
    buffer = aligned_buffer(count * SECTOR_BYTES)
    return bytes(buffer[: folder.read(child, name, first * SECTOR_BYTES, buffer)])


# Errors of removing or replacing a directory that is not empty.
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)

# Every operation that needs the child "child".
_ON_A_CHILD: list[Callable[[Storage, Folder], object]] = [
    lambda _, folder: folder.files("child"),
    lambda _, folder: folder.put("child", "file", b"new"),
    lambda _, folder: folder.get("child", "file"),
    lambda _, folder: read_from(folder, "child", "file"),
    lambda storage, folder: folder.link(storage, "page", "child", "linked"),
    lambda _, folder: folder.append("child", "file", memoryview(b"more")),
    lambda _, folder: folder.flush("child", "file"),
    lambda _, folder: folder.unlink("child", "file"),
    lambda _, folder: folder.remove("child"),
    lambda _, folder: folder.rename("child", "other"),
    lambda _, folder: folder.sync("child"),
]
# Every operation that needs a file "file" in the child.
_ON_A_FILE: list[Callable[[Storage, Folder], object]] = [
    lambda _, folder: folder.get("child", "file"),
    lambda _, folder: read_from(folder, "child", "file"),
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

    @pytest.fixture
    def parent(self, storage: Storage, folder: Folder) -> Folder:
        """Give the folder, with an empty child "child"; the storage has a file "page"."""
        create_with(storage, "page", CONTENT)
        folder.make("child")
        return folder

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
    def test_put_and_get(self, storage: Storage, parent: Folder, nbytes: int) -> None:
        parent.put("child", "file", b"longer content that was there before" * 3)
        parent.put("child", "file", random_bytes(nbytes))
        parent.sync("child")
        assert parent.get("child", "file") == random_bytes(nbytes)
        assert self.raw_children(storage) == {"child": {"file": random_bytes(nbytes)}}

    def test_put_replaces_the_file_and_leaves_its_other_name_alone(
        self, storage: Storage, parent: Folder
    ) -> None:
        create_with(storage, "page", CONTENT)
        parent.link(storage, "page", "child", "file")
        parent.put("child", "file", b"new")
        assert parent.get("child", "file") == b"new"
        assert read_bytes(storage, "page", 0, len(CONTENT)) == CONTENT
        assert not storage.is_shared("page")

    def test_put_refuses_what_get_would_refuse(self, parent: Folder) -> None:
        parent.put("child", "file", b"kept")
        with fails_with(errno.EFBIG):
            parent.put("child", "file", bytes(WHOLE_FILE_BYTES_MAX + 1))
        assert parent.get("child", "file") == b"kept"

    def test_make_refuses_a_name_that_is_taken(self, storage: Storage, parent: Folder) -> None:
        parent.put("child", "file", b"kept")
        with fails_with(errno.EEXIST) as caught:
            parent.make("child")
        assert caught.value.path == f"{parent.location}/child"
        assert self.raw_children(storage) == {"child": {"file": b"kept"}}

    def test_append_adds_to_the_end(self, storage: Storage, parent: Folder) -> None:
        for piece in (CONTENT[:1], CONTENT[1:5000], b"", CONTENT[5000:]):
            parent.append("child", "copy", memoryview(piece))
        parent.flush("child", "copy")
        parent.sync("child")
        assert self.raw_children(storage) == {"child": {"copy": CONTENT}}

    def test_read_gives_any_range_of_sectors(self, storage: Storage, parent: Folder) -> None:
        parent.append("child", "copied", memoryview(CONTENT))
        parent.link(storage, "page", "child", "linked")
        for name in ("copied", "linked"):
            for first in range(3):
                for count in range(1, 4 - first):
                    expected = CONTENT[first * SECTOR_BYTES :][: count * SECTOR_BYTES]
                    assert read_from(parent, "child", name, first, count) == expected

    def test_read_sees_what_was_written_since(self, storage: Storage, parent: Folder) -> None:
        parent.link(storage, "page", "child", "linked")
        assert read_from(parent, "child", "linked", 1) == CONTENT[SECTOR_BYTES : 2 * SECTOR_BYTES]
        write_bytes(storage, "page", SECTOR_BYTES, bytes(SECTOR_BYTES))
        assert read_from(parent, "child", "linked", 1) == bytes(SECTOR_BYTES)

    @pytest.mark.parametrize("nbytes", [1, 5000, len(CONTENT)])
    @pytest.mark.parametrize(("first", "count"), [(0, 4), (1, 1), (2, 2), (3, 1), (9, 1)])
    def test_read_stops_where_the_file_ends(
        self, parent: Folder, nbytes: int, first: int, count: int
    ) -> None:
        parent.append("child", "file", memoryview(CONTENT[:nbytes]))
        expected = CONTENT[:nbytes][first * SECTOR_BYTES :][: count * SECTOR_BYTES]
        assert read_from(parent, "child", "file", first, count) == expected

    def test_read_refuses_other_buffers(self, parent: Folder) -> None:
        parent.append("child", "file", memoryview(CONTENT))
        buffer = aligned_buffer(2 * SECTOR_BYTES)
        for wrong in (buffer[1 : SECTOR_BYTES + 1], buffer[:SECTOR_BYTES].toreadonly()):
            with pytest.raises(ValueError, match="buffer"):
                parent.read("child", "file", 0, wrong)
        for offset, wrong in ((0, buffer[:5]), (0, buffer[:0]), (5, buffer)):
            with pytest.raises(ValueError, match="must be a"):
                parent.read("child", "file", offset, wrong)

    def test_link_is_the_file_itself(self, storage: Storage, parent: Folder) -> None:
        parent.link(storage, "page", "child", "rank-00000.page-000000")
        parent.sync("child")
        assert self.raw_children(storage) == {"child": {"rank-00000.page-000000": CONTENT}}
        assert storage.is_shared("page")
        assert storage.list() == ["page"]
        storage.unlink("page")
        assert parent.get("child", "rank-00000.page-000000") == CONTENT

    def test_link_stays_when_another_file_takes_the_name(
        self, storage: Storage, parent: Folder
    ) -> None:
        parent.link(storage, "page", "child", "linked")
        create_with(storage, "page.next", bytes(len(CONTENT)))
        storage.rename("page.next", "page")
        assert self.raw_children(storage) == {"child": {"linked": CONTENT}}
        assert not storage.is_shared("page")

    def test_link_to_a_taken_name_is_an_error(self, storage: Storage, parent: Folder) -> None:
        parent.put("child", "taken", b"kept")
        with fails_with(errno.EEXIST):
            parent.link(storage, "page", "child", "taken")
        assert self.raw_children(storage) == {"child": {"taken": b"kept"}}
        assert not storage.is_shared("page")

    def test_link_of_a_missing_file_is_an_error(self, storage: Storage, parent: Folder) -> None:
        with fails_with(errno.ENOENT):
            parent.link(storage, "missing", "child", "linked")
        assert self.raw_children(storage) == {"child": {}}

    def test_unlink_takes_one_name_away(self, storage: Storage, parent: Folder) -> None:
        parent.link(storage, "page", "child", "linked")
        parent.put("child", "other", b"")
        parent.unlink("child", "linked")
        assert self.raw_children(storage) == {"child": {"other": b""}}
        assert read_bytes(storage, "page", 0, len(CONTENT)) == CONTENT

    def test_remove_takes_an_empty_child_only(self, storage: Storage, parent: Folder) -> None:
        parent.put("child", "file", b"kept")
        with fails_with(*_NOT_EMPTY):
            parent.remove("child")
        assert self.raw_children(storage) == {"child": {"file": b"kept"}}
        parent.unlink("child", "file")
        parent.remove("child")
        assert parent.children() == []

    def test_close_leaves_the_files(self, storage: Storage, folder: Folder) -> None:
        folder.make("child")
        folder.put("child", "file", b"content")
        folder.close()
        folder.close()
        again = storage.folder(folder_path(storage))
        assert again.get("child", "file") == b"content"
        again.close()

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
        with fails_with(*_NOT_EMPTY):
            folder.rename("new", "old")
        assert self.raw_children(storage) == {"new": {"file": b"new"}, "old": {"file": b"old"}}

    @pytest.mark.parametrize("operate", _ON_A_CHILD)
    def test_missing_child_is_an_error(
        self, storage: Storage, folder: Folder, operate: Callable[[Storage, Folder], object]
    ) -> None:
        create_with(storage, "page", CONTENT)
        with fails_with(errno.ENOENT):
            operate(storage, folder)
        assert self.raw_children(storage) == {}

    @pytest.mark.parametrize("operate", _ON_A_FILE)
    def test_missing_file_is_an_error(
        self, storage: Storage, parent: Folder, operate: Callable[[Storage, Folder], object]
    ) -> None:
        with fails_with(errno.ENOENT) as caught:
            operate(storage, parent)
        assert caught.value.path == f"{parent.location}/child/file"
        assert self.raw_children(storage) == {"child": {}}

    @pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\0b"])
    def test_bad_names_are_refused(self, storage: Storage, parent: Folder, name: str) -> None:
        parent.put("child", "file", b"kept")
        operations: list[Callable[[], object]] = [
            lambda: parent.files(name),
            lambda: parent.make(name),
            lambda: parent.put(name, "file", b""),
            lambda: parent.put("child", name, b""),
            lambda: parent.get("child", name),
            lambda: read_from(parent, "child", name),
            lambda: read_from(parent, name, "file"),
            lambda: parent.link(storage, name, "child", "linked"),
            lambda: parent.link(storage, "page", name, "linked"),
            lambda: parent.link(storage, "page", "child", name),
            lambda: parent.append("child", name, memoryview(b"")),
            lambda: parent.flush("child", name),
            lambda: parent.unlink("child", name),
            lambda: parent.remove(name),
            lambda: parent.rename("child", name),
            lambda: parent.rename(name, "other"),
            lambda: parent.sync(name),
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
