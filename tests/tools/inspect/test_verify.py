"""verify() finds every kind of damage to bytes, names the file, and changes nothing."""

from __future__ import annotations

import errno
import os
import pickle
import re
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
)

import tierstore
from tests.support.originals import (
    STEPS,
    TWIN,
    check,
    committed_pages,
    edit,
    entry_of,
    flip,
    places,
    reseal,
    save_plain,
    text,
)
from tests.support.published import published_toy
from tests.support.toy import FIRST, MODEL, RANK, Toy, make_run, unchanged
from tierstore.inspection import reader
from tierstore.tools.inspect.summary import summarize
from tierstore.tools.inspect.verify import verify

# ----------------------------------------------------------------------------- all is well


def test_a_run_without_faults(run: Path) -> None:
    report = check(run)
    assert (report.kind, report.step, report.faults, report.notes) == ("run", STEPS, (), ())
    pages = committed_pages(run)
    assert report.bytes_checked == sum((run / page).stat().st_size for page in pages)
    assert report.files == len(pages) + 4  # Two manifests, their layout and run.json.


def test_a_checkpoint_without_faults(published: Path) -> None:
    report = check(published)
    assert (report.kind, report.step, report.faults) == ("checkpoint", STEPS, ())
    assert report.notes == ()
    sizes = {path.name: path.stat().st_size for path in published.iterdir()}
    assert report.files == len(sizes)
    described = sizes.keys() - {"tierstore.json", MARK}
    assert report.bytes_checked == sum(sizes[name] for name in described)
    assert report.marked_whole


def test_a_plain_checkpoint_without_faults(plain: Path) -> None:
    report = check(plain)
    assert (report.kind, report.step, report.faults) == ("plain checkpoint", None, ())
    assert report.bytes_checked == (plain / "__0_0.distcp").stat().st_size
    (note,) = report.notes
    assert "tierstore did not publish it, so files have no checksums" in note


