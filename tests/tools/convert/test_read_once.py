"""A conversion reads what it needs once, and compares it with the checksums of the source."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tierstore
from tests.support import kernel
from tests.support.conversions import no_trace
from tierstore.tools.convert.convert import convert

NUMEL = 2**22
COUNT = 3
MODEL_BYTES = COUNT * NUMEL * 4
FRAMING_BYTES = 20 * 2**20
"""More than records have around their data, and than the kernel reads ahead."""


def state() -> Any:
    """A model, and an optimizer with states of twice its size."""
    names = [f"layers.{number}" for number in range(COUNT)]
    return {
        "model": {name: torch.randn(NUMEL) for name in names},
        "optimizer": {
            "state": {
                name: {
                    "step": 1.0,
                    **{key: torch.randn(NUMEL) for key in ("exp_avg", "exp_avg_sq")},
                }
                for name in names
            },
            "param_groups": [{"lr": 0.1, "params": names, "param_names": names}],
        },
    }


def save_dcp(saved: Any, path: Path) -> None:
    dcp.save(saved, checkpoint_id=path, no_dist=True)


SAVE: dict[str, Callable[[Any, Path], None]] = {"in.pt": torch.save, "in": save_dcp}


def files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.iterdir())


def bytes_read(source: Path, out: Path, only: str | None) -> int:
    """Convert; return the bytes read from the disk without the destination's, read to verify it."""
    for file in files_of(source):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before, _ = kernel.disk_bytes()
    convert(source, out, to="torch", only=only)
    return kernel.disk_bytes()[0] - before - out.stat().st_size


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", list(SAVE))
def test_bytes_are_read_once_and_only_where_needed(name: str, tmp_path: Path) -> None:
    SAVE[name](state(), tmp_path / name)
    found = bytes_read(tmp_path / name, tmp_path / "all.pt", None)
    assert found < 3 * MODEL_BYTES + FRAMING_BYTES
    found = bytes_read(tmp_path / name, tmp_path / "model.pt", "model")
    assert found < MODEL_BYTES + FRAMING_BYTES


@pytest.mark.quick(1)
@pytest.mark.parametrize("needed", [True, False])
@pytest.mark.parametrize("name", list(SAVE))
def test_a_flipped_bit(name: str, needed: bool, tmp_path: Path) -> None:
    saved = state()
    SAVE[name](saved, tmp_path / name)
    part = saved["model"] if needed else saved["optimizer"]["state"]["layers.1"]
    tensor = part["layers.1"] if needed else part["exp_avg"]
    flip(tmp_path / name, tensor)
    if needed:
        match = re.escape(str(tmp_path / name)) + ".* not what was written"
        with no_trace(tmp_path), pytest.raises(tierstore.CorruptionError, match=match):
            convert(tmp_path / name, tmp_path / "model.pt", to="torch", only="model")
    else:
        convert(tmp_path / name, tmp_path / "model.pt", to="torch", only="model")
        found = torch.load(tmp_path / "model.pt", weights_only=True)["model"]
        assert all(torch.equal(found[key], value) for key, value in saved["model"].items())
    with no_trace(tmp_path), pytest.raises(tierstore.CorruptionError, match="not what was written"):
        convert(tmp_path / name, tmp_path / "all.pt", to="torch")


def test_a_part_of_what_one_checksum_covers(tmp_path: Path) -> None:
    """Two tensors share a storage, which has one checksum: the other one is also compared."""
    whole = torch.randn(2, NUMEL)
    torch.save({"model": {"a": whole[0], "b": whole[1]}}, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "good.pt", to="torch", include=["a"])
    flip(tmp_path / "in.pt", whole[1])
    with no_trace(tmp_path), pytest.raises(tierstore.CorruptionError, match="not what was written"):
        convert(tmp_path / "in.pt", tmp_path / "out.pt", to="torch", include=["a"])


def flip(path: Path, tensor: torch.Tensor) -> None:
    """Change a bit in the middle of the elements of a tensor."""
    some = tensor[NUMEL // 2 : NUMEL // 2 + 16].numpy().tobytes()
    for file in files_of(path):
        data = bytearray(file.read_bytes())
        at = data.find(some)
        if at >= 0:
            data[at + 5] ^= 1
            file.write_bytes(data)
            return
    raise AssertionError("the tensor is in no file")


@pytest.mark.parametrize("number", [2, 3])
def test_a_source_that_can_no_longer_be_opened(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened first for its header, then for the tensor, then to compare checksums."""
    torch.save({"w": torch.ones(8)}, tmp_path / "in.pt")
    real, opened = os.open, []

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if Path(path) == tmp_path / "in.pt":
            opened.append(path)
            if len(opened) == number:
                raise OSError(5, "Input/output error")
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    with no_trace(tmp_path), pytest.raises(tierstore.StorageError, match=r"read.*in\.pt"):
        convert(tmp_path / "in.pt", tmp_path / "out.pt", to="torch")
