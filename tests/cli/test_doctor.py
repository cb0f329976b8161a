"""``tierstore doctor``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest
import torch

from tests.support.commands import call


def findings(*paths: Path, path_entry: Path | None = None) -> tuple[int, list[dict[str, str]]]:
    """Return the exit code and the findings, of a process that also imports from ``path_entry``."""
    done = subprocess.run(
        [sys.executable, "-m", "tierstore", "doctor", *paths, "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(path_entry or "")},
    )
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout)["findings"]


def test_a_good_directory(tmp_path: Path) -> None:
    code, found = findings(tmp_path)
    assert code == 0
    assert [one["text"] for one in found if one["subject"] == "packages"] == [
        f"tierstore 0.1.0, torch {torch.__version__}"
    ]
    here = [one for one in found if one["subject"] == str(tmp_path)]
    assert len(here) == 2
    assert here[1]["text"].startswith("engine ")
    assert list(tmp_path.iterdir()) == []
    assert all((one["remedy"] is None) == (one["health"] == "good") for one in found)


def test_a_line_for_each_finding_and_each_remedy(tmp_path: Path) -> None:
    code, out, _ = call("doctor", tmp_path / "absent")
    assert code == 1
    assert f"bad  {tmp_path / 'absent'}: not a directory\n      to do: make it, or " in out
    code, out, _ = call("doctor")
    assert code == 0
    assert "packages: tierstore " in out


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this machine has no /dev/shm")
def test_a_directory_in_memory_is_slow() -> None:
    code, found = findings(Path("/dev/shm"))
    assert code == 0
    slow = next(one for one in found if one["subject"] == "/dev/shm")
    assert slow["health"] == "slow"
    assert slow["text"].startswith("tmpfs keeps files in memory")
    assert slow["remedy"] == "name a directory on a disk"


def test_a_directory_that_nobody_can_write_to(tmp_path: Path) -> None:
    code, found = findings(Path("/proc"))
    assert code == 1
    assert found[-1]["health"] == "bad"
    assert "/proc cannot be used" in found[-1]["text"]


def test_another_package_that_has_a_module_muon(tmp_path: Path) -> None:
    metadata = tmp_path / "muon_optimizer-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: muon-optimizer\n")
    (metadata / "top_level.txt").write_text("muon\n")
    code, found = findings(path_entry=tmp_path)
    assert code == 1
    bad = next(one for one in found if one["health"] == "bad")
    assert " of muon-optimizer, and not the optimizer of tierstore" in bad["text"]
    assert bad["remedy"].startswith("pip uninstall muon-optimizer, then pip install ")


def test_a_module_muon_that_hides_the_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = spec_from_file_location("muon", tmp_path / "muon.py")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: other)
    code, out, _ = call("doctor")
    assert code == 1
    assert f"bad  packages: `import muon` finds {tmp_path / 'muon.py'}, and not the opt" in out
    assert "to do: pip uninstall muon, then" in out
