from __future__ import annotations

from pathlib import Path

from tests.support.bench_runs import report_of


def test_small_run(tmp_path: Path) -> None:
    report, printed = report_of("step.py", tmp_path)
    muon, adamw = report["comparisons"]
    assert muon["title"] in printed
    assert adamw["title"] in printed
    # bf16 parameters: a master and one bf16 state, or two of float32; and a little framing.
    assert 6 <= muon["state_bytes"] / muon["parameters"] <= 7
    assert 12 <= adamw["state_bytes"] / adamw["parameters"] <= 13
    for comparison in (muon, adamw):
        rows = {row["case"]: row for row in comparison["rows"]}
        assert list(rows) == [
            "in memory",
            "I/O alone",
            "on NVMe",
            comparison["bound"] + " again",
        ]
        assert set(rows[comparison["bound"]]["ratio"]) == {1.0}
        for row in rows.values():
            assert row["ratio"][0] > 0
            assert row["ratio"] == sorted(row["ratio"])
            assert min(row["backward_s"], row["step_s"], row["drain_s"], row["commit_s"]) > 0


def test_muon_beside_adamw(tmp_path: Path) -> None:
    report, printed = report_of("step.py", tmp_path, "--beside", "adamw")
    (comparison,) = report["comparisons"]
    assert comparison["title"] in printed
    rows = {row["case"]: row for row in comparison["rows"]}
    assert list(rows) == ["AdamW", "Muon", "AdamW again"]
    # Masters and two moments in float32; masters and momentum in bfloat16.
    for name, nbytes in (("AdamW", 12), ("Muon", 6)):
        for moved in ("read_bytes", "written_bytes"):
            per_parameter = rows[name][moved] / comparison["parameters"]
            assert nbytes <= per_parameter <= nbytes * 1.1
