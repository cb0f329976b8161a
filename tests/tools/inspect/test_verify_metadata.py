"""verify() of what `.metadata` names, in checkpoints that stock PyTorch wrote."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from tests.support import killed_processes
from tests.support.originals import (
    check,
    edit,
    entry_of,
    places,
    text,
)
from tierstore.inspection.dcp_metadata import read_metadata
from tierstore.tools.inspect.verify import verify


def cut(metadata: Metadata, *rows: tuple[int, int]) -> None:
    """Make "weight", of 4 by 3, a tensor of chunks of these rows, all in one slice."""
    tensor: Any = metadata.state_dict_metadata["weight"]
    info = entry_of(metadata, "weight")
    del metadata.storage_data[MetadataIndex("weight", torch.Size([0, 0]))]
    tensor.chunks = []
    for first, stop in rows:
        offsets = torch.Size([first, 0])
        tensor.chunks.append(ChunkStorageMetadata(offsets, torch.Size([stop - first, 3])))
        metadata.storage_data[MetadataIndex("weight", offsets)] = info


CHANGES: dict[str, tuple[Callable[[Metadata], None], str]] = {
    "missing chunk": (lambda m: cut(m, (0, 2)), "6 of 12 elements"),
    "no chunk": (lambda m: cut(m), "12 of 12 elements"),
    "overlapping chunks": (lambda m: cut(m, (0, 3), (2, 4)), "overlap"),
    "a chunk outside": (lambda m: cut(m, (0, 5)), "does not lie within"),
    "another shape": (lambda m: cut(m, (0, 2), (2, 4)), ".metadata says torch.float32 [2, 3]"),
    "no entry": (
        lambda m: m.storage_data.pop(MetadataIndex("weight", torch.Size([0, 0]))),
        "does not say in which file the data of its chunk at [0, 0] is",
    ),
    "no entry of an object": (
        lambda m: m.storage_data.pop(MetadataIndex("object.lr")),
        "does not say in which file",
    ),
    "another dtype": (
        lambda m: setattr(
            m.state_dict_metadata["weight"].properties,  # type: ignore[union-attr]
            *("dtype", torch.int32),
        ),
        "holds a tensor of torch.float32 [4, 3], but .metadata says torch.int32 [4, 3]",
    ),
    "an object in place of a tensor": (
        lambda m: vars(entry_of(m, "weight")).update(vars(entry_of(m, "object.lr"))),
        "does not hold a tensor",
    ),
    "past the end": (
        lambda m: setattr(entry_of(m, "weight"), "offset", 10**9),
        "of __0_0.distcp, which has",
    ),
    "before the start": (
        lambda m: setattr(entry_of(m, "weight"), "offset", -1),
        "bytes at offset -1 of",
    ),
    "no bytes": (
        lambda m: setattr(entry_of(m, "weight"), "length", 0),
        "not what torch.save wrote",
    ),
    "negative": (lambda m: setattr(entry_of(m, "weight"), "length", -5), "be the -5 bytes"),
    "in the middle": (
        lambda m: setattr(entry_of(m, "weight"), "offset", entry_of(m, "weight").offset + 64),
        "",
    ),
}


@pytest.mark.parametrize(("change", "expected"), CHANGES.values(), ids=CHANGES)
def test_metadata_that_does_not_fit_the_files(
    change: Callable[[Metadata], None], expected: str, plain: Path
) -> None:
    edit(plain, change)
    report = check(plain)
    assert places(report) <= {"weight", "object.lr"}
    assert report.faults
    assert expected in text(report)


def test_chunks_of_one_tensor_in_several_files(plain: Path) -> None:
    """Ranks write such files, and the stock reader reads them."""
    halves = [torch.arange(6.0).view(2, 3) + 6 * number for number in range(2)]
    for number, half in enumerate(halves):
        torch.save(half, plain / f"__{number}_1.distcp")

    def change(metadata: Metadata) -> None:
        cut(metadata, (0, 2), (2, 4))
        for number in range(2):
            name = f"__{number}_1.distcp"
            size = (plain / name).stat().st_size
            index = MetadataIndex("weight", torch.Size([2 * number, 0]))
            metadata.storage_data[index] = _StorageInfo(name, 0, size)

    edit(plain, change)
    assert check(plain).good
    state = {"weight": torch.zeros(4, 3)}
    dcp.load(state, checkpoint_id=plain, no_dist=True)
    assert torch.equal(state["weight"], torch.arange(12.0).view(4, 3))
    (plain / "__1_1.distcp").unlink()
    (fault,) = check(plain).faults
    assert (fault.place, fault.what) == ("__1_1.distcp", "is missing")


OUTSIDE = ["../x", "/etc/hostname", "a/../../x", "./__0_0.distcp", "a//b", "", "a\0b", "a/"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_paths_that_lead_outside(name: str, plain: Path) -> None:
    shutil.copyfile(plain / "__0_0.distcp", plain.parent / "x")
    (plain / "a").mkdir()
    edit(plain, lambda metadata: setattr(entry_of(metadata, "weight"), "relative_path", name))
    (fault,) = check(plain).faults
    assert fault.place == name
    assert "the path " in fault.what


@pytest.mark.parametrize("kind", ["file", "folder", "dangling", "loop", "pipe", "directory"])
def test_files_that_are_not_regular(kind: str, plain: Path) -> None:
    name = "__0_0.distcp"
    outside = plain.parent / "outside"
    outside.mkdir()
    os.rename(plain / name, outside / name)
    if kind == "file":
        (plain / name).symlink_to(outside / name)
    elif kind == "dangling":
        (plain / name).symlink_to("nowhere")
    elif kind == "loop":
        (plain / name).symlink_to(name)
    elif kind == "pipe":
        os.mkfifo(plain / name)
    elif kind == "directory":
        (plain / name).mkdir()
    else:
        (plain / "folder").symlink_to(outside)
        name = f"folder/{name}"

    def change(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = name

    edit(plain, change)
    (fault,) = verify(plain).faults
    assert fault.place == name
    assert "link" in fault.what or fault.what == "is not a file"


def test_files_in_folders(plain: Path) -> None:
    (plain / "folder").mkdir()
    os.rename(plain / "__0_0.distcp", plain / "folder" / "data")

    def change(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = "folder/data"

    edit(plain, change)
    assert check(plain).good


class Unknown:
    """A class that no safe reader unpickles."""

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("this must not run")

    def __getstate__(self) -> Any:
        return {"a": 1}


def test_an_object_of_an_unknown_class_is_not_made(tmp_path: Path) -> None:
    dcp.save({"object": Unknown()}, checkpoint_id=tmp_path, no_dist=True)
    report = check(tmp_path)
    assert report.good
    assert any("1 values are of classes that only" in note for note in report.notes)


def test_a_hostile_metadata_is_not_run(plain: Path) -> None:
    hostile = b"cposix\nsystem\n(S'touch pwned'\ntR."
    (plain / ".metadata").write_bytes(hostile)
    (fault,) = check(plain).faults
    assert fault.place == ".metadata"
    assert "names posix.system" in fault.what


def test_compressed_slices_are_noted(plain: Path) -> None:
    edit(
        plain,
        lambda m: setattr(entry_of(m, "weight"), "transform_descriptors", ["stream_transform"]),
    )
    report = check(plain)
    assert report.good
    assert any("1 slices are compressed" in note for note in report.notes)


def save_sharded(directory: Path, rank: int) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 7)).sum().backward()
    optimizer.step()
    states = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=directory / "c")
    torch.distributed.destroy_process_group()


@pytest.mark.long
def test_a_checkpoint_of_fsdp_on_two_ranks(tmp_path: Path) -> None:
    """Rank 0 has rows 0 to 2 of five, and of the moments; rank 1 has the others."""
    children = [
        killed_processes._processes.Process(target=save_sharded, args=(tmp_path, rank))
        for rank in (0, 1)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
    data = (tmp_path / "c" / ".metadata").read_bytes()
    metadata = pickle.loads(data)
    assert read_metadata(data, "") == metadata
    assert len(metadata.state_dict_metadata["model.0.weight"].chunks) == 2
    assert check(tmp_path / "c").good
    (tmp_path / "c" / "__1_0.distcp").unlink()
    assert places(check(tmp_path / "c")) == {"__1_0.distcp"}
