"""Drives: what sysfs and smartctl tell, and what remains unknown."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tierstore.tools.probe.drives import drives_below
from tierstore.tools.probe.result import Drive


@pytest.fixture
def blocks(tmp_path: Path) -> Path:
    """A sysfs in which tmp_path is on a RAID of a partition and a whole disk."""
    devices = tmp_path / "devices"
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
    device = os.stat(tmp_path).st_dev
    (tmp_path / "block").mkdir()
    number = f"{os.major(device)}:{os.minor(device)}"
    (tmp_path / "block" / number).symlink_to(devices / "md0")
    return tmp_path / "block"


def install_smartctl(path: Path, monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    path.mkdir()
    program = path / "smartctl"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\nexit 4\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path}:{os.environ['PATH']}")


def test_drives_below_a_raid(tmp_path: Path, blocks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = {"percentage_used": 7, "data_units_written": 3_000_000}
    output = json.dumps({"nvme_smart_health_information_log": log})
    install_smartctl(tmp_path / "bin", monkeypatch, output)
    assert drives_below(tmp_path, blocks) == (
        Drive("nvme0n1", "FAST 1", 7, 1_536_000_000_000, None),
        Drive("nvme1n1", None, 7, 1_536_000_000_000, None),
    )


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("", "smartctl failed: JSONDecodeError"),
        ("[]", "smartctl reports no NVMe wear"),
        ('{"nvme_smart_health_information_log": {"percentage_used": -1}}', "reports no NVMe wear"),
        ('{"smartctl": {"messages": [{"string": "Permission denied"}]}}', "Permission denied"),
    ],
)
def test_unknown_wear_has_a_reason(
    output: str, reason: str, tmp_path: Path, blocks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_smartctl(tmp_path / "bin", monkeypatch, output)
    drive = drives_below(tmp_path, blocks)[0]
    assert (drive.percentage_used, drive.bytes_written) == (None, None)
    assert drive.unknown is not None
    assert reason in drive.unknown


def test_without_smartctl(tmp_path: Path, blocks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert drives_below(tmp_path, blocks)[0] == Drive(
        "nvme0n1", "FAST 1", None, None, "smartctl is not installed"
    )
