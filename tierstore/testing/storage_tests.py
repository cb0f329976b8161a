"""The conformance suite: what every storage must do, whatever moves its bytes.

Subclass StorageTests once per storage, give it a ``storage`` fixture and the raw access
that bypasses the storage under test; pytest then runs all tests on it. For a storage with
one file per name in a directory, FileStorageTests has the raw access already. Call
``pytest.register_assert_rewrite("tierstore.testing.storage_tests")`` in a conftest.py to
have failed assertions explained.
"""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tierstore.errors import RunLockedError, StorageError, StoreClosedError
from tierstore.storage.base import Storage
from tierstore.testing.storage_machine import StorageMachine
from tierstore.testing.storage_sharing import FileSharingTests, SharingTests, folder_path
from tierstore.testing.transfers import (
    aligned_buffer,
    create_with,
    random_bytes,
    read_bytes,
    write_bytes,
)
from tierstore.units import SECTOR_BYTES, Extent

# Everything that needs the file "page" to be there.
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
    lambda storage: storage.register(aligned_buffer(SECTOR_BYTES)),
    lambda storage: storage.list(),
    lambda storage: storage.create("page", SECTOR_BYTES),
    lambda storage: storage.put("page", b""),
    lambda storage: storage.scratch(SECTOR_BYTES),
    lambda storage: storage.folder(folder_path(storage)),
    lambda storage: storage.sync_directory(),
]


