"""Commands and checkpoints of a run in several directories."""

from __future__ import annotations

import errno
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tierstore
from tests.support.faults import Fault, FaultyStorage
from tests.support.originals import flip, places, reseal, text
from tests.support.published import inodes, names_in, pages_of
from tests.support.striped_runs import PAGES, made, resumed, toy
from tests.support.toy import RANK, unchanged
from tierstore.run.striped_storage import StripedStorage
from tierstore.storage.select import open_storage
from tierstore.tools.cli import app
from tierstore.tools.inspect.summary import summarize
from tierstore.tools.inspect.verify import verify

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    return [tmp_path / disk / "run" for disk in ("disk0", "disk1")]


def call(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_a_checkpoint_on_the_same_filesystem_is_linked(two: list[Path], tmp_path: Path) -> None:
    run = toy(two)
    for _ in range(3):
        run.step()
    publication = run.store.checkpoint(tmp_path / "published")
    assert publication.bytes_copied == 0
    assert publication.bytes_total == publication.bytes_linked == run.store.stats().state_bytes
    published = inodes(pages_of(tmp_path / "published"))
    assert published <= inodes(path for place in two for path in (place / RANK).glob("page-*"))
    for _ in range(2):
        run.step()
    run.store.close()
    assert verify(tmp_path / "published").good
    resumed(two, 5).store.close()
    fresh = toy(tmp_path / "fresh")
    assert fresh.store.restore(checkpoint=tmp_path / "published") == 3
    fresh.assert_at(3)
    fresh.store.close()


@pytest.mark.parametrize("on_disk", [True, False])
def test_pages_on_two_filesystems_are_linked_or_copied(on_disk: bool, tmp_path: Path) -> None:
    """A path in shared memory is refused for a run, but not a storage."""
    if not SHARED_MEMORY.is_dir() or SHARED_MEMORY.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm is not a filesystem of its own")
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="tierstore-test-") as memory:
        directories = [tmp_path / "run" / RANK, Path(memory) / "run" / RANK]
        here = directories[0 if on_disk else 1]
        parts = [open_storage(directory) for directory in directories]
        run = toy(StripedStorage(parts, lambda parts: [2e9, 1e9]))
        for _ in range(3):
            run.step()
        folder = tmp_path if on_disk else Path(memory)
        publication = run.store.checkpoint(folder / "3")
        assert not list(here.glob("*.copying-*"))
        run.step()
        publication.wait()
        linked = {path for path in pages_of(folder / "3") if path.stat().st_nlink > 1}
        assert inodes(linked) <= inodes(here.glob("page-*"))
        assert len(linked) == (5 if on_disk else 3)
        assert len(pages_of(folder / "3")) == PAGES
        assert publication.bytes_linked == sum(path.stat().st_size for path in linked)
        copied = sum(path.stat().st_size for path in set(pages_of(folder / "3")) - linked)
        assert publication.bytes_copied == publication.bytes_total == copied
        run.store.close()
        assert not [path for place in directories for path in place.glob("*.copying-*")]
        assert verify(folder / "3").good
        fresh = toy(tmp_path / "fresh")
        assert fresh.store.restore(checkpoint=folder / "3") == 3
        fresh.assert_at(3)
        fresh.store.close()


@pytest.mark.parametrize(
    "fault",
    [
        Fault("error", "folder_append", call=1, name=f"{RANK}.page-000004", errno=errno.ENOSPC),
        Fault("error", "folder_flush", call=1, name=f"{RANK}.page-000004", errno=errno.EIO),
        Fault("error", "read", call=2, errno=errno.EIO),
        Fault("error", "unlink", call=2, errno=errno.EIO),
    ],
    ids=lambda fault: fault.operation,
)
def test_a_copy_that_fails_leaves_no_links(fault: Fault, two: list[Path], tmp_path: Path) -> None:
    parts = [FaultyStorage(open_storage(place / RANK)) for place in two]
    faulty = FaultyStorage(StripedStorage(parts, lambda parts: [2e9, 1e9]))
    run = toy(faulty)
    run.step()
    run.store.synchronize()
    for name in ("page-000001.a", "page-000004.a", "page-000007.a"):
        faulty.arm(Fault("error", "folder_link", call=1, name=name, errno=errno.EXDEV))
    faulty.arm(fault)
    publication = run.store.checkpoint(tmp_path / "checkpoints" / "1")
    with pytest.raises(tierstore.StorageError):
        publication.wait()
    assert names_in(tmp_path / "checkpoints") == []
    faulty.disarm()
    run.step()
    with pytest.raises(tierstore.StorageError):  # Also raised by the next call.
        run.store.checkpoint(tmp_path / "checkpoints" / "2")
    run.store.checkpoint(tmp_path / "checkpoints" / "2").wait()
    run.store.close()
    assert verify(tmp_path / "checkpoints" / "2").good
    resumed(two, 2).store.close()


