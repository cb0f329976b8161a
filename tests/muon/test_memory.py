"""Memory by place: the same as counters of the store, sizes of files and of tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import muon
import tierstore
from muon.newton_schulz import numel_needed
from tests.support.fake_cuda import fake_cuda

SHAPES = {"wide": (64, 256), "square": (128, 128), "bias": (300,)}


def optimizer_on(store: tierstore.TierStore) -> tuple[muon.Muon, dict[str, torch.nn.Parameter]]:
    parameters = {
        name: torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))
        for name, shape in SHAPES.items()
    }
    groups = [
        {"params": [(n, p) for n, p in parameters.items() if p.ndim == 2]},
        {"params": [("bias", parameters["bias"])], "algorithm": "adamw"},
    ]
    return muon.Muon(groups, store=store), parameters


def step(optimizer: muon.Muon, parameters: dict[str, torch.nn.Parameter]) -> None:
    torch.stack([p.float().square().sum() for p in parameters.values()]).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "options",
    [
        {"page_bytes": 4096, "buffers": 3},
        {"page_bytes": 4096, "host_memory": "1MiB"},
        {"page_bytes": 4096, "buffers": 3, "commit_every": None},
    ],
    ids=str,
)
def test_on_the_host(options: dict[str, Any], tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path, **options) as store:
        optimizer, parameters = optimizer_on(store)
        step(optimizer, parameters)
        store.synchronize()
        found = store.pages.memory()
        values = sum(parameter.nbytes for parameter in parameters.values())
        assert found["GPU"] == {}
        assert found["host"].pop("parameters") == found["host"].pop("gradients") == values
        assert sum(found["host"].values()) == store.stats().host_bytes_peak
        files = sum(path.stat().st_size for path in tmp_path.rglob("page-*"))
        assert found["NVMe"] == {"files of pages": files}
        text = optimizer.memory()
    host, nvme = text.splitlines()
    assert nvme == f"NVMe {files / 1024:.1f} KiB: files of pages {files / 1024:.1f} KiB"
    matrices = 2 * max(numel_needed(SHAPES[name], 1, on_gpu=False) for name in ("wide", "square"))
    assert f"matrices of Newton-Schulz {matrices / 1024:.1f} KiB" in host


def test_before_the_first_step_and_after_the_end() -> None:
    with tierstore.TierStore(None) as store:
        optimizer, parameters = optimizer_on(store)
        assert optimizer.memory() == "nothing is laid out before the first step or restore()"
        step(optimizer, parameters)
        assert optimizer.memory().startswith("host ")
    with pytest.raises(tierstore.StoreClosedError):
        optimizer.memory()


def test_beside_a_gpu(tmp_path: Path) -> None:
    options: dict[str, Any] = {"page_bytes": 4096, "buffers": 3, "device_memory": "128KiB"}
    with (
        fake_cuda(),
        tierstore.TierStore(tmp_path, offload_gradients="backward", **options) as store,
    ):
        optimizer, parameters = optimizer_on(store)
        optimizer.restore()
        step(optimizer, parameters)
        found = store.pages.memory()
        values = sum(parameter.nbytes for parameter in parameters.values())
        assert found["GPU"].pop("parameters") == values
        assert "gradients" not in found["GPU"]  # All have left.
        assert found["GPU"]["pages that rest there"] > 0
        assert sum(found["GPU"].values()) == store.stats().device_bytes_peak
        assert values <= found["host"]["gradients that leave"] < values + 3 * 64
        assert sum(found["host"].values()) == store.stats().host_bytes_peak