class StorageTests(SharingTests):
    """Subclass once per storage, with a fixture ``storage`` that gives an empty, open one."""

    @abstractmethod
    def hard_link(self, storage: Storage, name: str, new_name: str) -> None:
        """Give a file a second name without using the storage."""

    @abstractmethod
    def allocated_bytes(self, storage: Storage, name: str) -> int:
        """Return the space that a file holds on the medium."""

    @pytest.mark.parametrize("sectors", [1, 2, 3, 7, 255, 256, 257, 2047, 2048, 2049, 4099])
    def test_round_trip(self, storage: Storage, sectors: int) -> None:
        content = random_bytes(sectors * SECTOR_BYTES, seed=sectors)
        create_with(storage, "page", content)
        assert self.raw_bytes(storage, "page") == content
        assert read_bytes(storage, "page", 0, len(content)) == content

    def test_read_sees_bytes_of_the_medium(self, storage: Storage) -> None:
        content = random_bytes(5 * SECTOR_BYTES)
        storage.put("page", content)
        assert (
            read_bytes(storage, "page", SECTOR_BYTES, 3 * SECTOR_BYTES)
            == (content[SECTOR_BYTES : 4 * SECTOR_BYTES])
        )

    def test_write_in_the_middle_leaves_the_rest(self, storage: Storage) -> None:
        expected = bytearray(random_bytes(9 * SECTOR_BYTES))
        create_with(storage, "page", bytes(expected))
        patch = random_bytes(3 * SECTOR_BYTES, seed=1)
        write_bytes(storage, "page", 4 * SECTOR_BYTES, patch)
        expected[4 * SECTOR_BYTES : 7 * SECTOR_BYTES] = patch
        assert self.raw_bytes(storage, "page") == expected

    def test_read_fills_its_buffer_only(self, storage: Storage) -> None:
        create_with(storage, "page", b"\xff" * (3 * SECTOR_BYTES))
        whole = aligned_buffer(3 * SECTOR_BYTES)
        middle = whole[SECTOR_BYTES : 2 * SECTOR_BYTES]
        storage.read("page", Extent(0, SECTOR_BYTES), middle).wait()
        assert bytes(whole) == bytes(SECTOR_BYTES) + b"\xff" * SECTOR_BYTES + bytes(SECTOR_BYTES)

    def test_write_from_read_only_memory(self, storage: Storage) -> None:
        content = random_bytes(SECTOR_BYTES)
        storage.create("page", SECTOR_BYTES)
        storage.write("page", Extent(0, SECTOR_BYTES), aligned_buffer(content).toreadonly()).wait()
        assert self.raw_bytes(storage, "page") == content

    def test_transfers_overlap(self, storage: Storage) -> None:
        contents = [random_bytes(65 * SECTOR_BYTES, seed) for seed in range(6)]
        nbytes = len(contents[0])
        storage.create("page", nbytes * len(contents))
        writes = [
            storage.write("page", Extent(i * nbytes, nbytes), aligned_buffer(content))
            for i, content in enumerate(contents)
        ]
        for transfer in reversed(writes):
            transfer.wait()
        assert self.raw_bytes(storage, "page") == b"".join(contents)

    def test_transfers_from_several_threads(self, storage: Storage) -> None:
        def work(seed: int) -> bool:
            name = f"page-{seed}"
            content = random_bytes((40 + seed) * SECTOR_BYTES, seed)
            storage.create(name, len(content))
            for _ in range(5):
                write_bytes(storage, name, 0, content)
                if read_bytes(storage, name, 0, len(content)) != content:
                    return False
            return self.raw_bytes(storage, name) == content

        with ThreadPoolExecutor(4) as executor:
            assert all(executor.map(work, range(8)))

    def test_memory_may_be_registered_or_not(self, storage: Storage) -> None:
        memory = aligned_buffer(24 * SECTOR_BYTES)
        content = random_bytes(24 * SECTOR_BYTES)
        create_with(storage, "page", content)
        registered = (memory, memory[: 8 * SECTOR_BYTES], memory[8 * SECTOR_BYTES :], memory[:0])
        for part in registered:
            storage.register(part)
            memory[:] = bytes(len(memory))
            # Inside what is registered, across its edges, and beside it.
            pieces = [(0, 6), (6, 10), (10, 24)]
            transfers = []
            for first, last in pieces:
                start, end = first * SECTOR_BYTES, last * SECTOR_BYTES
                extent = Extent(start, end - start)
                transfers.append(storage.read("page", extent, memory[start:end]))
            for transfer in transfers:
                transfer.wait()
            assert bytes(memory) == content
            content = content[::-1]
            memory[:] = content
            storage.write("page", Extent(0, len(content)), memory).wait()
            assert self.raw_bytes(storage, "page") == content

    def test_memory_may_be_registered_while_transfers_are_in_flight(self, storage: Storage) -> None:
        nbytes = 512 * SECTOR_BYTES
        storage.create("page", 8 * nbytes)
        memory = aligned_buffer(random_bytes(8 * nbytes))
        transfers = []
        for index in range(8):
            extent = Extent(index * nbytes, nbytes)
            part = memory[extent.offset : extent.offset + nbytes]
            transfers.append(storage.write("page", extent, part))
            storage.register(memory[: index * nbytes])
        for transfer in transfers:
            transfer.wait()
        assert self.raw_bytes(storage, "page") == memory

    def test_registered_memory_is_kept_alive(self, storage: Storage) -> None:
        content = random_bytes(8 * SECTOR_BYTES)
        storage.register(aligned_buffer(8 * SECTOR_BYTES))
        gc.collect()
        # Would take the addresses just given back, if they were.
        create_with(storage, "page", content)
        assert self.raw_bytes(storage, "page") == content
        storage.register(memoryview(b""))
        assert read_bytes(storage, "page", 0, len(content)) == content

    def test_wait_may_be_called_again_and_by_several_threads(self, storage: Storage) -> None:
        storage.create("page", 512 * SECTOR_BYTES)
        content = random_bytes(512 * SECTOR_BYTES)
        transfer = storage.write("page", Extent(0, len(content)), aligned_buffer(content))
        with ThreadPoolExecutor(4) as executor:
            for waited in [executor.submit(transfer.wait) for _ in range(4)]:
                waited.result()
        transfer.wait()
        assert transfer.done()
        assert self.raw_bytes(storage, "page") == content

    def test_transfer_nobody_waits_for_ends_before_close(self, storage: Storage) -> None:
        content = random_bytes(2048 * SECTOR_BYTES)
        storage.create("page", len(content))
        storage.write("page", Extent(0, len(content)), aligned_buffer(content))
        storage.close()
        assert self.raw_bytes(storage, "page") == content

    def test_transfers_nobody_kept_end_before_drain_returns(self, storage: Storage) -> None:
        content = random_bytes(2048 * SECTOR_BYTES)
        storage.create("page", len(content))
        for start in range(0, len(content), len(content) // 4):
            part = content[start : start + len(content) // 4]
            storage.write("page", Extent(start, len(part)), aligned_buffer(part))
        storage.drain()
        assert self.raw_bytes(storage, "page") == content
        storage.drain()
        assert read_bytes(storage, "page", 0, len(content)) == content

    def test_drain_leaves_a_failure_to_wait(self, storage: Storage) -> None:
        storage.create("page", SECTOR_BYTES)
        transfer = storage.read("page", Extent(0, 2 * SECTOR_BYTES), aligned_buffer(8192))
        storage.drain()
        assert transfer.done()
        with pytest.raises(StorageError):
            transfer.wait()

    def test_drain_of_a_closed_storage_returns(self, storage: Storage) -> None:
        create_with(storage, "page", bytes(SECTOR_BYTES))
        storage.close()
        storage.drain()

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
        self.hard_link(storage, "page", "kept")
        storage.create("page", SECTOR_BYTES)
        write_bytes(storage, "page", 0, b"n" * SECTOR_BYTES)
        assert self.raw_bytes(storage, "kept") == content
        assert self.raw_bytes(storage, "page") == b"n" * SECTOR_BYTES

    def test_write_reaches_other_links_of_the_file(self, storage: Storage) -> None:
        storage.create("page", SECTOR_BYTES)
        self.hard_link(storage, "page", "linked")
        write_bytes(storage, "page", 0, b"n" * SECTOR_BYTES)
        assert self.raw_bytes(storage, "linked") == b"n" * SECTOR_BYTES

    def test_create_refuses_a_negative_length(self, storage: Storage) -> None:
        with pytest.raises(ValueError, match="negative"):
            storage.create("page", -SECTOR_BYTES)

    @pytest.mark.parametrize("operation", ["read", "write"])
    def test_unsuitable_buffers_are_refused(self, storage: Storage, operation: str) -> None:
        storage.create("page", 4 * SECTOR_BYTES)
        whole = aligned_buffer(4 * SECTOR_BYTES)
        start = storage.read if operation == "read" else storage.write
        for buffer, reason in [
            (whole[64 : 64 + SECTOR_BYTES], "multiple of 4096"),
            (whole[: SECTOR_BYTES - 1], "long"),
            (whole[: 2 * SECTOR_BYTES], "long"),
            (whole[: 2 * SECTOR_BYTES : 2], "contiguous"),
        ]:
            with pytest.raises(ValueError, match=reason):
                start("page", Extent(0, SECTOR_BYTES), buffer)
        assert self.raw_bytes(storage, "page") == bytes(4 * SECTOR_BYTES)

    def test_read_into_read_only_memory_is_refused(self, storage: Storage) -> None:
        storage.create("page", SECTOR_BYTES)
        with pytest.raises(ValueError, match="writable"):
            storage.read("page", Extent(0, SECTOR_BYTES), aligned_buffer(SECTOR_BYTES).toreadonly())

    @pytest.mark.parametrize(("offset", "nbytes"), [(512, 4096), (-4096, 4096), (0, 100), (0, 0)])
    def test_misaligned_extents_are_refused(
        self, storage: Storage, offset: int, nbytes: int
    ) -> None:
        storage.create("page", 4 * SECTOR_BYTES)
        with pytest.raises(ValueError, match="multiple of 4096"):
            storage.read("page", Extent(offset, nbytes), aligned_buffer(SECTOR_BYTES))

    @pytest.mark.parametrize("offset_sectors", [1, 3, 900])
    def test_read_past_the_end_is_an_error(self, storage: Storage, offset_sectors: int) -> None:
        storage.create("page", 3 * SECTOR_BYTES)
        extent = Extent(offset_sectors * SECTOR_BYTES, 4 * SECTOR_BYTES)
        transfer = storage.read("page", extent, aligned_buffer(extent.nbytes))
        for _ in range(2):
            with pytest.raises(StorageError) as caught:
                transfer.wait()
            assert caught.value.errno == errno.EIO
            assert (caught.value.offset, caught.value.nbytes) == (extent.offset, extent.nbytes)
            assert caught.value.path.endswith("page")
            assert transfer.done()

    def test_done_comes_without_wait(self, storage: Storage) -> None:
        storage.create("page", 512 * SECTOR_BYTES)
        content = random_bytes(512 * SECTOR_BYTES)
        transfer = storage.write("page", Extent(0, len(content)), aligned_buffer(content))
        deadline_s = time.monotonic() + 60
        while not transfer.done():
            assert time.monotonic() < deadline_s
        assert self.raw_bytes(storage, "page") == content

    def test_read_of_a_file_that_ends_in_a_sector_is_an_error(self, storage: Storage) -> None:
        storage.put("page", b"x" * (SECTOR_BYTES + 100))
        with pytest.raises(StorageError) as caught:
            read_bytes(storage, "page", 0, 2 * SECTOR_BYTES)
        assert caught.value.errno == errno.EIO

    def test_failed_transfer_leaves_others_alone(self, storage: Storage) -> None:
        content = random_bytes(600 * SECTOR_BYTES)
        create_with(storage, "good", content)
        storage.create("short", SECTOR_BYTES)
        extent = Extent(0, len(content))
        buffer = aligned_buffer(len(content))
        bad = storage.read("short", extent, aligned_buffer(len(content)))
        good = storage.read("good", extent, buffer)
        good.wait()
        assert bytes(buffer) == content
        with pytest.raises(StorageError):
            bad.wait()

    @pytest.mark.parametrize("operate", _ON_A_FILE)
    def test_missing_file_is_an_error(
        self, storage: Storage, operate: Callable[[Storage], object]
    ) -> None:
        with pytest.raises(StorageError) as caught:
            operate(storage)
        assert caught.value.errno == errno.ENOENT
        assert caught.value.path.endswith("page")
        assert storage.list() == []

    @pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "lock", "a\0b"])
    def test_names_that_are_no_plain_file_names_are_refused(
        self, storage: Storage, name: str
    ) -> None:
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
        storage.lock(0)  # One's own lock is no obstacle.
        with closing(self.open_again(storage)) as other:
            with pytest.raises(RunLockedError, match=f"process {os.getpid()} on host"):
                other.lock(0)
            assert storage.list() == []  # The lock is no file of the run.
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
        storage.lock(0)
        child = os.fork()
        if child == 0:
            try:
                storage.abandon()
                storage.close()
            except BaseException:
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
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
        child = os.fork()
        if child == 0:
            os._exit(_count_of_allowed(storage))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
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


