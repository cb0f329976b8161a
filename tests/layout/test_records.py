from __future__ import annotations

import hashlib
import io
import math
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tierstore.layout.records import (
    DATA_ALIGNMENT_BYTES,
    RECORD_DATA_BYTES_MAX,
    RECORD_DIMENSIONS_MAX,
    RECORD_PREFIX_BYTES,
    record_length,
    record_nbytes,
    record_prefix,
    record_trailer,
)

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
SIZES = [(), (1,), (7,), (1, 5), (5, 1), (3, 4, 5), (1, 1, 1), (0,), (3, 0, 2), (2,) * 10]


def make_tensor(sizes: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of any bits that its dtype allows."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    numel = math.prod(sizes) * dtype.itemsize
    data = torch.randint(high, (numel,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(sizes)


def data_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def make_record(tensor: torch.Tensor) -> bytes:
    sizes = tuple(tensor.shape)
    record = (
        record_prefix(sizes, tensor.dtype)
        + data_bytes(tensor)
        + record_trailer(sizes, tensor.dtype)
    )
    assert len(record) == record_length(sizes, tensor.dtype)
    return record


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.stride() == expected.stride()
    assert not actual.requires_grad
    assert data_bytes(actual) == data_bytes(expected)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_load_reads_a_record(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = make_tensor(sizes, dtype)
    assert_same(torch.load(io.BytesIO(make_record(tensor)), weights_only=True), tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_load_maps_a_record(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = make_tensor((5, 3), dtype)
    path = tmp_path / "record"
    path.write_bytes(make_record(tensor))
    mapped = torch.load(path, weights_only=True, mmap=True)
    assert_same(mapped, tensor)
    assert mapped.data_ptr() % DATA_ALIGNMENT_BYTES == 0


@given(st.lists(st.integers(0, 6), max_size=6).map(tuple), st.sampled_from(DTYPES))
def test_records_one_after_the_other(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """The second record is found at record_nbytes(), its data aligned, each by its slice."""
    first, second = make_tensor(sizes, dtype, 1), make_tensor(sizes, dtype, 2)
    nbytes, length = record_nbytes(sizes, dtype), record_length(sizes, dtype)
    assert nbytes % DATA_ALIGNMENT_BYTES == RECORD_PREFIX_BYTES % DATA_ALIGNMENT_BYTES == 0
    assert length <= nbytes < length + DATA_ALIGNMENT_BYTES
    page = make_record(first).ljust(nbytes, b"\0") + make_record(second).ljust(nbytes, b"\0")
    for offset, expected in [(0, first), (nbytes, second)]:
        record = io.BytesIO(page[offset : offset + length])
        assert_same(torch.load(record, weights_only=True), expected)


def test_torch_load_reads_data_rewritten_in_place(tmp_path: Path) -> None:
    path = tmp_path / "record"
    path.write_bytes(make_record(make_tensor((4, 6), torch.float32, 1)))
    rewritten = make_tensor((4, 6), torch.float32, 2)
    with path.open("r+b") as file:
        file.seek(RECORD_PREFIX_BYTES)
        file.write(data_bytes(rewritten))
    for mmap in (False, True):
        assert_same(torch.load(path, weights_only=True, mmap=mmap), rewritten)


def test_zipfile_opens_a_record() -> None:
    tensor = make_tensor((90, 100), torch.float32)  # More than zipfile reads ahead.
    archive = zipfile.ZipFile(io.BytesIO(make_record(tensor)))
    assert archive.namelist() == ["a/data.pkl", "a/byteorder", "a/version", "a/data/0"]
    assert archive.read("a/byteorder") == b"little"
    assert archive.read("a/version") == b"3\n"
    assert archive.getinfo("a/data.pkl").file_size == len(archive.read("a/data.pkl"))
    # Only the CRC of the data is unknown, and only zipfile, not torch.load, looks at it.
    assert archive.testzip() == "a/data/0"
    with archive.open("a/data/0") as data:
        assert data.read(8) == data_bytes(tensor)[:8]
    with pytest.raises(zipfile.BadZipFile, match="CRC"):
        archive.read("a/data/0")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prefix_and_trailer_have_one_length(dtype: torch.dtype) -> None:
    for sizes in [(), (3,), (2**27, 1), (1,) * RECORD_DIMENSIONS_MAX, (0, 5)]:
        assert len(record_prefix(sizes, dtype)) == RECORD_PREFIX_BYTES
        assert len(record_trailer(sizes, dtype)) == len(record_trailer((), torch.float64))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_framing_of_the_largest_record(dtype: torch.dtype, tmp_path: Path) -> None:
    """A file with a hole for data: mapped, it takes no memory."""
    sizes = (RECORD_DATA_BYTES_MAX // dtype.itemsize,)
    path = tmp_path / "record"
    with path.open("wb") as file:
        file.write(record_prefix(sizes, dtype))
        file.seek(RECORD_DATA_BYTES_MAX, io.SEEK_CUR)
        file.write(record_trailer(sizes, dtype))
    assert path.stat().st_size == record_length(sizes, dtype) < 2**31
    tensor = torch.load(path, weights_only=True, mmap=True)
    assert tensor.dtype == dtype
    assert tensor.shape == sizes
    assert tensor[-1].float().item() == 0.0


@pytest.mark.parametrize("function", [record_prefix, record_trailer, record_length, record_nbytes])
@pytest.mark.parametrize(
    ("sizes", "dtype", "message"),
    [
        ((2,), torch.complex64, "dtype must be one of float64, .*, bool, got torch.complex64"),
        ((2,), torch.uint16, "got torch.uint16"),
        ((1,) * (RECORD_DIMENSIONS_MAX + 1), torch.float32, "dimensions, got"),
        ((3, -1), torch.float32, r"must not be negative, got \[3, -1\]"),
        ((RECORD_DATA_BYTES_MAX // 4 + 1,), torch.float32, "cut it into smaller chunks"),
        ((RECORD_DATA_BYTES_MAX + 1,), torch.int8, "cut it into smaller chunks"),
        ((0, 2**31), torch.float32, "cut it into smaller chunks"),
        ((2**40, 2**40), torch.float32, "cut it into smaller chunks"),
    ],
)
def test_impossible_record_is_refused(
    function: Callable[[tuple[int, ...], torch.dtype], object],
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        function(sizes, dtype)


def test_stock_checkpoint_load_reads_records_of_a_page(tmp_path: Path) -> None:
    """Two chunks of one parameter, each a record of one file, as DCP finds them by metadata."""
    whole = make_tensor((5, 4), torch.int32).float()
    properties = TensorProperties(dtype=torch.float32)
    chunks = {(0, 0): whole[:2], (2, 0): whole[2:]}
    page, storage_data = b"\1" * 4096, {}
    for offsets, chunk in chunks.items():
        record = make_record(chunk)
        index = MetadataIndex("weight", torch.Size(offsets))
        storage_data[index] = _StorageInfo("page", len(page), len(record))
        page += record.ljust(record_nbytes(tuple(chunk.shape), torch.float32), b"\1")
    (tmp_path / "page").write_bytes(page)
    layout = [
        ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=chunk.shape)
        for offsets, chunk in chunks.items()
    ]
    metadata = Metadata(
        {"weight": TensorStorageMetadata(properties, whole.shape, layout)},
        storage_data=storage_data,
    )
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    state_dict = {"weight": torch.full((5, 4), -1.0)}
    state_dict_loader.load(state_dict, checkpoint_id=tmp_path, no_dist=True)
    assert_same(state_dict["weight"], whole)


def test_format_does_not_drift() -> None:
    """Runs on disk hold these bytes: a change must come with a new format version."""
    frame = record_prefix((3, 5), torch.float32) + record_trailer((3, 5), torch.float32)
    digest = hashlib.sha256(frame).hexdigest()
    assert digest == "95140c9c7e88d6574efec6962e24e636333bbada5ba72d40b9d8c9b0e3c52a81"
