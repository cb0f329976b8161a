"""``tierstore probe``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.support.commands import call, call_process
from tierstore.tools.probe.optimizers import Work
from tierstore.tools.probe.result import Probe

ROOT = Path(__file__).resolve().parents[3]


class QuickPlan:
    """An optimizer that measures nothing: what Muon computes takes a minute on some CPUs."""

    def rates(self, device: torch.device) -> Iterator[tuple[Work, list[float]]]:
        yield ("roar", (1, 2, 3), "float32"), [0.001]


@pytest.mark.long  # Muon measures itself.
@pytest.mark.timeout(1200)
def test_json_is_a_probe(tmp_path: Path) -> None:
    done = call_process("probe", tmp_path, "--page-bytes", "1MiB", "--json")
    assert done.returncode == 0
    probe = Probe.from_json(done.stdout)
    assert (probe.machine.host, probe.together) == (os.uname().nodename, None)
    assert probe.machine.kernel == f"Linux {os.uname().release}"
    (directory,) = probe.directories
    assert (directory.path, directory.page_bytes) == (str(tmp_path), 2**20)
    assert os.listdir(tmp_path) == []
    announced = f"tierstore: writes at most 68.6 MiB to {tmp_path}, and removes them\n"
    assert announced in done.stderr
    # 8 pages once, then 5 rounds of 8 and of 4; 9 manifests; the choice of the engine.
    assert directory.written_bytes <= 68 * 2**20 + 9 * 2**16 + 4096


def test_the_table_says_what_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "tierstore.tools.probe"
    monkeypatch.setattr(f"{module}.optimizers.load_optimizers", lambda: {"lions": QuickPlan()})
    monkeypatch.setattr(f"{module}.compute._BYTES", 2**20)
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    options = ("--page-bytes", "256KiB", "--sustained", "1MiB")
    code, out, _ = call("probe", *paths, *options)
    assert code == 0
    lines = out.splitlines()
    for path in paths:
        assert any(line.startswith(f"{path} mixed ") for line in lines)
        assert any(line.startswith(f"{path} sustained ") for line in lines)
        assert any(line.startswith(f"{path} commit ") and line.split()[-1] == "9" for line in lines)
        assert "unknown (" in out or "is unknown: " in out or "% used" in out
    assert any(line.startswith("all directories write ") for line in lines)
    assert any(line.startswith("roar 1x2x3 float32 cpu ") for line in lines)


def test_wrong_directories_are_2(tmp_path: Path) -> None:
    for arguments in ((tmp_path / "absent",), (tmp_path, tmp_path), ()):
        code, out, err = call("probe", *arguments)
        assert (code, out) == (2, "")
        assert "Traceback" not in err
    assert call("probe", tmp_path, "--sustained", "much")[0] == 2
    assert not (tmp_path / "absent").exists()


def test_a_disk_that_is_too_full_is_1(tmp_path: Path) -> None:
    code, out, err = call("probe", tmp_path, "--sustained", "1000000TiB", "--json")
    assert code == 1
    assert "No space left on device" in json.loads(out)["error"]
    assert "writes at most" not in err
    assert os.listdir(tmp_path) == []


def allocated_bytes(directory: Path) -> int:
    total = 0
    for path in directory.iterdir():
        with suppress(FileNotFoundError):  # The file of the choice of the engine.
            total += path.stat().st_size
    return total


@pytest.mark.long  # Muon measures itself.
@pytest.mark.timeout(1200)
def test_a_killed_probe_leaves_nothing(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tierstore.tools",
        "probe",
        str(tmp_path),
        "--sustained",
        "1GiB",
    ]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as child:
        assert child.stderr is not None
        while allocated_bytes(tmp_path) < 2**30:
            assert child.poll() is None
        child.send_signal(signal.SIGKILL)
        # The process that removes the files has the same stderr, which ends with it.
        assert b"Error" not in child.stderr.read()
    assert child.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []
