from __future__ import annotations

import copy
import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.support.faults import OPERATIONS, Fault, FaultyStorage
from tests.support.folder_tests import read_from
from tests.support.storage_tests import StorageTests
from tests.support.transfers import (
    aligned_buffer,
    create_with,
    random_bytes,
    read_bytes,
    write_bytes,
)
from tierstore.errors import StorageError
from tierstore.storage.base import Folder, Storage
from tierstore.storage.memory import MemoryStorage
from tierstore.units import SECTOR_BYTES, Extent

OLD = b"o" * (8 * SECTOR_BYTES)
NEW = b"n" * (8 * SECTOR_BYTES)


def files_of(storage: Storage) -> dict[str, bytearray]:
    assert isinstance(storage, FaultyStorage)
    assert isinstance(storage.inner, MemoryStorage)
    return storage.inner.files.contents


class TestFaultyStorageWithoutFaults(StorageTests):
    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        with closing(FaultyStorage(MemoryStorage())) as storage:
            yield storage

    def raw_bytes(self, storage: Storage, name: str) -> bytes:
        return bytes(files_of(storage)[name])

    def allocated_bytes(self, storage: Storage, name: str) -> int:
        return len(files_of(storage)[name])

    def open_again(self, storage: Storage) -> Storage:
        assert isinstance(storage, FaultyStorage)
        assert isinstance(storage.inner, MemoryStorage)
        return FaultyStorage(MemoryStorage(storage.inner.files))


@pytest.fixture
def storage() -> FaultyStorage:
    storage = FaultyStorage(MemoryStorage(), seed=1)
    create_with(storage, "page", OLD)
    return storage


STORAGE_OPERATIONS: dict[str, Callable[[Storage], object]] = {
    "lock": lambda storage: storage.lock(0),
    "require_in_place": lambda storage: storage.require_in_place("page"),
    "list": lambda storage: storage.list(),
    "size": lambda storage: storage.size("page"),
    "create": lambda storage: storage.create("page", SECTOR_BYTES),
    "read": lambda storage: read_bytes(storage, "page", 0, SECTOR_BYTES),
    "write": lambda storage: write_bytes(storage, "page", 0, NEW),
    "flush": lambda storage: storage.flush(["other", "page"]),
    "put": lambda storage: storage.put("page", NEW),
    "get": lambda storage: storage.get("page"),
    "rename": lambda storage: storage.rename("page", "renamed"),
    "link": lambda storage: storage.link("page", "linked"),
    "is_shared": lambda storage: storage.is_shared("page"),
    "map": lambda storage: storage.map("page"),
    "scratch": lambda storage: storage.scratch(SECTOR_BYTES),
    "folder": lambda storage: storage.folder("published"),
    "unlink": lambda storage: storage.unlink("page"),
    "sync_directory": lambda storage: storage.sync_directory(),
    "close": lambda storage: storage.close(),
}


@pytest.mark.parametrize("operation", STORAGE_OPERATIONS)
def test_error_strikes_and_nothing_happens(storage: FaultyStorage, operation: str) -> None:
    storage.put("other", b"")
    storage.arm(Fault("error", operation, call=1, errno=errno.ENOSPC))
    with pytest.raises(StorageError) as caught:
        STORAGE_OPERATIONS[operation](storage)
    assert caught.value.errno == errno.ENOSPC
    assert files_of(storage) == {"page": OLD, "other": b""}
    STORAGE_OPERATIONS[operation](storage)  # Only the first call fails.


