from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.benching import report_of, run_benchmark


def test_small_run_on_the_cpu(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    report, printed = report_of("gpu.py", tmp_path, "--device", "cpu", "--trace", str(trace))
    assert "Pages of 1 MiB" in printed
    assert report["copies"]["ratio"] == sorted(report["copies"]["ratio"])
    assert report["copies"]["ratio"][0] > 0
    rows = {row["case"]: row for row in report["steps"]["rows"]}
    assert list(rows) == [
        "on the GPU",
        "in host memory",
        "on NVMe",
        "on NVMe, stepped on the host",
        "on the GPU again",
    ]
    assert set(rows["on the GPU"]["ratio"]) == {1.0}
    assert min(row["step_s"] for row in rows.values()) > 0
    picture = tmp_path / "timeline.png"
    done = run_benchmark("timeline.py", "--trace", str(trace), "--picture", str(picture))
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so() -> None:
    done = run_benchmark("gpu.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "not measured: there is no CUDA device\n"
