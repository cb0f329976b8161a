"""Conformance tests of transfers: read, write, register and drain."""

from __future__ import annotations

import errno
import gc
import os
import time
from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.support.transfers import (
    RawAccess,
    aligned_buffer,
    create_with,
    exit_code,
    fails_with,
    random_bytes,
    read_bytes,
    start_child,
    start_pieces,
    wait_all,
    write_bytes,
)
from tierstore.errors import StorageError
from tierstore.storage.base import Storage
from tierstore.units import SECTOR_BYTES, Extent

_MIB = 1 << 20


class TransferTests(RawAccess):
    """Tests of transfers on any storage, a part of StorageTests."""

    @pytest.mark.parametrize("sectors", [1, 2, 3, 7, 255, 256, 257, 2047, 2048, 2049, 4099])
    def test_round_trip(self, storage: Storage, sectors: int) -> None:
        content = random_bytes(sectors * SECTOR_BYTES, seed=sectors)
        create_with(storage, "page", content)
        assert self.raw_bytes(storage, "page") == content
        assert read_bytes(storage, "page", 0, len(content)) == content

    def test_read_sees_bytes_of_the_medium(self, storage: Storage) -> None:
        content = random_bytes(5 * SECTOR_BYTES)
        storage.put("page", content)
        found = read_bytes(storage, "page", SECTOR_BYTES, 3 * SECTOR_BYTES)
        assert found == content[SECTOR_BYTES : 4 * SECTOR_BYTES]

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
        content = random_bytes(6 * 65 * SECTOR_BYTES)
        storage.create("page", len(content))
        wait_all(start_pieces(storage.write, "page", aligned_buffer(content), 6)[::-1])
        assert self.raw_bytes(storage, "page") == content

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
            # Inside the registered memory, across its edges, and outside.
            ends = [sectors * SECTOR_BYTES for sectors in (0, 6, 10, 24)]
            wait_all(
                [
                    storage.read("page", Extent(start, end - start), memory[start:end])
                    for start, end in pairwise(ends)
                ]
            )
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
        wait_all(transfers)
        assert self.raw_bytes(storage, "page") == memory

    def test_registered_memory_is_kept_alive(self, storage: Storage) -> None:
        content = random_bytes(8 * SECTOR_BYTES)
        storage.register(aligned_buffer(8 * SECTOR_BYTES))
        gc.collect()
        # If the registered memory were freed, new buffers would get its addresses.
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

    @pytest.mark.parametrize("finish", ["drain", "close"])
    def test_drain_and_close_wait_for_dropped_transfers(
        self, storage: Storage, finish: str
    ) -> None:
        content = random_bytes(2048 * SECTOR_BYTES)
        storage.create("page", len(content))
        start_pieces(storage.write, "page", aligned_buffer(content), 4)
        getattr(storage, finish)()
        assert self.raw_bytes(storage, "page") == content

    def test_drain_leaves_a_failure_to_wait(self, storage: Storage) -> None:
        create_with(storage, "page", b"x" * SECTOR_BYTES)
        transfer = storage.read("page", Extent(0, 2 * SECTOR_BYTES), aligned_buffer(8192))
        for _ in range(2):
            storage.drain()
            assert transfer.done()
        with pytest.raises(StorageError):
            transfer.wait()
        assert read_bytes(storage, "page", 0, SECTOR_BYTES) == b"x" * SECTOR_BYTES

    def test_drain_of_a_closed_storage_returns(self, storage: Storage) -> None:
        create_with(storage, "page", bytes(SECTOR_BYTES))
        storage.close()
        storage.drain()

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

    @pytest.mark.parametrize("offset_sectors", [0, 1, 3, 900])
    @pytest.mark.parametrize("nbytes", [3 * SECTOR_BYTES, SECTOR_BYTES + 100])
    def test_read_past_the_end_is_an_error(
        self, storage: Storage, nbytes: int, offset_sectors: int
    ) -> None:
        storage.put("page", bytes(nbytes))
        extent = Extent(offset_sectors * SECTOR_BYTES, 4 * SECTOR_BYTES)
        transfer = storage.read("page", extent, aligned_buffer(extent.nbytes))
        for _ in range(2):
            with fails_with(errno.EIO) as caught:
                transfer.wait()
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

    @pytest.mark.parametrize(
        ("first", "sectors"), [(4, 3), (1, 2047), (3, 2048), (2047, 2), (2, 4098), (4098, 1)]
    )
    def test_any_part_of_a_file(self, storage: Storage, first: int, sectors: int) -> None:
        expected = bytearray(random_bytes(4100 * SECTOR_BYTES))
        create_with(storage, "page", bytes(expected))
        start, nbytes = first * SECTOR_BYTES, sectors * SECTOR_BYTES
        assert read_bytes(storage, "page", start, nbytes) == expected[start : start + nbytes]
        expected[start : start + nbytes] = random_bytes(nbytes, seed=1)
        write_bytes(storage, "page", start, bytes(expected[start : start + nbytes]))
        assert self.raw_bytes(storage, "page") == expected

    def test_several_storages_move_at_once(self, storage: Storage) -> None:
        assert moves_right(storage, "page", seed=9)  # Before the others: some work happens once.
        names = [f"page-{index}" for index in range(6)]
        with ExitStack() as stack, ThreadPoolExecutor(len(names)) as executor:
            storages = [stack.enter_context(closing(self.open_again(storage))) for _ in names]
            assert all(executor.map(moves_right, storages, names, range(len(names))))
        for seed, name in enumerate(names):
            assert self.raw_bytes(storage, name) == random_bytes(3 * _MIB, seed)


