"""Files striped over several directories: as a storage like any other, and where they lie."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import Fault, FaultyStorage
from tests.support.storage_sharing import FileSharingTests
from tests.support.storage_tests import StorageTests
from tests.support.transfers import create_with, random_bytes, read_bytes
from tierstore.errors import RunDirectoryError, RunLockedError, StorageError
from tierstore.run.bandwidth import measured_bandwidths
from tierstore.run.striped_storage import StripedStorage
from tierstore.storage import open_storage
from tierstore.storage.base import Storage
from tierstore.storage.memory import MemoryFiles, MemoryStorage
from tierstore.units import SECTOR_BYTES


def weighing(*megabytes: float) -> Callable[[Sequence[Storage]], list[float]]:
    """A measurement with a known outcome."""
    return lambda parts: [value * 1e6 for value in megabytes]


def over(*parts: Storage) -> StripedStorage:
    """These parts, striped pages 0, 1, 0, 1, 2 again and again where there are three."""
    return StripedStorage(parts, weighing(200, 200, 100))


def pages(count: int) -> list[str]:
    return [f"page-{number:06d}.a" for number in range(count)]


# ------------------------------------------------------------- like any other storage


class _AsPages(StripedStorage):
    """Has the names that the conformance suite uses lie in the second directory."""

    def _part(self, name: str) -> Storage:
        return self._parts[1]


def content_of(storage: Storage, name: str) -> bytearray:
    home = storage.home(name)
    assert isinstance(home, MemoryStorage)
    return home.files.contents[name]


class TestStripedMemory(StorageTests):
    """Files lie in the second directory."""

    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        folders = MemoryFiles().folders
        self.files = [MemoryFiles(folders) for _ in range(3)]
        with closing(self._open()) as storage:
            yield storage

    def _open(self) -> Storage:
        return _AsPages([MemoryStorage(files) for files in self.files], weighing(3, 2, 1))

    def raw_bytes(self, storage: Storage, name: str) -> bytes:
        return bytes(content_of(storage, name))

    def allocated_bytes(self, storage: Storage, name: str) -> int:
        return len(content_of(storage, name))

    def open_again(self, storage: Storage) -> Storage:
        return self._open()


class TestStripedDirectories(FileSharingTests, StorageTests):
    """Files lie in the first of two directories."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Iterator[Storage]:
        self.directories = [tmp_path / "one", tmp_path / "two"]
        with closing(self._open()) as storage:
            yield storage

    def _open(self) -> Storage:
        parts = [open_storage(directory) for directory in self.directories]
        return StripedStorage(parts, weighing(5, 4))

    def _path(self, storage: Storage, name: str) -> Path:
        return Path(storage.home(name).location) / name

    def raw_bytes(self, storage: Storage, name: str) -> bytes:
        return self._path(storage, name).read_bytes()

    def allocated_bytes(self, storage: Storage, name: str) -> int:
        return self._path(storage, name).stat().st_blocks * 512

    def open_again(self, storage: Storage) -> Storage:
        return self._open()


# ------------------------------------------------------------------- where files lie


class Three:
    """Three directories in memory, and every storage that was opened over them."""

    def __init__(self) -> None:
        folders = MemoryFiles().folders
        self.files = [MemoryFiles(folders) for _ in range(3)]

    def open(self, order: Sequence[int] = (0, 1, 2), **options: Any) -> StripedStorage:
        parts = [MemoryStorage(self.files[index]) for index in order]
        return StripedStorage(parts, weighing(200, 200, 100), **options)

    def names(self) -> list[set[str]]:
        return [set(files.contents) - {"striping.json"} for files in self.files]


@pytest.fixture
def three() -> Three:
    return Three()


def test_pages_are_dealt_and_all_else_is_in_the_first(three: Three) -> None:
    storage = three.open()
    for name in (*pages(7), "run.json", "page", "page-7", "commit-0000000001"):
        storage.create(name, SECTOR_BYTES)
    zero, one, two, three_, four, five, six = pages(7)
    others = {"run.json", "page", "page-7", "commit-0000000001"}
    assert three.names() == [{zero, three_, five, *others}, {one, four, six}, {two}]
    assert storage.list() == sorted([*pages(7), *others])


def test_all_files_of_a_page_are_in_one_directory(three: Three) -> None:
    storage = three.open()
    names = ["page-000002.a", "page-000002.b", "page-000002.a.next"]
    for name in names:
        storage.create(name, SECTOR_BYTES)
    storage.link("page-000002.a", "page-000002.a.copying-0f")
    storage.rename("page-000002.a.next", "page-000002.a")
    assert three.names() == [set(), set(), {*names[:2], "page-000002.a.copying-0f"}]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_found_again_in_any_order(order: Sequence[int], three: Three) -> None:
    contents = {name: random_bytes(SECTOR_BYTES, seed) for seed, name in enumerate(pages(11))}
    with closing(three.open()) as storage:
        for name, content in contents.items():
            create_with(storage, name, content)
        storage.put("file", b"content")
    before = three.names()
    with closing(three.open(order)) as storage:
        storage.lock(0)
        assert storage.list() == sorted([*contents, "file"])
        for name, content in contents.items():
            assert read_bytes(storage, name, 0, SECTOR_BYTES) == content
        assert storage.get("file") == b"content"
        create_with(storage, "page-000000.b", contents[pages(1)[0]])
    before[0].add("page-000000.b")
    assert three.names() == before


