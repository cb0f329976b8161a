from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.bench_runs import BENCH, report_of, run_benchmark

PARTS = ["page", "exchange", "newton_schulz", "apply", "spread", "other"]


@pytest.mark.long  # Worlds of several sizes.
@pytest.mark.timeout(1200)
def test_small_run(tmp_path: Path) -> None:
    report, printed = report_of("distributed.py", tmp_path)
    assert "all-gather" in printed
    rows = {(row["ranks"], row["case"]): row for row in report["rows"]}
    assert list(rows) == [
        (1, "sharded"),
        (1, "sharded again"),
        (1, "replicated"),
        (2, "sharded"),
        (2, "sharded again"),
        (2, "sharded, all-gather"),
        (2, "replicated"),
    ]
    for (ranks, case), row in rows.items():
        parts = row["parts_s"]
        assert list(parts) == PARTS
        assert min(parts.values()) >= 0
        # One rank tells none, copies are not exchanged, and shards are on one rank each.
        assert (parts["exchange"] > 0) == (ranks > 1 and case != "replicated")
        assert parts["newton_schulz"] > 0
        if ranks > 1 and case == "replicated":
            assert parts["spread"] > 0
        assert row["ratio"] == sorted(row["ratio"])
        assert row["ratio_to_one_rank"][0] > 0
    for ranks in (1, 2):
        assert set(rows[ranks, "sharded"]["ratio"]) == {1.0}


@pytest.mark.long
def test_pipeline_is_drawn(tmp_path: Path) -> None:
    scratch, picture = tmp_path / "device", tmp_path / "picture.png"
    scratch.mkdir()
    paths = ("--directory", str(scratch), "--picture", str(picture))
    done = run_benchmark("pipeline.py", "--small", *paths)
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert list(scratch.iterdir()) == []


def test_a_range_counts_without_what_lies_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    distributed = importlib.import_module("distributed")
    events = [
        SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))
        for name, start, end in (
            ("bench::step", 0, 1000e3),
            ("muon::gather", 100e3, 300e3),
            ("tierstore::stall", 150e3, 200e3),
            ("aten::copy_", 210e3, 220e3),
            ("muon::scatter", 300e3, 400e3),
            ("muon::newton_schulz", 500e3, 900e3),
        )
    ]
    found = distributed.split(SimpleNamespace(events=lambda: events))
    expected = {"page": 0.05, "exchange": 0.25, "newton_schulz": 0.4, "other": 0.3}
    assert found == pytest.approx({"apply": 0.0, "spread": 0.0, **expected})