def test_commands_find_all_directories_from_the_first(two: list[Path], tmp_path: Path) -> None:
    made(two)
    with unchanged(tmp_path):
        code, out, _ = call("verify", two[0])
        assert code == 0  # Two manifests, a layout, run.json, and two striping.json.
        assert out.startswith(f"{two[0]}: run, step 3: good ({PAGES + 6} files")
        code, out, _ = call("inspect", two[0])
        assert code == 0
        assert f"{two[0] / RANK}: 67% of the pages\n" in out
        assert f"{two[1] / RANK}: 33% of the pages\n" in out
    summary = summarize(two[0])
    files = [path for place in two for path in place.rglob("*") if path.is_file()]
    assert summary.files == len(files)
    assert summary.file_bytes == sum(path.stat().st_size for path in files)
    code, out, _ = call("checkpoint", two[0], tmp_path / "published")
    assert code == 0
    assert "of pages linked, they take no further space\n" in out
    assert verify(tmp_path / "published").good
    assert len(pages_of(tmp_path / "published")) == PAGES
    resumed(two).store.close()


def test_commands_name_the_first_directory(two: list[Path], tmp_path: Path) -> None:
    made(two)
    for arguments in (["verify"], ["inspect"], ["checkpoint"]):
        out = [tmp_path / "out"] if arguments == ["checkpoint"] else []
        code, _, message = call(*arguments, two[1], *out)
        assert code == 2
        assert f"name the first, {two[0]}" in message
    assert not (tmp_path / "out").exists()


def test_commands_name_what_is_missing(two: list[Path], tmp_path: Path) -> None:
    made(two)
    two[1].rename(two[1].parent / "away")
    report = verify(two[0])
    assert [(fault.place, fault.what) for fault in report.faults] == [
        (str(two[1] / RANK), "is missing")
    ]
    assert any(str(two[1] / RANK) in note for note in report.notes)
    assert f"{two[1] / RANK} is missing" in call("inspect", two[0])[1]
    code, _, message = call("checkpoint", two[0], tmp_path / "out")
    assert (code, f"{two[1] / RANK} is missing" in message) == (2, True)
    assert not two[1].exists()


def test_verify_reads_every_page_in_its_directory(two: list[Path]) -> None:
    made(two)
    newest = json.loads((two[0] / RANK / "commit-0000000003").read_bytes().partition(b"\n")[2])
    for number, (slot, *_) in enumerate(newest["pages"]):
        (path,) = [
            path for place in two for path in (place / RANK).glob(f"page-{number:06d}.{slot}")
        ]
        flip(path, 600)
        name = f"{RANK}/{path.name}" if two[0] in path.parents else str(path)
        assert places(verify(two[0])) == {name}
        flip(path, 600)
    assert verify(two[0]).good


CHANGES: list[tuple[int, Callable[[dict[str, Any]], None], str]] = [
    (1, lambda body: body.update(striping_id="0" * 32), "of another run"),
    (1, lambda body: body.update(index=0), "of another directory of this one"),
    (1, lambda body: body.update(weights=[10**12, 1]), "does not have the content of its kind"),
    (0, lambda body: body.update(weights=[1]), "does not have the content of its kind"),
    (0, lambda body: body.update(surprise=1), "does not have the content of its kind"),
    (0, lambda body: body.update(directories=["/1", "relative"]), "is not an absolute path"),
    (0, lambda body: body.update(directories=["/1", "/etc"]), "is missing"),
    (0, lambda body: body.update(directories=["/1", "/etc/passwd"]), "not a directory"),
    (0, lambda body: body.update(directories=["/1", "/nowhere\0"]), "is not an absolute path"),
]


@pytest.mark.parametrize(("changed", "change", "expected"), CHANGES)
def test_hostile_files_do_not_lead_to_other_directories(
    changed: int, change: Callable[[dict[str, Any]], None], expected: str, two: list[Path]
) -> None:
    made(two)
    reseal(two[changed] / RANK / "striping.json", "striping", change)
    report = verify(two[0])
    assert expected in text(report)
    assert not any(place.startswith(str(two[1] / RANK / "page-")) for place in places(report))


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_links_are_not_followed(kind: str, two: list[Path], tmp_path: Path) -> None:
    made(two)
    path = two[1] / RANK
    if kind == "file":
        path = path / "striping.json"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert "no link is followed" in text(verify(two[0]))
