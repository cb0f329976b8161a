"""Training with states in fewer bytes, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.bench_runs import run_benchmark


@pytest.mark.long  # Trainings are processes that import torch.
@pytest.mark.timeout(1200)
def test_small_run(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = run_benchmark(
        "fewer_bytes.py", "--small", "--json", str(path), "--pictures", str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    losses = {(run["form"], run["seed"]): run["losses"] for run in report["runs"]}
    forms = list(report["differences"])
    assert list(losses) == [(form, seed) for form in forms for seed in (0, 1)]
    # A byte drawn at random costs log(256) = 5.55 nats.
    assert all(0 < loss < 7 for curve in losses.values() for _, loss in curve)
    assert report["differences"]["full"] == [0.0, 0.0]
    for form in forms[2:]:  # After few steps only the rounding of halves differs for remainders.
        assert losses[form, 0] != losses["full", 0], form
    assert (tmp_path / "fewer-bytes.svg").stat().st_size > 1000
