"""Small filesystems on loop devices, which can be full, read-only or without power."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_MIB = 2**20

# Kind -> the least size that its mkfs takes, and options of mkfs.
_KINDS = {
    "ext4": (16 * _MIB, ("-q", "-F", "-m", "0", "-b", "4096", "-J", "size=4")),
    "xfs": (300 * _MIB, ("-q", "-f")),
    "btrfs": (112 * _MIB, ("-q", "-f", "--mixed")),
}
KINDS = tuple(_KINDS)

_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_BLOCK_BYTES = 4096

# _IOR('X', 125, __u32), and the flag for "drop what the log has not written".
_SHUTDOWN = 2 << 30 | 4 << 16 | ord("X") << 8 | 125
_WITHOUT_LOG = 2


class SmallFilesystem:
    """A filesystem of a few MiB in a file.

    Args:
        kind: one of KINDS.
        image: the file, which is made.
        point: where to mount it, a directory that is made.
        options: further options of mkfs.
    """

    def __init__(self, kind: str, image: Path, point: Path, *options: str) -> None:
        self.kind = kind
        self.point = point
        nbytes, always = _KINDS[kind]
        with image.open("wb") as file:
            file.truncate(nbytes)
        _call(f"mkfs.{kind}", *always, *options, str(image))
        point.mkdir(exist_ok=True)
        self._device = _call("losetup", "--find", "--show", str(image)).strip()
        self._mounted = False
        self._undone = ExitStack()
        self._undone.callback(_call, "losetup", "--detach", self._device)
        try:
            # Else a mount namespace, which another test makes, keeps the filesystem in use.
            _call("mount", "--bind", str(point), str(point))
            self._undone.callback(_call, "umount", "--lazy", str(point))
            _call("mount", "--make-shared", str(point))
            self.mount()
        except BaseException:
            self.end()
            raise

    def mount(self) -> None:
        """Mount it; the log is replayed."""
        # Of an error of the filesystem, ext4 alone needs to be told what to make.
        options = ("-o", "errors=remount-ro") if self.kind == "ext4" else ()
        _call("mount", "-t", self.kind, *options, self._device, str(self.point))
        self._mounted = True

    def unmount(self) -> None:
        _call("umount", str(self.point))
        self._mounted = False

    def end(self) -> None:
        """Unmount it and release the device, whoever still uses it."""
        if self._mounted:
            _call("umount", "--lazy", str(self.point))
            self._mounted = False
        self._undone.close()

    def repair(self) -> None:
        """Unmount it, have errors mended, and mount it again."""
        self.unmount()
        if self.kind == "ext4":
            _call("fsck.ext4", "-f", "-y", self._device, good=(0, 1))
        self.mount()

    def fill(self, *, leave: int = 0) -> None:
        """Take all space except this number of blocks of 4096 bytes, as far as it is free."""
        ballast = self.point / "ballast"
        ballast.mkdir(exist_ok=True)
        nbytes = 64 * _MIB
        with (ballast / "large").open("wb") as file:
            while nbytes >= _BLOCK_BYTES:
                try:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, nbytes)
                except OSError:
                    nbytes //= 2
            size = os.fstat(file.fileno()).st_size
            file.truncate(max(0, size - leave * _BLOCK_BYTES))
            os.fsync(file.fileno())

    def take_inodes(self, *, leave: int = 0) -> None:
        """Take all inodes except this number."""
        ballast = self.point / "ballast"
        ballast.mkdir(exist_ok=True)
        names = []
        with suppress(OSError):
            while True:
                names.append(ballast / f"{len(names)}")
                names[-1].touch(exist_ok=False)
        for name in names[:-1][:leave]:
            name.unlink()

    def free(self) -> None:
        """Give back what fill() or take_inodes() took."""
        shutil.rmtree(self.point / "ballast", ignore_errors=True)

    def make_read_only(self) -> None:
        """Have the kernel find an error in the filesystem; ext4 only."""
        device = Path(self._device).name
        Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("1")

    def cut_power(self) -> None:
        """Lose all that is not on the device. Until unmount() and mount() everything fails.

        Raises:
            OSError: this kind of filesystem cannot do that.
        """
        fd = os.open(self.point, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, ctypes.c_uint32(_WITHOUT_LOG))
        finally:
            os.close(fd)


@contextmanager
def small_filesystem(
    kind: str, scratch: Path, point: str, *options: str
) -> Iterator[SmallFilesystem]:
    """Yield a mounted filesystem; its image is in ``scratch``, and gone afterwards."""
    image = scratch / f"{kind}.image"
    try:
        made = SmallFilesystem(kind, image, scratch / point, *options)
        try:
            yield made
        finally:
            made.end()
    finally:
        image.unlink(missing_ok=True)


@functools.cache
def why_not(kind: str) -> str:
    """Return why a filesystem of this kind cannot be made and mounted here; "" where it can."""
    for program in (f"mkfs.{kind}", "losetup", "mount", "umount"):
        if shutil.which(program, path=_PATH) is None:
            return f"{program} is not installed"
    try:
        with (
            tempfile.TemporaryDirectory() as scratch,
            small_filesystem(kind, Path(scratch), "mounted"),
        ):
            return ""
    except OSError as error:
        return f"{kind} on a loop device cannot be mounted: {error}"


def _call(program: str, *arguments: str, good: tuple[int, ...] = (0,)) -> str:
    ended = subprocess.run(
        [program, *arguments],
        env={**os.environ, "PATH": _PATH},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode not in good:
        raise OSError(f"{program} {' '.join(arguments)}: {ended.stderr.strip()}")
    return ended.stdout
