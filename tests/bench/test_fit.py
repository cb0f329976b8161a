from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bench_runs import report_of
from tierstore.units import parse_bytes


@pytest.mark.long
@pytest.mark.timeout(600)
def test_small_run(tmp_path: Path) -> None:
    report, printed = report_of("fit.py", tmp_path)
    assert "Jobs that fit refused" in printed
    one, two = report["rows"]
    assert "ns_dtype" not in one["settings"]
    assert "layers again, 1024 logits" in two["settings"]
    for row in (one, two):
        measured = row["measured"]
        assert measured["failure"] is None
        assert len(measured["step_s"]) == row["case"]["steps"]
        assert min(measured["step_s"]) > 0
        # Of a model this small, most memory is of Python and torch.
        assert row["memory_returned"] < row["predicted_memory"] < 2 * row["memory_returned"]
        assert row["predicted_memory"] == sum(row["parts"].values())
        if measured["written"]:  # A directory in memory has no drive.
            assert row["predicted_written"] == pytest.approx(measured["written"], rel=0.05)
        assert row["predicted_written"] == pytest.approx(measured["store_written"], rel=0.05)
        assert row["step_error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1)
    (refused,) = report["refused"]
    assert refused["failure"] is not None
    assert (refused["least_failure"], refused["change_failure"]) == (None, None)
    assert parse_bytes(refused["least"]) > refused["case"]["host_memory"]
    assert refused["change"] == "4.0 GiB more host memory"
