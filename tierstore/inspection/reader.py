"""Files of a directory that nobody vouches for: read as they are, and never changed.

No link is followed, and no name leads out of the directory but into those that were
admitted. What is wrong with one file is noted, and the next one is looked at.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tierstore.errors import CheckpointError, CorruptionError, RunDirectoryError
from tierstore.layout.page_layout import BLOCK_BYTES
from tierstore.storage.paths import OPEN_FLAGS
from tierstore.units import format_bytes

T = TypeVar("T")

GET_BYTES_MAX = 2**30
"""Most that is read at once. A file may say that it has any size, and have none of it."""

_FORBIDDEN = (errno.EACCES, errno.EPERM)
# Without O_NONBLOCK the open of a named pipe would wait for a writer.
_READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | OPEN_FLAGS


def wrong_name(name: str) -> str | None:
    """Return what is wrong with a file's name, which may have folders in it; or None."""
    if not name or "\0" in name:
        return "is no name of a file"
    if name.startswith("/"):
        return "is absolute: only files of the checkpoint itself are read"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "leads elsewhere: only files of the checkpoint itself are read"
    return None


class File:
    """One file that is open to be read."""

    def __init__(self, reader: Reader, name: str, fd: int) -> None:
        self.reader = reader
        self._fd = fd
        self.name = name
        self.nbytes = os.fstat(fd).st_size

    def drop_cached(self) -> None:
        """Have the next reads come from the disk, not from memory of the system."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` with the bytes from ``offset`` on.

        Raises:
            CorruptionError: the disk does not give them, or the file ends before.
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

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return some bytes; errors as in read_into()."""
        data = bytearray(nbytes)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes [start, stop) in order, each piece valid until the next."""
        for offset in range(start, stop, BLOCK_BYTES):
            yield self.piece(offset, min(BLOCK_BYTES, stop - offset))

    def piece(self, offset: int, nbytes: int) -> memoryview:
        """Return up to BLOCK_BYTES bytes, valid until the next call for any file."""
        piece = self.reader.buffer[:nbytes]
        self.read_into(piece, offset)
        return piece


class Reader:
    """Reads below one directory, and notes what is wrong there.

    Args:
        root: the directory.
        on_progress: told of the bytes that were read, and of all that shall be.
        rank: which of several this is that read together, each a part.
        world_size: how many they are.
    """

    def __init__(
        self,
        root: Path,
        on_progress: Callable[[int, int], None] | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.root = root
        self.faults: list[Fault] = []
        self.notes: list[str] = []
        self._names: set[str] = set()
        self._admitted: set[str] = set()
        self.bytes_done = 0
        """How many of the expected bytes are behind."""
        self._bytes_total = 0
        self._on_progress = on_progress
        self._buffer: memoryview | None = None
        self._rank = rank
        self._world_size = world_size
        self._asked = 0

    def takes(self) -> bool:
        """Return whether the next of all that is to be read is this one's; all ask in one order."""
        self._asked += 1
        return (self._asked - 1) % self._world_size == self._rank

    @property
    def buffer(self) -> memoryview:
        """BLOCK_BYTES of memory to read into."""
        if self._buffer is None:
            self._buffer = memoryview(bytearray(BLOCK_BYTES))
        return self._buffer

    @property
    def files(self) -> int:
        """How many files were opened."""
        return len(self._names)

    def fault(self, place: str, what: str) -> None:
        """Note that something is wrong."""
        self.faults.append(Fault(place, what))

    def note(self, what: str) -> None:
        """Note what is worth knowing."""
        self.notes.append(what)

    def expect(self, nbytes: int) -> None:
        """Count bytes among those that shall be read."""
        self._bytes_total += nbytes

    def advance(self, nbytes: int) -> None:
        """Tell that so many of the expected bytes are behind."""
        self.bytes_done += nbytes
        if self._on_progress is not None and nbytes:
            self._on_progress(self.bytes_done, self._bytes_total)

    @contextlib.contextmanager
    def advancing(self, nbytes: int) -> Iterator[None]:
        """Have so many of the expected bytes behind after the block, whatever it read."""
        bytes_done = self.bytes_done + nbytes
        try:
            yield
        finally:
            self.advance(bytes_done - self.bytes_done)

    @contextlib.contextmanager
    def noting(self, place: str) -> Iterator[None]:
        """Note as a fault of ``place`` whatever shows in the block that it is not whole.

        Raises:
            CheckpointError: this user may not read it.
        """
        try:
            yield
        except CorruptionError as error:
            self.fault(place, str(error))
        except OSError as error:
            self.fault(place, f"cannot be read: {error.strerror} (errno {error.errno})")

    def admit(self, directory: str) -> None:
        """Let names of files in another directory be read, too.

        Raises:
            CorruptionError: it is absent, a link, or no absolute path.
            CheckpointError: this user may not look.
        """
        if not directory.startswith("/") or "\0" in directory:
            raise CorruptionError("is no absolute path")
        with self.permitted(Path(directory)):
            try:
                status = os.lstat(directory)
            except (FileNotFoundError, NotADirectoryError):
                raise CorruptionError("is missing") from None
        if not stat.S_ISDIR(status.st_mode):
            raise CorruptionError("is a link, or no directory: no link is followed")
        self._admitted.add(directory)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[File]:
        """Open a file by its name below the directory, or in full in one that was admitted.

        Raises:
            CorruptionError: it is absent, a link or no file, or its name leads elsewhere.
            CheckpointError: this user may not read it.
            OSError: the disk refuses.
        """
        above, _, own_name = name.rpartition("/")
        admitted = above in self._admitted
        wrong = wrong_name(own_name if admitted else name)
        if wrong is not None:
            raise CorruptionError(f"the path {name!r} {wrong}")
        folder = self.root
        for part in name.split("/")[:-1] if not admitted else ():
            folder = folder / part
            if folder.is_symlink():
                raise CorruptionError(f"lies behind {folder}, which is a link: no link is followed")
        with self.permitted(self.root / name):
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
            self._names.add(name)
            yield File(self, name, fd)
        finally:
            os.close(fd)

    def get(self, name: str) -> bytes:
        """Return the content of a file of at most GET_BYTES_MAX bytes; errors as in open()."""
        with self.open(name) as file:
            if file.nbytes > GET_BYTES_MAX:
                raise CorruptionError(
                    f"has {format_bytes(file.nbytes)}: no file of its kind has more than "
                    f"{format_bytes(GET_BYTES_MAX)}"
                )
            return file.read(0, file.nbytes)

    def size(self, name: str) -> int:
        """Return the length of a file; errors as in open()."""
        with self.open(name) as file:
            return file.nbytes

    def list(self, folder: str = "") -> list[str]:
        """Return the names of all that is in the directory or a folder of it, sorted.

        Raises:
            CheckpointError: this user may not.
            OSError: the disk refuses.
        """
        with self.permitted(self.root / folder):
            return sorted(os.listdir(self.root / folder))

    @contextlib.contextmanager
    def permitted(self, path: Path) -> Iterator[None]:
        """Turn the refusal of the system to let this user do something into CheckpointError."""
        try:
            yield
        except OSError as error:
            if error.errno not in _FORBIDDEN:
                raise
            raise CheckpointError(
                f"{path} may not be read by user {os.geteuid()}: run this as the user who "
                "wrote it, or make it readable"
            ) from error


def unsealed(read: Callable[[bytes, str], T], data: bytes, name: str) -> T:
    """Return what ``read`` makes of the content of a sealed file.

    Raises:
        CorruptionError: it is damaged or of another version.
    """
    try:
        return read(data, name)
    except CorruptionError as error:
        raise CorruptionError(str(error).removeprefix(f"{name} ")) from error
    except RunDirectoryError as error:
        raise CorruptionError(
            f"{str(error).removeprefix(f'{name} ')}; if there is none, the file is damaged"
        ) from error


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is not as it was written."""

    place: str
    """The file, from the directory looked at, or the key of ``.metadata``."""
    what: str
    """What is wrong with it, and what that means where it is not plain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of verify()."""

    path: str
    kind: str
    """"run", "checkpoint", or "plain checkpoint": one that tierstore did not publish."""
    step: int | None
    """The committed step; None where nothing says it, or nothing was committed."""
    files: int
    """How many files were looked into."""
    bytes_checked: int
    """How many bytes of them were, each counted once."""
    faults: Sequence[Fault]
    notes: Sequence[str]
    """What is worth knowing and no fault."""

    @property
    def good(self) -> bool:
        """Whether no fault was found."""
        return not self.faults
