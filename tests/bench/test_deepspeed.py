from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.bench_runs import BENCH, run_without


@pytest.mark.long
def test_says_how_to_install_deepspeed(tmp_path: Path) -> None:
    report_path = tmp_path / "report.json"
    done = run_without("deepspeed", "deepspeed_step.py", report_path)
    assert done.returncode == 0, done.stderr
    assert "not measured: DeepSpeed is not installed" in done.stdout
    assert "pip install --no-build-isolation" in done.stdout
    assert not report_path.exists()


@pytest.mark.long  # DeepSpeed compiles in each of its processes.
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)
def test_small_run(tmp_path: Path) -> None:
    scratch = tmp_path / "device"
    scratch.mkdir()
    report_path = tmp_path / "report.json"
    paths = ("--directory", str(scratch), "--json", str(report_path))
    done = subprocess.run(
        [sys.executable, str(BENCH / "deepspeed_step.py"), "--small", *paths],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(report_path.read_text())
    assert [trial["error"] for trial in report["trials"]] == [None] * len(report["trials"])
    assert [(row["rule"], row["contender"]) for row in report["rows"]] == [
        (rule, contender)
        for rule in ("muon", "adamw")
        for contender in ("DeepSpeed", "ours", "ours again", "ours, fewest bytes")
    ]
    for row in report["rows"]:
        assert row["whole_ratio"] == sorted(row["whole_ratio"])
        assert row["peak_bytes"] > 0
        assert row["read_bytes"] > 0
        assert row["written_bytes"] > 0
        # The same model, batch and rule give the same loss, except for rounding.
        theirs = next(other for other in report["rows"] if other["rule"] == row["rule"])
        for step, their_step in zip(row["steps"], theirs["steps"], strict=True):
            assert step["loss"] == pytest.approx(their_step["loss"], rel=0.02)
    assert list(scratch.iterdir()) == []
