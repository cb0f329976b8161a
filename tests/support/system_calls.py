"""System calls of a child process that its parent watches, answers or ends (seccomp).

The child hands the parent a descriptor of the kernel that names each watched call before it is
done (user notification, Linux 5.14). No privileges are needed, and calls that do not concern the
files of the test are let through.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import platform
import select
import signal
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support import killed_processes

# Call -> its numbers on x86_64 and aarch64; None where there is none. What identifies the files of
# a call is a path, a directory's descriptor and a path in it, or a descriptor.
_BY_PATH = {
    "open": (2, None),
    "stat": (4, None),
    "lstat": (6, None),
    "access": (21, None),
    "rename": (82, None),
    "mkdir": (83, None),
    "rmdir": (84, None),
    "link": (86, None),
    "unlink": (87, None),
    "statfs": (137, 43),
}
_BY_DIRECTORY = {
    "openat": (257, 56),
    "mkdirat": (258, 34),
    "newfstatat": (262, 79),
    "unlinkat": (263, 35),
    "renameat": (264, 38),
    "linkat": (265, 37),
    "faccessat": (269, 48),
    "renameat2": (316, 276),
    "statx": (332, 291),
    "openat2": (437, 437),
    "faccessat2": (439, 439),
}
_BY_DESCRIPTOR = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "fstat": (5, 80),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "readv": (19, 65),
    "writev": (20, 66),
    "flock": (73, 32),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "ftruncate": (77, 46),
    "fstatfs": (138, 44),
    "getdents64": (217, 61),
    "sync_file_range": (277, 84),
    "fallocate": (285, 47),
    "pwritev": (296, 70),
    "copy_file_range": (326, 285),
}
# Only stores make these.
_BY_ENGINE = {"io_submit": (209, 2), "io_uring_enter": (426, 426)}
_CALLS = {**_BY_PATH, **_BY_DIRECTORY, **_BY_DESCRIPTOR, **_BY_ENGINE}

READING = frozenset(
    {"stat", "lstat", "access", "statfs", "newfstatat", "faccessat", "statx", "faccessat2"}
    | {"read", "fstat", "pread64", "readv", "fstatfs", "getdents64"}
)
"""Calls that change nothing."""

# Machine -> its architecture for seccomp, the column of the numbers, the number of seccomp().
_MACHINES = {"x86_64": (0xC000003E, 0, 317), "aarch64": (0xC00000B7, 1, 277)}

_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
_ANSWER = struct.Struct("=QqiI")
_REPLACEMENT = struct.Struct("=QIIII")


def _ioctl(number: int, size: int, direction: int = 3) -> int:
    return direction << 30 | size << 16 | ord("!") << 8 | number


_RECEIVE = _ioctl(0, _NOTIFICATION.size)
_SEND = _ioctl(1, _ANSWER.size)
_REPLACE = _ioctl(3, _REPLACEMENT.size, 1)
_CONTINUE = 1
_REPLACE_NUMBER = 1
_AT_FDCWD = -100


@dataclass(frozen=True, slots=True)
class Call:
    """A system call on a file of the test that the child is about to make."""

    name: str
    place: str
    """The file; "" for a call of an engine."""

    @property
    def changes(self) -> bool:
        """True if the call may change files, locks or descriptors."""
        return self.name not in READING

    def __str__(self) -> str:
        return f"{self.name} {self.place}"


KILL = "kill"

Rule = Callable[[Call], int | str | None]
"""Returns the outcome of a call: None lets it through, an errno fails it, KILL ends the child."""


@dataclass(slots=True)
class Outcome:
    """Facts about a child that has ended."""

    told: list[Any]
    """Everything that it told, in order."""
    exitcode: int
    """As of ``multiprocessing.Process``."""
    hung: bool
    """True if it had to be ended because it took too long."""


def run_watched(
    target: Callable[..., None],
    *arguments: Any,
    tree: Path,
    rule: Rule,
    only_changes: bool = False,
    timeout_s: float = 120.0,
) -> Outcome:
    """Call ``target(tell, *arguments)`` in a child, and decide about its calls on files.

    Args:
        target: a function of a module; ``tell`` sends a value to the outcome.
        arguments: its further arguments.
        tree: the directory whose files the rule is about.
        rule: called once for each call on these files, in the order in which they are begun.
        only_changes: whether calls that change nothing are left out, which is faster.
        timeout_s: seconds after which the child is ended.
    """
    context = killed_processes._processes
    ours, theirs = context.Pipe(duplex=True)
    watched = [name for name in _CALLS if not (only_changes and name in READING)]
    child = context.Process(target=_child, args=(theirs, watched, target, arguments))
    child.start()
    theirs.close()
    try:
        listener = reduction.recv_handle(ours)
        try:
            return _serve(child, ours, listener, f"{tree}{os.sep}", rule, timeout_s)
        finally:
            os.close(listener)
    finally:
        child.kill()
        child.join()
        ours.close()


@functools.cache
def why_not() -> str:
    """Return why calls cannot be watched here; "" where they can."""
    if platform.system() != "Linux" or platform.machine() not in _MACHINES:
        return f"system calls of {platform.system()} on {platform.machine()} are not known"
    seen: list[Call] = []
    try:
        outcome = run_watched(_try, tree=Path("/proc/self"), rule=seen.append)
    except (OSError, EOFError) as error:
        return f"seccomp user notification is not permitted: {error!r}"
    if outcome.told != ["done"] or not seen:
        return f"seccomp user notification does not work: {outcome}"
    return ""


def _try(tell: Callable[[Any], None]) -> None:
    with suppress(FileNotFoundError):
        os.unlink("/proc/self/nothing")
    tell("done")


# ------------------------------------------------------------------------ in the child


def _child(
    parent: Connection,
    watched: Sequence[str],
    target: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    try:
        listener = _install_filter(watched)
    except OSError:
        parent.close()
        raise
    reduction.send_handle(parent, listener, None)
    os.close(listener)
    target(parent.send, *arguments)


def _install_filter(watched: Sequence[str]) -> int:
    """Have the kernel announce watched calls of this process; return the descriptor of that."""
    architecture, column, seccomp = _MACHINES[platform.machine()]
    numbers = [_CALLS[name][column] for name in watched if _CALLS[name][column] is not None]
    # Loads, comparisons and returns of classic BPF, as (code, jump if true, if false, value).
    load, compare, end = 0x20, 0x15, 0x06
    program = [(load, 0, 0, 4), (compare, 1, 0, architecture), (end, 0, 0, 0x7FFF0000)]
    program.append((load, 0, 0, 0))
    for index, number in enumerate(numbers):
        program.append((compare, len(numbers) - index, 0, number))
    program += [(end, 0, 0, 0x7FFF0000), (end, 0, 0, 0x7FC00000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    header = struct.pack("@HP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if libc.prctl(38, ctypes.c_ulong(1), zero, zero, zero):  # No new privileges.
        raise OSError(ctypes.get_errno(), "prctl")
    listener = libc.syscall(ctypes.c_long(seccomp), ctypes.c_ulong(1), ctypes.c_ulong(8), header)
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return int(listener)


# ----------------------------------------------------------------------- in the parent


def _serve(
    child: Any, told: Connection, listener: int, prefix: str, rule: Rule, timeout_s: float
) -> Outcome:
    values: list[Any] = []
    deadline = time.monotonic() + timeout_s
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(told.fileno(), select.POLLIN)
    hung = False
    with _Memory(child.pid) as memory:
        while True:
            ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
            if not ready:
                hung = True
                break
            if ready.get(told.fileno()):
                try:
                    values.append(told.recv())
                except (EOFError, ConnectionResetError):
                    poll.unregister(told.fileno())
            if ready.get(listener, 0) & select.POLLIN:
                if not _answer(listener, child.pid, memory, prefix, rule):
                    break
            elif ready.get(listener):  # No thread is left that makes calls.
                break
    if hung:
        child.kill()
    child.join()
    with suppress(EOFError, ConnectionResetError):
        while True:
            values.append(told.recv())
    return Outcome(values, child.exitcode, hung)


def _answer(listener: int, pid: int, memory: _Memory, prefix: str, rule: Rule) -> bool:
    """Receive the next call of the child, and say what becomes of it; return False for KILL."""
    notification = bytearray(_NOTIFICATION.size)
    try:
        fcntl.ioctl(listener, _RECEIVE, notification)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINTR):  # The child was killed or interrupted.
            return True
        raise
    identity, _, _, number, _, _, *values = _NOTIFICATION.unpack(notification)
    name = _names()[number]
    place = memory.place_of(name, values)
    decision: int | str | None = None
    if not place or place.startswith(prefix) or place + os.sep == prefix:
        decision = rule(Call(name, place))
    if decision == KILL:
        os.kill(pid, signal.SIGKILL)
        return False
    if isinstance(decision, int):
        if name == "close":
            _close(listener, identity, values[0])
        answer = _ANSWER.pack(identity, 0, -decision, 0)
    else:
        answer = _ANSWER.pack(identity, 0, 0, _CONTINUE)
    with suppress(FileNotFoundError):  # A signal took the thread out of the call.
        fcntl.ioctl(listener, _SEND, bytearray(answer))
    return True


def _close(listener: int, identity: int, fd: int) -> None:
    """Close a file of the child, as close() does though it fails; the number stays taken."""
    with open(os.devnull, "rb") as nothing:
        replacement = _REPLACEMENT.pack(identity, _REPLACE_NUMBER, nothing.fileno(), fd, 1 << 19)
        fcntl.ioctl(listener, _REPLACE, replacement)


@functools.cache
def _names() -> dict[int, str]:
    column = _MACHINES[platform.machine()][1]
    return {pair[column]: name for name, pair in _CALLS.items() if pair[column] is not None}


class _Memory:
    """The memory and the descriptors of a child."""

    def __init__(self, pid: int) -> None:
        self._process = f"/proc/{pid}"

    def __enter__(self) -> _Memory:
        self._fd = os.open(f"{self._process}/mem", os.O_RDONLY)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def place_of(self, name: str, values: list[int]) -> str:
        """Return the file that a call is about, "/" for none that is known."""
        if name in _BY_ENGINE:
            return ""
        if name in _BY_PATH:
            return self._text(values[0]) or os.sep
        if name in _BY_DESCRIPTOR:
            return self._file(values[0])
        text = self._text(values[1])
        if os.path.isabs(text):
            return text
        fd = ctypes.c_int32(values[0] & 0xFFFFFFFF).value
        return os.path.join(self._file(fd), text).rstrip(os.sep)

    def _file(self, fd: int) -> str:
        link = "cwd" if fd == _AT_FDCWD else f"fd/{fd}"
        try:
            return os.readlink(f"{self._process}/{link}").removesuffix(" (deleted)")
        except OSError:
            return os.sep

    def _text(self, address: int) -> str:
        # Not beyond the memory page of the first byte, because the next may not be there.
        text = b""
        while b"\0" not in text:
            start = address + len(text)
            try:
                text += os.pread(self._fd, 4096 - start % 4096, start)
            except OSError:
                return os.sep
        return os.fsdecode(text[: text.index(b"\0")])
