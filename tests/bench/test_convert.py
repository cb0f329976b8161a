from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bench_runs import report_of


@pytest.mark.long  # Each turn is a process that imports torch.
@pytest.mark.timeout(1200)
def test_small_run(tmp_path: Path) -> None:
    report, printed = report_of("convert.py", tmp_path)
    assert "From DCP to torch.save" in printed
    rows = {row["case"]: row for row in report["dcp"]}
    assert list(rows) == ["cp, fsync", "tierstore convert", "dcp_to_torch_save, fsync"]
    for row in rows.values():
        assert row["seconds"] > 0
        assert row["written_bytes"] > report["state_bytes"]
        assert all(ratio > 0 for ratio in row["ratios"])
    assert rows["tierstore convert"]["verification_s"] > 0
    assert rows["cp, fsync"]["ratios"] == [1.0] * 5
