from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from tests.support.bench_runs import BENCH, run_benchmark


def size_of(picture: Path) -> tuple[int, int]:
    """Return width and height, from the header of a PNG."""
    header = picture.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")


def test_small_run(tmp_path: Path) -> None:
    scratch, picture = tmp_path / "device", tmp_path / "picture.png"
    scratch.mkdir()
    done = run_benchmark(
        "timeline.py", "--small", "--directory", str(scratch), "--picture", str(picture)
    )
    assert done.returncode == 0, done.stderr
    assert min(size_of(picture)) > 100
    assert list(scratch.iterdir()) == []


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("category", "name"),
    [
        ("user_annotation", "tierstore::stall"),
        ("kernel", "void at::native::vectorized_elementwise_kernel<4>(int)"),
        ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)"),
        ("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)"),
    ],
)
def test_a_trace_of_another_run(category: str, name: str, tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.png"
    event = {"ph": "X", "cat": category, "name": name, "ts": 1, "dur": 2}
    trace.write_text(json.dumps({"traceEvents": [event]}))
    done = run_benchmark("timeline.py", "--trace", str(trace), "--picture", str(picture))
    assert done.returncode == 0, done.stderr
    assert min(size_of(picture)) > 100


def test_checksums_have_the_lane_of_their_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    timeline = importlib.import_module("timeline")
    trace = tmp_path / "trace.json"
    events = [
        {"ph": "X", "cat": "user_annotation", "name": name, "ts": 1, "dur": 2, "tid": tid}
        for name, tid in (
            ("tierstore::checksums", 7),
            ("tierstore::check", 7),
            ("tierstore::checksums", 8),
            ("tierstore::swap_out 3", 9),
        )
    ]
    trace.write_text(json.dumps({"traceEvents": events}))
    kinds = [span.kind for span in timeline.read_spans(trace)]
    assert kinds == ["checksums", "check", "late checksums", "swap_out"]
    assert timeline.KINDS["checksums"][0] != timeline.KINDS["late checksums"][0]


def test_a_trace_without_ranges_is_refused(tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.png"
    event = {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 1, "dur": 2}
    trace.write_text(json.dumps({"traceEvents": [event]}))
    done = run_benchmark("timeline.py", "--trace", str(trace), "--picture", str(picture))
    assert done.returncode == 2
    assert "ranges of tierstore" in " ".join(done.stderr.replace("│", " ").split())
    assert not picture.exists()
