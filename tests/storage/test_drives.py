"""Drives: what sysfs and smartctl tell, and what remains unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.smart import install_drives, install_smartctl, smart_log
from tierstore.storage.drives import Drive, drives_below


@pytest.fixture(autouse=True)
def raid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_drives(tmp_path, monkeypatch)


def test_drives_below_a_raid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_smartctl(tmp_path / "bin", monkeypatch, smart_log(1_536_000_000_000))
    assert drives_below(tmp_path) == (
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
    output: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_smartctl(tmp_path / "bin", monkeypatch, output)
    drive = drives_below(tmp_path)[0]
    assert (drive.percentage_used, drive.bytes_written) == (None, None)
    assert drive.unknown is not None
    assert reason in drive.unknown


def test_without_smartctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert drives_below(tmp_path)[0] == Drive(
        "nvme0n1", "FAST 1", None, None, "smartctl is not installed"
    )
