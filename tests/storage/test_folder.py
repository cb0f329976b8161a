from __future__ import annotations

import errno
import gc
import os
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.faults import FaultyStorage
from tests.support.folder_tests import CONTENT, FolderTests, read_from
from tests.support.storage_sharing import folder_path
from tests.support.transfers import create_with
from tierstore.errors import RunDirectoryError, StorageError, StoreClosedError
from tierstore.storage.aiofile import AiofilesStorage
from tierstore.storage.base import Folder, Storage
from tierstore.storage.memory import MemoryFiles, MemoryStorage
from tierstore.units import SECTOR_BYTES


def open_descriptors() -> int:
    gc.collect()  # Errors of earlier tests keep folders.
    return len(os.listdir("/proc/self/fd"))


class TestLocalFolder(FolderTests):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Iterator[Storage]:
        with closing(AiofilesStorage(tmp_path / "run")) as storage:
            yield storage

    def raw_children(self, storage: Storage) -> dict[str, dict[str, bytes]]:
        return {
            child.name: {file.name: file.read_bytes() for file in child.iterdir()}
            for child in Path(folder_path(storage)).iterdir()
        }

    def test_is_private_to_the_user(self, storage: Storage) -> None:
        umask = os.umask(0)
        try:
            folder = storage.folder(f"{folder_path(storage)}/below")
            folder.make("child")
            folder.put("child", "put", b"")
            folder.append("child", "appended", memoryview(b"x"))
        finally:
            os.umask(umask)
        root = Path(folder_path(storage))
        modes = {path.name: path.stat().st_mode & 0o777 for path in (root, *root.rglob("*"))}
        assert modes == {
            root.name: 0o700,
            "below": 0o700,
            "child": 0o700,
            "put": 0o600,
            "appended": 0o600,
        }

    def test_link_shares_the_inode(self, storage: Storage, folder: Folder) -> None:
        create_with(storage, "page", CONTENT)
        folder.make("child")
        folder.link(storage, "page", "child", "linked")
        page = (Path(storage.location) / "page").stat()
        assert (page.st_nlink, page.st_ino) == (
            2,
            (Path(folder.location) / "child/linked").stat().st_ino,
        )

    def test_read_where_the_filesystem_refuses_direct_reads(
        self, folder: Folder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder.make("child")
        folder.put("child", "file", CONTENT)
        opened = os.open
        refused = []

        def refuse(path: str, flags: int, *rest: int, **named: int) -> int:
            if flags & os.O_DIRECT:
                refused.append(path)
                raise OSError(errno.EINVAL, "no direct reads here")
            return opened(path, flags, *rest, **named)

        monkeypatch.setattr(os, "open", refuse)
        assert read_from(folder, "child", "file", 1, 2) == CONTENT[SECTOR_BYTES:]
        assert refused

    @pytest.mark.timeout(20)
    def test_read_of_a_named_pipe_does_not_wait(self, folder: Folder) -> None:
        folder.make("child")
        os.mkfifo(Path(folder.location) / "child/pipe")
        with pytest.raises(StorageError):
            read_from(folder, "child", "pipe")

    def test_only_directories_are_children(self, storage: Storage, folder: Folder) -> None:
        root = Path(folder.location)
        (root / "directory").mkdir()
        (root / "file").touch()
        (root / "link").symlink_to("directory")
        assert folder.children() == ["directory"]
        for taken in ("file", "link"):
            with pytest.raises(StorageError) as caught:
                folder.make(taken)
            assert caught.value.errno == errno.EEXIST
            with pytest.raises(StorageError) as caught:
                folder.rename("directory", taken)
            assert caught.value.errno == errno.ENOTDIR
            with pytest.raises(StorageError) as caught:
                folder.files(taken)
            assert caught.value.errno == errno.ENOTDIR
        assert folder.children() == ["directory"]

    def test_links_to_files_are_not_followed(self, storage: Storage, folder: Folder) -> None:
        folder.make("child")
        target = Path(folder.location) / "target"
        target.write_bytes(CONTENT)
        (Path(folder.location) / "child/link").symlink_to(target)
        for operate in (
            lambda: folder.get("child", "link"),
            lambda: folder.append("child", "link", memoryview(b"more")),
            lambda: folder.flush("child", "link"),
        ):
            with pytest.raises(StorageError) as caught:
                operate()
            assert caught.value.errno == errno.ELOOP
        folder.put("child", "link", b"new")  # Replaces the link itself.
        assert folder.get("child", "link") == b"new"
        folder.unlink("child", "link")
        assert target.read_bytes() == CONTENT

    def test_link_to_another_filesystem_is_an_error(
        self, storage: Storage, other_filesystem: Path
    ) -> None:
        create_with(storage, "page", CONTENT)
        folder = storage.folder(str(other_filesystem))
        folder.make("child")
        with pytest.raises(StorageError) as caught:
            folder.link(storage, "page", "child", "linked")
        assert caught.value.errno == errno.EXDEV
        assert folder.files("child") == []
        assert not storage.is_shared("page")

    def test_cannot_be_made_where_a_file_is(self, storage: Storage, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for path in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(RunDirectoryError, match="cannot be used as a directory"):
                storage.folder(str(path))

    def test_stays_the_directory_that_was_opened(
        self, storage: Storage, folder: Folder, tmp_path: Path
    ) -> None:
        create_with(storage, "page", CONTENT)
        folder.make("child")
        folder.put("child", "file", CONTENT)
        root, moved = Path(folder.location), tmp_path / "moved"
        root.rename(moved)
        (root / "child").mkdir(parents=True)
        (root / "child/file").write_bytes(b"another")
        assert folder.get("child", "file") == CONTENT
        assert read_from(folder, "child", "file") == CONTENT[:SECTOR_BYTES]
        folder.append("child", "file", memoryview(b"more"))
        folder.link(storage, "page", "child", "linked")
        folder.make("made")
        folder.rename("made", "renamed")
        folder.sync("child")
        folder.sync_children()
        assert folder.children() == ["child", "renamed"]
        assert (moved / "child/file").read_bytes() == CONTENT + b"more"
        assert (moved / "child/linked").read_bytes() == CONTENT
        folder.unlink("child", "linked")
        folder.remove("renamed")
        assert [path.name for path in moved.rglob("*")] == ["child", "file"]
        assert [path.name for path in root.rglob("*")] == ["child", "file"]
        assert (root / "child/file").read_bytes() == b"another"

    def test_links_a_file_of_a_storage_that_was_moved(
        self, storage: Storage, folder: Folder, tmp_path: Path
    ) -> None:
        create_with(storage, "page", CONTENT)
        root = Path(storage.location)
        root.rename(tmp_path / "moved")
        root.mkdir()
        (root / "page").write_bytes(b"another")
        folder.make("child")
        folder.link(storage, "page", "child", "linked")
        assert folder.get("child", "linked") == CONTENT

    def test_a_child_that_is_a_symbolic_link_is_not_followed(
        self, storage: Storage, folder: Folder, tmp_path: Path
    ) -> None:
        create_with(storage, "page", CONTENT)
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere/file").write_bytes(CONTENT)
        (Path(folder.location) / "link").symlink_to(tmp_path / "elsewhere")
        for operate in (
            lambda: folder.get("link", "file"),
            lambda: folder.put("link", "new", b""),
            lambda: folder.link(storage, "page", "link", "new"),
            lambda: folder.unlink("link", "file"),
            lambda: folder.sync("link"),
        ):
            with pytest.raises(StorageError) as caught:
                operate()
            assert caught.value.errno == errno.ENOTDIR
        assert os.listdir(tmp_path / "elsewhere") == ["file"]

    def test_close_gives_the_descriptor_back(self, storage: Storage) -> None:
        opened = open_descriptors()
        folder = storage.folder(folder_path(storage))
        assert open_descriptors() == opened + 1
        folder.close()
        folder.close()
        assert open_descriptors() == opened
        with pytest.raises(StoreClosedError):
            folder.children()

    def test_keeps_no_further_descriptors(self, storage: Storage, folder: Folder) -> None:
        opened = open_descriptors()
        folder.make("child")
        for _ in range(5):
            folder.put("child", "file", b"content")
            folder.append("child", "file", memoryview(b"more"))
            folder.flush("child", "file")
            folder.get("child", "file")
            folder.sync("child")
            folder.sync_children()
            with pytest.raises(StorageError):
                folder.get("child", "absent")
        assert open_descriptors() == opened


@pytest.fixture
def other_filesystem(tmp_path: Path) -> Iterator[Path]:
    """A directory on another filesystem than ``tmp_path``; skips the test if there is none."""
    shared_memory = Path("/dev/shm")
    if not os.access(shared_memory, os.W_OK) or (
        shared_memory.stat().st_dev == tmp_path.stat().st_dev
    ):
        pytest.skip("there is no second filesystem")
    with tempfile.TemporaryDirectory(dir=shared_memory) as directory:
        yield Path(directory)


class TestMemoryFolder(FolderTests):
    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        with closing(MemoryStorage()) as storage:
            yield storage

    def raw_children(self, storage: Storage) -> dict[str, dict[str, bytes]]:
        return raw_memory(storage)

    def test_link_from_another_kind_of_storage_is_an_error(
        self, storage: Storage, folder: Folder, tmp_path: Path
    ) -> None:
        folder.make("child")
        with closing(AiofilesStorage(tmp_path)) as elsewhere:
            create_with(elsewhere, "page", CONTENT)
            with pytest.raises(StorageError) as caught:
                folder.link(elsewhere, "page", "child", "linked")
        assert caught.value.errno == errno.EXDEV

    def test_storages_of_several_ranks_share_it(self, storage: Storage, folder: Folder) -> None:
        assert isinstance(storage, MemoryStorage)
        other = MemoryStorage(MemoryFiles(storage.files.folders))
        create_with(storage, "page", CONTENT)
        create_with(other, "page", CONTENT[::-1])
        folder.make("child")
        folder.link(storage, "page", "child", "rank-00000.page-000000")
        other.folder(folder_path(storage)).link(other, "page", "child", "rank-00001.page-000000")
        assert raw_memory(storage) == {
            "child": {"rank-00000.page-000000": CONTENT, "rank-00001.page-000000": CONTENT[::-1]}
        }
        assert storage.is_shared("page")
        assert other.is_shared("page")


class TestFaultyFolderWithoutFaults(FolderTests):
    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        with closing(FaultyStorage(MemoryStorage())) as storage:
            yield storage

    def raw_children(self, storage: Storage) -> dict[str, dict[str, bytes]]:
        assert isinstance(storage, FaultyStorage)
        return raw_memory(storage.inner)


def raw_memory(storage: Storage) -> dict[str, dict[str, bytes]]:
    assert isinstance(storage, MemoryStorage)
    folder = storage.files.folders.get(folder_path(storage), {})
    return {
        child: {name: bytes(content) for name, content in files.items()}
        for child, files in folder.items()
    }
