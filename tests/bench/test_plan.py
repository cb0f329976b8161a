from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bench_runs import report_of
from tierstore.storage.select import choose_storage


@pytest.mark.long  # The machine is probed, which takes its time.
@pytest.mark.timeout(1200)
def test_small_run(tmp_path: Path) -> None:
    storage, _ = choose_storage(tmp_path)
    storage.close()
    if not getattr(storage, "direct", False):
        pytest.skip("a plan needs the rate of reads, which only O_DIRECT tells")
    report, printed = report_of("plan.py", tmp_path)
    one, two = report["rows"]
    assert "2 ranks FSDP" in printed
    assert (len(one["measured"]), len(two["measured"])) == (1, 2)
    for row in (one, two):
        for predicted, measured in zip(row["predicted"], row["measured"], strict=True):
            found = measured["nbytes"]
            for name in ("files", "host", "device", "read", "written"):
                assert predicted[name] == found[name], name
            assert found["read"] > 0
            assert found["memory"] > 0
            if measured["kernel_written"]:  # A directory in memory has no drive.
                assert measured["kernel_read"] == pytest.approx(found["read"], rel=0.05)
                assert measured["kernel_written"] == pytest.approx(found["written"], rel=0.05)
            assert min(measured["step_s"]) > 0
            assert {"step", "muon::adamw"} <= measured["ranges_s"].keys()
        assert row["error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1)
        assert (row["drift"], len(row["rates"])) == (0.0, 2)
    # Two steps from one commit to the next, and two cycles of them.
    assert (len(one["measured"][0]["step_s"]), len(two["measured"][0]["step_s"])) == (2, 4)