def test_a_stray_page_is_not_taken_for_the_page(three: Three) -> None:
    storage = three.open()
    create_with(storage, "page-000001.a", b"1" * SECTOR_BYTES)
    three.files[2].contents["page-000001.a"] = bytearray(SECTOR_BYTES)
    three.files[2].contents["page-000001.b"] = bytearray(SECTOR_BYTES)
    assert storage.list() == ["page-000001.a"]
    assert read_bytes(storage, "page-000001.a", 0, SECTOR_BYTES) == b"1" * SECTOR_BYTES


@pytest.mark.parametrize("operation", ["rename", "link"])
def test_no_name_goes_from_one_directory_to_another(operation: str, three: Three) -> None:
    storage = three.open()
    storage.create("page-000001.a", SECTOR_BYTES)
    with pytest.raises(StorageError) as caught:
        getattr(storage, operation)("page-000001.a", "page-000002.a")
    assert caught.value.errno == errno.EXDEV
    assert storage.list() == ["page-000001.a"]


def test_pages_are_published_from_where_they_lie(tmp_path: Path, three: Three) -> None:
    real = StripedStorage(
        [open_storage(tmp_path / str(number)) for number in range(3)], weighing(200, 200, 100)
    )
    for storage in (three.open(), real):
        folder = storage.folder(str(tmp_path / "published"))
        folder.make("child")
        for seed, name in enumerate(pages(5)):
            create_with(storage, name, random_bytes(SECTOR_BYTES, seed))
            folder.link(storage, name, "child", name)
        for seed, name in enumerate(pages(5)):
            assert folder.get("child", name) == random_bytes(SECTOR_BYTES, seed)
            assert storage.is_shared(name)
        storage.close()
    assert {path.name for path in (tmp_path / "2").iterdir()} >= {pages(3)[2]}


def test_overwrite_lists_everything_and_deals_anew(three: Three) -> None:
    with closing(three.open()) as storage:
        for name in pages(6):
            storage.create(name, SECTOR_BYTES)
    three.files[2].contents["page-000000.a"] = bytearray(1)  # Not where it belongs.
    old = [bytes(files.contents["striping.json"]) for files in three.files]
    with closing(three.open((2, 0, 1), overwrite=True)) as storage:
        storage.lock(0)
        assert storage.list() == pages(6)
        for name in storage.list():
            storage.unlink(name)
        assert three.names() == [set(), set(), set()]
        storage.put("run.json", b"")
        storage.create("page-000001.a", SECTOR_BYTES)
    assert three.names() == [{"page-000001.a"}, set(), {"run.json"}]
    new = [bytes(files.contents["striping.json"]) for files in three.files]
    assert not set(new) & set(old)


# ----------------------------------------------------------------- all of them at once


class Watched(FaultyStorage):
    """A storage in memory that calls something before each of its operations."""

    def __init__(self, before: Callable[[str], None], files: MemoryFiles | None = None) -> None:
        super().__init__(
            MemoryStorage(files),
            on_operation=lambda operation, name, when: (
                before(operation) if when == "before" else None
            ),
        )


def test_flush_is_of_all_directories_at_once() -> None:
    together = threading.Barrier(3)

    def meet(operation: str) -> None:
        if operation == "flush":
            together.wait(60)

    storage = over(*(Watched(meet) for _ in range(3)))
    for name in pages(5):
        storage.create(name, SECTOR_BYTES)
    storage.flush(pages(5))


def test_sync_is_of_the_others_at_once_and_of_the_first_last() -> None:
    together = threading.Barrier(2)
    synced: list[int] = []

    def meet(part: int) -> Callable[[str], None]:
        def before(operation: str) -> None:
            if operation == "sync_directory" and part and begun:
                together.wait(60)
            if operation == "sync_directory":
                synced.append(part)

        return before

    begun: list[bool] = []
    storage = over(*(Watched(meet(part)) for part in range(3)))
    storage.put("file", b"")
    begun.append(True)
    synced.clear()
    storage.sync_directory()
    assert sorted(synced) == [0, 1, 2]
    assert synced[-1] == 0


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_flush_tells_of_a_failure_after_all_have_ended(failing: int) -> None:
    flushed: list[str] = []
    parts = [Watched(flushed.append) for _ in range(3)]
    storage = over(*parts)
    for name in pages(5):
        storage.create(name, SECTOR_BYTES)
    parts[failing].arm(Fault("error", "flush", call=1, errno=errno.EIO))
    with pytest.raises(StorageError):
        storage.flush(pages(5))
    assert flushed.count("flush") == 3


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_first_is_not_synced_after_a_failure(failing: int) -> None:
    synced: list[str] = []
    parts = [Watched(synced.append if part == 0 else lambda _: None) for part in range(3)]
    storage = over(*parts)
    storage.put("file", b"")
    synced.clear()
    parts[failing].arm(Fault("error", "sync_directory", call=1, errno=errno.EIO))
    with pytest.raises(StorageError):
        storage.sync_directory()
    assert synced == (["sync_directory"] if failing == 0 else [])


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_close_reaches_all(failing: int) -> None:
    files = [MemoryFiles() for _ in range(3)]
    parts = [Watched(lambda _: None, of_part) for of_part in files]
    storage = over(*parts)
    storage.lock(0)
    parts[failing].arm(Fault("error", "close", call=1, errno=errno.EIO))
    with pytest.raises(StorageError):
        storage.close()
    held = [of_part.holder is not None for of_part in files]
    assert held == [part == failing for part in range(3)]