FOLDER_OPERATIONS: dict[str, Callable[[Storage, Folder], object]] = {
    "folder_children": lambda _, folder: folder.children(),
    "folder_files": lambda _, folder: folder.files("child"),
    "folder_make": lambda _, folder: folder.make("made"),
    "folder_put": lambda _, folder: folder.put("child", "file", b"new"),
    "folder_get": lambda _, folder: folder.get("child", "file"),
    "folder_read": lambda _, folder: read_from(folder, "child", "file"),
    "folder_link": lambda storage, folder: folder.link(storage, "page", "child", "linked"),
    "folder_append": lambda _, folder: folder.append("child", "file", memoryview(b"more")),
    "folder_flush": lambda _, folder: folder.flush("child", "file"),
    "folder_unlink": lambda _, folder: folder.unlink("child", "file"),
    "folder_remove": lambda _, folder: folder.remove("empty"),
    "folder_rename": lambda _, folder: folder.rename("child", "renamed"),
    "folder_sync": lambda _, folder: folder.sync("child"),
    "folder_sync_children": lambda _, folder: folder.sync_children(),
    "folder_close": lambda _, folder: folder.close(),
}


def test_every_operation_of_a_fault_is_tried() -> None:
    assert {*STORAGE_OPERATIONS, *FOLDER_OPERATIONS} == set(OPERATIONS)
    named = {name for protocol in (Storage, Folder) for name in vars(protocol) if name[0] != "_"}
    others = {"engine", "location", "home", "register", "drain", "abandon"}
    assert named - others == {name.removeprefix("folder_") for name in OPERATIONS}


@pytest.mark.parametrize("operation", FOLDER_OPERATIONS)
def test_error_strikes_a_folder_and_nothing_happens(storage: FaultyStorage, operation: str) -> None:
    folder = storage.folder("published")
    folder.make("child")
    folder.make("empty")
    folder.put("child", "file", bytes(SECTOR_BYTES))
    assert isinstance(storage.inner, MemoryStorage)
    before = copy.deepcopy(storage.inner.files.folders)
    storage.arm(Fault("error", operation, call=1, errno=errno.ENOSPC))
    with pytest.raises(StorageError) as caught:
        FOLDER_OPERATIONS[operation](storage, folder)
    assert caught.value.errno == errno.ENOSPC
    assert storage.inner.files.folders == before
    FOLDER_OPERATIONS[operation](storage, folder)


def test_folder_faults_match_the_name_of_the_file(storage: FaultyStorage) -> None:
    storage.arm(Fault("error", "folder_put", name=".metadata", call=1))
    folder = storage.folder("published")
    folder.make("child")
    folder.put("child", "other", b"")
    with pytest.raises(StorageError):
        folder.put("child", ".metadata", b"")
    assert folder.files("child") == ["other"]


def test_error_of_a_transfer_shows_at_every_wait(storage: FaultyStorage) -> None:
    storage.arm(Fault("error", "write", call=1))
    extent = Extent(SECTOR_BYTES, SECTOR_BYTES)
    transfer = storage.write("page", extent, aligned_buffer(SECTOR_BYTES))
    for _ in range(2):
        with pytest.raises(StorageError) as caught:
            transfer.wait()
        assert (caught.value.offset, caught.value.nbytes) == (SECTOR_BYTES, SECTOR_BYTES)


def test_calls_are_counted_per_name(storage: FaultyStorage) -> None:
    storage.arm(Fault("error", "get", name="page", call=2))
    storage.put("other", b"")
    for name in ("other", "other", "page"):
        storage.get(name)
    with pytest.raises(StorageError):
        storage.get("page")
    storage.get("page")


def test_probability_depends_on_the_seed_alone() -> None:
    def outcomes(seed: int) -> list[bool]:
        storage = FaultyStorage(MemoryStorage(), seed=seed)
        storage.put("file", b"")
        storage.arm(Fault("error", "get", probability=0.3))
        failed = []
        for _ in range(400):
            try:
                storage.get("file")
                failed.append(False)
            except StorageError:
                failed.append(True)
        return failed

    assert outcomes(5) == outcomes(5)
    assert outcomes(5) != outcomes(6)
    assert 60 < sum(outcomes(5)) < 180  # 120 expected, 6.5 standard deviations either way.


def test_disarm_ends_faults(storage: FaultyStorage) -> None:
    storage.arm(Fault("error", "get", probability=1))
    storage.disarm()
    assert storage.get("page") == OLD


