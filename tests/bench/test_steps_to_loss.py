"""Training of both optimizers over a grid, as a user runs it."""

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
        "steps_to_loss.py", "--small", "--json", str(path), "--pictures", str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    grid = [(run["optimizer"], run["matrix_rate"], run["other_rate"]) for run in report["grid"]]
    assert grid == [(name, rate, 0.01) for name in ("AdamW", "Muon") for rate in (0.001, 0.01)]
    for name, runs in report["best"].items():
        assert [run["seed"] for run in runs] == [0, 1]
        last = min(run["losses"][-1][1] for run in report["grid"] if run["optimizer"] == name)
        assert runs[0]["losses"][-1][1] == last
    # A byte drawn at random costs log(256) = 5.55 nats.
    assert all(0 < loss < 6 for run in report["grid"] for _, loss in run["losses"])
    first, second = (runs[0]["losses"][0][1] for runs in report["best"].values())
    assert first != second
    assert (tmp_path / "steps-to-loss.svg").stat().st_size > 1000
