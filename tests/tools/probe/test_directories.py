"""Directories: figures beside the kernel's counters and the clock, and nothing left."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernel import disk_bytes
from tierstore.errors import RunDirectoryError, StorageError
from tierstore.tools.probe.directories import (
    check_directories,
    probe_directories,
    written_bytes_max,
)

MIB = 2**20
PAGE_BYTES = MIB


@pytest.fixture
def small_memory_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 80 MiB."""
    point = tmp_path / "tmpfs"
    point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=80m", "none", str(point)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount")
    yield point
    subprocess.run(["umount", str(point)], check=True)


def test_bytes_equal_the_kernel(tmp_path: Path) -> None:
    before = disk_bytes()[1]
    (result,), together = probe_directories([tmp_path], PAGE_BYTES)
    written = disk_bytes()[1] - before
    assert os.listdir(tmp_path) == []
    assert together is None
    assert result.written_bytes <= written_bytes_max(PAGE_BYTES, 1, 0)
    if result.direct and result.drives:
        # The file system writes inodes and names beside the data.
        assert result.written_bytes <= written <= result.written_bytes + MIB


def test_rounds_take_no_longer_than_the_probe(tmp_path: Path) -> None:
    began = time.perf_counter()
    (result,), _ = probe_directories([tmp_path], PAGE_BYTES)
    elapsed = time.perf_counter() - began
    bandwidths, commits = result.bandwidths, result.commit_seconds
    rates = [rate for rate in (bandwidths.write, bandwidths.read, bandwidths.mixed) if rate]
    for rate in [*rates, commits]:
        assert 0 < rate.lowest <= rate.median <= rate.highest
    # A round moves 8 pages.
    shortest = sum(rate.rounds * 8 * PAGE_BYTES / rate.highest for rate in rates)
    assert shortest + commits.rounds * commits.lowest <= elapsed


def test_several_directories(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    results, together = probe_directories(check_directories(paths, PAGE_BYTES, 0), PAGE_BYTES)
    assert [result.path for result in results] == [str(path) for path in paths]
    assert together is not None
    assert together.write.median > 0
    limit = written_bytes_max(PAGE_BYTES, 2, 0)
    assert all(result.written_bytes <= limit for result in results)
    assert [os.listdir(path) for path in paths] == [[], []]


def test_sustained_writes_its_bytes_once(tmp_path: Path) -> None:
    nbytes = 21 * MIB + 4096
    (result,), _ = probe_directories([tmp_path], PAGE_BYTES, nbytes)
    assert result.sustained is not None
    assert result.sustained.nbytes == nbytes
    assert result.sustained.bytes_per_s.lowest <= result.sustained.last_bytes_per_s
    assert nbytes < result.written_bytes <= written_bytes_max(PAGE_BYTES, 1, nbytes)


def test_memory_has_no_drive(small_memory_disk: Path) -> None:
    (result,), _ = probe_directories([small_memory_disk], PAGE_BYTES)
    assert result.drives == ()
    assert "on no block device" in result.notes[0]
    if not result.direct:  # Linux before 6.6.
        assert result.bandwidths.read is result.bandwidths.mixed is None


def test_a_full_disk_is_refused_before_the_first_byte(small_memory_disk: Path) -> None:
    check_directories([small_memory_disk], PAGE_BYTES, 0)
    (small_memory_disk / "large").write_bytes(bytes(10 * MIB))
    with pytest.raises(StorageError, match=r"reserving 72\.0 MiB where 70\.0 MiB are free"):
        check_directories([small_memory_disk], PAGE_BYTES, 0)
    with pytest.raises(StorageError, match="No space left"):
        check_directories([small_memory_disk], PAGE_BYTES, 2**40)
    assert os.listdir(small_memory_disk) == ["large"]


def test_directories_of_one_disk_share_its_space(small_memory_disk: Path) -> None:
    paths = [small_memory_disk / "a", small_memory_disk / "b", small_memory_disk / "c"]
    for path in paths:
        path.mkdir()
    check_directories(paths[:2], PAGE_BYTES, 0)
    with pytest.raises(StorageError, match=r"reserving 88\.0 MiB where 80\.0 MiB are free"):
        check_directories(paths, PAGE_BYTES, 0)


def test_wrong_directories_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("absent", "file"):
        with pytest.raises(RunDirectoryError, match=f"{name} is not a directory.*make it, or name"):
            check_directories([tmp_path / name], PAGE_BYTES, 0)
    with pytest.raises(RunDirectoryError, match="named twice"):
        check_directories([tmp_path, tmp_path / "."], PAGE_BYTES, 0)


def test_a_read_only_directory_is_refused(small_memory_disk: Path) -> None:
    remount = ["mount", "-o", "remount,ro", str(small_memory_disk)]
    subprocess.run(remount, check=True)
    with pytest.raises(RunDirectoryError, match=r"cannot be used.*Read-only file system"):
        probe_directories([small_memory_disk], PAGE_BYTES)


def test_an_error_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tierstore.tools.probe import directories

    def failing(*_: object) -> None:
        raise StorageError("write", path="x", errno=5)

    monkeypatch.setattr(directories, "write_durably", failing)
    with pytest.raises(StorageError):
        probe_directories([tmp_path], PAGE_BYTES)
    assert os.listdir(tmp_path) == []
