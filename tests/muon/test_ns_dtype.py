"""ns_dtype="auto": measured once and kept by the run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import muon
import tierstore
from muon import newton_schulz
from tests.support import training


@pytest.mark.parametrize("step_on", [None, "cpu"])
def test_ns_dtype_is_measured_once_and_kept_by_the_run(
    step_on: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run keeps its dtype, whatever a new measurement would say."""
    shapes: list[tuple[tuple[int, ...], str]] = []

    def measured(dtype: torch.dtype) -> None:
        def fastest(shape: tuple[int, ...], device: torch.device) -> torch.dtype:
            shapes.append((tuple(shape), device.type))
            return dtype

        monkeypatch.setattr(newton_schulz, "fastest_dtype", fastest)

    parameters = training.make_parameters()
    measured(torch.float32)
    with tierstore.TierStore(tmp_path, step_on=step_on) as store:
        optimizer = muon.Muon(training.make_groups(parameters), store=store, ns_dtype="auto")
        assert optimizer.param_groups[0]["ns_dtype"] == torch.float32
        assert shapes == [((17, 61), "cpu"), ((24, 40), "cpu")]  # The two Muon groups.
        training.train(optimizer, parameters, range(1, 3))
    expected = training.make_parameters()
    reference = muon.Muon(training.make_groups(expected), ns_dtype=torch.float32)
    training.train(reference, expected, range(1, 5))
    measured(torch.bfloat16)
    with tierstore.TierStore(tmp_path, resume=True, step_on=step_on) as store:
        optimizer = muon.Muon(training.make_groups(parameters), store=store, ns_dtype="auto")
        assert optimizer.restore() == 2
        assert optimizer.param_groups[0]["ns_dtype"] == torch.float32
        training.train(optimizer, parameters, range(3, 5))
    assert all(torch.equal(parameters[name], expected[name]) for name in expected)


def test_float32_is_chosen_if_it_is_much_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    real = newton_schulz.orthogonalize_
    clock, calls = 0.0, 0
    slow: dict[torch.dtype, float] = {}
    threads_seen = set[int]()

    def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
        nonlocal clock, calls
        calls += 1
        threads_seen.add(torch.get_num_threads())
        # Other work occupies the processor during several calls of both dtypes.
        clock += slow.get(matrix.dtype, 1.0) + (1000.0 if calls in range(5, 10) else 0.0)
        return real(matrix)

    monkeypatch.setattr(newton_schulz, "orthogonalize_", orthogonalize)
    monkeypatch.setattr(newton_schulz.time, "perf_counter", lambda: clock)
    threads = torch.get_num_threads()
    for dtype, slow in (
        (torch.bfloat16, {torch.float32: 300.0}),
        (torch.bfloat16, {torch.bfloat16: 1.4}),  # Within noise.
        (torch.float32, {torch.bfloat16: 1.7}),
        (torch.float32, {torch.bfloat16: 5000.0}),
    ):
        calls = 0
        assert newton_schulz.fastest_dtype((1000, 30), torch.device("cpu")) == dtype
        assert calls == (4 if slow.get(torch.bfloat16) == 5000.0 else 16)
        assert threads_seen == {1}
        assert torch.get_num_threads() == threads
    with pytest.raises(ValueError, match="Muon needs"):
        muon.Muon([torch.nn.Parameter(torch.ones(2))], ns_dtype="auto")
    with pytest.raises(ValueError, match="ns_dtype must be one of"):
        muon.Muon([torch.nn.Parameter(torch.ones(2, 2))], ns_dtype="fast")
