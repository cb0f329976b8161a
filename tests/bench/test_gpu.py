from __future__ import annotations

import importlib
import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.support.bench_runs import BENCH, report_of, run_benchmark
from tests.support.fake_cuda import fake_cuda


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
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"forward", "backward", "tierstore::check"} <= names
    picture = tmp_path / "timeline.png"
    done = run_benchmark("timeline.py", "--trace", str(trace), "--picture", str(picture))
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_pages_rest_where_the_report_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """State in host memory is not on the GPU."""
    monkeypatch.syspath_prepend(str(BENCH))
    gpu = importlib.import_module("gpu")
    plan, cpu = gpu.PLANS["small"], torch.device("cpu")
    monkeypatch.setattr(gpu, "copy_by_torch", lambda *_: lambda: 1.0)
    with fake_cuda():
        assert gpu.measure_copies(cpu, plan).pages_in.keys() == {"host"}
        with ExitStack() as stack:
            contenders = gpu.make_contenders(tmp_path, stack, plan, cpu)
            assert {case: [*each.store.stats().pages_in] for case, each in contenders.items()} == {
                "on the GPU": ["device"],
                "in host memory": ["host"],
                "on NVMe": ["nvme"],
                "on NVMe, stepped on the host": ["nvme"],
            }


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so() -> None:
    done = run_benchmark("gpu.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "not measured: there is no CUDA device\n"
