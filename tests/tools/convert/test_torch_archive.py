"""Files of torch.save whose directory, behind the data, is damaged."""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch

from tierstore.errors import CorruptionError
from tierstore.inspection.reader import Reader
from tierstore.tools.convert.torch_archive import read_torch_file


def tensors_in(path: Path) -> dict[str, bytes]:
    """Read all tensors of a file, and compare the checksums."""
    reader = Reader(path.parent, collect_checksums=True)
    found = {}
    with reader.open(path.name) as file:
        for name, tensor in read_torch_file(reader, path.name).items():
            found[name] = bytearray(4 * tensor.shape[0])
            file.read_data_into(memoryview(found[name]), tensor.offset)
    reader.compare_checksums()
    return {name: bytes(data) for name, data in found.items()}


def test_each_bit_of_the_entries_of_tensors(tmp_path: Path) -> None:
    """An entry also points at the data of another tensor then."""
    path = tmp_path / "in.pt"
    tensors = {f"w{n}": torch.full((size,), float(n)) for n, size in enumerate([16, 16, 32])}
    torch.save(tensors, path)
    expected = {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
    assert tensors_in(path) == expected
    with zipfile.ZipFile(path) as archive:
        directory = archive.start_dir
    original = path.read_bytes()
    begin = original.index(b"in/data/0", directory) - 46
    end = original.index(b"in/version", directory) - 46
    with open(path, "r+b", buffering=0) as file:
        for byte in range(begin, end):
            for bit in range(8):
                file.seek(byte)
                file.write(bytes([original[byte] ^ 1 << bit]))
                try:
                    assert tensors_in(path) == expected, (byte - begin, bit)
                except CorruptionError:
                    continue
            file.seek(byte)
            file.write(original[byte : byte + 1])
