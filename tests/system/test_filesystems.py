"""Filesystems that are full, read-only or without power: nothing acknowledged is lost.

They are mounted from loop devices, which needs root.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import small_filesystems
from tests.support.disturbed_runs import ENGINES, Case
from tests.support.interrupted_run import AFTER_ERROR
from tests.support.small_filesystems import KINDS, SmallFilesystem, small_filesystem
from tests.support.system_calls import KILL, Call

pytestmark = pytest.mark.usefixtures("watched_calls")

CALLS = 1000
"""About the number of calls of a program that change something."""


def require(kind: str) -> None:
    if reason := small_filesystems.why_not(kind):
        pytest.skip(reason)


class At:
    """Acts before the n-th call that changes something, and once more at a later one.

    Args:
        number: of the first call, counted from 1.
        act: called before it. What it returns becomes of the call.
        later: number of calls until ``undo``; 0 for never.
        undo: called then.
    """

    def __init__(
        self,
        number: int,
        act: Callable[[], str | None],
        *,
        later: int = 0,
        undo: Callable[[], None] = lambda: None,
    ) -> None:
        self._left = number
        self._act = act
        self._later = -later
        self._undo = undo

    def __call__(self, call: Call) -> str | None:
        self._left -= 1
        if self._left == 0:
            return self._act()
        if self._left == self._later:
            self._undo()
        return None


def fill_at(disk: SmallFilesystem, case: Case, number: int, variant: int, *, inodes: bool) -> bool:
    """Let a filesystem become full at a call, and free it later; return whether errors came.

    Args:
        disk: holds the run, its checkpoints or both.
        case: the run.
        number: of the call.
        variant: draws what is left free, when it is freed, and what follows an error.
        inodes: whether inodes are lacking instead of blocks.
    """
    take = disk.take_inodes if inodes else disk.fill
    # A page file has two or three blocks, a manifest and a directory one.
    leave = (0, 1, 2, 5, 11)[variant % 5]
    rule = At(number, lambda: take(leave=leave), later=variant % 2 * 150, undo=disk.free)
    case.run(rule, after_error=AFTER_ERROR[variant % 3], only_changes=True)
    failed = bool(case.promises.errors)
    case.promises.errors.clear()
    disk.free()
    case.check()
    return failed


def fill_at_calls(
    scratch: Path, kind: str, name: str, engine: str, numbers: range, *, inodes: bool = False
) -> int:
    """Let a filesystem become full at each of these calls; return how many runs had errors.

    With "copy" it holds the checkpoints, and the run is on another one.
    """
    failed = 0
    options = ("-N", "128") if inodes else ()
    with small_filesystem(kind, scratch, "disk", *options) as disk:
        for index, number in enumerate(numbers):
            run = f"run-{number}" if name == "copy" else f"disk/run-{number}"
            folder = f"disk/checkpoints-{number}"
            case = Case(scratch, name, engine, run=run, folder=folder)
            failed += fill_at(disk, case, number, index + number, inodes=inodes)
            shutil.rmtree(scratch / run)
            shutil.rmtree(scratch / folder)
    return failed


def resume_on_a_full_disk(scratch: Path, kind: str, engine: str, leaves: range) -> int:
    """Resume a run that was killed with this number of blocks left; return how many had errors.

    The resume makes page files anew, because the end was not clean.
    """
    failed = 0
    with small_filesystem(kind, scratch, "disk") as disk:
        for leave in leaves:
            run, folder = f"disk/run-{leave}", f"disk/checkpoints-{leave}"
            case = Case(scratch, "train", engine, run=run, folder=folder)
            case.run(At(400 + 13 * leave, lambda: KILL), only_changes=True)
            disk.fill(leave=leave)
            case.run(lambda call: None, after_error=AFTER_ERROR[leave % 3], only_changes=True)
            failed += bool(case.promises.errors)
            case.promises.errors.clear()
            disk.free()
            case.check()
            shutil.rmtree(scratch / run)
            shutil.rmtree(scratch / folder)
    return failed


def cut_power_at_calls(
    scratch: Path, kind: str, engine: str, numbers: range, *, kill: bool
) -> None:
    """Lose what is not on the disk at each of these calls of a run, and go on with it."""
    with small_filesystem(kind, scratch, "disk") as disk:

        def cut() -> str | None:
            disk.cut_power()
            return KILL if kill else None

        for index, number in enumerate(numbers):
            run, folder = f"disk/run-{number}", f"disk/checkpoints-{number}"
            case = Case(scratch, "train", engine, run=run, folder=folder)
            after = AFTER_ERROR[(index + number) % 3]
            case.run(At(number, cut), after_error=after, only_changes=True)
            case.promises.errors.clear()
            disk.repair()
            case.check()
            shutil.rmtree(scratch / run)
            shutil.rmtree(scratch / folder)


def make_read_only_at_calls(scratch: Path, engine: str, numbers: range) -> None:
    """Have a filesystem refuse all changes from each of these calls on, and repair it."""
    with small_filesystem("ext4", scratch, "disk") as disk:
        for index, number in enumerate(numbers):
            run, folder = f"disk/run-{number}", f"disk/checkpoints-{number}"
            case = Case(scratch, "train", engine, run=run, folder=folder)
            after = AFTER_ERROR[(index + number) % 3]
            case.run(At(number, disk.make_read_only), after_error=after, only_changes=True)
            assert case.promises.errors
            case.promises.errors.clear()
            disk.repair()
            case.check()
            shutil.rmtree(scratch / run)
            shutil.rmtree(scratch / folder)


@pytest.mark.parametrize("name", ["train", "copy"])
def test_full(name: str, tmp_path: Path) -> None:
    require("ext4")
    assert fill_at_calls(tmp_path, "ext4", name, "auto", range(300, 301)) == 1


def test_resume_on_a_full_disk(tmp_path: Path) -> None:
    require("ext4")
    assert resume_on_a_full_disk(tmp_path, "ext4", "auto", range(2, 3)) == 1


def test_few_inodes(tmp_path: Path) -> None:
    require("ext4")
    assert fill_at_calls(tmp_path, "ext4", "train", "auto", range(300, 301), inodes=True) == 1


def test_read_only(tmp_path: Path) -> None:
    require("ext4")
    make_read_only_at_calls(tmp_path, "auto", range(300, 301))


def test_power_cut(tmp_path: Path) -> None:
    require("ext4")
    cut_power_at_calls(tmp_path, "ext4", "auto", range(300, 301), kill=True)


@pytest.mark.parametrize("renamed", ["/commit-0000000002.tmp", "/.step-2-1-1.tmp-"])
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_power_cut_before_a_name_is_durable(kind: str, renamed: str, tmp_path: Path) -> None:
    """XFS without power lets fsync() of a directory succeed."""
    require(kind)
    with small_filesystem(kind, tmp_path, "disk") as disk:
        has_name = is_cut = False

        def cut_before_sync(call: Call) -> None:
            nonlocal has_name, is_cut
            if has_name and not is_cut and call.name == "fsync":
                disk.cut_power()
                is_cut = True
            has_name = has_name or (call.name.startswith("rename") and renamed in call.place)

        case = Case(tmp_path, "train", "auto", run="disk/run", folder="disk/checkpoints")
        case.run(cut_before_sync, only_changes=True)
        assert is_cut
        assert case.promises.errors
        case.promises.errors.clear()
        disk.repair()
        case.check()


# ----------------------------------------------------------------------- the same, often


@pytest.mark.long
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["train", "copy"])
@pytest.mark.parametrize("kind", KINDS)
def test_full_at_all_calls(kind: str, name: str, engine: str, tmp_path: Path) -> None:
    require(kind)
    begin = 1 + 17 * ENGINES.index(engine)
    assert fill_at_calls(tmp_path, kind, name, engine, range(begin, CALLS, 51)) >= 5


@pytest.mark.long
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_resumes_on_a_full_disk(kind: str, engine: str, tmp_path: Path) -> None:
    require(kind)
    assert resume_on_a_full_disk(tmp_path, kind, engine, range(0, 36, 3)) >= 5


@pytest.mark.long
@pytest.mark.parametrize("engine", ENGINES)
def test_few_inodes_at_all_calls(engine: str, tmp_path: Path) -> None:
    require("ext4")
    numbers = range(1 + 17 * ENGINES.index(engine), CALLS, 51)
    assert fill_at_calls(tmp_path, "ext4", "train", engine, numbers, inodes=True) >= 5


@pytest.mark.long
@pytest.mark.parametrize("engine", ENGINES)
def test_read_only_at_all_calls(engine: str, tmp_path: Path) -> None:
    require("ext4")
    make_read_only_at_calls(tmp_path, engine, range(1 + 17 * ENGINES.index(engine), CALLS, 51))


def test_a_mount_namespace_does_not_keep_a_filesystem_in_use(tmp_path: Path) -> None:
    """``ip netns exec`` makes such a namespace, for the nodes of other tests."""
    require("ext4")
    program = ["unshare", "--mount", "--propagation", "slave", "sh", "-c", "echo; read line"]
    with small_filesystem("ext4", tmp_path, "disk") as disk:
        with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as namespace:
            assert namespace.stdout is not None
            namespace.stdout.readline()
            disk.repair()
            namespace.communicate(b"\n")
        assert namespace.returncode == 0


@pytest.mark.long
@pytest.mark.parametrize("kill", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_power_cuts_at_all_calls(kind: str, engine: str, kill: bool, tmp_path: Path) -> None:
    require(kind)
    numbers = range(1 + 10 * ENGINES.index(engine), CALLS, 31)
    cut_power_at_calls(tmp_path, kind, engine, numbers, kill=kill)
