"""Device memory of a training step, and bytes over the bus, with gradients that leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import muon
import tierstore
from tests.support import training
from tests.support.fake_cuda import fake_cuda
from tests.support.kernel import peak_of
from tierstore.paging import buffers, host_gradients, page_table
from tierstore.paging.device import Device

LAYERS, WIDTH = 12, 256
MATRIX = 2 * WIDTH * WIDTH  # Bytes in bfloat16.
NEWTON_SCHULZ = 6 * MATRIX
"""Input, three products, and temporaries, in bfloat16."""


class Gpu(Device):
    """A device of plain memory, beside which arenas are the host."""

    is_host = False


class Model(nn.Module):
    """Matrices of one size, a few activations, and a checkpoint for each layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = inputs + functional.relu(layer(inputs))
        return inputs.float().square().mean()


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_table, "device_of", lambda groups: torch.device("cuda"))
    monkeypatch.setattr(page_table, "open_device", lambda device: Gpu())
    monkeypatch.setattr(buffers, "_lock_pages", lambda *args: None)
    monkeypatch.setattr(host_gradients, "LEAVING_BYTES_MAX", 2 * MATRIX)


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize("backwards", [1, 3])
def test_a_training_step_has_few_gradients_on_the_device(backwards: int, tmp_path: Path) -> None:
    """Beside parameters: what leaves, slabs and staging, Newton-Schulz, and activations."""

    def peak(**options: Any) -> tuple[int, int]:
        model = Model().to(torch.bfloat16)
        with tierstore.TierStore(
            tmp_path / str(len(options)), page_bytes=8 * MATRIX, buffers=3, **options
        ) as store:
            group = {"params": list(model.named_parameters()), "algorithm": "muon"}
            optimizer = muon.Muon([group], store=store)
            optimizer.restore()

            def step() -> None:
                for _ in range(backwards):
                    model(torch.ones(4, WIDTH, dtype=torch.bfloat16)).backward()
                optimizer.step()
                optimizer.zero_grad()

            step()
            return peak_of(step), store.stats().device_bytes_peak

    gradients = LAYERS * MATRIX
    stays, _ = peak()
    leaves, in_slabs = peak(offload_gradients="backward", free_gradients=True)
    in_flight = 2 * MATRIX + (backwards > 1) * MATRIX  # The sum beside what autograd adds.
    activations = LAYERS * 4 * WIDTH * 16
    assert stays >= gradients
    assert leaves <= max(in_flight + MATRIX, NEWTON_SCHULZ) + activations
    assert leaves < 0.7 * gradients
    assert in_slabs > 0


@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("step_on", [None, "cpu"])
def test_bytes_over_the_bus(step_on: str | None, backwards: int, tmp_path: Path) -> None:
    """2 down and 2 up for each bfloat16 parameter and backward, and pages once each way."""
    with fake_cuda() as cuda:
        parameters = training.make_parameters(torch.bfloat16)
        numel = sum(parameter.numel() for parameter in parameters.values())
        with tierstore.TierStore(
            tmp_path, page_bytes=16384, buffers=2, offload_gradients="backward", step_on=step_on
        ) as store:
            groups = training.make_groups(parameters)
            optimizer = muon.Muon(groups, store=store, ns_dtype=torch.float32)
            optimizer.restore()
            for _ in range(2):
                optimizer.zero_grad()
                cuda.bytes_up = cuda.bytes_down = 0
                for _ in range(backwards):
                    sum(p.float().sum() for p in parameters.values()).backward()
                optimizer.step()
            pages = store.stats().state_bytes
    in_sums = 2 * numel * (backwards - 1)
    if step_on is None:
        assert cuda.bytes_up == in_sums + 2 * numel + pages
        assert cuda.bytes_down == 2 * numel * backwards + pages
    else:  # Parameters go down and up.
        assert cuda.bytes_up == in_sums + 2 * numel
        assert cuda.bytes_down == 2 * numel * backwards + 2 * numel