@pytest.mark.parametrize("seed", range(8))
def test_short_write_moves_a_prefix_and_fails(seed: int) -> None:
    storage = FaultyStorage(MemoryStorage(), seed=seed)
    create_with(storage, "page", OLD)
    storage.arm(Fault("short", "write", call=1, errno=errno.EIO))
    with pytest.raises(StorageError):
        write_bytes(storage, "page", 0, NEW)
    moved = bytes(files_of(storage)["page"]).count(b"n")
    assert moved < len(NEW)
    assert moved % SECTOR_BYTES == 0
    assert files_of(storage)["page"] == NEW[:moved] + OLD[moved:]


def test_short_read_moves_a_prefix_and_fails(storage: FaultyStorage) -> None:
    storage.arm(Fault("short", "read", probability=1))
    lengths = set()
    for _ in range(20):
        buffer = aligned_buffer(len(OLD))
        with pytest.raises(StorageError):
            storage.read("page", Extent(0, len(OLD)), buffer).wait()
        moved = bytes(buffer).count(b"o")
        assert bytes(buffer) == OLD[:moved] + bytes(len(OLD) - moved)
        lengths.add(moved)
    assert len(lengths) > 1
    assert max(lengths) < len(OLD)


def test_flipped_bit_changes_one_bit_of_a_read(storage: FaultyStorage) -> None:
    storage.arm(Fault("flipped_bit", "read", call=1))
    buffer = aligned_buffer(len(OLD))
    transfer = storage.read("page", Extent(0, len(OLD)), buffer)
    transfer.wait()
    transfer.wait()
    difference = int.from_bytes(bytes(buffer), "big") ^ int.from_bytes(OLD, "big")
    assert difference.bit_count() == 1
    assert files_of(storage)["page"] == OLD
    assert read_bytes(storage, "page", 0, len(OLD)) == OLD


def test_lost_write_is_reported_as_done(storage: FaultyStorage) -> None:
    storage.arm(Fault("lost", "write", call=1))
    write_bytes(storage, "page", 0, NEW)
    assert files_of(storage)["page"] == OLD


def test_misdirected_write_lands_a_sector_late(storage: FaultyStorage) -> None:
    expected = bytearray(OLD)
    storage.arm(Fault("misdirected", "write", probability=1))
    patch = random_bytes(2 * SECTOR_BYTES)
    write_bytes(storage, "page", SECTOR_BYTES, patch)
    expected[2 * SECTOR_BYTES : 4 * SECTOR_BYTES] = patch
    assert files_of(storage)["page"] == expected
    write_bytes(storage, "page", 0, NEW)
    assert files_of(storage)["page"] == OLD[:SECTOR_BYTES] + NEW[SECTOR_BYTES:]


def test_delayed_transfer_ends_after_later_ones(storage: FaultyStorage) -> None:
    release = threading.Event()
    storage.arm(Fault("delayed", "write", call=1, release=release))
    extent = Extent(0, SECTOR_BYTES)
    ended: list[str] = []
    early = storage.write("page", extent, aligned_buffer(b"1" * SECTOR_BYTES))

    def wait_for_early() -> None:
        early.wait()
        ended.append("early")

    waiter = threading.Thread(target=wait_for_early)
    waiter.start()
    storage.write("page", extent, aligned_buffer(b"2" * SECTOR_BYTES)).wait()
    ended.append("late")
    assert not early.done()
    assert files_of(storage)["page"][:SECTOR_BYTES] == b"2" * SECTOR_BYTES
    release.set()
    waiter.join()
    assert ended == ["late", "early"]
    assert files_of(storage)["page"][:SECTOR_BYTES] == b"1" * SECTOR_BYTES


def test_released_transfer_ends_without_wait(storage: FaultyStorage) -> None:
    release = threading.Event()
    storage.arm(Fault("delayed", "write", call=1, release=release))
    transfer = storage.write("page", Extent(0, len(NEW)), aligned_buffer(NEW))
    assert not transfer.done()
    release.set()
    assert transfer.done()
    assert files_of(storage)["page"] == NEW