def _count_of_allowed(storage: Storage) -> int:
    """Return how many operations a forked child could do, or 100 after an error."""
    allowed = 0
    try:
        for operate in [*_ON_A_FILE, *_WITHOUT_A_FILE]:
            try:
                operate(storage)
                allowed += 1
            except StoreClosedError:
                pass
    except BaseException:
        return 100
    return allowed


class FileStorageTests(FileSharingTests, StorageTests):
    """For storages with one file per name in a directory; override ``open_storage``."""

    @abstractmethod
    def open_storage(self, directory: Path) -> Storage:
        """Return an open storage of the directory."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Iterator[Storage]:
        """Give an empty storage and close it afterwards."""
        with closing(self.open_storage(tmp_path / "run")) as storage:
            yield storage

    def raw_bytes(self, storage: Storage, name: str) -> bytes:
        """See StorageTests."""
        return (Path(storage.location) / name).read_bytes()

    def hard_link(self, storage: Storage, name: str, new_name: str) -> None:
        """See StorageTests."""
        os.link(Path(storage.location) / name, Path(storage.location) / new_name)

    def allocated_bytes(self, storage: Storage, name: str) -> int:
        """See StorageTests."""
        return (Path(storage.location) / name).stat().st_blocks * 512

    def open_again(self, storage: Storage) -> Storage:
        """See StorageTests."""
        return self.open_storage(Path(storage.location))

    def test_files_are_closed_to_other_users(self, storage: Storage) -> None:
        umask = os.umask(0)  # The storage itself must see to it.
        try:
            storage.create("page", SECTOR_BYTES)
            storage.put("file", b"")
            storage.lock(0)
        finally:
            os.umask(umask)
        modes = [path.stat().st_mode & 0o777 for path in Path(storage.location).iterdir()]
        assert len(modes) >= 2
        assert set(modes) == {0o600}