@pytest.mark.parametrize("name", ["run", "published", "plain"])
def test_progress(name: str, originals: Path) -> None:
    calls: list[tuple[int, int]] = []
    report = verify(originals / name, lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert {total for _, total in calls} == {report.bytes_checked}
    assert calls[-1] == (report.bytes_checked, report.bytes_checked)


def test_a_path_that_is_a_link(published: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(published)
    assert check(tmp_path / "latest").good


MARK = f"{RANK}.whole"


@pytest.mark.long
def test_a_marker_of_a_billion_ranks_takes_no_memory(published: Path) -> None:
    reseal(published / "tierstore.json", "checkpoint", lambda body: body.update(world_size=10**9))
    report = verify(published)
    assert not report.good
    assert report.marked_whole is False


@pytest.fixture
def no_crc32() -> Iterator[None]:
    """torch.save writes 0 for all checksums."""
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(True)


@pytest.mark.usefixtures("no_crc32")
def test_saved_without_checksums(tmp_path: Path) -> None:
    save_plain(tmp_path / "plain")
    assert check(tmp_path / "plain").good
    checkpoint = published_toy(tmp_path)
    assert check(checkpoint).good
    toy = Toy(tmp_path / "begun")
    assert toy.store.restore(checkpoint=checkpoint) == 3
    toy.store.close()


@pytest.mark.usefixtures("no_crc32")
def test_damage_without_checksums(tmp_path: Path) -> None:
    """Without checksums, only what torch cannot read as the right tensor is found."""
    save_plain(tmp_path)
    path = tmp_path / "__0_0.distcp"
    whole = path.read_bytes()
    for needle in (b"PK\3\4", b"PK\1\2", b"PK\5\6", b"FloatStorage", b"torch._utils"):
        path.write_bytes(whole.replace(needle, bytes(len(needle))))
        assert not check(tmp_path).good, needle
    entry = re.search(rb"PK\x01\x02.{42}archive/data/0", whole, re.DOTALL)
    assert entry is not None
    place = entry.start() + 42  # The entry says here where the header of the data is.
    for bit in range(32):
        changed = int.from_bytes(whole[place : place + 4], "little") ^ 1 << bit
        path.write_bytes(whole[:place] + changed.to_bytes(4, "little") + whole[place + 4 :])
        assert not check(tmp_path).good, bit


# ------------------------------------------------------------------------- damaged bytes


def layouts(run: Path) -> set[str]:
    return {f"{RANK}/{path.name}" for path in (run / RANK).glob("layout-*")}


def test_flips_in_a_run(run: Path) -> None:
    newest = f"{RANK}/commit-{STEPS:010d}"
    before = f"{RANK}/commit-{STEPS - 1:010d}"
    needed = {*committed_pages(run), *layouts(run), newest, before, f"{RANK}/run.json"}
    for path in sorted((run / RANK).iterdir()):
        name = f"{RANK}/{path.name}"
        size = path.stat().st_size
        for position in sorted({*range(0, size, 1 + size // 12), size - 1}) if size else ():
            flip(path, position)
            report = check(run)
            assert (name in places(report)) == (name in needed), (name, position)
            assert report.step == (STEPS - 1 if name == newest else STEPS)
            flip(path, position)
    assert check(run).good


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "name",
    [
        ".metadata",
        "tierstore.json",
        "unpaged",
        f"{RANK}.commit",
        f"{RANK}.layout",
        f"{RANK}.page-000000",
    ],
)
def test_flips_in_a_checkpoint(name: str, published: Path) -> None:
    path = published / name
    size = path.stat().st_size
    for position in {*range(0, size, 1 + size // 40), size - 1}:
        flip(path, position)
        assert name in places(check(published)), position
        flip(path, position)
    assert check(published).good


def test_a_flip_names_the_lost_state(published: Path) -> None:
    flip(published / f"{RANK}.page-000000", 512)
    (fault,) = check(published).faults
    assert fault.place == f"{RANK}.page-000000"
    assert "bytes at offset 0 are not those written in step 3; they hold " in fault.what
    assert fault.what.endswith("they hold master of second")


def test_flips_in_a_plain_checkpoint(plain: Path) -> None:
    """torch.save leaves a CRC-32 of all that it writes, and torch.load does not look at it."""
    metadata: Metadata = pickle.loads((plain / ".metadata").read_bytes())
    needles = {
        "weight": torch.arange(12.0).numpy().tobytes(),
        "half": torch.arange(7).to(torch.float16).numpy().tobytes(),
        "count": torch.tensor(3).numpy().tobytes(),
        "object.lr": pickle.BINFLOAT + struct.pack(">d", 0.5),
    }
    path = plain / "__0_0.distcp"
    data = path.read_bytes()
    assert {index.fqn for index in metadata.storage_data} == needles.keys()
    for index, info in metadata.storage_data.items():
        needle = needles[index.fqn]
        first = data.index(needle, info.offset, info.offset + info.length)
        for position in (first, first + len(needle) - 1):
            flip(path, position)
            (fault,) = check(plain).faults
            assert fault.place == index.fqn
            assert "Bad CRC-32" in fault.what
            flip(path, position)


def test_no_flip_of_a_plain_metadata_is_an_exception(plain: Path) -> None:
    path = plain / ".metadata"
    whole = path.read_bytes()
    found = 0
    for position in range(len(whole)):
        flip(path, position, 1 << position % 8)
        found += not verify(plain).good
        path.write_bytes(whole)
    assert found > len(whole) / 2  # In what names a version, say, it makes no difference.


# -------------------------------------------------------------- missing, short, misplaced


def test_each_file_of_a_checkpoint_removed(published: Path) -> None:
    for path in list(published.iterdir()):
        data = path.read_bytes()
        path.unlink()
        report = check(published)
        if path.name == MARK:
            assert (report.good, report.marked_whole) == (True, False)
        else:
            assert path.name in places(report)
            assert "is missing" in text(report)
        path.write_bytes(data)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("published", ".metadata"),
        ("published", "tierstore.json"),
        ("published", f"{RANK}.commit"),
        ("plain", ".metadata"),
        ("run", f"{RANK}/run.json"),
        ("run", f"{RANK}/commit-{STEPS:010d}"),
        ("run", f"{RANK}/dirty"),
    ],
)
def test_files_of_any_size(kind: str, name: str, originals: Path, tmp_path: Path) -> None:
    """Sparse files: no memory is allocated for the sizes that they claim."""
    directory = Path(shutil.copytree(originals / kind, tmp_path / kind))
    with (directory / name).open("ab") as file:
        file.truncate(2**40)
    assert f"{name}: has 1.0 TiB: no file of its kind has more than 1.0 GiB" in text(
        verify(directory)
    )
    if not name.endswith("dirty"):
        assert f"{name} has 1.0 TiB: no file of its kind" in said_of(directory)
    if kind != "run":
        toy = Toy(tmp_path / "new")
        with pytest.raises(tierstore.CorruptionError, match="nothing of it was loaded"):
            toy.store.restore(checkpoint=directory)
        toy.store.close()


def said_of(directory: Path) -> str:
    """Return the part of a summary that names faults."""
    try:
        return "\n".join(summarize(directory).notes)
    except tierstore.CorruptionError as error:
        return str(error)


@pytest.mark.parametrize(
    ("entry_bytes", "list_bytes", "expected"),
    [
        (2**31, None, "has 2.0 GiB besides the data of tensors"),
        (0, 2**31, "its list of entries is too long"),
    ],
)
def test_pickles_of_any_size(
    entry_bytes: int, list_bytes: int | None, expected: str, plain: Path
) -> None:
    """A zip of one file in a hole, or with a hole as its list of files."""
    name = b"archive/data.pkl"
    sizes = (0, entry_bytes, entry_bytes)
    entry = struct.pack("<4s6H3L5H2L", b"PK\1\2", *[20] * 2, *[0] * 4, *sizes, 16, *[0] * 6) + name
    with (plain / "hollow").open("wb") as file:
        file.write(struct.pack("<4s5H3L2H", b"PK\3\4", 20, *[0] * 4, *sizes, 16, 0) + name)
        file.seek(max(entry_bytes, list_bytes or 0), os.SEEK_CUR)
        start = file.tell()
        file.write(entry)
        listed = (len(entry), start) if list_bytes is None else (list_bytes + len(entry), 46)
        file.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, *listed, 0))
        length = file.tell()
    place = {"relative_path": "hollow", "offset": 0, "length": length}
    edit(plain, lambda metadata: vars(entry_of(metadata, "object.lr")).update(place))
    (fault,) = verify(plain).faults
    assert fault.place == "object.lr"
    assert expected in fault.what


@pytest.mark.parametrize("nbytes", [-1, 1, -4096, 4096, None])
def test_each_file_of_a_checkpoint_cut_or_longer(nbytes: int | None, published: Path) -> None:
    for path in list(published.iterdir()):
        data = path.read_bytes()
        nbytes_now = 0 if nbytes is None else max(0, len(data) + nbytes)
        path.write_bytes((data + bytes(4096))[:nbytes_now])
        report = check(published)
        if path.name == MARK:
            assert (report.good, report.marked_whole) == (True, False)
        else:
            assert path.name in places(report)
        path.write_bytes(data)


def test_each_file_of_a_run_removed(run: Path) -> None:
    needed = {*committed_pages(run), *layouts(run), f"{RANK}/run.json"}
    for path in list((run / RANK).iterdir()):
        data = path.read_bytes()
        path.unlink()
        report = check(run)
        assert report.good == (f"{RANK}/{path.name}" not in needed)
        newest = path.name == f"commit-{STEPS:010d}"
        assert report.step == (STEPS - 1 if newest else STEPS)
        path.write_bytes(data)


def test_a_shortened_page_of_a_run(run: Path) -> None:
    page = run / committed_pages(run)[0]
    size = page.stat().st_size
    os.truncate(page, size - 4096)
    (fault,) = check(run).faults
    assert fault.what == f"has {size - 4096} bytes, expected {size}"


@pytest.mark.parametrize("kind", ["run", "published"])
def test_two_pages_swapped(kind: str, tmp_path: Path) -> None:
    """Two whole pages of one layout, each under the name of the other."""
    toy = Toy(tmp_path / "run", [[FIRST], [TWIN]])
    toy.groups[1].hyperparameters["lr"] = 0.5
    toy.step()
    toy.store.checkpoint(tmp_path / "published")
    toy.store.close()
    directory = tmp_path / kind
    names = (
        committed_pages(directory, step=1)
        if kind == "run"
        else [f"{RANK}.page-000000", f"{RANK}.page-000001"]
    )
    one, other = (directory / name for name in names)
    os.rename(one, tmp_path / "aside")
    os.rename(other, one)
    os.rename(tmp_path / "aside", other)
    assert places(check(directory)) == set(names)


def test_a_page_of_the_step_before(run: Path, published: Path) -> None:
    """The bytes of the step before, under the name of this step."""
    page = committed_pages(run)[0]
    stale = page[:-1] + ("a" if page.endswith("b") else "b")
    shutil.copyfile(run / stale, run / page)
    shutil.copyfile(run / stale, published / f"{RANK}.page-000000")
    for directory in (run, published):
        report = check(directory)
        assert len(places(report)) == 1
        assert "are not those written in step 3" in text(report)


def test_a_page_of_another_run(published: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "other", steps=STEPS + 2)
    page = committed_pages(tmp_path / "other", STEPS + 2)[0]
    shutil.copyfile(tmp_path / "other" / page, published / f"{RANK}.page-000000")
    assert places(check(published)) == {f"{RANK}.page-000000"}


def test_a_disk_that_fails(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = run / committed_pages(run)[0]
    inode = page.stat().st_ino
    preadv = os.preadv

    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        if os.fstat(fd).st_ino == inode and offset == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    (fault,) = verify(run).faults
    assert fault.place == committed_pages(run)[0]
    assert "cannot be read at byte 0: Input/output error (errno 5); they hold" in fault.what


def test_without_rights(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refusing(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).endswith("unpaged"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(tierstore.CheckpointError, match=r"unpaged may not be read by user"):
        verify(published)


# ---------------------------------------------------------------------------- wrong calls


def test_a_run_in_use(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.step()
    toy.store.synchronize()
    with (
        unchanged(tmp_path),
        pytest.raises(tierstore.RunLockedError, match=f"in use by process {os.getpid()} on host"),
    ):
        verify(tmp_path)
    toy.step()
    toy.store.close()
    assert check(tmp_path).step == 2


def test_a_run_that_is_started_meanwhile(run: Path) -> None:
    stores: list[Toy] = []

    def start(done: int, total: int) -> None:
        if not stores:
            stores.append(Toy(run, [*MODEL, [TWIN]], resume=True))

    with pytest.raises(tierstore.RunLockedError, match="is in use by"):
        verify(run, start)
    stores[0].store.restore()
    stores[0].assert_at(STEPS)
    stores[0].store.close()


def test_a_run_that_committed_meanwhile(run: Path) -> None:
    calls: list[int] = []

    def step(done: int, total: int) -> None:
        if not calls:
            calls.append(done)
            toy = Toy(run, [*MODEL, [TWIN]], resume=True)
            toy.store.restore()
            toy.step()
            toy.store.close()

    with pytest.raises(tierstore.RunLockedError, match="was changed during the check"):
        verify(run, step)


def directory_of(tmp_path: Path, kind: str) -> Iterator[Path]:
    if kind == "file":
        (tmp_path / "x").write_text("")
    elif kind == "other files":
        (tmp_path / "x").mkdir()
        (tmp_path / "x" / "model.safetensors").write_text("")
    elif kind == "empty":
        (tmp_path / "x").mkdir()
    elif kind == "loop":
        (tmp_path / "x").symlink_to("x")
    yield tmp_path / "x"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("absent", "No such file or directory"),
        ("file", "is not a directory"),
        ("loop", "is not a directory"),
        ("empty", "it is empty"),
        ("other files", r"holds neither a run \(rank-00000/\) nor a checkpoint \(\.metadata\)$"),
    ],
)
def test_paths_that_are_neither_run_nor_checkpoint(
    kind: str, expected: str, tmp_path: Path
) -> None:
    (path,) = directory_of(tmp_path, kind)
    with pytest.raises(tierstore.CheckpointError, match=expected):
        verify(path)


def test_the_folder_of_a_rank_and_an_unfinished_checkpoint(run: Path, published: Path) -> None:
    with pytest.raises(tierstore.CheckpointError, match="name the directory above it"):
        verify(run / RANK)
    unfinished = published.parent / ".step-3.tmp-01234567-89abcdef"
    os.rename(published, unfinished)
    with pytest.raises(tierstore.CheckpointError, match="is an unfinished checkpoint"):
        verify(unfinished)


def test_a_checkpoint_of_dcp_whose_metadata_was_not_written(plain: Path) -> None:
    (plain / ".metadata").unlink()
    with pytest.raises(tierstore.CheckpointError, match=r"its \.metadata is missing"):
        verify(plain)


def test_a_directory_that_a_disk_does_not_list(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: Any) -> list[str]:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    monkeypatch.setattr(os, "listdir", failing)
    with pytest.raises(tierstore.StorageError, match="errno 5"):
        verify(run)


def test_a_large_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every larger file is read in several pieces."""
    save_plain(tmp_path)
    monkeypatch.setattr("tierstore.inspection.slices._READ_BYTES", 7)
    monkeypatch.setattr(reader, "BLOCK_BYTES", 4096)
    assert verify(tmp_path).good