def test_failed_start_of_a_delayed_transfer_is_its_outcome(storage: FaultyStorage) -> None:
    release = threading.Event()
    storage.arm(Fault("delayed", "write", call=1, release=release))
    transfer = storage.write("page", Extent(0, len(NEW)), aligned_buffer(NEW))
    storage.unlink("page")
    release.set()
    assert transfer.done()
    storage.drain()
    for _ in range(2):
        with pytest.raises(StorageError) as caught:
            transfer.wait()
        assert caught.value.errno == errno.ENOENT
        assert transfer.done()


def test_drain_ends_delayed_transfers(storage: FaultyStorage) -> None:
    release = threading.Event()
    storage.arm(Fault("delayed", "write", call=1, release=release))
    storage.write("page", Extent(0, len(NEW)), aligned_buffer(NEW))
    release.set()
    storage.drain()
    assert files_of(storage)["page"] == NEW


def test_close_ends_delayed_transfers(storage: FaultyStorage) -> None:
    release = threading.Event()
    storage.arm(Fault("delayed", "write", call=1, release=release))
    storage.write("page", Extent(0, len(NEW)), aligned_buffer(NEW))
    release.set()
    storage.close()
    assert files_of(storage)["page"] == NEW


def test_callback_sees_every_operation() -> None:
    seen: list[tuple[str, str, str]] = []
    storage = FaultyStorage(MemoryStorage(), on_operation=lambda *call: seen.append(call))
    storage.create("page", SECTOR_BYTES)
    transfer = storage.write("page", Extent(0, SECTOR_BYTES), aligned_buffer(SECTOR_BYTES))
    storage.put("other", b"")
    transfer.wait()
    transfer.wait()
    storage.flush(["page", "other"])
    storage.arm(Fault("error", "unlink", call=1))
    with pytest.raises(StorageError):
        storage.unlink("page")
    storage.sync_directory()
    assert seen == [
        ("create", "page", "before"),
        ("create", "page", "after"),
        ("write", "page", "before"),
        ("put", "other", "before"),
        ("put", "other", "after"),
        ("write", "page", "after"),
        ("flush", "page,other", "before"),
        ("flush", "page,other", "after"),
        ("unlink", "page", "before"),
        ("sync_directory", "", "before"),
        ("sync_directory", "", "after"),
    ]


@pytest.mark.parametrize("when", ["before", "after"])
def test_callback_may_raise_at_an_exact_operation(when: str) -> None:
    def interrupt(operation: str, name: str, now: str) -> None:
        if (operation, name, now) == ("write", "page", when):
            raise KeyboardInterrupt

    storage = FaultyStorage(MemoryStorage(), on_operation=interrupt)
    storage.create("page", SECTOR_BYTES)
    with pytest.raises(KeyboardInterrupt):
        write_bytes(storage, "page", 0, b"n" * SECTOR_BYTES)
    moved = bytes(files_of(storage)["page"]) != bytes(SECTOR_BYTES)
    assert moved == (when == "after")


@pytest.mark.parametrize(
    "arguments",
    [
        {"kind": "lost", "operation": "read", "call": 1},
        {"kind": "short", "operation": "flush", "call": 1},
        {"kind": "error", "operation": "raed", "call": 1},
        {"kind": "error", "operation": "folder_seek", "call": 1},
        {"kind": "error", "operation": "read"},
        {"kind": "error", "operation": "read", "call": 0},
        {"kind": "error", "operation": "read", "call": 1, "probability": 0.5},
        {"kind": "error", "operation": "read", "probability": 1.5},
        {"kind": "delayed", "operation": "read", "call": 1},
        {"kind": "error", "operation": "read", "call": 1, "release": threading.Event()},
    ],
)
def test_invalid_faults_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Fault(**arguments)
