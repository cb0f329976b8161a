from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bench_runs import report_of


@pytest.mark.long
def test_small_run(tmp_path: Path) -> None:
    report, printed = report_of("checkpoint.py", tmp_path)
    for word in ("Saving", "dcp.load of", "Publishing, by size"):
        assert word in printed
    assert [row["case"] for row in report["saving"]] == [
        "store.checkpoint()",
        "dcp.save",
        "dcp.save again",
        "torch.save, fsync",
    ]
    assert [row["case"] for row in report["loading"]] == [
        "of dcp.save",
        "of dcp.save again",
        "published",
    ]
    for row in report["saving"] + report["loading"]:
        assert 0 < row["ratio_min"] <= row["ratio_median"] <= row["ratio_max"]
        assert 0 < row["seconds_min"] <= row["seconds"] <= row["seconds_max"]
    sizes = [(point["state_bytes"], point["pages"]) for point in report["points"]]
    assert sizes[0][1] < sizes[1][1]
    assert sizes[0][0] < sizes[2][0]
