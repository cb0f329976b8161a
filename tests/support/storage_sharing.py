"""Conformance tests of shared files: link, is_shared, map, scratch and folder.

A file is shared if it has a second name, in the directory or in a folder, or is mapped. Writers
must be able to find out, and mapped memory must keep its content.
"""

from __future__ import annotations

import errno
import gc
import os
import resource
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.support.held import Held
from tests.support.transfers import (
    RawAccess,
    create_with,
    exit_code_of_child,
    fails_with,
    random_bytes,
    read_bytes,
    resource_limit,
    write_bytes,
)
from tierstore.storage.base import Storage
from tierstore.units import SECTOR_BYTES

OLD = random_bytes(3 * SECTOR_BYTES, seed=1)
NEW = random_bytes(3 * SECTOR_BYTES, seed=2)


def folder_path(storage: Storage) -> str:
    """Return the path of the folder that tests publish in, beside the storage's directory."""
    return f"{storage.location}-published"


def write_unless_shared(storage: Storage, name: str) -> None:
    """Write NEW to a file, as a writer does that must leave mapped memory alone."""
    if not storage.is_shared(name):
        write_bytes(storage, name, 0, NEW)


class SharingTests(RawAccess):
    """Tests of shared files on any storage, a part of StorageTests."""

    @pytest.fixture
    def stored(self, storage: Storage) -> Storage:
        """Give the storage, with a file "page" of content OLD."""
        create_with(storage, "page", OLD)
        return storage

    def test_link_is_a_second_name_of_one_file(self, stored: Storage) -> None:
        stored.link("page", "linked")
        stored.sync_directory()
        assert stored.list() == ["linked", "page"]
        assert self.raw_bytes(stored, "linked") == OLD
        write_bytes(stored, "page", 0, NEW)
        assert self.raw_bytes(stored, "linked") == NEW
        stored.unlink("page")
        assert stored.list() == ["linked"]
        assert read_bytes(stored, "linked", 0, len(NEW)) == NEW

    @pytest.mark.parametrize("new_name", ["taken", "page"])
    def test_link_to_a_taken_name_is_an_error(self, stored: Storage, new_name: str) -> None:
        create_with(stored, "taken", NEW)
        with fails_with(errno.EEXIST):
            stored.link("page", new_name)
        assert self.raw_bytes(stored, "taken") == NEW
        assert self.raw_bytes(stored, "page") == OLD
        assert not stored.is_shared("page")

    def test_link_survives_a_file_that_takes_the_first_name(self, stored: Storage) -> None:
        stored.link("page", "kept")
        create_with(stored, "next", NEW)
        stored.rename("next", "page")
        assert self.raw_bytes(stored, "kept") == OLD
        assert self.raw_bytes(stored, "page") == NEW
        assert not stored.is_shared("kept")
        assert not stored.is_shared("page")

    def test_shared_while_it_has_another_name(self, stored: Storage) -> None:
        create_with(stored, "other", OLD)
        assert not stored.is_shared("page")
        stored.link("page", "linked")
        assert stored.is_shared("page")
        assert stored.is_shared("linked")
        assert not stored.is_shared("other")  # The same content is not the same file.
        stored.unlink("page")
        assert not stored.is_shared("linked")

    def test_shared_while_a_folder_has_a_link(self, stored: Storage) -> None:
        folder = stored.folder(folder_path(stored))
        folder.make("child")
        folder.link(stored, "page", "child", "linked")
        assert stored.is_shared("page")
        folder.rename("child", "published")
        assert stored.is_shared("page")
        folder.unlink("published", "linked")
        assert not stored.is_shared("page")

    def test_reopened_storage_sees_that_a_file_is_linked(self, stored: Storage) -> None:
        stored.link("page", "linked")
        stored.close()
        with closing(self.open_again(stored)) as again:
            assert again.is_shared("page")

    def test_fresh_file_of_a_shared_name_is_not_shared(self, stored: Storage) -> None:
        stored.link("page", "linked")
        mapped = stored.map("page")
        stored.create("page", SECTOR_BYTES)
        assert not stored.is_shared("page")
        stored.put("page", b"short")
        assert bytes(mapped) == self.raw_bytes(stored, "linked") == OLD

    @pytest.mark.parametrize("nbytes", [1, SECTOR_BYTES - 1, 3 * SECTOR_BYTES, 3_000_001])
    def test_map_is_the_whole_content(self, storage: Storage, nbytes: int) -> None:
        storage.put("page", random_bytes(nbytes))
        mapped = storage.map("page")
        assert bytes(mapped) == random_bytes(nbytes)
        assert (mapped.format, mapped.ndim, mapped.readonly) == ("B", 1, False)

    def test_map_is_private(self, stored: Storage) -> None:
        mapped = stored.map("page")
        mapped[SECTOR_BYTES:] = NEW[SECTOR_BYTES:]
        assert self.raw_bytes(stored, "page") == OLD
        assert read_bytes(stored, "page", 0, len(OLD)) == OLD
        assert bytes(stored.map("page")) == OLD
        assert bytes(mapped) == OLD[:SECTOR_BYTES] + NEW[SECTOR_BYTES:]

    @pytest.mark.parametrize("touched", [False, True])
    def test_map_stays_when_another_file_takes_the_name(
        self, stored: Storage, touched: bool
    ) -> None:
        mapped = stored.map("page")
        if touched:
            assert bytes(mapped) == OLD
        create_with(stored, "next", NEW)
        stored.rename("next", "page")
        assert not stored.is_shared("page")  # The new file is not mapped.
        write_bytes(stored, "page", 0, NEW)
        stored.flush(["page"])
        assert bytes(mapped) == OLD
        stored.unlink("page")
        assert bytes(mapped) == OLD

    def test_mapped_file_is_shared_or_copied(self, stored: Storage) -> None:
        mapped = stored.map("page")
        write_unless_shared(stored, "page")
        assert bytes(mapped) == OLD

    def test_mapped_file_is_shared_under_every_name(self, stored: Storage) -> None:
        stored.link("page", "linked")
        mapped = stored.map("page")
        stored.unlink("page")
        write_unless_shared(stored, "linked")
        assert bytes(mapped) == OLD

    def test_reopened_storage_sees_that_a_file_is_mapped(self, stored: Storage) -> None:
        mapped = stored.map("page")
        stored.close()
        with closing(self.open_again(stored)) as again:
            write_unless_shared(again, "page")
            assert bytes(mapped) == OLD
            del mapped
            gc.collect()
            assert not again.is_shared("page")

    def test_forked_child_sees_that_a_file_is_mapped(self, stored: Storage) -> None:
        """The child has dropped the memory, but its parent still uses it."""
        mapped = [stored.map("page")]
        stored.close()

        def drop_and_write() -> None:
            mapped.clear()
            gc.collect()
            write_unless_shared(self.open_again(stored), "page")

        assert exit_code_of_child(drop_and_write) == 0
        assert bytes(mapped[0]) == OLD

    def test_fresh_file_is_not_shared(self, storage: Storage) -> None:
        """The system may reuse the inode number of a removed file that was mapped."""
        for _ in range(3):
            create_with(storage, "page", OLD)
            assert not storage.is_shared("page")
            mapped = storage.map("page")
            assert exit_code_of_child(lambda: 0) == 0
            storage.unlink("page")
            del mapped
            gc.collect()

    def test_dropped_map_is_not_shared(self, stored: Storage) -> None:
        mapped = [stored.map("page") for _ in range(2)]
        assert [bytes(memory) for memory in mapped] == [OLD, OLD]
        mapped.clear()
        gc.collect()
        assert not stored.is_shared("page")

    @pytest.mark.parametrize("nbytes", [1, SECTOR_BYTES, 3_000_001])
    def test_scratch_is_zeroed_writable_and_without_a_name(
        self, storage: Storage, nbytes: int
    ) -> None:
        one, other = storage.scratch(nbytes), storage.scratch(nbytes)
        assert (one.format, one.ndim, one.readonly) == ("B", 1, False)
        assert bytes(one) == bytes(nbytes)
        one[:] = random_bytes(nbytes)
        assert bytes(one) == random_bytes(nbytes)
        assert bytes(other) == bytes(nbytes)
        assert storage.list() == []

    def test_memory_outlives_the_storage(self, stored: Storage) -> None:
        mapped, scratch = stored.map("page"), stored.scratch(len(NEW))
        scratch[:] = NEW
        stored.close()
        gc.collect()
        assert (bytes(mapped), bytes(scratch)) == (OLD, NEW)
        mapped[:1] = scratch[:1] = b"x"

    def test_memory_stays_valid_in_a_forked_child(self, stored: Storage) -> None:
        mapped = stored.map("page")

        def compare() -> int:
            stored.abandon()
            return bytes(mapped) != OLD

        assert exit_code_of_child(compare) == 0

    def test_one_path_is_one_folder(self, storage: Storage) -> None:
        folder = storage.folder(folder_path(storage))
        assert folder.children() == []
        folder.make("child")
        folder.put("child", "file", b"content")
        again = storage.folder(folder_path(storage))
        assert again.children() == ["child"]
        assert again.get("child", "file") == b"content"