class FileTransferTests(TransferTests):
    """Tests of transfers on a filesystem."""

    @abstractmethod
    def open_storage(self, directory: Path) -> Storage:
        """Return an open storage of the directory."""

    def test_several_processes_move_at_once(self, storage: Storage) -> None:
        def move_elsewhere(index: int) -> bool:
            directory = Path(storage.location).with_name(f"other-{index}")
            with closing(self.open_storage(directory)) as other:
                return not moves_right(other, "page", seed=index)

        children = [start_child(partial(move_elsewhere, index)) for index in range(4)]
        assert moves_right(storage, "page", seed=9)
        assert [exit_code(child) for child in children] == [0] * 4

    def test_open_files_are_bounded(self, storage: Storage) -> None:
        names = [f"page-{index}" for index in range(300)]
        contents = [random_bytes(4 * SECTOR_BYTES, seed) for seed in range(len(names))]
        for name in names:
            storage.create(name, 4 * SECTOR_BYTES)
        opened = len(os.listdir("/proc/self/fd"))
        opened_most = 0
        for move in (storage.write, storage.read):
            transfers = []
            for name, content in zip(names, contents, strict=True):
                buffer = aligned_buffer(content if move == storage.write else len(content))
                transfers.append((buffer, move(name, Extent(0, len(content)), buffer)))
                opened_most = max(opened_most, len(os.listdir("/proc/self/fd")) - opened)
            for (buffer, transfer), content in zip(transfers, contents, strict=True):
                transfer.wait()
                assert buffer == content
        assert opened_most < 100
        assert self.raw_bytes(storage, names[-1]) == contents[-1]

    @pytest.mark.long
    def test_more_than_two_gib(self, storage: Storage) -> None:
        nbytes = (2 << 30) + 3 * _MIB + SECTOR_BYTES
        buffer = aligned_buffer(nbytes)
        for index, start in enumerate(range(0, nbytes, SECTOR_BYTES)):
            buffer[start : start + 8] = index.to_bytes(8, "little")
        storage.create("page", nbytes)
        storage.write("page", Extent(0, nbytes), buffer).wait()
        assert np.array_equal(np.fromfile(Path(storage.location) / "page", np.uint8), buffer)
        again = aligned_buffer(nbytes)
        storage.read("page", Extent(0, nbytes), again).wait()
        assert np.array_equal(again, buffer)
        storage.unlink("page")


def moves_right(storage: Storage, name: str, seed: int) -> bool:
    """Write and read a file in pieces that overlap in time; return whether all bytes match."""
    content = random_bytes(3 * _MIB, seed)
    storage.create(name, len(content))
    memory = aligned_buffer(content)
    for move in (storage.write, storage.read):
        wait_all(start_pieces(move, name, memory, 6))
        if memory != content:
            return False
        memory[:] = bytes(len(memory))
    return True
