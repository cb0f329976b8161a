"""The program of a day with a GPU, on the CPU, with a GPU that there is not, and without one."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.bench_runs import BENCH, run_benchmark
from tests.support.fake_cuda import fake_cuda

# By hand: embedding and head; in 2 layers q and o, k and v, gate, up and down, and norms; a norm.
PARAMETERS = 2 * 512 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 224 * 64 + 2 * 64) + 64
TINY = ("--size", "tiny", "--tokens", "48", "--steps", "2", "--device", "cpu")


@pytest.fixture(scope="module")
def contenders() -> ModuleType:
    return imported("gpu_contenders")


@pytest.fixture(scope="module")
def day() -> ModuleType:
    return imported("gpu_day")


def imported(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        return importlib.import_module(name)


def job(contenders: ModuleType, name: str, directory: Path, **options: Any) -> Any:
    given = {"tokens": 48, "micro_batches": 1, "steps": 2, **options}
    return contenders.Job(contender=name, size="tiny", device="cpu", directory=directory, **given)


def run_part(tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Return what a run wrote, and what it printed; it leaves nothing behind."""
    scratch, path = tmp_path / "device", tmp_path / "report.json"
    scratch.mkdir()
    paths = ("--directory", str(scratch), "--json", str(path))
    done = run_benchmark("gpu_day.py", *arguments, *TINY, *paths)
    assert done.returncode == 0, done.stderr
    assert list(scratch.iterdir()) == []
    return json.loads(path.read_text()), done.stdout


def test_state_and_gradients_rest_where_the_contender_says(
    contenders: ModuleType, tmp_path: Path
) -> None:
    """Losses are near the losses of torch's optimizers, which do not have masters."""

    def trained(name: str) -> Any:
        given = job(contenders, name, tmp_path / name, micro_batches=2, steps=1)
        return contenders.train(given)

    expected = trained("torch").losses
    for tier in ("device", "host", "nvme"):
        bytes_down, losses = [], []
        for name in (tier, f"{tier}-offload"):
            with fake_cuda() as cuda:
                found = trained(name)
            assert found.pages_in.keys() == {tier}
            assert found.parameters == PARAMETERS
            bytes_down.append(cuda.bytes_down)
            losses.append(found.losses)
        assert losses[0] == losses[1]
        assert losses[0][0] == expected[0]
        assert losses[0] == pytest.approx(expected, abs=0.03)
        assert losses[0] == sorted(losses[0], reverse=True)
        # 2 bytes of each gradient in each backward. Without files the first step copies its sums.
        copies = 2 * 2 if tier == "nvme" else 1 + 2
        assert bytes_down[1] - bytes_down[0] == copies * 2 * PARAMETERS


def test_micro_batches_have_the_gradient_of_all_their_tokens(
    contenders: ModuleType, tmp_path: Path
) -> None:
    def trained(**options: Any) -> list[float]:
        losses: list[float] = contenders.train(
            job(contenders, "adamw-host", tmp_path, **options)
        ).losses
        return losses

    # Sequences of a micro-batch, and micro-batches of a sequence, see the same tokens.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contenders, "SEQUENCE", 24)
        at_once = trained(tokens=48)
        in_turn = trained(tokens=24, micro_batches=2)
    assert in_turn == pytest.approx(at_once, abs=1e-3)
    assert in_turn[0] > in_turn[-1]