class FileSharingTests(SharingTests):
    """Tests of shared files on a filesystem, where map() does not copy."""

    def test_mapped_file_is_shared_while_its_memory_is_referenced(self, stored: Storage) -> None:
        whole = stored.map("page")
        array = np.frombuffer(whole, np.uint8)
        part = array[SECTOR_BYTES:].data
        assert stored.is_shared("page")
        del whole, array
        gc.collect()
        assert stored.is_shared("page")
        assert bytes(part) == OLD[SECTOR_BYTES:]
        del part
        gc.collect()
        assert not stored.is_shared("page")

    def test_mappings_hold_no_descriptors(self, stored: Storage) -> None:
        before = Held()
        memory = [stored.map("page") for _ in range(20)]
        memory += [stored.scratch(SECTOR_BYTES) for _ in range(20)]
        before.assert_nothing_new()
        assert bytes(memory[0]) == OLD

    def test_map_costs_no_memory_until_it_is_written_to(self, storage: Storage) -> None:
        nbytes = 48 << 20  # More than malloc() ever keeps after free().
        storage.create("page", nbytes)
        mapped = storage.map("page")
        assert not np.frombuffer(mapped, np.uint8).any()
        with_map = _anonymous_bytes()
        del mapped
        gc.collect()
        assert with_map - _anonymous_bytes() < nbytes // 4

    def test_scratch_takes_disk_space_at_once(self, storage: Storage) -> None:
        nbytes = 64 << 20
        taken_bytes: list[int] = []
        while max(taken_bytes, default=0) < nbytes // 2:
            # Other programs may free space on the filesystem at the same time.
            assert len(taken_bytes) < 10
            before = os.statvfs(storage.location)
            scratch = storage.scratch(nbytes)
            after = os.statvfs(storage.location)
            taken_bytes.append((before.f_bfree - after.f_bfree) * after.f_frsize)
            assert list(Path(storage.location).iterdir()) == []
            del scratch

    def test_file_size_limit_is_an_error_of_scratch(self, storage: Storage) -> None:
        before = Held()
        limit = resource_limit(resource.RLIMIT_FSIZE, 16 * SECTOR_BYTES)
        with limit, fails_with(errno.EFBIG) as caught:
            storage.scratch(64 * SECTOR_BYTES)
        assert caught.value.path == storage.location
        assert list(Path(storage.location).iterdir()) == []
        before.assert_nothing_new()
        assert bytes(storage.scratch(64 * SECTOR_BYTES)) == bytes(64 * SECTOR_BYTES)

    @pytest.mark.parametrize("operation", ["map", "scratch"])
    def test_descriptors_exhausted_is_an_error(self, stored: Storage, operation: str) -> None:
        with resource_limit(resource.RLIMIT_NOFILE, 3), fails_with(errno.EMFILE):
            stored.map("page") if operation == "map" else stored.scratch(SECTOR_BYTES)
        assert not stored.is_shared("page")

    def test_links_are_not_followed_by_map_and_link(self, storage: Storage) -> None:
        directory = Path(storage.location)
        target = directory.parent / "target"
        target.write_bytes(OLD)
        (directory / "symbolic").symlink_to(target)
        with fails_with(errno.ELOOP):
            storage.map("symbolic")
        storage.link("symbolic", "second")
        assert (directory / "second").is_symlink()  # It links the symbolic link, not its target.
        assert target.stat().st_nlink == 1


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