# -------------------------------------------------------------------------- one user


@pytest.mark.parametrize("shared", [0, 1, 2])
def test_a_second_user_is_refused_whichever_directory_it_shares(shared: int, three: Three) -> None:
    storage = three.open()
    storage.lock(0)
    own = [MemoryFiles(), MemoryFiles(), three.files[shared]]
    other = over(*map(MemoryStorage, own))
    with pytest.raises(RunLockedError, match=f"process {os.getpid()}"):
        other.lock(0)
    other.close()
    assert not any(files.contents for files in own[:2])
    storage.close()
    with closing(three.open()) as storage:
        storage.lock(0)


# ------------------------------------------------------------ a crash as it is striped


class Crashed(BaseException):
    pass


def begin(storage: Storage) -> None:
    """Do what a new run does, which deletes first what is there and was not committed."""
    storage.lock(0)
    for name in storage.list():
        storage.unlink(name)
    storage.sync_directory()
    for name in ("run.json", *pages(5)):
        storage.create(name, SECTOR_BYTES)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_crash_while_it_is_dealt_leaves_directories_to_begin_in(overwrite: bool) -> None:
    for operations in itertools.count(1):
        three = Three()
        if overwrite:
            with closing(three.open()) as storage:
                begin(storage)
        left = operations

        def count(operation: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Crashed

        parts = [Watched(count, files) for files in three.files]
        storage = StripedStorage(parts, weighing(200, 200, 100), overwrite=overwrite)
        try:
            begin(storage)
        except Crashed:
            for part in parts:
                part.inner.close()
        else:
            break
        with closing(three.open()) as again:
            begin(again)
        with closing(three.open((1, 2, 0))) as again:
            again.lock(0)
            assert again.list() == [*pages(5), "run.json"]
    assert operations > 20


# ------------------------------------------------------------------------- measuring


def test_measuring_moves_a_little_in_all_at_once_and_leaves_nothing() -> None:
    together = threading.Barrier(2)
    moved = [0, 0]

    def meet(part: int) -> Callable[[str], None]:
        def before(operation: str) -> None:
            if operation == "create":
                together.wait(60)
            moved[part] += operation in ("read", "write")

        return before

    parts = [Watched(meet(part)) for part in range(2)]
    found = measured_bandwidths(parts, page_bytes=256 << 20)
    assert len(found) == 2
    assert min(found) > 0
    assert all(1 <= count <= 16 for count in moved)
    assert [part.list() for part in parts] == [[], []]


def test_a_slower_directory_is_measured_as_slower() -> None:
    """One that begins before the other does, and is not done before the other is."""
    begun, done = threading.Event(), threading.Event()

    def slow(operation: str) -> None:
        if operation == "write":
            begun.set()
        if operation == "flush":
            assert done.wait(60)

    def fast(operation: str) -> None:
        if operation == "create":
            assert begun.wait(60)
        if operation == "unlink":
            done.set()

    of_slow, of_fast = measured_bandwidths([Watched(slow), Watched(fast)], page_bytes=SECTOR_BYTES)
    assert of_slow < of_fast


@pytest.mark.parametrize(
    ("operation", "number", "expected"),
    [
        ("create", errno.ENOSPC, RunDirectoryError),
        ("write", errno.EDQUOT, RunDirectoryError),
        ("write", errno.EIO, StorageError),
        ("flush", errno.EIO, StorageError),
        ("read", errno.EIO, StorageError),
    ],
)
def test_a_directory_that_refuses_is_named(
    operation: str, number: int, expected: type[Exception], tmp_path: Path
) -> None:
    parts = [FaultyStorage(open_storage(tmp_path / name)) for name in ("one", "two")]
    fault = Fault("error", operation, call=1, errno=number)  # type: ignore[arg-type]
    parts[1].arm(fault)
    with pytest.raises(expected, match=f"{tmp_path / 'two'}.*{os.strerror(number)}"):
        measured_bandwidths(parts, page_bytes=SECTOR_BYTES)
    for part in parts:
        assert part.list() == []
        part.close()
