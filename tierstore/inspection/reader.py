"""Reading of untrusted files: links are not followed, and nothing is changed.

A name cannot lead out of the directory, except into allowed directories. The fault of a file is
recorded, and the next file is read.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, TypeVar

from tierstore.errors import CheckpointError, CorruptionError, RunDirectoryError
from tierstore.inspection.data_checksums import DataChecksums
from tierstore.layout.page_layout import BLOCK_BYTES
from tierstore.storage.paths import OPEN_FLAGS, storage_errors, whole_file_fault

T = TypeVar("T")

_FORBIDDEN = (errno.EACCES, errno.EPERM)
# Without O_NONBLOCK the open of a named pipe would wait for a writer.
_READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | OPEN_FLAGS


def wrong_name(name: str) -> str | None:
    """Return the fault of a file name, which may contain folders; None if it has no fault."""
    if not name or "\0" in name:
        return "is not a file name"
    if name.startswith("/"):
        return "is absolute: only files of the checkpoint itself are read"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "leads elsewhere: only files of the checkpoint itself are read"
    return None


class File:
    """An open file."""

    def __init__(self, reader: Reader, name: str, fd: int) -> None:
        self.reader = reader
        self._fd = fd
        self.name = name
        self.nbytes = os.fstat(fd).st_size

    def drop_cached(self) -> None:
        """Drop cached pages, so that the next reads come from the disk."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def stream(self) -> BinaryIO:
        """Return a separate stream of the file."""
        return open(os.dup(self._fd), "rb")

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` with the bytes from ``offset`` on.

        Raises:
            CorruptionError: the disk fails, or the file ends before these bytes.
        """
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise CorruptionError(
                    f"cannot be read at byte {offset + done}: {error.strerror} "
                    f"(errno {error.errno})"
                ) from error
            if count == 0:
                raise CorruptionError(
                    f"ends at byte {offset + done}, before the {len(buffer)} bytes at {offset} do"
                )
            done += count

    def read_data_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` as read_into() does, for compare_checksums() of the reader."""
        self.read_into(buffer, offset)
        checksums = self.reader.checksums.get(self.name)
        if checksums is not None:
            checksums.add(offset, buffer)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return the bytes from ``offset`` on; errors as in read_into()."""
        data = bytearray(nbytes)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def piece(self, offset: int, nbytes: int) -> memoryview:
        """Return up to BLOCK_BYTES bytes, valid until the next call for any file."""
        piece = self.reader.buffer[:nbytes]
        self.read_into(piece, offset)
        return piece


