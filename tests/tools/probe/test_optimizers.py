"""Optimizers from entry points of installed packages, and Muon's own measurement."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch

from muon.plan import MuonPlan
from tierstore.errors import PlanError
from tierstore.tools.plan.classes import ClassPlan
from tierstore.tools.probe.optimizers import GROUP, load_optimizers, optimizer_rates

ROOT = Path(__file__).resolve().parents[3]


def install(path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str) -> None:
    """Install a package whose entry point is the class Plan of a module."""
    (path / f"{name}_plan.py").write_text(module)
    metadata = path / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {name}_plan:Plan\n")
    monkeypatch.syspath_prepend(path)


def test_an_installed_optimizer_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for own in (MuonPlan, ClassPlan):
        monkeypatch.setattr(own, "rates", lambda self, device: ())  # They take their time.
    rate_text = "('roar', (1, 2, 3), 'float32'), [3.0, 1.0, 2.0]"
    module = f"class Plan:\n def rates(self, device): yield {rate_text}\n"
    install(tmp_path, monkeypatch, "lions", module)
    (rate,) = [rate for rate in optimizer_rates(torch.device("cpu")) if rate.optimizer == "lions"]
    assert (rate.work, rate.shape, rate.dtype, rate.device) == ("roar", (1, 2, 3), "float32", "cpu")
    assert (rate.seconds.median, rate.seconds.lowest, rate.seconds.highest) == (2, 1, 3)


@pytest.mark.parametrize("module", ["import absent_module\n", "Plan = None\n", ""])
def test_an_optimizer_that_cannot_be_loaded_is_named(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"broken{len(module)}"  # A module is imported once per process.
    install(tmp_path, monkeypatch, name, module)
    with pytest.raises(PlanError, match=rf"the optimizer '{name}' .*cannot be loaded.*uninstall"):
        load_optimizers()


def test_own_entry_points() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][GROUP] == {
        "muon": "muon.plan:MuonPlan",
        "torch": "tierstore.tools.plan.classes:ClassPlan",
    }


@pytest.mark.long  # Rounds of a quarter of a second, and longer ones on a slow CPU.
@pytest.mark.timeout(1200)
def test_muon_measures_several_kinds_of_shapes() -> None:
    rates = list(MuonPlan().rates(torch.device("cpu")))
    shapes = [shape for (work, shape, _), _ in rates if work == "newton_schulz"]
    assert len(shapes) >= 5
    assert any(rows < 512 and count == 1 for count, rows, _ in shapes)
    assert any(rows == columns >= 512 for _, rows, columns in shapes)
    assert any(columns == 4 * rows for _, rows, columns in shapes)
    assert any(count > 1 for count, _, _ in shapes)
    assert all(dtype in ("float32", "bfloat16") for (_, _, dtype), _ in rates)
    assert all(min(seconds) > 0 for _, seconds in rates)
    elementwise = {(work, dtype) for (work, _, dtype), _ in rates if work != "newton_schulz"}
    works, dtypes = ("adamw_elements", "muon_elements"), ("float32", "bfloat16")
    assert elementwise == {
        *((work, dtype) for work in works for dtype in dtypes),
        *(
            (f"{work}_of_encoded_{kind}", "bfloat16")
            for work in works
            for kind in ("masters", "states")
        ),
    }


@pytest.mark.long  # Many steps of 4M elements.
def test_classes_of_torch_are_measured() -> None:
    planner = ClassPlan()
    rates = list(planner.rates(torch.device("cpu")))
    for dtype, nbytes in (("float32", 4), ("bfloat16", 2)):
        found = {work: shape for (work, shape, d), _ in rates if d == dtype}
        assert found.keys() == {*planner.algorithms}
        for name, states in (("SGD", 0), ("RMSprop", 1), ("AdamW", 2)):
            shape = found[f"torch.optim.{name}"]
            assert shape[0] == 1 + states
            # Gradient and parameter, which is also written; master and states likewise.
            moved = shape[2] * (3 * nbytes + 8 * (1 + states))
            assert planner.operations((name, shape, dtype)) == (0, moved)
    assert all(min(seconds) > 0 for _, seconds in rates)