@pytest.mark.long
def test_a_trace_is_drawn(contenders: ModuleType, tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "timeline.png"
    contenders.train(job(contenders, "nvme", tmp_path, trace=trace))
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"forward", "backward", "tierstore::check"} <= names
    done = run_benchmark("timeline.py", "--trace", str(trace), "--picture", str(picture))
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_copied_pages_rest_on_the_host(day: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = imported("gpu_copies")
    monkeypatch.setattr(copies, "copy_by_torch", lambda *_: lambda: 1.0)
    with fake_cuda():
        (task,) = day.copies(torch.device("cpu"), tiny=True).values()
        assert task(1.0).pages_in.keys() == {"host"}


def test_time_is_kept_and_errors_are_rows(day: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task begins while there is as much time as the quickest took, and is told how much."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(day, "time", SimpleNamespace(monotonic=lambda: clock.now))
    told = []

    def task(seconds: float, error: Exception | None = None) -> Any:
        def do(left: float) -> Any:
            told.append(left)
            clock.now += seconds
            if error is not None:
                raise error
            return day.Checked(passed=1, skipped=0, failed=[])

        return do

    written: list[int] = []
    rows = day.do_all(
        {
            "slow": task(40),
            "absent": task(1, ModuleNotFoundError("No module named 'torchao'")),
            "quick": task(20),
            "stopped": task(30, TimeoutError()),
            "late": task(20),
        },
        100,
        lambda rows: written.append(len(rows)),
    )
    assert told == [100, 60, 59, 39]
    assert {row.name: row.error for row in rows} == {
        "slow": None,
        "absent": "ModuleNotFoundError: No module named 'torchao'",
        "quick": None,
        "stopped": "stopped after 39 s",
        "late": "not run: 9 s were left",
    }
    assert written == [1, 2, 3, 4, 5]


@pytest.mark.long
def test_a_training_is_stopped_at_the_end_of_the_time(tmp_path: Path) -> None:
    names = ("--only", "host", "--only", "torch")
    report, printed = run_part(tmp_path, "steps", *names, "--seconds", "0.3")
    assert [(row["name"], row["error"]) for row in report["rows"]] == [
        ("torch", "stopped after 0 s"),
        ("host", "not run: 0 s were left"),
    ]
    assert "host: not run: 0 s were left" in printed


@pytest.mark.long
def test_a_name_that_there_is_not_is_refused(tmp_path: Path) -> None:
    done = run_benchmark("gpu_day.py", "peers", *TINY, "--only", "absent")
    assert done.returncode == 2
    assert "absent" in done.stderr


@pytest.mark.long  # A process for each contender.
@pytest.mark.parametrize(
    ("part", "agreements"),
    [
        ("steps", {"muon": 5, "adamw": 2, "adamw in 8 bits": 1}),
        ("nvme", {"muon": 3}),
    ],
)
def test_all_trainings_of_ours(part: str, agreements: dict[str, int], tmp_path: Path) -> None:
    report, printed = run_part(tmp_path, part, "--micro-batches", "2")
    rows = {row["name"]: row for row in report["rows"]}
    assert {name: row["error"] for name, row in rows.items()} == dict.fromkeys(rows)
    found = report["agreements"]
    assert {each["rule"]: len(each["contenders"]) for each in found} == agreements
    assert all(each["differing"] == [] for each in found)
    assert "muon: losses are equal in " in printed
    for row in rows.values():
        found = row["result"]
        assert found["parameters"] == PARAMETERS
        assert len(found["losses"]) == 3
        assert found["losses"][0] == rows["host"]["result"]["losses"][0]
        assert found["gpu_gib"] is None
        assert 0.05 < found["host_gib"] < 4
        assert 0 < found["issued_s"] <= found["step_s"] < row["seconds"]
        assert found["tokens_per_s"] > 0
        assert found["device"] == report["machine"]["cpu"]


@pytest.mark.long
def test_peers(tmp_path: Path) -> None:
    """FSDP2 trains with float32 masters, which torch's AdamW steps: the losses are ours."""
    names = ("torchao", "fsdp2", "adamw-cpu")
    report, printed = run_part(tmp_path, "peers", *(f"--only={name}" for name in names))
    rows = {row["name"]: row for row in report["rows"]}
    assert rows.keys() == set(names)
    losses = rows["adamw-cpu"]["result"]["losses"]
    assert rows["fsdp2"]["result"]["losses"] == pytest.approx(losses, abs=1e-3)
    absent = importlib.util.find_spec("torchao") is None
    wanted = "ModuleNotFoundError: No module named 'torchao'" if absent else "AssertionError"
    assert rows["torchao"]["result"] is None
    assert rows["torchao"]["error"].startswith(wanted)
    assert f"torchao: {wanted}" in printed


def test_failed_tests_are_named(
    day: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(day, "has_package", lambda name: False)  # Processes of xdist begin slowly.
    (tmp_path / "test_some.py").write_text(
        "import os, pytest\n"
        "def test_right(): assert os.environ['GIVEN'] == 'x'\n"
        "def test_wrong(): assert False\n"
        "def test_absent(gone): pass\n"
        "@pytest.mark.skip\n"
        "def test_not_here(): pass\n"
    )
    found = day.run_pytest([str(tmp_path / "test_some.py")], {"GIVEN": "x"}, 60)
    assert (found.passed, found.skipped) == (1, 1)
    assert {name.rpartition(".")[2] for name in found.failed} == {"test_wrong", "test_absent"}


def test_tests_that_need_a_gpu_are_found(day: ModuleType, tmp_path: Path) -> None:
    found = day.checks(tmp_path)
    assert {"doctor", "tests/test_cuda.py", "tests/muon/test_kernels.py"} <= found.keys()
    assert {"tests/muon/test_gpu_kernels.py", "expandable segments"} <= found.keys()
    assert not any("bench" in name for name in found)


@pytest.mark.long
def test_doctor_and_tests(tmp_path: Path) -> None:
    report, _ = run_part(tmp_path, "tests", "--only=doctor", "--only=tests/test_cuda.py")
    doctor, tests = (row["result"] for row in report["rows"])
    assert doctor["passed"] > 0
    assert tests["failed"] == []
    ran, not_run = ("passed", "skipped") if torch.cuda.is_available() else ("skipped", "passed")
    assert tests[ran] > 50
    assert tests[not_run] == 0


@pytest.mark.long  # Products of bfloat16 take long on some CPUs.
def test_products_and_copies(tmp_path: Path) -> None:
    for part in ("newton_schulz", "copies"):
        folder = tmp_path / part
        folder.mkdir()
        report, printed = run_part(folder, part)
        results = [row["result"] for row in report["rows"]]
        assert [row["error"] for row in report["rows"]] == [None] * len(results)
        assert all(result["ratio"] == sorted(result["ratio"]) for result in results)
        assert ("224 x 64" if part == "newton_schulz" else "Pages of 1 MiB") in printed


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run_benchmark("gpu_day.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "not measured: there is no CUDA device\n"
