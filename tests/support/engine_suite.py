"""Tests of storages with an engine, in addition to the conformance suite."""

from __future__ import annotations

import errno
import mmap
import os
from abc import abstractmethod
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.held import Held
from tests.support.storage_tests import FileStorageTests
from tests.support.transfers import aligned_buffer, create_with, random_bytes, read_bytes
from tierstore.errors import StorageError
from tierstore.storage.base import Storage
from tierstore.storage.engine import REQUEST_BYTES
from tierstore.units import SECTOR_BYTES, Extent


class EngineStorageTests(FileStorageTests):
    """Tests of the storage around any engine."""

    @abstractmethod
    def engine_type(self) -> tuple[Any, str]:
        """Return a module and the name in it by which the storage finds its engine's class."""

    def test_error_names_where_a_read_stopped(self, storage: Storage) -> None:
        nbytes = 3 * REQUEST_BYTES
        storage.create("page", nbytes)
        os.truncate(Path(storage.location) / "page", REQUEST_BYTES + 5 * SECTOR_BYTES)
        extent = Extent(SECTOR_BYTES, nbytes - SECTOR_BYTES)
        with pytest.raises(StorageError, match="stopped at byte") as caught:
            storage.read("page", extent, aligned_buffer(extent.nbytes)).wait()
        stopped_at = int(str(caught.value).split("stopped at byte ")[1].split(")")[0])
        assert REQUEST_BYTES + 5 * SECTOR_BYTES <= stopped_at < nbytes
        assert caught.value.errno == errno.EIO

    @pytest.mark.parametrize("submitted", [False, True])
    def test_interrupted_submission_is_seen_by_drain(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, submitted: bool
    ) -> None:
        module, name = self.engine_type()

        class InterruptedEngine(getattr(module, name)):  # type: ignore[misc]
            def submit(self, *arguments: Any) -> None:
                if submitted:
                    super().submit(*arguments)
                raise KeyboardInterrupt

        content = random_bytes(2 * REQUEST_BYTES)
        monkeypatch.setattr(module, name, InterruptedEngine)
        with closing(self.open_storage(tmp_path)) as storage:
            storage.create("page", len(content))
            before = Held()
            with pytest.raises(KeyboardInterrupt):
                storage.write("page", Extent(0, len(content)), aligned_buffer(content))
            storage.drain()
            found = (tmp_path / "page").read_bytes()
            assert found == (content if submitted else bytes(len(content)))
            before.assert_nothing_new()


class DirectStorageTests(EngineStorageTests):
    """Tests of engines with direct I/O."""

    @pytest.mark.parametrize("extra", [-SECTOR_BYTES, 0, SECTOR_BYTES])
    def test_round_trip_of_more_requests_than_may_be_in_flight(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: int
    ) -> None:
        module, _ = self.engine_type()
        monkeypatch.setattr(module, "QUEUE_DEPTH", 3)
        monkeypatch.setattr(module, "REQUEST_BYTES", 16 * SECTOR_BYTES)
        content = random_bytes(64 * 16 * SECTOR_BYTES + extra)
        with closing(self.open_storage(tmp_path)) as storage:
            create_with(storage, "page", content)
            assert self.raw_bytes(storage, "page") == content
            assert read_bytes(storage, "page", 0, len(content)) == content

    def test_data_is_on_the_medium_past_the_page_cache(self, storage: Storage) -> None:
        content = random_bytes(33 * SECTOR_BYTES)
        create_with(storage, "page", content)
        memory = mmap.mmap(-1, len(content))
        fd = os.open(Path(storage.location) / "page", os.O_RDONLY | os.O_DIRECT)
        try:
            assert os.preadv(fd, [memory], 0) == len(content)
        finally:
            os.close(fd)
        assert memory[:] == content
