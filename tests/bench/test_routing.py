"""Routing of models of other libraries, if they are installed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.support.bench_runs import BENCH, run_benchmark, run_without

LIBRARIES = ("transformers", "timm", "torchvision", "diffusers")
MISSING = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]


@pytest.mark.long
def test_says_how_to_install_the_libraries(tmp_path: Path) -> None:
    report_path = tmp_path / "report.json"
    done = run_without("timm", "routing.py", report_path)
    assert done.returncode == 0, done.stderr
    assert "not measured: not installed:" in done.stdout
    assert "timm" in done.stdout
    assert "pip install" in done.stdout
    assert not report_path.exists()


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_small_run(tmp_path: Path) -> None:
    report_path = tmp_path / "report.json"
    done = run_benchmark("routing.py", "--small", "--json", str(report_path))
    assert done.returncode == 0, done.stderr
    rows = json.loads(report_path.read_text())["rows"]
    assert [row["library"] for row in rows] == list(LIBRARIES)
    for row in rows:
        assert row["model"] in done.stdout
        assert row["elements"] == sum(row["elements_by_rule"].values())
        assert row["elements_by_rule"].keys() == row["names_by_rule"].keys()


def test_results_cover_40_models_of_each_library() -> None:
    rows = json.loads((BENCH / "results" / "routing.json").read_text())["rows"]
    assert len(rows) == 40
    assert {row["library"] for row in rows} == set(LIBRARIES)