class Reader:
    """Reads files below one directory, and records their faults.

    Args:
        root: the directory.
        on_progress: called with the bytes read so far and the bytes to read in total.
        rank: number of this reader among the readers that share the work.
        world_size: number of readers.
        collect_checksums: whether the checksums of data are kept for compare_checksums().
    """

    def __init__(
        self,
        root: Path,
        on_progress: Callable[[int, int], None] | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        collect_checksums: bool = False,
    ) -> None:
        self.root = root
        self.checksums: dict[str, DataChecksums] = {}
        """Name of a file -> the checksums of its data, if they are collected."""
        self._collect_checksums = collect_checksums
        self.faults: list[Fault] = []
        self.notes: list[str] = []
        """Facts that a user should know and that are not faults."""
        self.opened: set[str] = set()
        """Names of the files that were opened."""
        self._allowed: set[str] = set()
        self.bytes_done = 0
        """Bytes announced by expect() that were read or skipped."""
        self._bytes_total = 0
        self._on_progress = on_progress
        self._turns = itertools.cycle(number == rank for number in range(world_size))

    def takes_next(self) -> bool:
        """Return whether this reader takes the next item. The readers take turns."""
        return next(self._turns)

    @cached_property
    def buffer(self) -> memoryview:
        """BLOCK_BYTES of memory to read into."""
        return memoryview(bytearray(BLOCK_BYTES))

    def fault(self, where: str, what: str) -> None:
        """Record a fault; see Fault."""
        self.faults.append(Fault(where, what))

    def expect(self, nbytes: int) -> None:
        """Add to the number of bytes to read."""
        self._bytes_total += nbytes

    def advance(self, nbytes: int) -> None:
        """Add to the number of bytes that were read."""
        self.bytes_done += nbytes
        if self._on_progress is not None and nbytes:
            self._on_progress(self.bytes_done, self._bytes_total)

    def expect_data(self, name: str, start: int, nbytes: int, crc: int) -> None:
        """State the CRC-32 of data. It is compared if File.read_data_into() reads any of it."""
        if self._collect_checksums:
            self.checksums.setdefault(name, DataChecksums()).expect(start, nbytes, crc)

    def compare_checksums(self) -> None:
        """Compare the checksums of all data that was read in part. Reads the rest of this data.

        Raises:
            CorruptionError: some data is not what was written.
            StorageError: a file cannot be opened.
        """
        for name, checksums in self.checksums.items():
            try:
                with storage_errors("read", self.root / name), self.open(name) as file:
                    checksums.compare(file.read_into)
            except CorruptionError as error:
                raise CorruptionError(f"{self.root / name}: {error}") from error

    @contextlib.contextmanager
    def advancing(self, nbytes: int) -> Iterator[None]:
        """Count ``nbytes`` as read after the block, even if the block read fewer bytes."""
        bytes_done = self.bytes_done + nbytes
        try:
            yield
        finally:
            self.advance(bytes_done - self.bytes_done)

    @contextlib.contextmanager
    def record_faults(self, where: str) -> Iterator[None]:
        """Record a CorruptionError or OSError of the block as a fault.

        Raises:
            CheckpointError: this user may not read the file.
        """
        try:
            yield
        except CorruptionError as error:
            self.fault(where, str(error).removeprefix(f"{where} "))
        except OSError as error:
            self.fault(where, f"cannot be read: {error.strerror} (errno {error.errno})")

    def allow(self, directory: str) -> None:
        """Allow open() to read files of another directory.

        Raises:
            CorruptionError: the directory is absent, a link, or not an absolute path.
            CheckpointError: this user may not read the directory.
        """
        if not directory.startswith("/") or "\0" in directory:
            raise CorruptionError("is not an absolute path")
        with self.permission_errors(Path(directory)):
            try:
                status = os.lstat(directory)
            except (FileNotFoundError, NotADirectoryError):
                raise CorruptionError("is missing") from None
        if not stat.S_ISDIR(status.st_mode):
            raise CorruptionError("is a link, or not a directory: no link is followed")
        self._allowed.add(directory)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[File]:
        """Open a file by its path below the directory, or by its full path if allow() permits it.

        Raises:
            CorruptionError: the file is absent, a link, or not a regular file, or its name leads
                out of the directory.
            CheckpointError: this user may not read the file.
            OSError: the disk refuses.
        """
        directory, _, last = name.rpartition("/")
        is_allowed = directory in self._allowed
        wrong = wrong_name(last if is_allowed else name)
        if wrong is not None:
            raise CorruptionError(f"the path {name!r} {wrong}")
        folder = self.root
        for part in name.split("/")[:-1] if not is_allowed else ():
            folder = folder / part
            if folder.is_symlink():
                raise CorruptionError(f"lies behind {folder}, which is a link: no link is followed")
        with self.permission_errors(self.root / name):
            try:
                fd = os.open(self.root / name, _READ_FLAGS)
            except FileNotFoundError:
                raise CorruptionError("is missing") from None
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise CorruptionError("is a link: no link is followed") from None
                raise
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise CorruptionError("is not a file")
            self.opened.add(name)
            yield File(self, name, fd)
        finally:
            os.close(fd)

    def get(self, name: str) -> bytes:
        """Return the content of a file of at most WHOLE_FILE_BYTES_MAX bytes; errors as in open().

        Raises:
            CorruptionError: the file has more bytes.
        """
        with self.open(name) as file:
            fault = whole_file_fault(file.nbytes)
            if fault is not None:
                raise CorruptionError(fault)
            return file.read(0, file.nbytes)

    def parse(self, name: str, parse: Callable[[bytes, str], T]) -> T:
        """Return ``parse(content, name)`` of a sealed file.

        Raises:
            CorruptionError: the file is damaged or of another version; or as in open().
            CheckpointError, OSError: as in open().
        """
        data = self.get(name)
        try:
            return parse(data, name)
        except (CorruptionError, RunDirectoryError) as error:
            what = str(error).removeprefix(f"{name} ")
            if isinstance(error, RunDirectoryError):
                what += "; if there is none, the file is damaged"
            raise CorruptionError(what) from error

    def list(self, folder: str = "") -> list[str]:
        """Return the sorted names in the directory, or in a folder in it.

        Raises:
            CheckpointError: this user may not read the directory.
            OSError: the disk refuses.
        """
        with self.permission_errors(self.root / folder):
            return sorted(os.listdir(self.root / folder))

    @contextlib.contextmanager
    def permission_errors(self, path: Path) -> Iterator[None]:
        """Convert a PermissionError in the block to CheckpointError."""
        try:
            yield
        except OSError as error:
            if error.errno not in _FORBIDDEN:
                raise
            raise CheckpointError(
                f"{path} may not be read by user {os.geteuid()}: run this as the user who "
                "wrote it, or make it readable"
            ) from error


@dataclass(frozen=True, slots=True)
class Fault:
    """One difference from the files as they were written."""

    place: str
    """The file, relative to the directory that was checked, or the key of ``.metadata``."""
    what: str
    """The fault, as text that follows ``place``."""
