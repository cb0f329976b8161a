"""State in file-backed mappings beside pages, as a user runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bench_runs import report_of


@pytest.mark.long  # Programs on a full disk are processes that import torch.
@pytest.mark.timeout(1200)
def test_small_run(tmp_path: Path) -> None:
    report, printed = report_of("mapped.py", tmp_path)
    assert "On a full disk" in printed
    rows = {row["contender"]: row for row in report["rows"]}
    losses = {name: [step["loss"] for step in row["steps"]] for name, row in rows.items()}
    # One model, the same steps: all but the rounding of bfloat16 gradients is equal.
    assert losses["ours"] == losses["ours again"]
    for name in ("mapped", "mapped, in the page cache"):
        assert losses[name] == pytest.approx(losses["ours"], rel=1e-3)
        assert rows[name]["mapped_bytes"] == 12 * report["parameters"]
    if rows["mapped"]["read_bytes"]:  # A directory in memory has no drive.
        assert rows["mapped"]["read_bytes"] > 11 * report["parameters"]
        assert rows["mapped, in the page cache"]["read_bytes"] == 0
    found = report["full_disk"]
    if not found["ours"].startswith("not tried"):  # To mount a filesystem takes root.
        assert found["ours"].startswith("StorageError before the first step")
        assert found["mapped"] == "the process is killed by signal 7"
