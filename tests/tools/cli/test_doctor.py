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

from muon.kernels import rules
from muon.plan import MuonPlan
from tests.support.commands import call
from tierstore.paging import buffers


def findings(*paths: Path, path_entry: Path | None = None) -> tuple[int, list[dict[str, str]]]:
    """Return the exit code and the findings, of a process that also imports from ``path_entry``."""
    done = subprocess.run(
        [sys.executable, "-m", "tierstore.tools", "doctor", *paths, "--json"],
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
        f"tierstore 0.2.0, torch {torch.__version__}"
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


@pytest.mark.long
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


def metadata_of_another_muon(directory: Path) -> None:
    metadata = directory / "muon_optimizer-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: muon-optimizer\n")
    (metadata / "top_level.txt").write_text("muon\n")


@pytest.mark.long
def test_another_package_that_has_a_module_muon(tmp_path: Path) -> None:
    metadata_of_another_muon(tmp_path)
    code, found = findings(path_entry=tmp_path)
    assert code == 0
    slow = next(one for one in found if "muon-optimizer" in one["text"])
    assert slow["health"] == "slow"
    assert slow["remedy"].startswith("pip uninstall muon-optimizer, then pip install ")


@pytest.mark.parametrize("has_metadata", [False, True])
def test_a_module_muon_that_hides_the_optimizer(
    has_metadata: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_metadata:
        metadata_of_another_muon(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
    other = spec_from_file_location("muon", tmp_path / "muon.py")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: other)
    code, out, _ = call("doctor")
    assert code == 1
    owner = " of muon-optimizer" if has_metadata else ""
    assert f"bad  packages: `import muon` finds {tmp_path / 'muon.py'}{owner}, and not the" in out
    assert ("to do: pip uninstall muon-opt" if has_metadata else "to do: rename that file") in out


def have_gpu(monkeypatch: pytest.MonkeyPatch, folder: Path, lanes: str) -> None:
    """Let this machine have a GPU. Its nvidia-smi shows these lanes."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '0, {lanes}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(buffers, "_lock_pages", lambda *args: None)


def test_a_gpu_with_all_that_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    have_gpu(monkeypatch, tmp_path, "16, 16")
    monkeypatch.delattr(MuonPlan, "problem")  # As a class of another package.
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    code, out, _ = call("doctor")
    assert code == 0
    for line in (
        "GPU: 1 x a card",
        "kernels: steps of muon, torch have them",
        "page-locking: the GPU copies page buffers by itself",
        "bus of GPU 0: 16 of 16 lanes",
    ):
        assert f"good  {line}" in out


def test_a_gpu_without_triton_lanes_and_page_locking(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    have_gpu(monkeypatch, tmp_path, "4, 16")
    monkeypatch.setitem(sys.modules, "triton", None)  # CUDA builds of torch have brought it.
    for module in ("muon.kernels.gpu", "muon.kernels.gpu_encoded"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    for kernels in (rules.kernels_for, rules.encoded_kernels_for):
        kernels.cache_clear()
    monkeypatch.setattr(rules, "_problems", {})
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: False)
    code, out, _ = call("doctor")
    assert code == 0
    assert (
        "slow  kernels: steps take more passes over the memory of the GPU: muon: import of triton "
        "halted" in out
    )
    assert "slow  page-locking: CUDA does not page-lock page buffers" in out
    assert "slow  bus of GPU 0: 4 of 16 lanes: copies between host and GPU are slower" in out
    have_gpu(monkeypatch, tmp_path, "[N/A], [N/A]")
    assert "bus of GPU" not in call("doctor")[1]


def test_a_path_that_cannot_be_looked_at(tmp_path: Path) -> None:
    code, out, _ = call("doctor", tmp_path / ("a" * 300), tmp_path)
    assert code == 1
    assert "File name too long" in out
    assert f"{tmp_path}: engine " in out


@pytest.mark.long
def test_a_limit_of_locked_memory_within_a_namespace_of_users() -> None:
    """Root of a namespace has the capability, and the limit holds for it nevertheless."""
    namespace = ["unshare", "-Ur", "bash", "-c"]
    if subprocess.run(["bash", "-c", "unshare -Ur true"], capture_output=True).returncode:
        pytest.skip("this system makes no namespaces of users")
    program = f"ulimit -l 64; exec {sys.executable} -m tierstore.tools doctor"
    done = subprocess.run([*namespace, program], capture_output=True, text=True)
    assert "slow  locked memory: this user may lock 64.0 KiB" in done.stdout
