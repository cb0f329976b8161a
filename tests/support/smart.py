"""A system with drives: a sysfs that lists them, and a smartctl that prints what it is told."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tierstore.storage import drives


def install_drives(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the filesystem of a folder on a RAID of a partition of nvme0n1 and all of nvme1n1."""
    devices = folder / "devices"
    for disk, model in (("nvme0n1", "FAST 1\n"), ("nvme1n1", None)):
        (devices / disk / "device").mkdir(parents=True)
        if model is not None:
            (devices / disk / "device/model").write_text(model)
    partition = devices / "nvme0n1/nvme0n1p1"
    partition.mkdir()
    (partition / "partition").write_text("1\n")
    slaves = devices / "md0/slaves"
    slaves.mkdir(parents=True)
    (slaves / "nvme0n1p1").symlink_to(partition)
    (slaves / "nvme1n1").symlink_to(devices / "nvme1n1")
    device = os.stat(folder).st_dev
    (folder / "block").mkdir()
    number = f"{os.major(device)}:{os.minor(device)}"
    (folder / "block" / number).symlink_to(devices / "md0")
    monkeypatch.setattr(drives, "BLOCK_DEVICES", folder / "block")


def install_smartctl(folder: Path, monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    """Put a smartctl on PATH that prints a text, whatever the drive is."""
    folder.mkdir()
    program = folder / "smartctl"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\nexit 4\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def smart_log(nbytes: int, percentage: int = 7) -> str:
    """Return what smartctl prints of a drive to which these bytes were written."""
    log = {"percentage_used": percentage, "data_units_written": nbytes // 512_000}
    return json.dumps({"nvme_smart_health_information_log": log})
